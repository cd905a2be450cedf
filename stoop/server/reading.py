"""Reads an answer into pieces, and counts the tokens of its reasoning."""

from bisect import bisect_left
from collections.abc import Sequence

from stoop.server.pieces import Piece, Reader
from stoop.server.reasoning import END, ReasoningReader
from stoop.text.tokenizer import Tokenizer


class AnswerReader:
    """One answer, as it comes. num_reasoning: of its tokens so far, those that are reasoning"""

    def __init__(self, reader: Reader, count: "ReasoningCount | None" = None) -> None:
        self._reader = reader
        self._count = count

    @property
    def num_reasoning(self) -> int:
        return self._count.num_tokens if self._count is not None else 0

    def read(self, text: str, token_ids: Sequence[int], last: bool) -> list[Piece]:
        """The pieces of new text. last: the answer is complete"""
        pieces = self._reader.feed(text)
        if last:
            pieces += self._reader.finish()
        if self._count is not None:
            self._count.take(token_ids)
        return pieces


class ReasoningCount:
    """Counts the tokens up to and including the one that completes `</think>`.

    If the block never ends, all tokens are in it. So the rest is what the visible answer took.
    """

    def __init__(
        self, reader: ReasoningReader, tokenizer: Tokenizer, skip_special_tokens: bool
    ) -> None:
        """reader: is fed the text of tokens before `take` gets them"""
        self.num_tokens = 0
        self._reader = reader
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._ids: list[int] = []
        self._done = False

    def take(self, token_ids: Sequence[int]) -> None:
        if self._done:
            return
        self._ids += token_ids
        if not self._reader.decided:
            return
        self.num_tokens = len(self._ids) if self._reader.in_block else 0
        if self._reader.past_block:
            # Text lags behind tokens, and both come in pieces: the tokens tell where it was.
            self.num_tokens = self._find_end() if self._reader.had_block else 0
            self._done, self._ids = True, []

    def _find_end(self) -> int:
        """The number of tokens that it takes to write the end of the block."""
        ids = self._ids
        mark = self._tokenizer.encode(END, add_special_tokens=False)
        if len(mark) == 1 and mark[0] in ids:  # as in the models that were trained to think
            place = ids.index(mark[0])
            if not self._has_end(place):
                return place + 1
        return min(bisect_left(range(len(ids)), True, key=self._has_end), len(ids))

    def _has_end(self, num_tokens: int) -> bool:
        return END in self._tokenizer.decode(self._ids[:num_tokens], self._skip_special)
