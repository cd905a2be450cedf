"""Documents into packs: one step's tokens in a row, with positions that begin anew in each document.

    document    t0  t1  t2  t3  t4  t5        prompt of 2 tokens, answer of 4
    slot         0   1   2   3   4   5
    pass 0      t1  t2  t3  t4  t5   -        slot p gets the token at p + 1 and drafts that at p + 2
    pass 1      t2  t3  t4  t5   -   -        its own feature, the token at p + 2: drafts p + 3
    learns       .   0   1   2   3   .        as when serving: t2 comes from the target itself, then
                                              slot 1 drafts t3; slot 3 has t5 to learn, slot 4 nothing
"""

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
    prompt_lens: Sequence[int],
    num_passes: int,
    device: torch.device,
) -> Pack:
    """prompt_lens: where answers begin; what stands before is context, not learnt"""
    lengths = np.array([len(document) for document in documents])
    positions = np.concatenate([np.arange(length) for length in lengths])
    behind = np.repeat(lengths, lengths) - 1 - positions  # tokens that follow in the document
    # The first draft behind a prompt comes from its last token, whose successor is known by then.
    anchor = positions >= np.repeat(np.asarray(prompt_lens), lengths) - 1
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


def pack_documents(
    corpus: Corpus, indices: Sequence[int], max_len: int, num_passes: int, prompts: bool
) -> "PackMaker":
    return PackMaker(corpus, indices, max_len, num_passes, prompts)


@dataclass(frozen=True)
class PackMaker:
    pass
