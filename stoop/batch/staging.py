"""Host writes to device state, collected and applied together.

A write names a tensor, a row and an offset in the row. Nothing changes until `apply`, which makes
one copy to the device for all writes and one scatter per tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class _Edits:
    """The staged writes of one tensor, in order."""

    target: Tensor
    places: list[int] = field(default_factory=list)  # indices into the flat tensor
    values: list[int | float] = field(default_factory=list)
    rows: set[int] = field(default_factory=set)
    again: bool = False  # a row was written more than once, so places may repeat

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return places and values, with only the last write of each place."""
        places = np.array(self.places, dtype=np.int64)
        values = np.array(self.values, dtype=_NUMPY[self.target.dtype])
        if not self.again:
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
        many = values if isinstance(values, Sequence) else (values,)
        width = target.stride(0)
        assert target.is_contiguous() and 0 <= row < target.shape[0], (row, target.shape)
        if start < 0 or start + len(many) > width:
            raise IndexError(f"{len(many)} values at {start} overrun a row of {width}")
        if not many:
            return
        edits = self._edits.get(id(target))
        if edits is None:
            edits = self._edits[id(target)] = _Edits(target)
        first = row * width + start
        edits.places += range(first, first + len(many))
        edits.values += many
        edits.again |= row in edits.rows
        edits.rows.add(row)

    def clear(self) -> None:
        """Drop all staged writes."""
        self._edits = {}

    def apply(self) -> None:
        """Send all staged writes to the device."""
        if not self._edits:
            return
        edits, self._edits = self._edits, {}  # a write that fails is not retried
        sent = iter(self._send([array for each in edits.values() for array in each.arrays()]))
        for each in edits.values():
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
