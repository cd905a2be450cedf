"""Captured tensor programs on a CPU, with a CUDA graph's semantics.

Capturing runs the Python function with every tensor operation recorded and none executed: outputs
get memory and no values, as under CUDA stream capture. Replaying executes the recorded operations
on the recorded addresses; Python is not run again, so host values are those of the capture.

What a CUDA graph refuses is refused here: reading a value on the host, shapes that depend on
values, random state. Our own operations are registered with torch.library, so each is one call;
inside, it may do as it likes, for it runs anew in every replay.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from stoop.graph.arena import Arena
from stoop.graph.operations import (
    base_name,
    is_composite,
    is_view,
    tensors_of,
    written_arguments,
)

Call = Callable[[Any], object]  # takes the context of the replay
HostFunction = Callable[..., None]  # takes the context, then tensors

_UNINITIALISED = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::new_empty",
        "aten::empty_strided",
        "aten::new_empty_strided",
    }
)
_SYNCS = frozenset({"aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero"})
_HOST_READS = ("tolist", "numpy", "__array__")


class CaptureError(RuntimeError):
    """The function does what a captured graph cannot do."""


@dataclass(frozen=True)
class _Place:
    """A tensor in the arena, by address: holding the tensor itself would keep its place taken."""

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
    """A call that is made by Python in every replay, between the recorded pieces."""

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
        self.arena.restart()
        self._recorder = _Recorder(self.arena)
        try:
            with torch.inference_mode(), _no_host_reads(), self._recorder:
                function()
            return Tape(self._recorder.calls())
        finally:
            self._recorder = None

    def host_call(self, function: HostFunction, *tensors: Tensor) -> None:
        """In a capture: leave this call to Python. It runs in every replay, on these tensors."""
        assert self._recorder is not None, "only while capturing"
        self._recorder.record_host_call(function, tensors)


class _Recorder(TorchDispatchMode):
    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.arena = arena
        self.entries: list[_Entry | _HostEntry] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        _refuse_uncapturable(func, args)
        if is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if is_view(func):
            return func(*args, **kwargs)
        written = written_arguments(func, args, kwargs)
        if written:
            self._record(func, args, kwargs, ())
            return _returned(func, written)
        outputs = self._allocate(func, args, kwargs)
        flat = tuple(outputs) if isinstance(outputs, list | tuple) else (outputs,)
        if base_name(func) not in _UNINITIALISED:
            self._record(func, args, kwargs, flat)
        return outputs

    def record_host_call(self, function: HostFunction, tensors: tuple[Tensor, ...]) -> None:
        self.entries.append(_HostEntry(function, tuple(map(self._reference, tensors))))

    def calls(self) -> list[Call]:
        return [_bind(entry, self._tensor) for entry in self.entries]

    def _allocate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Outputs without values, of the shapes that the operation would give."""
        device = torch.device("meta")
        meta_args, meta_kwargs = tree_map(_to_meta, (args, kwargs))
        if "device" in meta_kwargs or not tensors_of(args, kwargs):
            meta_kwargs["device"] = device
        try:
            shapes = func(*meta_args, **meta_kwargs)
        except Exception as error:
            raise CaptureError(f"{func} cannot be captured: {error}") from error
        return tree_map(self._empty_like, shapes)

    def _empty_like(self, shape: Any) -> Any:
        if not isinstance(shape, Tensor):
            return shape
        return self.arena.empty_strided(tuple(shape.shape), shape.stride(), shape)

    def _record(self, func: Any, args: Any, kwargs: Any, outputs: tuple[Tensor, ...]) -> None:
        args, kwargs = tree_map(self._reference, (args, kwargs))
        places = tuple(self._reference(output) for output in outputs)
        self.entries.append(_Entry(func, args, kwargs, places))

    def _reference(self, value: Any) -> Any:
        """How an entry remembers an argument: by place in the arena, or by an alias outside it.

        The alias keeps the address even if `value.data` is set to something else later.
        """
        if not isinstance(value, Tensor):
            return value
        if self.arena.owns(value):
            return _Place(value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
        return value.detach()

    def _tensor(self, value: Any) -> Any:
        if not isinstance(value, _Place):
            return value
        return self.arena.at(value.address, value.size, value.stride, value.dtype)


# ---- what an operation is ----


def _refuse_uncapturable(func: Any, args: Any) -> None:
    tags = func.tags
    if base_name(func) in _SYNCS or torch.Tag.data_dependent_output in tags:
        raise CaptureError(f"{func} reads a value on the host, which a captured graph cannot do")
    if torch.Tag.dynamic_output_shape in tags and _depends_on_values(func, args):
        raise CaptureError(f"{func} has a shape that depends on values: use a fixed shape")
    if torch.Tag.nondeterministic_seeded in tags:
        raise CaptureError(f"{func} uses random state: use stoop.ops.random, which has none")


def _depends_on_values(func: Any, args: Any) -> bool:
    """Indexing has a fixed shape unless a mask selects."""
    if base_name(func) != "aten::index":
        return True
    return any(index is not None and index.dtype == torch.bool for index in args[1])


def _returned(func: Any, written: list[Any]) -> Any:
    """An operation that writes into arguments returns them, if anything."""
    num_returns = len(func._schema.returns)
    if num_returns == 0:
        return None
    return written[0] if num_returns == 1 else tuple(written[:num_returns])


def _to_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


# ---- replay ----


def _bind(entry: _Entry | _HostEntry, tensor: Callable[[Any], Any]) -> Call:
    """The recorded operation as a call that writes to its recorded addresses."""
    if isinstance(entry, _HostEntry):
        function, tensors = entry.function, tuple(map(tensor, entry.tensors))
        return lambda context: function(context, *tensors)
    args, kwargs = tree_map(tensor, (entry.args, entry.kwargs))
    func = entry.func
    if not entry.outputs:
        return lambda context: func(*args, **kwargs)
    outputs = tuple(tensor(place) for place in entry.outputs)
    into, names = _out_variant(func)
    if into is not None and all(output.is_contiguous() for output in outputs):
        kwargs = kwargs | dict(zip(names, outputs, strict=True))
        return lambda context: into(*args, **kwargs)

    def run_and_copy(context: Any) -> None:
        results = func(*args, **kwargs)
        results = results if isinstance(results, list | tuple) else (results,)
        for output, result in zip(outputs, results, strict=True):
            output.copy_(result)

    return run_and_copy


def _out_variant(func: Any) -> tuple[Any, list[str]]:
    """The overload that takes the same arguments and writes into given outputs."""
    schema = func._schema
    wanted = [(argument.name, str(argument.type)) for argument in schema.arguments]
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        inputs = [a for a in overload._schema.arguments if not a.is_out]
        outs = [a.name for a in overload._schema.arguments if a.is_out]
        if len(outs) == len(schema.returns) and [(a.name, str(a.type)) for a in inputs] == wanted:
            return overload, outs
    return None, []


# ---- host reads that do not dispatch ----


@contextmanager
def _no_host_reads() -> Iterator[None]:
    """`.tolist()` and `.numpy()` go past the dispatcher: refuse them in this thread."""
    thread = threading.get_ident()
    originals = {name: getattr(Tensor, name) for name in _HOST_READS}

    def refusing(name: str) -> Callable[..., Any]:
        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                raise CaptureError(f".{name}() reads values on the host: not in a captured graph")
            return originals[name](self, *args, **kwargs)

        return read

    for name in _HOST_READS:
        setattr(Tensor, name, refusing(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Tensor, name, original)
