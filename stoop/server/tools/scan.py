"""Finds the end of a JSON or Python value in text that is still growing."""

import json
import re
from typing import Any

# The head of a call: its name comes first, then the arguments begin.
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_FIRST_KEY = re.compile(r'\s*\{\s*"([^"\\]*)"')
_CALL_KEYS = ("name", "arguments", "parameters", "type", "function", "id")


class Scanner:
    """Follows brackets and strings; `feed` returns the end of the value that the text begins."""

    def __init__(self, quotes: str = '"') -> None:
        self._quotes = quotes
        self._depth = 0
        self._quote = ""  # that of the string we are in
        self._escaped = False
        self._place = 0  # characters seen

    def feed(self, text: str) -> int | None:
        """text: all of it, from the beginning of the value. None: the value goes on"""
        for place in range(self._place, len(text)):
            char = text[place]
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == self._quote:
                    self._quote = ""
            elif char in self._quotes:
                self._quote = char
            elif char in "{[(":
                self._depth += 1
            elif char in "}])":
                self._depth -= 1
                if self._depth <= 0:
                    self._place = place + 1
                    return place + 1
        self._place = len(text)
        return None


def call_head(text: str) -> tuple[str, int] | None:
    """The name of a call and where its arguments begin, once the text has both."""
    found = _HEAD.match(text)
    if found is None:
        return None
    try:
        return json.loads(found[1]), found.end()
    except ValueError:
        return None


def cannot_be_call(text: str) -> bool:
    """Whether this beginning of an object can be told from a call."""
    found = _FIRST_KEY.match(text)
    return found is not None and found[1] not in _CALL_KEYS


def read_call(text: str, names: list[str] | tuple[str, ...]) -> tuple[str, str] | None:
    """Name and arguments, as JSON text, of a whole call; None if it is no call of these names."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return value["name"], json.dumps(arguments, ensure_ascii=False)
