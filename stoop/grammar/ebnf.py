"""Mends three faults of xgrammar 0.2.8 in the grammars that it makes, as EBNF text.

- Classes of characters hold surrogates. In UTF-8 these are no characters: a decoder writes three
  replacement characters for one, so a string may be longer than its schema allows.
- Strings of a bounded length hold control characters, which JSON forbids.
- Masks near the end of such a string take milliseconds: tokens that are too long for it are tried
  one by one at every step. If the quote that ends the string is part of the rules that count its
  characters, most tokens are ruled out when the grammar is compiled.
"""

import re

_PART = re.compile(r'"(?:\\.|[^"\\])*"|\[\^?(?:\\.|[^\]\\])*\]', re.DOTALL)
_SURROGATES = r"\ud800-\udfff"
# Any string of JSON. It has no length to count, and the library knows this form.
_ANY_STRING = r"[^\0-\x1f\"\\\r\n]"
_BOUNDED_STRING = r"[^\"\\\r\n]"
_CHARACTER = rf"[^\0-\x1f\"\\{_SURROGATES}]"  # of a string in JSON, without escapes
# The rule of a bounded string's characters, as the library names it, and where it is used.
_CHARACTERS = re.compile(rf"^(\w+_characters) ::= \(\({re.escape(_BOUNDED_STRING)}\)\)$", re.M)
_BOUNDED = re.compile(rf'"\\"" (\w+_characters)\{{(\d+), (\d+)\}} "\\""|{_PART.pattern}', re.DOTALL)
# Longer strings stay as the library writes them: a rule takes ten milliseconds to compile.
MAX_COUNTED = 256
# A range that ends at the last character of Unicode.
_LONG_RANGE = re.compile(
    r"(\\U[0-9a-fA-F]{8}|\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}|\\.|[^\\])-\\U0010ffff", re.DOTALL
)


def mend(text: str, of_schema: bool = False) -> str:
    """The same grammar, without the faults. Literals stay as they are.

    text: as the library prints a grammar
    of_schema: of a JSON schema alone; then strings of at most one character, whose class has no
    rule of its own, are known, too. In a structural tag such a class may be the user's, and stays
    """
    names = set(_CHARACTERS.findall(text))
    text = _CHARACTERS.sub(lambda found: f"{found.group(1)} ::= (({_CHARACTER}))", text)
    text = _count_to_the_quote(text, names)
    if of_schema:
        text = _PART.sub(_without_controls, text)
    return _PART.sub(_mend_part, text)


def _without_controls(found: re.Match[str]) -> str:
    return _CHARACTER if found.group() == _BOUNDED_STRING else found.group()


def _count_to_the_quote(text: str, names: set[str]) -> str:
    """Let bounded strings share rules that say how many characters may come before the quote.

    names: of rules for one character
    """
    prefix = "bounded_string_"
    while prefix in text:
        prefix += "_"
    longest = -1

    def shared(found: re.Match[str]) -> str:
        nonlocal longest
        name, low, high = found.groups()
        if name not in names or not int(low) <= int(high) <= MAX_COUNTED:
            return found.group()
        room = int(high) - int(low)
        longest = max(longest, room)
        required = f"{name}{{{low}, {low}}} " if int(low) else ""
        return rf'"\"" {required}{prefix}{room}'

    text = _BOUNDED.sub(shared, text)
    if longest < 0:
        return text
    rules = [rf'{prefix}0 ::= (("\""))']
    for room in range(1, longest + 1):
        rules.append(rf'{prefix}{room} ::= (("\"") | ({_CHARACTER} {prefix}{room - 1}))')
    return "\n".join([text.rstrip("\n"), *rules, ""])


def _mend_part(found: re.Match[str]) -> str:
    part = found.group()
    if part.startswith('"') or part in (_ANY_STRING, _CHARACTER):
        return part
    if part.startswith("[^"):
        return f"{part[:-1]}{_SURROGATES}]"
    return _LONG_RANGE.sub(_split, part)


def _split(found: re.Match[str]) -> str:
    start = found.group(1)
    if start[:2] in ("\\U", "\\u", "\\x"):
        code = int(start[2:], 16)
    else:
        code = 0 if start == "\\0" else ord(start[-1])
    if code >= 0xD800:
        return found.group()
    return rf"{start}-\ud7ff\ue000-\U0010ffff"
