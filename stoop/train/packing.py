"""Packs documents: one step's tokens in a row, with positions that restart at 0 in each document.

An anchor is a token from which the head drafts a chain of tokens, one per pass.

    document    t0  t1  t2  t3  t4  t5    a prompt of 2 tokens, an answer of 4
    anchor       0   1   2   3   4   5
    pass 0      t1  t2  t3  t4  t5   -    anchor p: feature, position p; token p + 1; drafts p + 2
    pass 1      t2  t3  t4  t5   -   -    its own output; position p + 1; token p + 2; drafts p + 3

Anchors 1 to 3 are trained in pass 0, anchors 1 and 2 in pass 1. When serving, the target itself
produces t2, so the first draft is t3, from anchor 1. The successor of t5 is unknown.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stoop.train.shards import Corpus


@dataclass(frozen=True)
class Layout:
    """The boundaries of documents, which attention does not cross."""

    lengths: tuple[int, ...]
    starts: Tensor  # [documents + 1] int32, on the device

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def slices(self) -> Iterator[slice]:
        start = 0
        for length in self.lengths:
            yield slice(start, start + length)
            start += length


@dataclass(frozen=True)
class Pack:
    """Documents packed for one training step."""

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, from 0 in each document
    layout: Layout
    # The anchors trained in each pass, a subset of those of the pass before.
    anchors: tuple[Tensor, ...]  # [anchors of the pass] int64
    label_places: Tensor  # [labels] int64: tokens whose successor is a draft's label
    label_of: Tensor  # [tokens] int64: the label's index for those tokens, 0 for others

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]


def make_pack(
    documents: Sequence[np.ndarray],
    prompt_lens: np.ndarray,
    num_passes: int,
    device: torch.device,
) -> Pack:
    """Pack documents. prompt_lens: [documents], tokens that are context and not trained on"""
    lengths = np.array([len(document) for document in documents])
    positions = np.concatenate([np.arange(length) for length in lengths])
    num_after = np.repeat(lengths, lengths) - 1 - positions  # tokens that follow in the document
    # The first draft after a prompt comes from its last token, whose successor is known by then.
    is_anchor = positions >= np.repeat(prompt_lens, lengths) - 1
    anchors = [np.flatnonzero(is_anchor & (num_after >= 2 + n)) for n in range(num_passes)]
    places = np.flatnonzero(np.roll(is_anchor, 1) & (positions > 0) & (num_after >= 1))
    label_of = np.zeros(len(positions), dtype=np.int64)
    label_of[places] = np.arange(len(places))

    def put(array: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(array).to(device, dtype, non_blocking=True)

    return Pack(
        token_ids=put(np.concatenate(documents)),
        positions=put(positions),
        layout=Layout(
            tuple(lengths.tolist()), put(np.concatenate(([0], np.cumsum(lengths))), torch.int32)
        ),
        anchors=tuple(put(each) for each in anchors),
        label_places=put(places),
        label_of=put(label_of),
    )


def plan_batches(
    lengths: np.ndarray, batch_tokens: int, seed: int, *, epochs: int, steps: int | None
) -> list[np.ndarray]:
    """Return the documents of each step, in an order that the seed and the epoch determine.

    `steps` overrides `epochs`. lengths: [documents], none above `batch_tokens`
    """
    batches: list[np.ndarray] = []
    for epoch in range(epochs) if steps is None else itertools.count():
        order = np.random.default_rng((seed, epoch)).permutation(len(lengths))
        batches += _fill(order, lengths, batch_tokens)
        if steps is not None and len(batches) >= steps:
            return batches[:steps]
    return batches


def _fill(order: np.ndarray, lengths: np.ndarray, batch_tokens: int) -> list[np.ndarray]:
    """Split documents into batches, starting a new one when the next document does not fit."""
    ends = []
    room = batch_tokens
    for place, length in enumerate(lengths[order].tolist()):
        if length > room:
            ends.append(place)
            room = batch_tokens
        room -= length
    return np.split(order, ends)


@dataclass(frozen=True)
class Packer:
    """Packs documents of a corpus, truncated to `max_len`."""

    corpus: Corpus
    max_len: int
    num_passes: int
    include_prompts: bool
    device: torch.device

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        return np.minimum(self.corpus.lengths[indices], self.max_len)

    def pack(self, indices: np.ndarray) -> Pack:
        documents = [self.corpus.document(index)[: self.max_len] for index in indices]
        prompt_lens = self.corpus.prompt_lens[indices]
        if self.include_prompts:
            prompt_lens = np.zeros_like(prompt_lens)
        return make_pack(documents, prompt_lens, self.num_passes, self.device)


def split(corpus: Corpus, val_share: float) -> tuple[np.ndarray, np.ndarray]:
    """Split into training and held-out documents; all answers to a prompt go to the same side."""
    held_out = corpus.keys % np.uint64(10_000) < np.uint64(round(10_000 * val_share))
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)
