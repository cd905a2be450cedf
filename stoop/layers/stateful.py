"""Layers that keep something between steps, and the context that runs them.

A model calls `ctx.run(layer, *inputs)`; the context has the layer's state and this step's metadata
and calls `layer.core(state, metadata, *inputs)`. That call is the only place where state is read or
written, so a context decides how it happens: right away, by Python between the pieces of a graph,
or without any cache while a draft head is trained.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from stoop.core.state import State
from stoop.graph.manager import GraphBackend

Input = Any  # a tensor, or a dataclass whose fields are tensors


class StatefulLayer(nn.Module):
    """A layer with a state; `number_layers` tells it which one is its own."""

    index = -1  # of its state among those of all layers

    @property
    def state(self) -> State:
        """What it keeps, as numbers."""
        raise NotImplementedError

    def core(self, state: Any, metadata: Any, *inputs: Input) -> Tensor:
        """Read and update the state.

        state: its tensor, or its tensors by name; metadata: of this step, for states of its kind
        """
        raise NotImplementedError

    def empty_output(self, *inputs: Input) -> Tensor:
        """An uninitialised tensor of the shape that `core` returns."""
        raise NotImplementedError


class HasModules(Protocol):
    def modules(self) -> Iterator[nn.Module]: ...


def stateful_layers(*modules: HasModules) -> list[StatefulLayer]:
    """Those of all modules, in order."""
    every = (layer for module in modules for layer in module.modules())
    return [layer for layer in every if isinstance(layer, StatefulLayer)]


def number_layers(layers: Iterable[StatefulLayer]) -> None:
    for index, layer in enumerate(layers):
        layer.index = index


class ForwardContext(Protocol):
    """What layers need beside their inputs; passed down, never a global."""

    def run(self, layer: StatefulLayer, *inputs: Input) -> Tensor:
        """The layer's `core` on its state."""
        ...


@dataclasses.dataclass(frozen=True)
class StateContext:
    """Runs each layer right where it is called."""

    states: Sequence[Any]  # by layer: a tensor, or tensors by name
    metadata: Mapping[type[State], Any]

    def run(self, layer: StatefulLayer, *inputs: Input) -> Tensor:
        return layer.core(self.states[layer.index], self.metadata[type(layer.state)], *inputs)


class BreakingContext:
    """In a piecewise capture: leaves stateful layers to Python, on tensors of the graphs around."""

    def __init__(self, backend: GraphBackend) -> None:
        self.backend = backend

    def run(self, layer: StatefulLayer, *inputs: Input) -> Tensor:
        out = layer.empty_output(*inputs)
        kinds = [type(each) for each in inputs]  # a call must not keep tensors of the capture

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
    """Inputs of these types, from the tensors that `_flatten` gave."""
    rest = iter(tensors)
    return [
        next(rest)
        if issubclass(kind, Tensor)
        else kind(*(next(rest) for _ in dataclasses.fields(kind)))
        for kind in kinds
    ]
