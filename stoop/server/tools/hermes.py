"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen and others."""

from collections.abc import Sequence

from stoop.server.pieces import Content, Piece, held_back
from stoop.server.tools.calls import CallsReader

START, END = "<tool_call>", "</tool_call>"


class HermesReader(CallsReader):
    """Text outside the tags is content, and so is a block that is no call."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._spaces = ""  # after text; dropped if a tag follows

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._held and (self._inside(pieces) if self._call else self._outside(pieces)):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._call is not None and not self._call.started:
            self._give_up(pieces)
        if self._call is None:
            self._text(pieces, self._held)
            if self._spaces and not self._num_calls:
                pieces.append(Content(self._spaces))
        self._held = self._spaces = ""
        return pieces

    def _text(self, pieces: list[Piece], text: str) -> None:
        text = self._spaces + text
        kept = text.rstrip()
        self._spaces = text[len(kept) :]
        if kept:
            pieces.append(Content(kept))

    def _outside(self, pieces: list[Piece]) -> bool:
        place = self._held.find(START)
        if place >= 0:
            self._text(pieces, self._held[:place])
            self._held = self._held[place + len(START) :]
            self._spaces = ""
            self._begin_call()
            return True
        keep = held_back(self._held, START)
        self._text(pieces, self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return False

    def _inside(self, pieces: list[Piece]) -> bool:
        call = self._call
        assert call is not None
        if call.state in ("head", "arguments", "tail"):
            held, self._held = self._held, ""
            pieces += call.feed(held)
            if call.state == "bad":
                self._give_up(pieces)
                return bool(self._held)
            if call.state != "done":
                return False
            self._held, call.rest = call.rest, ""
            self._num_calls += 1
        # After the object: only the closing tag belongs to the call.
        rest = self._held.lstrip()
        if not rest or (END.startswith(rest) and rest != END):
            return False
        self._held = rest[len(END) :] if rest.startswith(END) else rest
        self._call = None
        return True

    def _give_up(self, pieces: list[Piece]) -> None:
        """What looked like a call is content."""
        assert self._call is not None
        text, self._call = self._call.text, None
        self._text(pieces, START)
        self._held = text + self._held
