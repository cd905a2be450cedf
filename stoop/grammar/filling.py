"""Fills the masks of all rows of a step: one call of the library for a row and all its drafts.

Calls that are slow run in several threads; the library lets go of the interpreter lock.
"""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from stoop.grammar.follower import FREE, Follower

Path = tuple[Follower, Sequence[int]]  # a row's place in its grammar, and its drafts

MAX_THREADS = 8
# Most rows take about 15 us of processor time. If they take longer than this on average, threads
# fill the masks of some steps; then it is tried again without. Threads that do not help, since
# there is no free core, are not tried for a while.
SLOW_SECONDS = 100e-6
NUM_THREADED_STEPS = 32
NUM_PLAIN_STEPS = 512


@dataclass
class _Walk:
    """A row's drafts: free text first, then those that its grammar follows."""

    follower: Follower
    num_free: int = 0  # positions before the grammar
    drafts: list[int] = field(default_factory=list)  # that the grammar follows
    first_row: int | None = None  # of its masks; None if the grammar does not begin

    @staticmethod
    def of(follower: Follower, drafts: Sequence[int]) -> "_Walk":
        """Takes in the free text, up to a token that ends the answer."""
        walk = _Walk(follower)
        for draft in drafts:
            if draft in follower.stop_ids:
                break
            if follower.is_free:
                follower.take(draft)
                walk.num_free += 1
            else:
                walk.drafts.append(draft)
        return walk

    def rows(self, allows: list[bool], alive: list[bool]) -> list[int]:
        """The mask row of each position.

        allows, alive: whether a mask allows the draft after it, and anything at all
        """
        rows = [FREE] * self.num_free
        if self.first_row is None:
            return [*rows, FREE]
        for row in range(self.first_row, self.first_row + len(self.drafts) + 1):
            # A mask without any token is a dead end: `advance` refuses what is drawn there.
            rows.append(row if alive[row] else FREE)
            if not allows[row]:
                break
        return rows


class MaskFiller:
    """Fills masks like `fill_one_by_one`, its slow twin, and faster."""

    def __init__(self) -> None:
        self._num_threaded = 0  # steps with threads to come
        self._num_plain = 0  # steps to come in which threads are not thought of
        self._plain_seconds = 0.0  # what the last step without threads took
        self._threads: ThreadPoolExecutor | None = None
        self._trees = _Trees(np.zeros((0, 0), np.int32))

    def fill(self, paths: Sequence[Path], bits: Tensor) -> tuple[list[list[int]], int]:
        """Write the masks after each row's tokens and after each of its drafts, as
        `Follower.fill` does. Followers are afterwards where they were before.

        Returns the mask rows of each row's positions, and how many mask rows are used.
        bits: [rows, words] int32, on the host
        """
        words = bits.numpy()  # the same memory
        if not self._trees.belong_to(words):
            self._trees = _Trees(words)
        walks = [_Walk.of(*path) for path in paths]
        calls: list[tuple[Any, ...]] = []
        tokens: list[int] = []  # by mask row: the draft before it
        for walk in walks:
            if not walk.follower.is_free:
                walk.first_row = len(tokens)
                tokens += (0, *walk.drafts)
                call = self._trees.get(walk.first_row, len(walk.drafts) + 1)
                calls.append((walk.follower.matcher, *call))
            walk.follower.take_back([True] * walk.num_free)
        self._trees.tokens[: len(tokens)] = tokens
        self._run(calls)
        allows, alive = _look(words[: len(tokens)], tokens)
        return [walk.rows(allows, alive) for walk in walks], len(tokens)

    def _run(self, calls: list[tuple[Any, ...]]) -> None:
        if self._num_threaded and len(calls) > 1:
            self._num_threaded -= 1
            self._run_in_threads(calls)
            return
        started = time.thread_time()  # other programs do not count
        _traverse(iter(calls))
        self._plain_seconds = time.thread_time() - started
        if self._num_plain:
            self._num_plain -= 1
        elif self._plain_seconds > SLOW_SECONDS * len(calls) and _num_threads() > 1:
            self._num_threaded = NUM_THREADED_STEPS

    def _run_in_threads(self, calls: list[tuple[Any, ...]]) -> None:
        count, left = _num_threads(), iter(calls)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(count, "stoop-masks")
        started = time.perf_counter()
        for each in [self._threads.submit(_traverse, left) for _ in range(count)]:
            each.result()
        if time.perf_counter() - started > self._plain_seconds:
            self._num_threaded, self._num_plain = 0, NUM_PLAIN_STEPS


def _traverse(calls: Iterator[tuple[Any, ...]]) -> None:
    """Several threads may share an iterator over a list."""
    for matcher, *tree in calls:
        matcher.traverse_draft_tree(*tree)


class _Trees:
    """What the library wants to know of drafts: trees in which each token has one successor.

    Arrays of NumPy: it takes their memory for the host's, pinned or not.
    """

    def __init__(self, words: np.ndarray) -> None:
        self.tokens = np.zeros(len(words), np.int64)
        self._words = words
        self._known: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}

    def belong_to(self, words: np.ndarray) -> bool:
        known = self._words
        return known.ctypes.data == words.ctypes.data and known.shape == words.shape

    def get(self, first_row: int, count: int) -> tuple[np.ndarray, ...]:
        """The arguments for masks in `count` rows from `first_row` on."""
        found = self._known.get((first_row, count))
        if found is None:
            following = np.arange(1, count + 1)
            following[-1] = -1
            rows = slice(first_row, first_row + count)
            found = (following, np.full(count, -1), self.tokens[rows], self._words[rows])
            self._known[first_row, count] = found
        return found


def _look(words: np.ndarray, tokens: Sequence[int]) -> tuple[list[bool], list[bool]]:
    """Whether each mask allows the token of the next row, and whether it allows anything.

    words: [len(tokens), words] int32
    """
    if not tokens:
        return [], []
    after = np.roll(np.array(tokens), -1)
    allows = words[np.arange(len(tokens)), after >> 5] >> (after & 31) & 1
    return (allows != 0).tolist(), (np.bitwise_or.reduce(words, axis=1) != 0).tolist()


def fill_one_by_one(paths: Sequence[Path], bits: Tensor) -> tuple[list[list[int]], int]:
    """The slow twin of `MaskFiller.fill`."""
    every, count = [], 0
    for follower, drafts in paths:
        every.append(follower.fill(drafts, bits, count))
        count += sum(row != FREE for row in every[-1])
    return every, count


def _num_threads() -> int:
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))
