"""What an operation does to its arguments, according to its schema.

A capture asks this for every call, and schemas do not change, so answers are cached.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LeafMode(TorchDispatchMode):
    """Intercepts every operation that is not composed of others."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self.operation(func, args, kwargs)

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


# These share their argument's memory, though their schema does not say so.
_SILENT_VIEWS = frozenset(
    f"aten::{name}" for name in ("_unsafe_view", "_reshape_alias", "lift_fresh", "detach_")
)
_OVERWRITES = frozenset({"aten::copy_", "aten::fill_", "aten::zero_"})


SEQUENCES = (tuple, list)
NESTED = (tuple, list, dict)


def leaves(value: Any) -> Iterator[Any]:
    """The elements of arguments or results, through lists, tuples and dictionaries."""
    if isinstance(value, SEQUENCES):
        for each in value:
            yield from leaves(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from leaves(each)
    else:
        yield value


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply the function to each leaf, keeping lists, tuples and dictionaries."""
    if isinstance(value, SEQUENCES):
        found = [
            mapped(function, each) if isinstance(each, NESTED) else function(each) for each in value
        ]
        return found if type(value) is list else type(value)(found)
    if isinstance(value, dict):
        return {name: mapped(function, each) for name, each in value.items()}
    return function(value)


@functools.cache
def base_name(func: Any) -> str:
    """`aten::add` of `aten::add.Tensor`."""
    name: str = func.name().split(".")[0]
    return name


@functools.cache
def is_composite(func: Any) -> bool:
    """Whether it is composed of other operations, which can be intercepted instead."""
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    )


@functools.cache
def is_view(func: Any) -> bool:
    if base_name(func) in _SILENT_VIEWS:
        return True
    aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


@functools.cache
def _written_places(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    places = _written_places(func)
    if not places:
        return []
    written = [args[index] if index < len(args) else kwargs.get(name) for index, name in places]
    return [value for value in leaves(written) if isinstance(value, Tensor)]


@functools.cache
def overwrites(func: Any) -> bool:
    """Whether it overwrites all of its written arguments without reading them."""
    writes_out = any(argument.is_out for argument in func._schema.arguments)
    return writes_out or base_name(func) in _OVERWRITES or func.namespace == "stoop"


def tensors_of(args: Any, kwargs: Any) -> list[Tensor]:
    return [value for value in leaves((args, kwargs)) if isinstance(value, Tensor)]


@functools.cache
def returns_tensors(func: Any) -> bool:
    return any("Tensor" in str(entry.type) for entry in func._schema.returns)


def argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """An argument by name; True if the operation has no argument of that name."""
    for index, entry in enumerate(func._schema.arguments):
        if entry.name == name:
            given = args[index] if index < len(args) else kwargs.get(name, entry.default_value)
            return given
    return True


@functools.cache
def out_variant(func: Any) -> tuple[Any, list[str]]:
    """The overload with the same arguments that writes into given outputs, if it exists."""
    schema = func._schema
    if any(str(entry.type) != "Tensor" for entry in schema.returns):
        return None, []
    wanted = [(entry.name, str(entry.type)) for entry in schema.arguments]
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        inputs = [entry for entry in overload._schema.arguments if not entry.is_out]
        outs = [entry.name for entry in overload._schema.arguments if entry.is_out]
        same = [(entry.name, str(entry.type)) for entry in inputs] == wanted
        if same and len(outs) == len(schema.returns):
            return overload, outs
    return None, []
