"""Tool calls in the formats of model families: how they are read, and how they are forced."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from stoop.server.pieces import Reader
from stoop.server.tools.forced import JsonCalls, forced_tags
from stoop.server.tools.hermes import HermesReader
from stoop.server.tools.llama import LlamaReader
from stoop.server.tools.pythonic import PythonicReader

TOOL_PARSERS = ("hermes", "llama3_json", "pythonic")


class ToolFormat(Protocol):
    """One family's way to write calls."""

    name: str
    markers: tuple[str, ...]  # texts that must not be skipped as special tokens

    def reader(self, names: Sequence[str]) -> Reader:
        """Reads calls of these functions; any other text is content."""
        ...

    def forced(self, tools: Sequence[Any], parallel: bool) -> dict[str, Any]:
        """Fields of `StructuredOutputs` under which an answer is nothing but calls."""
        ...

    def forced_reader(self, names: Sequence[str]) -> Reader: ...


class TaggedFormat:
    """Calls between fixed texts around JSON, which xgrammar's structural tags can force."""

    def __init__(
        self,
        name: str,
        make: Callable[[Sequence[str]], Reader],
        *,
        tag: tuple[str, str],
        key: str,
        separator: str,
        markers: tuple[str, ...] = (),
    ) -> None:
        self.name, self.markers = name, markers
        self._make, self._tag, self._key, self._separator = make, tag, key, separator

    def reader(self, names: Sequence[str]) -> Reader:
        return self._make(names)

    forced_reader = reader

    def forced(self, tools: Sequence[Any], parallel: bool) -> dict[str, Any]:
        return forced_tags(tools, parallel, self._tag, self._key, self._separator)


class PythonicFormat:
    """Calls as Python writes them. No grammar forces these, so forced calls are a JSON list."""

    name = "pythonic"
    markers: tuple[str, ...] = ()

    def reader(self, names: Sequence[str]) -> Reader:
        return PythonicReader(names)

    def forced(self, tools: Sequence[Any], parallel: bool) -> dict[str, Any]:
        return JsonCalls.schema(tools, parallel)

    def forced_reader(self, names: Sequence[str]) -> Reader:
        return JsonCalls(names)


FORMATS: dict[str, ToolFormat] = {
    "hermes": TaggedFormat(
        "hermes",
        HermesReader,
        tag=("<tool_call>\n", "\n</tool_call>"),
        key="arguments",
        separator="\n",
        markers=("<tool_call>", "</tool_call>"),
    ),
    "llama3_json": TaggedFormat(
        "llama3_json", LlamaReader, tag=("", ""), key="parameters", separator="; "
    ),
    "pythonic": PythonicFormat(),
}


def choose_format(wanted: str, template: str) -> ToolFormat:
    """wanted: a name, or auto: what the text of the chat template shows"""
    if wanted != "auto":
        return FORMATS[wanted]
    if "<tool_call>" in template:
        return FORMATS["hermes"]
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return FORMATS["llama3_json"]
    if "func_name1(params_name1=" in template:
        return FORMATS["pythonic"]
    return FORMATS["hermes"]
