"""Mends two faults of xgrammar 0.2.8 in the grammars that it makes, as EBNF text.

- Classes of characters hold surrogates. In UTF-8 these are no characters: a decoder writes three
  replacement characters for one, so a string may be longer than its schema allows.
- Strings of a bounded length hold control characters, which JSON forbids.
"""

import re

_PART = re.compile(r'"(?:\\.|[^"\\])*"|\[\^?(?:\\.|[^\]\\])*\]', re.DOTALL)
_SURROGATES = r"\ud800-\udfff"
# Any string of JSON. It has no length to count, and the library knows this form.
_ANY_STRING = r"[^\0-\x1f\"\\\r\n]"
_BOUNDED_STRING = r"[^\"\\\r\n]"
# A range that ends at the last character of Unicode.
_LONG_RANGE = re.compile(
    r"(\\U[0-9a-fA-F]{8}|\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}|\\.|[^\\])-\\U0010ffff", re.DOTALL
)


def mend(text: str) -> str:
    """The same grammar, without the faults. Literals stay as they are."""
    return _PART.sub(_mend_part, text)


def _mend_part(found: re.Match[str]) -> str:
    part = found.group()
    if part.startswith('"') or part == _ANY_STRING:
        return part
    if part == _BOUNDED_STRING:
        return rf"[^\0-\x1f\"\\{_SURROGATES}]"
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
