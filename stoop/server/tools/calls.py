"""One JSON call while it is written: `{"name": ..., "arguments": {...}}`."""

from collections.abc import Sequence

from stoop.server.pieces import CallArguments, CallStart, Piece
from stoop.server.tools.scan import Scanner, call_head, cannot_be_call, read_call


class CallReader:
    """Reads one object. `text` is what it has taken; `rest` what follows it, once it is complete.

    The arguments are passed on as they come if the name comes first, as models write it. Otherwise
    the object is read as a whole. `state` ends as "done", or as "bad" if this is no call.
    """

    def __init__(self, index: int, names: Sequence[str]) -> None:
        self.index = index
        self.names = tuple(names)
        self.text = ""
        self.rest = ""
        self.state = "head"
        self._whole = Scanner()
        self._arguments = Scanner()
        self._start = 0  # of the arguments
        self._sent = 0  # characters of the arguments

    def feed(self, text: str) -> list[Piece]:
        self.text += text
        pieces: list[Piece] = []
        if self.state == "head":
            self._read_head(pieces)
        if self.state == "arguments":
            self._read_arguments(pieces)
        if self.state == "tail":
            end = self._whole.feed(self.text)
            if end is not None:
                self._complete(end, "done")
        return pieces

    def _read_head(self, pieces: list[Piece]) -> None:
        if not self.text.strip():
            return
        if self.text.lstrip()[0] != "{" or cannot_be_call(self.text):
            self.state = "bad"
            return
        head = call_head(self.text)
        if head is not None:
            name, self._start = head
            self.state = "arguments" if name in self.names else "bad"
            if self.state == "arguments":
                pieces.append(CallStart(self.index, name))
            return
        end = self._whole.feed(self.text)
        if end is None:
            return
        call = read_call(self.text[:end], self.names)
        if call is None:
            self.state = "bad"
            return
        pieces += [CallStart(self.index, call[0]), CallArguments(self.index, call[1])]
        self._complete(end, "done")

    def _read_arguments(self, pieces: list[Piece]) -> None:
        written = self.text[self._start :]
        end = self._arguments.feed(written)
        new = written[self._sent : end]
        if new:
            pieces.append(CallArguments(self.index, new))
        self._sent += len(new)
        if end is not None:
            self.state = "tail"

    def _complete(self, end: int, state: str) -> None:
        self.text, self.rest = self.text[:end], self.text[end:]
        self.state = state

    @property
    def started(self) -> bool:
        """Whether the call has been passed on, so that it cannot become content any more."""
        return self.state in ("arguments", "tail", "done")


class CallsReader:
    """What readers of several calls, one after the other, have in common."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._held = ""  # text that is not read yet
        self._call: CallReader | None = None  # the one that is being written
        self._num_calls = 0

    def _begin_call(self) -> CallReader:
        self._call = CallReader(self._num_calls, self._names)
        return self._call
