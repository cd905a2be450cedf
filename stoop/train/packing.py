"""Documents into packs: one step's tokens in a row, positions anew from 0 in each document.

    document    t0  t1  t2  t3  t4  t5    a prompt of 2 tokens, an answer of 4
    slot         0   1   2   3   4   5
    pass 0      t1  t2  t3  t4  t5   -    slot p: feature and position p, token p + 1; drafts p + 2
    pass 1      t2  t3  t4  t5   -   -    its own output, position p + 1, token p + 2; drafts p + 3

Slots 1 to 3 learn in pass 0, slots 1 and 2 in pass 1: the target itself says t2, as it does when
serving, so that the first draft is t3, of slot 1; and what follows t5 is not known.
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
    """Where documents begin, for attention that stays inside them."""

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
    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, from 0 in each document
    layout: Layout
    # Of each pass the slots that learn; a pass has no slot that the one before has not.
    slots: tuple[Tensor, ...]  # [slots of the pass] int64
    label_places: Tensor  # [labels] int64: tokens behind which some draft is foreseen
    label_of: Tensor  # [tokens] int64: which of the labels, for those; others 0

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]


def make_pack(
    documents: Sequence[np.ndarray],
    prompt_lens: np.ndarray,
    num_passes: int,
    device: torch.device,
) -> Pack:
    """prompt_lens: [documents], where answers begin; what stands before is context, not learnt"""
    lengths = np.array([len(document) for document in documents])
    positions = np.concatenate([np.arange(length) for length in lengths])
    behind = np.repeat(lengths, lengths) - 1 - positions  # tokens that follow in the document
    # The first draft behind a prompt comes from its last token, whose successor is known by then.
    anchor = positions >= np.repeat(prompt_lens, lengths) - 1
    slots = [np.flatnonzero(anchor & (behind >= 2 + number)) for number in range(num_passes)]
    places = np.flatnonzero(np.roll(anchor, 1) & (positions > 0) & (behind >= 1))
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
        slots=tuple(put(each) for each in slots),
        label_places=put(places),
        label_of=put(label_of),
    )


def plan_batches(
    lengths: np.ndarray, batch_tokens: int, seed: int, *, epochs: int, steps: int | None
) -> list[np.ndarray]:
    """Of each step the documents, in an order that is new in each epoch and fixed by the seed.

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
    """Document after document into a batch, until the next one does not fit."""
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
    """Documents of a corpus into packs, cut to `max_len`."""

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
    """Documents to train on, and those held out: all answers to a prompt stand on one side."""
    held_out = corpus.keys % np.uint64(10_000) < np.uint64(round(10_000 * val_share))
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)
