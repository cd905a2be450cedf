"""One request's place in its grammar."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from stoop.grammar.vocabulary import Vocabulary

FREE = -1  # the mask row of a position without a mask


class FreeText:
    """Text before the marker that starts the grammar, in bytes.

    Only as many bytes are kept as the beginning of a marker can have.
    """

    def __init__(self, marker: bytes, texts: Sequence[bytes]) -> None:
        assert marker
        self._marker = marker
        self._texts = texts
        self._tail = b""
        self._before: list[bytes] = []  # tails before each token, to take tokens back
        self.ended = False

    def push(self, token: int) -> None:
        """The grammar begins with the token after the one in which the marker ends."""
        assert not self.ended
        self._before.append(self._tail)
        text = self._tail + self._texts[token]
        self.ended = self._marker in text
        self._tail = text[max(0, len(text) - len(self._marker) + 1) :]

    def pop(self) -> None:
        self._tail = self._before.pop()
        self.ended = False

    def settle(self) -> None:
        """Tokens so far will not be taken back."""
        self._before.clear()


class Follower:
    """Follows a request's tokens through its grammar, which masks the token after them.

    `advance` takes tokens of the answer and nothing takes them back. `fill` also looks at drafts,
    which are taken back before it returns; `MaskFiller` does the same for many rows, and faster.

    matcher: xgrammar's GrammarMatcher; after it has accepted a stop token it takes no more
    free: text before the grammar begins; None if it begins with the answer
    """

    def __init__(self, matcher: Any, stop_ids: Iterable[int], free: FreeText | None) -> None:
        self.matcher = matcher
        self.stop_ids = frozenset(stop_ids)
        self._free = free
        self.ended = False  # a stop token ended the answer
        self.drafted = False  # whether a step has made drafts for it

    @property
    def is_free(self) -> bool:
        """Whether the grammar has not begun."""
        return self._free is not None and not self._free.ended

    def advance(self, tokens: Iterable[int]) -> int:
        """Take in tokens of the answer; returns how many of them the grammar allows.

        Tokens after the one that ends the answer count as allowed: they are dropped elsewhere.
        """
        tokens = list(tokens)
        for count, token in enumerate(tokens):
            if self.ended:
                return len(tokens)
            if not self.take(token):
                return count
            self.ended = token in self.stop_ids
        if self._free is not None:
            self._free.settle()
        return len(tokens)

    def fill(self, drafts: Sequence[int], bits: Tensor, row: int) -> list[int]:
        """Write the masks after the answer so far and after each draft, from `row` of `bits` on.

        Returns the row of each position, FREE for those without a mask. The path ends at a draft
        that the grammar forbids, which its mask rejects, or that ends the answer.
        bits: [rows, words] int32, on the host
        """
        rows: list[int] = []
        taken: list[bool] = []  # by draft: whether it was free text
        words = bits.numpy()  # the same memory; indexing it is cheaper
        for draft in (*drafts, None):
            free = self.is_free
            masked = not free and self.matcher.fill_next_token_bitmask(bits, row)
            allows = not masked or (draft is not None and _allows(words[row], draft))
            # A mask without any token is a dead end: `advance` will refuse what is drawn there.
            masked = masked and (allows or bool(words[row].any()))
            rows.append(row if masked else FREE)
            if draft is None or draft in self.stop_ids or (masked and not allows):
                break
            row += masked
            if not self.take(draft):
                break
            taken.append(free)
        self.take_back(taken)
        return rows

    def take(self, token: int) -> bool:
        """Take in a token, which `take_back` can undo; returns whether the grammar allows it."""
        if self.is_free:
            assert self._free is not None
            self._free.push(token)
            return True
        return bool(self.matcher.accept_token(token))

    def take_back(self, taken: Sequence[bool]) -> None:
        """Undo the last tokens. taken: for each of them, whether it was free text"""
        num_matched = len(taken) - sum(taken)
        if num_matched:
            self.matcher.rollback(num_matched)
        for _ in range(sum(taken)):
            assert self._free is not None
            self._free.pop()


def _allows(words: np.ndarray, token: int) -> bool:
    """Whether a mask allows a token. The library would log an error for some that it forbids."""
    return bool(int(words[token // 32]) >> (token % 32) & 1)


def make_free_text(marker: str | None, vocabulary: Vocabulary) -> FreeText | None:
    return None if marker is None else FreeText(marker.encode(), vocabulary.texts)
