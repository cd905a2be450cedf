"""`{"name": ..., "parameters": {...}}`, after `<|python_tag|>` or not: Llama 3."""

from collections.abc import Sequence

from stoop.server.pieces import Content, Piece
from stoop.server.tools.calls import CallsReader

TAG = "<|python_tag|>"


class LlamaReader(CallsReader):
    """The answer is either calls, separated by semicolons, or content."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._plain = False  # the rest is content

    def feed(self, text: str) -> list[Piece]:
        if self._plain:
            return [Content(text)] if text else []
        self._held += text
        pieces: list[Piece] = []
        while self._held and not self._plain and self._next(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._call is not None and not self._call.started:
            self._give_up(pieces)
        elif self._call is None and self._held.strip(" ;\n") and not self._plain:
            pieces.append(Content(self._held))
        self._held = ""
        return pieces

    def _next(self, pieces: list[Piece]) -> bool:
        if self._call is None and not self._begin(pieces):
            return False
        call = self._call
        assert call is not None
        held, self._held = self._held, ""
        pieces += call.feed(held)
        if call.state == "bad":
            self._give_up(pieces)
        elif call.state == "done":
            self._held, self._call = call.rest, None
            self._num_calls += 1
        return bool(self._held)

    def _begin(self, pieces: list[Piece]) -> bool:
        """Look for the beginning of a call; False: there is none yet."""
        text = self._held.lstrip(" ;\n" if self._num_calls else None)
        if not text or (TAG.startswith(text) and text != TAG):
            return False
        text = text.removeprefix(TAG).lstrip()
        if text and text[0] != "{":
            pieces.append(Content(self._held))
            self._held, self._plain = "", True
            return False
        self._held = text
        if not text:
            return False
        self._begin_call()
        return True

    def _give_up(self, pieces: list[Piece]) -> None:
        assert self._call is not None
        pieces.append(Content(self._call.text + self._held))
        self._call, self._held, self._plain = None, "", True
