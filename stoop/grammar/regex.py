"""Checks of regular expressions: what xgrammar would ignore without an error is refused."""

import re
from collections.abc import Iterator

from stoop.config.errors import RequestError

_CLASS = r"\[\^?\]?(?:\\.|[^\]\\])*\]"
# The last but one takes all that follows a bracket without an end, so that this is found once.
_PART = re.compile(rf"\\(?:x[0-9a-fA-F]{{2}}|u[0-9a-fA-F]{{4}}|c.|.)|{_CLASS}|\[.*|.", re.DOTALL)
_LOOKAROUND = re.compile(r"\(\?<?[=!]")
# Letters after a backslash that the library knows, or refuses itself. It would match others as
# themselves.
_KNOWN_ESCAPES = frozenset("dDwWsSnrtvfxucbBpPk0123456789")
_SURROGATES = r"\ud800-\udfff"
_NOT_IN_STRINGS = frozenset('"\\') | {chr(code) for code in range(0x20)}


def check_regex(name: str, pattern: str, in_json: bool = False) -> None:
    """Refuse lookarounds, anchors in the middle, and escapes that other libraries have.

    in_json: of a string in JSON, in which some characters must be escaped
    """
    parts = _PART.findall(pattern)
    if parts and parts[-1][0] == "[" and not re.fullmatch(_CLASS, parts[-1], re.DOTALL):
        raise RequestError(f"{name} has a [ without its ]: close it, or write \\[")
    for part in parts:
        if part[0] == "\\" and part[1:].isalnum() and part[1] not in _KNOWN_ESCAPES:
            raise RequestError(f"{name} has {part}, which is not known: leave it out")
        if in_json and _NOT_IN_STRINGS.intersection(_characters(part)):
            raise RequestError(
                f"{name} has a quote, a backslash or a control character ({part!r}), which JSON "
                "writes otherwise: leave it out"
            )
    text = "".join(part if len(part) == 1 else "_" for part in parts)
    if _LOOKAROUND.search(text):
        raise RequestError(f"{name} has a lookaround, which no grammar can honour: leave it out")
    if "^" in text[1:] or "$" in text[:-1]:
        raise RequestError(
            f"{name} has an anchor in its middle: the whole text must match, so leave out ^ and $"
        )


def without_surrogates(pattern: str) -> str:
    """The same pattern, for the library: its classes hold surrogates, which are no characters."""
    return "".join(map(_mend, _PART.findall(pattern)))


def _mend(part: str) -> str:
    if part == ".":
        return rf"[^{_SURROGATES}]"
    if part in (r"\S", r"\D", r"\W"):
        return rf"[^{part.lower()}{_SURROGATES}]"
    if part.startswith("[^") and len(part) > 2:
        return f"{part[:-1]}{_SURROGATES}]"
    return part


def _characters(part: str) -> Iterator[str]:
    """The characters that a part of a pattern names. Classes of several name none: the library
    leaves out of them what a string cannot hold."""
    if part[0] == "[" and len(part) > 1:
        inner = _PART.findall(part[1:-1])
        if part[1] == "^" or len(inner) != 1:
            return
        part = inner[0]
    if part[0] != "\\":
        yield part
    elif part[1] in "xu" and len(part) > 2:
        yield chr(int(part[2:], 16))
    elif part[1] in "nrtvfc0":
        yield "\n"  # any control character
    elif not part[1].isalnum():
        yield part[1]
