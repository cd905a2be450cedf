"""Answers that must be tool calls: grammars for them, and a reader of JSON lists of calls."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stoop.server.pieces import CallArguments, CallStart, Content, Piece
from stoop.server.tools.calls import CallsReader

ANY_OBJECT: dict[str, Any] = {"type": "object"}


def parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a function's arguments."""
    return tool["function"].get("parameters") or ANY_OBJECT


def forced_tags(
    tools: Sequence[Mapping[str, Any]],
    parallel: bool,
    tag: tuple[str, str],
    key: str,
    separator: str,
) -> dict[str, Any]:
    """One or more calls of these tools, each between the texts of `tag`."""
    tags = []
    for tool in tools:
        name = json.dumps(tool["function"]["name"])
        begin = f'{tag[0]}{{"name": {name}, "{key}": '
        content = {"type": "json_schema", "json_schema": parameters(tool)}
        tags.append({"type": "tag", "begin": begin, "content": content, "end": "}" + tag[1]})
    form = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    return {"structural_tag": {"type": "structural_tag", "format": form}}


class JsonCalls(CallsReader):
    """Reads `[{"name": ..., "parameters": {...}}, ...]`, the form that `schema` forces."""

    @staticmethod
    def schema(tools: Sequence[Mapping[str, Any]], parallel: bool) -> dict[str, Any]:
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    "parameters": parameters(tool),
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for tool in tools
        ]
        form: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        if not parallel:
            form["maxItems"] = 1
        return {"json": form}

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._held:
            if self._call is None:
                self._held = self._held.lstrip("[], \n\t")
                if not self._held:
                    break
            call = self._call or self._begin_call()
            held, self._held = self._held, ""
            pieces += call.feed(held)
            if call.state == "bad":
                pieces.append(Content(call.text))
                self._call = None
            elif call.state == "done":
                self._held, self._call = call.rest, None
                self._num_calls += 1
        return pieces

    def finish(self) -> list[Piece]:
        return []


class NamedCall:
    """The whole answer is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def feed(self, text: str) -> list[Piece]:
        if not text:
            return []
        pieces: list[Piece] = [] if self._started else [CallStart(0, self._name)]
        self._started = True
        return [*pieces, CallArguments(0, text)]

    def finish(self) -> list[Piece]:
        return []
