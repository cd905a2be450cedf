"""Checks of regular expressions: what xgrammar would ignore without an error is refused."""

import re

from stoop.config.errors import RequestError

_LOOKAROUND = re.compile(r"\(\?<?[=!]")
# Letters after a backslash that the library knows, or refuses itself. It would match others as
# themselves.
_KNOWN_ESCAPES = frozenset("dDwWsSnrtvfxucbBpPk0123456789")


def check_regex(name: str, pattern: str) -> None:
    """Refuse lookarounds, anchors in the middle, and escapes that other libraries have."""
    plain = []  # outside of classes, escapes removed
    for part in re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", pattern, flags=re.DOTALL):
        if part[0] == "\\":
            if part[1:].isalnum() and part[1] not in _KNOWN_ESCAPES:
                raise RequestError(f"{name} has {part}: it is not known, leave it out")
            part = "_"
        plain.append("_" if part[0] == "[" and len(part) > 1 else part)
    text = "".join(plain)
    if _LOOKAROUND.search(text):
        raise RequestError(f"{name} has a lookaround: no grammar can honour it, leave it out")
    if "^" in text[1:] or "$" in text[:-1]:
        raise RequestError(
            f"{name} has an anchor in its middle: the whole text must match, so leave out ^ and $"
        )
