"""Host edits of device state, collected and applied together.

An edit names a tensor, a row and a place in it. Nothing changes until `apply`, which makes one
copy to the device and one scatter for each tensor that has edits.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Values = Sequence[int] | Sequence[float] | int | float


class StagedWrites:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._edits: dict[int, tuple[Tensor, list[np.ndarray], list[np.ndarray]]] = {}

    def put(self, target: Tensor, row: int, values: Values, start: int = 0) -> None:
        """Stage `target[row, start : start + len(values)] = values` (flat within the row)."""
        data = np.atleast_1d(np.array(values))
        if data.size == 0:  # would turn its neighbours into floats
            return
        width = target.stride(0)
        assert target.is_contiguous() and 0 <= row < target.shape[0], (row, target.shape)
        if start < 0 or start + data.size > width:
            raise IndexError(f"{data.size} values at {start} overrun a row of {width}")
        first = row * width + start
        _, places, contents = self._edits.setdefault(id(target), (target, [], []))
        places.append(np.arange(first, first + data.size))
        contents.append(data)

    def apply(self) -> None:
        edits, self._edits = self._edits, {}  # an edit that fails is not tried again
        for target, places, contents in edits.values():
            place, values = np.concatenate(places), np.concatenate(contents)
            last = _last_edits(place)
            index = self._to_device(torch.from_numpy(place[last]))
            found = torch.from_numpy(values[last]).to(target.dtype)
            target.view(-1).index_copy_(0, index, self._to_device(found))

    def _to_device(self, host: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return host
        # The pinned block goes back to torch's host allocator only after the copy has run.
        return host.pin_memory().to(self.device, non_blocking=True)


def _last_edits(place: np.ndarray) -> np.ndarray:
    """Where the last edit of each place stands; a scatter of duplicates has no defined order."""
    _, first_from_back = np.unique(place[::-1], return_index=True)
    return place.size - 1 - first_from_back
