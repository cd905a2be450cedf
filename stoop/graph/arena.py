"""Memory of intermediates that all tapes share, as all CUDA graphs share one pool.

Tapes never run at the same time and keep nothing in the arena between replays, so each may use all
of it. Within one tape a place is reused once the tensors that had it are freed. The largest tape is
captured first; the others then fit into what it took.
"""

import weakref
from bisect import insort

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64
CHUNK_BYTES = 1 << 20  # chunks are never smaller


class Arena:
    """An allocator over chunks of bytes whose addresses never change."""

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        self._free: list[tuple[int, int, int]] = []  # (chunk, start, bytes), in order
        self._live: set[tuple[int, int]] = set()  # places of the current tape that are in use

    @property
    def num_bytes(self) -> int:
        return sum(chunk.num_bytes for chunk in self._chunks)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def restart(self) -> None:
        """Give all of the arena to the next tape."""
        self._live = set()
        self._free = [(i, 0, chunk.num_bytes) for i, chunk in enumerate(self._chunks)]

    def empty_strided(
        self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """An uninitialised tensor, whose place is free again when the tensor is."""
        elements = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        if 0 in size:
            elements = 0
        num_bytes = max(-(-elements * dtype.itemsize // ALIGNMENT) * ALIGNMENT, ALIGNMENT)
        chunk, start = self._take(num_bytes)
        # torch keeps the array alive as long as any tensor uses this memory, views included.
        place = self._chunks[chunk].memory[start : start + num_bytes]
        self._live.add((chunk, start))
        weakref.finalize(place, self._give, self._free, self._live, (chunk, start, num_bytes))
        flat = torch.from_numpy(place).view(dtype)
        return flat.as_strided(size, stride)

    def owns(self, tensor: Tensor) -> bool:
        return self._chunk_of(address_of(tensor)) is not None

    def at(
        self, address: int, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """A tensor over a place, whether or not it is in use."""
        chunk = self._chunk_of(address)
        assert chunk is not None, hex(address)
        return chunk.viewed_as(dtype).as_strided(
            size, stride, (address - chunk.start) // dtype.itemsize
        )

    def _chunk_of(self, address: int) -> "_Chunk | None":
        for chunk in self._chunks:
            if chunk.start <= address < chunk.end:
                return chunk
        return None

    def _take(self, num_bytes: int) -> tuple[int, int]:
        for index, (chunk, start, length) in enumerate(self._free):
            if length >= num_bytes:
                del self._free[index]
                if length > num_bytes:
                    insort(self._free, (chunk, start + num_bytes, length - num_bytes))
                return chunk, start
        size = max(num_bytes, CHUNK_BYTES)
        self._chunks.append(_Chunk(size))
        if size > num_bytes:
            insort(self._free, (len(self._chunks) - 1, num_bytes, size - num_bytes))
        return len(self._chunks) - 1, 0

    @staticmethod
    def _give(
        free: list[tuple[int, int, int]], live: set[tuple[int, int]], place: tuple[int, int, int]
    ) -> None:
        """Return a place to the list that it came from, and join it with free neighbours.

        A place of an earlier tape belongs to a list that is no longer used.
        """
        live.discard(place[:2])
        insort(free, place)
        index = free.index(place)
        for left in (index, index - 1):
            if 0 <= left < len(free) - 1:
                a, b = free[left], free[left + 1]
                if a[0] == b[0] and a[1] + a[2] == b[1]:
                    free[left : left + 2] = [(a[0], a[1], a[2] + b[2])]


class _Chunk:
    """Aligned bytes, and where they are."""

    def __init__(self, num_bytes: int) -> None:
        raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
        skip = -raw.ctypes.data % ALIGNMENT
        self.memory = raw[skip : skip + num_bytes]
        self.num_bytes = num_bytes
        self.start = self.memory.ctypes.data
        self.end = self.start + num_bytes
        self._views: dict[torch.dtype, Tensor] = {}

    def viewed_as(self, dtype: torch.dtype) -> Tensor:
        """All of it."""
        found = self._views.get(dtype)
        if found is None:
            found = self._views[dtype] = torch.from_numpy(self.memory).view(dtype)
        return found


def address_of(tensor: Tensor) -> int:
    """The address of a tensor; unlike `data_ptr`, also of one without elements."""
    start = tensor.untyped_storage().data_ptr()
    return start + int(tensor.storage_offset()) * tensor.element_size()
