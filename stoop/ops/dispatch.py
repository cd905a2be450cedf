"""One dispatch from the torch reference of an operation to its kernel: in Triton for GPUs, and for
some operations in C++ for CPUs.

    @op("x")
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(...)

The decorated function is the reference: plain torch, for any device. The kernel is the function of
the same name and signature in `stoop/ops/kernels/`, in the module of the same name unless the
decorator gives another. The kernel serves a call if `uses_kernels` accepts the deciding tensor,
which the decorator names: a parameter ("x"), a field of a dataclass ("step.row_slots") or an
element of a sequence ("parts.0").

An operation with `native=True` has a twin of its name in ops/native/steps.py, too. It serves calls
on a CPU in a process that has loaded those kernels.

A call costs little: the deciding argument is found once, at import, and the kernel once, at its
first call, because triton is optional.
"""

import functools
import importlib
import inspect
import operator
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from stoop.ops.kernels.choice import uses_kernels
from stoop.ops.native.library import loaded_native

P = ParamSpec("P")
R = TypeVar("R")


class Op(Generic[P, R]):
    """An operation with two implementations; calling it runs the one that serves the arguments."""

    def __init__(
        self,
        reference: Callable[P, R],
        decided_by: str,
        kernel_module: str | None,
        native: bool = False,
    ) -> None:
        functools.update_wrapper(self, reference)
        self.reference = reference
        self.name = reference.__name__
        self.kernel_module = kernel_module or reference.__module__.rpartition(".")[2]
        self._parameter, *path = decided_by.split(".")
        self._place = list(inspect.signature(reference).parameters).index(self._parameter)
        self._tensor_in = _getter(path)
        self.has_native = native

    def __repr__(self) -> str:
        return f"<op {self.name}, kernel in {self.kernel_module}>"

    @functools.cached_property
    def kernel(self) -> Callable[P, R]:
        """The Triton twin. Needs triton, but no GPU."""
        module = importlib.import_module(f"stoop.ops.kernels.{self.kernel_module}")
        kernel: Callable[P, R] = getattr(module, self.name)
        return kernel

    @functools.cached_property
    def native(self) -> Callable[P, R]:
        """The twin in C++."""
        steps = importlib.import_module("stoop.ops.native.steps")
        twin: Callable[P, R] = getattr(steps, self.name)
        return twin

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given: Any = args[self._place]
        except IndexError:
            given = kwargs.get(self._parameter)
            if given is None:  # the argument is missing: let Python say so
                return self.reference(*args, **kwargs)
        if self._tensor_in is not None:
            given = self._tensor_in(given)
        if uses_kernels(given):
            return self.kernel(*args, **kwargs)
        if self.has_native and uses_native(given):
            return self.native(*args, **kwargs)
        return self.reference(*args, **kwargs)


def _getter(path: list[str]) -> Callable[[Any], Any] | None:
    """From the deciding argument to its tensor; None if the argument is the tensor."""
    if not path:
        return None
    (field,) = path
    return operator.itemgetter(int(field)) if field.isdigit() else operator.attrgetter(field)


# By "module.name" of the reference, so that tests can enumerate them.
OPS: dict[str, Op[Any, Any]] = {}


def uses_native(tensor: Any) -> bool:
    """Whether the kernels in C++ serve it: logits in float32, and whole numbers."""
    if loaded_native() is None or tensor.device.type != "cpu":
        return False
    return tensor.dtype == torch.float32 or not tensor.is_floating_point()


def op(
    decided_by: str, *, kernel_module: str | None = None, native: bool = False
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make a reference an operation; see the module's docstring.

    kernel_module: file of the kernel, if its name is not that of the reference's module
    native: it has a twin in C++
    """

    def decorate(reference: Callable[P, R]) -> Op[P, R]:
        made = Op(reference, decided_by, kernel_module, native)
        OPS[f"{reference.__module__.rpartition('.')[2]}.{made.name}"] = made
        return made

    return decorate
