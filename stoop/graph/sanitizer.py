"""Finds captured graphs that read stale buffers.

Every persistent buffer declares a lifetime. Before a step, all buffers that live for one step are
filled with a mark. An element that still has the mark when a graph is about to read it was not
written in this step: a stale read, reported with the buffer's name and the step that last wrote it.

What a graph reads is learnt by watching its capture: the elements that are read before the graph
itself has written them.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from stoop.graph.buffers import Buffer, Lifetime
from stoop.graph.operations import (
    LeafMode,
    is_view,
    overwrites,
    tensors_of,
    written_arguments,
)


class SanitizerError(RuntimeError):
    """A captured graph does not do what its phases do."""


class StaleRead(SanitizerError):
    def __init__(self, reader: str, buffer: str, written: int, step: int) -> None:
        self.buffer = buffer
        when = f"last written in step {written}" if written else "never written"
        super().__init__(f"{reader}: `{buffer}` {when}, read in step {step}")


class UndeclaredRead(SanitizerError):
    def __init__(self, reader: str, buffer: str) -> None:
        self.buffer = buffer
        super().__init__(f"{reader}: relies on `{buffer}`, which none of its phases says it reads")


class ReplayMismatch(SanitizerError):
    def __init__(self, reader: str, buffer: str, step: int) -> None:
        self.buffer = buffer
        super().__init__(f"{reader}: `{buffer}` differs from the eager twin's in step {step}")


class MovedBuffer(SanitizerError):
    def __init__(self, buffer: str) -> None:
        self.buffer = buffer
        super().__init__(f"`{buffer}` has moved since the capture: graphs read its old address")


class BadPadding(SanitizerError):
    def __init__(self, reader: str, buffer: str, harmless: int, step: int) -> None:
        self.buffer = buffer
        super().__init__(
            f"{reader}: `{buffer}` has something other than {harmless} past its live extent in "
            f"step {step}"
        )


class UnwrittenRead(SanitizerError):
    def __init__(self, reader: str, buffer: str, step: int) -> None:
        self.buffer = buffer
        super().__init__(
            f"{reader}: `{buffer}` has NaN in step {step}: a layer read KV or state that nothing "
            "has written (a backend that reads masked values must declare zeroed_cache), or the "
            "model's own values overflow"
        )


class Sanitizer:
    def __init__(self, buffers: Iterable[Buffer]) -> None:
        self.buffers = [b for b in buffers if b.lifetime in (Lifetime.STEP, Lifetime.DRAFT)]
        self.step = 0
        # By buffer: the step that last wrote each element, 0 for never.
        self._stamps = {b.name: torch.zeros_like(b.tensor, dtype=torch.int32) for b in self.buffers}
        self._footprints: dict[Any, list[tuple[Buffer, Tensor]]] = {}

    def learn(self, key: Any, function: Callable[[], object]) -> list[str]:
        """Watch a graph's phases and record what they read; returns the names of the buffers."""
        with _disable_current_modes():  # a capture around us must not record this
            watcher = _Watcher(self.buffers)
        with watcher:
            function()
        with _disable_current_modes():
            relied = ((b, watcher.relied_on[b.name]) for b in self.buffers)
            self._footprints[key] = [(b, mask) for b, mask in relied if bool(mask.any())]
            return [buffer.name for buffer, _ in self._footprints[key]]

    def begin_step(self) -> None:
        self._stamp_written()
        self.step += 1
        self._mark_all(self.buffers)

    def begin_draft_decode(self) -> None:
        """From here on, what was derived for the previous draft is stale."""
        self._stamp_written()
        self._mark_all([b for b in self.buffers if b.lifetime is Lifetime.DRAFT])

    def check_reads(self, key: Any, reader: str) -> None:
        """Refuse a replay that would read an element that this step has not written."""
        for buffer, relied in self._footprints[key]:
            stale = _marked(buffer.tensor) & relied.to(buffer.tensor.device)
            if bool(stale.any()):
                written = int(self._stamps[buffer.name][stale].max())
                raise StaleRead(reader, buffer.name, written, self.step)

    def _stamp_written(self) -> None:
        for buffer in self.buffers:
            self._stamps[buffer.name].masked_fill_(~_marked(buffer.tensor), self.step)

    @staticmethod
    def _mark_all(buffers: Iterable[Buffer]) -> None:
        for buffer in buffers:
            buffer.tensor.fill_(_mark(buffer.tensor.dtype))


def _mark(dtype: torch.dtype) -> float | int:
    """A value that no phase writes, and that fails as an index."""
    if dtype.is_floating_point:
        return -54272.0  # exact in every float type that we use
    return 0x5A5A5A5A


def _marked(tensor: Tensor) -> Tensor:
    return tensor == _mark(tensor.dtype)


class _Watcher(LeafMode):
    """Tracks reads and writes of buffers, element by element."""

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        super().__init__()
        self._buffers = {b.tensor.untyped_storage().data_ptr(): b for b in buffers}
        self._written = {b.name: _shadow(b) for b in self._buffers.values()}
        self.relied_on = {b.name: _shadow(b) for b in self._buffers.values()}

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not is_view(func):
            self._note(func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, func: Any, args: Any, kwargs: Any) -> None:
        written = written_arguments(func, args, kwargs)
        kept = set() if not overwrites(func) else {id(tensor) for tensor in written}
        for tensor in tensors_of(args, kwargs):
            if id(tensor) not in kept:
                self._read(tensor)
        for tensor in written:
            self._write(tensor)

    def _read(self, tensor: Tensor) -> None:
        buffer = self._find(tensor)
        if buffer is not None:
            relied, written = self.relied_on[buffer.name], self._written[buffer.name]
            with _disable_current_modes():  # a capture around us must not record this
                part = _same_part(relied, tensor)
                part |= ~_same_part(written, tensor)

    def _write(self, tensor: Tensor) -> None:
        buffer = self._find(tensor)
        if buffer is not None:
            with _disable_current_modes():
                _same_part(self._written[buffer.name], tensor).fill_(True)

    def _find(self, tensor: Tensor) -> Buffer | None:
        return self._buffers.get(tensor.untyped_storage().data_ptr())


def _shadow(buffer: Buffer) -> Tensor:
    """A buffer's shadow on the host, so that updating it is not captured into a CUDA graph."""
    assert buffer.tensor.is_contiguous(), buffer.name
    return torch.zeros(buffer.tensor.shape, dtype=torch.bool)


def _same_part(shadow: Tensor, tensor: Tensor) -> Tensor:
    """The elements of a buffer's shadow that a view of the buffer covers, each once."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    shape = [min(size, 1) if stride == 0 else size for size, stride in pairs]  # expanded
    return shadow.as_strided(shape, tensor.stride(), tensor.storage_offset())
