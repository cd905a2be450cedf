"""Parts of an answer as clients see them: content, reasoning, tool calls."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, frozen=True)
class Content:
    text: str


@dataclass(slots=True, frozen=True)
class Reasoning:
    text: str


@dataclass(slots=True, frozen=True)
class CallStart:
    """A tool call begins; `index` numbers the calls of one answer."""

    index: int
    name: str


@dataclass(slots=True, frozen=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments


class Reader(Protocol):
    """Turns the text of one answer into pieces, as it comes.

    The pieces do not depend on how the text was cut, except that a text may be cut further.
    """

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]:
        """What was held back, at the end of the answer."""
        ...


class PlainReader:
    """All text is content."""

    def feed(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class OneCall:
    """Leaves out every call but the first, as `parallel_tool_calls`: false asks for."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def feed(self, text: str) -> list[Piece]:
        return _without_later_calls(self._reader.feed(text))

    def finish(self) -> list[Piece]:
        return _without_later_calls(self._reader.finish())


def _without_later_calls(pieces: list[Piece]) -> list[Piece]:
    return [
        piece
        for piece in pieces
        if not isinstance(piece, CallStart | CallArguments) or not piece.index
    ]


def held_back(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


@dataclass
class Call:
    """A whole tool call."""

    name: str
    arguments: str = ""


@dataclass
class Parts:
    """The pieces of a whole answer, joined."""

    content: str
    reasoning: str
    calls: list[Call]

    @staticmethod
    def of(pieces: list[Piece]) -> "Parts":
        parts = Parts("", "", [])
        for piece in pieces:
            if isinstance(piece, Content):
                parts.content += piece.text
            elif isinstance(piece, Reasoning):
                parts.reasoning += piece.text
            elif isinstance(piece, CallStart):
                parts.calls.append(Call(piece.name))
            else:
                parts.calls[piece.index].arguments += piece.text
        return parts
