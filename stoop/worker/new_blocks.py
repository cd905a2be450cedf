"""Zeroes the KV blocks that requests get in a step, where attention reads masked values.

A kernel that multiplies the values of masked keys by 0 yields NaN if one of them is NaN, and a
block keeps what its last holder left in it.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from stoop.batch.staging import StagedWrites

_NAN_BYTE = 0x7F  # NaN in float8_e4m3fn and in float8_e5m2


class NewBlocks:
    """caches: of all layers, the drafter's too: [2, num_blocks, ...] each
    num_blocks: the most that one step can name; 0 if blocks are never zeroed
    """

    def __init__(self, caches: Sequence[Tensor], num_blocks: int, device: torch.device) -> None:
        self.caches = caches
        self._ids = torch.zeros((1, num_blocks), dtype=torch.int64, device=device)

    def stage(self, staged: StagedWrites, blocks: Sequence[int]) -> None:
        """Send the ids along with the step's other edits, in the same copy to the device."""
        staged.put(self._ids, 0, blocks)

    def zero(self, count: int) -> None:
        """Zero the first `count` staged blocks, before any phase of the step; never in a graph.

        Steps in flight may still write to blocks whose requests have ended for the host. This runs
        on the same stream after them, so their writes come first.
        """
        if count:
            fill_blocks(self.caches, self._ids[0, :count], 0.0)


def fill_blocks(caches: Iterable[Tensor], blocks: Tensor, value: float) -> None:
    """Fill blocks of every cache with zeros or NaN: one operation per cache, and no sync.

    blocks: [count] int64, on the device of the caches
    """
    assert value == 0 or math.isnan(value), value
    for cache in caches:
        if cache.dtype.itemsize > 1:
            cache.index_fill_(1, blocks, value)
        else:  # torch cannot fill 8-bit floats by index
            cache.view(torch.uint8).index_fill_(1, blocks, _NAN_BYTE if value else 0)
