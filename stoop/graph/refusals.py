"""Refuses, during a capture, what a captured graph cannot do."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stoop.graph.operations import argument, base_name, is_view

_SYNCS = frozenset({"aten::_local_scalar_dense", "aten::equal"})
_RESHAPES = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_"})
_HOST_READS = ("tolist", "numpy", "__array__", "__dlpack__")


class CaptureError(RuntimeError):
    """The function does what a captured graph cannot do."""


class MissingGraph(RuntimeError):
    """A batch was sent to a graph that was not captured for it."""


def refuse_uncapturable(func: Any, args: Any, kwargs: Any) -> None:
    name, tags = base_name(func), func.tags
    if name in _SYNCS or torch.Tag.data_dependent_output in tags:
        raise CaptureError(f"{func} reads a value on the host, which a captured graph cannot do")
    if _shape_depends_on_values(func, args):
        raise CaptureError(f"{func} has a shape that depends on values: use a fixed shape")
    if torch.Tag.nondeterministic_seeded in tags and argument(func, args, kwargs, "dropout_p"):
        raise CaptureError(f"{func} uses random state: use stoop.ops.random, which has none")
    if (torch.Tag.inplace_view in tags and not is_view(func)) or name in _RESHAPES:
        raise CaptureError(f"{func} changes a tensor's shape in place: make a view instead")


def _shape_depends_on_values(func: Any, args: Any) -> bool:
    """Indexing has a fixed shape unless a mask selects."""
    name = base_name(func)
    if name in ("aten::index", "aten::index_put_", "aten::index_put"):
        masks = any(index is not None and index.dtype == torch.bool for index in args[1])
        # Writing a single value through a mask does not need the number of its elements.
        return masks and (name == "aten::index" or args[2].numel() != 1)
    return torch.Tag.dynamic_output_shape in func.tags


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Refuse `.tolist()` and `.numpy()`, which bypass the dispatcher, in this thread."""
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
