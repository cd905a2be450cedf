"""`[get_weather(city="Paris"), now()]`: Llama 4 and others."""

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from stoop.server.pieces import CallArguments, CallStart, Content, Piece
from stoop.server.tools.scan import Scanner

_BEGIN = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_BEGINNING = re.compile(r"\[\s*([A-Za-z_][\w.]*\s*)?$")


class PythonicReader:
    """The answer is either one list of calls or content. Each call is passed on as a whole."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._held = ""  # from the bracket on
        self._state = "before"  # inside, plain, after
        self._num_calls = 0
        self._start = 1  # of the next call in what is held
        self._scanner = Scanner("\"'")

    def feed(self, text: str) -> list[Piece]:
        if self._state == "plain":
            return [Content(text)] if text else []
        self._held += text
        pieces: list[Piece] = []
        if self._state == "before":
            self._decide(pieces)
        while self._state == "inside" and self._next(pieces):
            pass
        if self._state == "after" and self._held.strip():
            pieces.append(Content(self._held))
            self._held, self._state = "", "plain"
        return pieces

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._state == "before" and held:
            return [Content(held)]
        rest = held[self._start :].strip(", \n\t") if self._state == "inside" else ""
        if not rest:
            return []
        return [Content(held if not self._num_calls else rest)]

    def _decide(self, pieces: list[Piece]) -> None:
        text = self._held.lstrip()
        if not text or _BEGINNING.match(text):
            return
        if _BEGIN.match(text):
            self._held, self._state = text, "inside"
            return
        pieces.append(Content(self._held))
        self._held, self._state = "", "plain"

    def _next(self, pieces: list[Piece]) -> bool:
        """Read one call, or the end of the list; False: more text is needed."""
        rest = self._held[self._start :]
        stripped = rest.lstrip(", \n\t")
        if stripped.startswith("]"):
            self._held, self._state = stripped[1:], "after"
            return False
        self._start += len(rest) - len(stripped)
        if "(" not in stripped:
            return False
        end = self._scanner.feed(stripped)
        if end is None:
            return False
        self._scanner = Scanner("\"'")
        call = read_python_call(stripped[:end], self._names)
        if call is None:
            text = self._held if not self._num_calls else stripped
            pieces.append(Content(text))
            self._held, self._state = "", "plain"
            return False
        pieces += [CallStart(self._num_calls, call[0]), CallArguments(self._num_calls, call[1])]
        self._num_calls += 1
        self._start += end
        return True


def read_python_call(text: str, names: Sequence[str]) -> tuple[str, str] | None:
    """Name and arguments, as JSON text, of `name(key=value, ...)` with literal values."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            return None
        name = ast.unparse(tree.func)
        arguments: dict[str, Any] = {}
        for keyword in tree.keywords:
            if keyword.arg is None:
                return None
            arguments[keyword.arg] = _literal(keyword.value)
        if name not in names:
            return None
        return name, json.dumps(arguments, ensure_ascii=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


_JSON_WORDS = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr) -> Any:
    """The value of a literal; models also write JSON's words."""
    if isinstance(node, ast.Name) and node.id in _JSON_WORDS:
        return _JSON_WORDS[node.id]
    if isinstance(node, ast.List):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else ast.literal_eval(key) for key in node.keys]
        return dict(zip(keys, map(_literal, node.values), strict=True))
    return ast.literal_eval(node)
