"""Captured tensor programs on a CPU, with a CUDA graph's semantics.

Capturing runs the Python function with every tensor operation recorded and none executed: outputs
get memory but no values, as in CUDA stream capture. Replaying executes the recorded operations on
the recorded addresses; Python is not run again, so host values are those of the capture.

What a CUDA graph refuses is refused here (graph/refusals.py). Our own operations are registered
with torch.library, so each is one call, which may do anything inside because every replay runs it
again.
"""

import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stoop.graph.arena import Arena, address_of
from stoop.graph.operations import (
    SEQUENCES,
    LeafMode,
    base_name,
    is_view,
    leaves,
    mapped,
    out_variant,
    returns_tensors,
    tensors_of,
    written_arguments,
)
from stoop.graph.refusals import CaptureError, no_host_reads, refuse_uncapturable

Call = Callable[[Any], object]  # takes the context of the replay
HostFunction = Callable[..., None]  # takes the context, then tensors

_UNINITIALISED = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
)
_capturing = threading.Lock()  # host reads are refused for the whole process, so one at a time


@dataclass(frozen=True)
class _Place:
    """A tensor in the arena, by address; holding the tensor itself would keep its place in use."""

    address: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Entry:
    func: Any  # OpOverload
    args: Any  # with a _Place for each tensor in the arena
    kwargs: Any
    outputs: tuple[_Place, ...]  # empty for operations that write into their arguments


@dataclass(frozen=True)
class _HostEntry:
    """A call that Python makes in every replay, between the recorded pieces."""

    function: HostFunction
    tensors: tuple[Any, ...]


class Tape:
    """A captured program. Tensors outside the arena are held, so that they are not freed."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls

    def __len__(self) -> int:
        return len(self._calls)

    @torch.inference_mode()
    def replay(self, context: Any = None) -> None:
        if _Recorder.active_in == threading.get_ident():
            raise CaptureError(
                "a replay inside a capture would overwrite its intermediates: replay after it"
            )
        for call in self._calls:
            call(context)


class TapeBackend:
    """Captures on the CPU. All tapes of one backend share its arena."""

    name = "tape"

    def __init__(self) -> None:
        self.arena = Arena()
        self._recorder: _Recorder | None = None

    @property
    def num_bytes(self) -> int:
        return self.arena.num_bytes

    def capture(self, function: Callable[[], object]) -> Tape:
        if _Recorder.active_in == threading.get_ident():
            raise CaptureError("a capture inside a capture: end the first one first")
        with _capturing:
            self.arena.restart()
            self._recorder = _Recorder(self.arena)
            try:
                with torch.inference_mode(), no_host_reads(), self._recorder:
                    _Recorder.active_in = threading.get_ident()
                    function()
                self._refuse_escapes()
                return Tape(self._recorder.calls())
            finally:
                _Recorder.active_in = None
                self._recorder = None

    def host_call(self, function: HostFunction, *tensors: Tensor) -> None:
        """In a capture: leave this call to Python. It runs in every replay, on these tensors."""
        if self._recorder is None:
            raise CaptureError("host_call outside a capture: call it inside one")
        self._recorder.record_host_call(function, tensors)

    def _refuse_escapes(self) -> None:
        """Refuse intermediates that outlive the capture: the next tape would overwrite them."""
        if self.arena.num_live:
            gc.collect()
        if self.arena.num_live:
            raise CaptureError(
                f"{self.arena.num_live} intermediates outlive the capture: copy what you keep into "
                "a persistent buffer"
            )


class _Recorder(LeafMode):
    active_in: int | None = None  # the thread that is capturing

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.arena = arena
        self.entries: list[_Entry | _HostEntry] = []
        self._constants: dict[int, Tensor] = {}  # created by the host in this capture, by address

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        refuse_uncapturable(func, args, kwargs)
        if is_view(func):
            return self._view(func, args, kwargs)
        written = written_arguments(func, args, kwargs)
        if written:
            self._check_writes(func, args, kwargs, written)
            self._record(func, args, kwargs, ())
            return _returned(func, written)
        if not returns_tensors(func):
            return self._without_outputs(func, args, kwargs)
        outputs = self._allocate(func, args, kwargs)
        if base_name(func) not in _UNINITIALISED:
            self._record(func, args, kwargs, tuple(leaves(outputs)))
        return outputs

    def record_host_call(self, function: HostFunction, tensors: tuple[Tensor, ...]) -> None:
        self.entries.append(_HostEntry(function, tuple(map(self._reference, tensors))))

    def calls(self) -> list[Call]:
        return [_bind(entry, self._tensor) for entry in self.entries]

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if base_name(func) == "aten::lift_fresh":  # what torch.tensor(...) made
            self._constants[result.untyped_storage().data_ptr()] = result
        return result

    def _without_outputs(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation that returns nothing, or a number that does not depend on values."""
        if func._schema.returns:
            return func(*args, **kwargs)
        self._record(func, args, kwargs, ())
        return None

    def _check_writes(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> None:
        """Refuse wrong shapes now rather than at the first replay, and writes into constants."""
        for tensor in written:
            if tensor.untyped_storage().data_ptr() in self._constants:
                raise CaptureError(
                    f"{func} writes into a constant, which a replay does not reset: clone it first"
                )
        if func.namespace == "stoop":
            return
        after = _on_meta(func, args, kwargs).written
        if any(tensor.shape != shape.size for tensor, shape in zip(written, after, strict=True)):
            raise CaptureError(f"{func} changes the shape of a tensor: give it the right one")

    def _allocate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Uninitialised outputs of the shapes that the operation returns."""
        return mapped(self._empty, _on_meta(func, args, kwargs).returned)

    def _empty(self, shape: Any) -> Any:
        if not isinstance(shape, _Shape):
            return shape
        return self.arena.empty_strided(shape.size, shape.stride, shape.dtype)

    def _record(self, func: Any, args: Any, kwargs: Any, outputs: tuple[Tensor, ...]) -> None:
        args, kwargs = mapped(self._reference, (args, kwargs))
        places = tuple(self._reference(output) for output in outputs)
        self.entries.append(_Entry(func, args, kwargs, places))

    def _reference(self, value: Any) -> Any:
        """How an entry stores an argument: by its place in the arena, or as an alias if outside it.

        The alias keeps the address even if `value.data` is assigned later.
        """
        if not isinstance(value, Tensor):
            return value
        if not self.arena.owns(value):
            return value.detach()
        if value.is_conj() or value.is_neg():
            raise CaptureError("a lazily conjugated intermediate: use resolve_conj()")
        return _Place(address_of(value), tuple(value.shape), value.stride(), value.dtype)

    def _tensor(self, value: Any) -> Any:
        if not isinstance(value, _Place):
            return value
        return self.arena.at(value.address, value.size, value.stride, value.dtype)


def _returned(func: Any, written: list[Any]) -> Any:
    """What an operation that writes into arguments returns: those arguments, or nothing."""
    returns = func._schema.returns
    if not returns:
        return None
    if any(entry.alias_info is None for entry in returns):
        raise CaptureError(f"{func} writes into an argument and returns another tensor")
    return written[0] if len(returns) == 1 else tuple(written[: len(returns)])


@dataclass(frozen=True)
class _Shape:
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _MetaRun:
    """What an operation does to shapes."""

    returned: Any  # with a _Shape for each tensor
    written: tuple[_Shape, ...]  # arguments, as they come out


_meta_runs: dict[Any, _MetaRun] = {}  # layers and drafts repeat each other's calls


def _on_meta(func: Any, args: Any, kwargs: Any) -> _MetaRun:
    try:
        key = (func, _signature(args), _signature(kwargs), torch.get_default_dtype())
        known = _meta_runs.get(key)
    except TypeError:  # an argument that cannot be a key
        return _run_on_meta(func, args, kwargs)
    if known is None:
        known = _meta_runs[key] = _run_on_meta(func, args, kwargs)
    return known


def _signature(value: Any) -> Any:
    """The part of an argument that the shapes of an operation's outputs can depend on."""
    if isinstance(value, Tensor):
        return _shape_of(value)
    if isinstance(value, SEQUENCES):
        return tuple(map(_signature, value))
    if isinstance(value, dict):
        return tuple((name, _signature(each)) for name, each in value.items())
    return type(value), value  # 1, 1.0 and True are equal


def _shape_of(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _Shape(tuple(value.shape), value.stride(), value.dtype)


def _run_on_meta(func: Any, args: Any, kwargs: Any) -> _MetaRun:
    meta_args, meta_kwargs = mapped(_to_meta, (args, kwargs))
    if "device" in meta_kwargs or not tensors_of(args, kwargs):
        meta_kwargs["device"] = torch.device("meta")
    try:
        returned = func(*meta_args, **meta_kwargs)
    except Exception as error:
        raise CaptureError(f"{func} cannot be captured: {error}") from error
    written = tuple(map(_shape_of, written_arguments(func, meta_args, meta_kwargs)))
    return _MetaRun(mapped(_shape_of, returned), written)


def _to_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _bind(entry: _Entry | _HostEntry, tensor: Callable[[Any], Any]) -> Call:
    """The recorded operation as a call that writes to the recorded addresses."""
    if isinstance(entry, _HostEntry):
        function, tensors = entry.function, tuple(map(tensor, entry.tensors))
        return lambda context: function(context, *tensors)
    args, kwargs = mapped(tensor, (entry.args, entry.kwargs))
    func = entry.func
    if not entry.outputs:
        return lambda context: func(*args, **kwargs)
    outputs = tuple(tensor(place) for place in entry.outputs)
    into, names = out_variant(func)
    if into is not None and all(output.is_contiguous() for output in outputs):
        kwargs = kwargs | dict(zip(names, outputs, strict=True))
        return lambda context: into(*args, **kwargs)

    def run_and_copy(context: Any) -> None:
        for output, result in zip(outputs, leaves(func(*args, **kwargs)), strict=True):
            output.copy_(result)

    return run_and_copy
