"""Layers that keep state between steps, and the context that runs them.

A model calls `ctx.run(layer, *inputs)`; the context holds the layer's state and this step's
metadata and calls `layer.core(state, metadata, *inputs)`. Only that call reads or writes state, so
a context decides how it happens: directly, by Python between the pieces of a graph, or without a
cache while a draft head is trained.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from stoop.core.state import State
from stoop.graph.manager import GraphBackend

Input = Any  # a tensor, or a dataclass whose fields are tensors


class StatefulLayer(nn.Module, ABC):
    """A layer with a state; `number_layers` sets its index."""

    index = -1  # of its state among those of all layers

    @property
    @abstractmethod
    def state(self) -> State:
        """The spec of what it keeps."""

    @property
    def unserved(self) -> str | None:
        """Its sizes that no GPU kernel serves, and those that are served, in words; or None."""
        return None

    @property
    def most_tokens(self) -> int | None:
        """The most tokens that its GPU kernels take in one step; None if any number."""
        return None

    @abstractmethod
    def core(self, state: Any, metadata: Any, *inputs: Input) -> Tensor:
        """Read and update the state.

        state: its tensor, or its tensors by name
        metadata: this step's, for states of this kind
        """

    @abstractmethod
    def empty_output(self, *inputs: Input) -> Tensor:
        """An uninitialised tensor with the shape of what `core` returns."""


class HasModules(Protocol):
    def modules(self) -> Iterator[nn.Module]: ...


def stateful_layers(*modules: HasModules) -> list[StatefulLayer]:
    """The stateful layers of all modules, in order."""
    every = (layer for module in modules for layer in module.modules())
    return [layer for layer in every if isinstance(layer, StatefulLayer)]


def number_layers(layers: Iterable[StatefulLayer]) -> None:
    for index, layer in enumerate(layers):
        layer.index = index


class ForwardContext(Protocol):
    """What layers need besides their inputs; it is an argument, never a global."""

    def run(self, layer: StatefulLayer, *inputs: Input) -> Tensor:
        """Call the layer's `core` with its state."""
        ...


@dataclasses.dataclass(frozen=True)
class StateContext:
    """Runs each layer directly."""

    states: Sequence[Any]  # by layer: a tensor, or tensors by name
    metadata: Mapping[type[State], Any]

    def run(self, layer: StatefulLayer, *inputs: Input) -> Tensor:
        return layer.core(self.states[layer.index], self.metadata[type(layer.state)], *inputs)


class BreakingContext:
    """For piecewise capture: ends the graph at each stateful layer, which Python then calls."""

    def __init__(self, backend: GraphBackend) -> None:
        self.backend = backend

    def run(self, layer: StatefulLayer, *inputs: Input) -> Tensor:
        out = layer.empty_output(*inputs)
        kinds = [type(each) for each in inputs]  # `call` must not keep tensors of the capture

        def call(context: ForwardContext, *tensors: Tensor) -> None:
            *read, written = tensors
            written.copy_(context.run(layer, *_rebuild(kinds, read)))

        self.backend.host_call(call, *_flatten(inputs), out)
        return out


def _flatten(inputs: Sequence[Input]) -> list[Tensor]:
    tensors: list[Tensor] = []
    for each in inputs:
        if isinstance(each, Tensor):
            tensors.append(each)
        else:
            tensors += [getattr(each, field.name) for field in dataclasses.fields(each)]
    return tensors


def _rebuild(kinds: Sequence[Any], tensors: Iterable[Tensor]) -> list[Input]:
    """Undo `_flatten`: build inputs of these types from tensors."""
    rest = iter(tensors)
    return [
        next(rest)
        if issubclass(kind, Tensor)
        else kind(*(next(rest) for _ in dataclasses.fields(kind)))
        for kind in kinds
    ]
