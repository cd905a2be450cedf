"""Host writes to device state, collected and applied together.

A write names a tensor, a row and an offset in the row. Nothing changes until `apply`, which makes
one copy to the device for all writes and one scatter per tensor.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Values = Sequence[int] | Sequence[float] | int | float

_NUMPY: dict[torch.dtype, Any] = {
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.float64: np.float64,
    torch.float32: np.float32,
}
_ALIGNED = 8  # bytes


class _Edits:
    """The staged writes of one tensor, in order."""

    __slots__ = ("firsts", "lengths", "num_rows", "target", "values", "width")

    def __init__(self, target: Tensor) -> None:
        assert target.is_contiguous(), target.stride()
        self.target = target
        self.num_rows, self.width = target.shape[0], target.stride(0)
        self.firsts: list[int] = []  # of each write, an index into the flat tensor
        self.lengths: list[int] = []
        self.values: list[int | float] = []

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return places and values, with only the last write of each place."""
        places = np.array(self.firsts, dtype=np.int64)
        values = np.array(self.values, dtype=_NUMPY[self.target.dtype])
        again = len(np.unique(places // self.width)) < len(places)  # a row was written twice
        if len(values) > len(places):
            lengths = np.array(self.lengths)
            skipped = places - (np.cumsum(lengths) - lengths)
            places = np.repeat(skipped, lengths) + np.arange(len(values))
        if not again:
            return places, values
        last = _last_edits(places)
        return places[last], values[last]


class StagedWrites:
    """Collects writes to device tensors until `apply`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._edits: dict[int, _Edits] = {}

    def put(self, target: Tensor, row: int, values: Values, start: int = 0) -> None:
        """Stage `target[row, start : start + len(values)] = values` (flat within the row)."""
        edits = self._edits.get(id(target))
        if edits is None:
            edits = self._edits[id(target)] = _Edits(target)
        single = isinstance(values, int | float)
        length = 1 if single else len(values)  # type: ignore[arg-type]
        assert 0 <= row < edits.num_rows, (row, target.shape)
        if start < 0 or start + length > edits.width:
            raise IndexError(f"{length} values at {start} overrun a row of {edits.width}")
        if not length:
            return
        edits.firsts.append(row * edits.width + start)
        edits.lengths.append(length)
        if single:
            edits.values.append(values)  # type: ignore[arg-type]
        else:
            edits.values.extend(values)  # type: ignore[arg-type]

    def clear(self) -> None:
        """Drop all staged writes."""
        self._edits = {}

    def apply(self) -> None:
        """Send all staged writes to the device."""
        every, self._edits = self._edits, {}  # a write that fails is not retried
        edits = [each for each in every.values() if each.values]
        if not edits:
            return
        sent = iter(self._send([array for each in edits for array in each.arrays()]))
        for each in edits:
            places, values = next(sent).view(torch.int64), next(sent).view(each.target.dtype)
            each.target.view(-1).index_copy_(0, places, values)

    def _send(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Copy the arrays to the device in one buffer, and return their bytes."""
        ends = np.cumsum([-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays])
        starts = [0, *ends[:-1].tolist()]
        pinned = self.device.type == "cuda"
        host = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=pinned)
        memory = host.numpy()
        for start, array in zip(starts, arrays, strict=True):
            memory[start : start + array.nbytes] = array.view(np.uint8)
        # torch's host allocator reuses a pinned block only after the copy has run.
        sent = host.to(self.device, non_blocking=True)
        return [sent[s : s + array.nbytes] for s, array in zip(starts, arrays, strict=True)]


def _last_edits(place: np.ndarray) -> np.ndarray:
    """Return the index of each place's last write, since a scatter of duplicates is unordered."""
    _, first_from_back = np.unique(place[::-1], return_index=True)
    return place.size - 1 - first_from_back
