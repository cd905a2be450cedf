"""Weights of layers: the values that products take, and where each tensor of a checkpoint goes.

A module lists its checkpoint tensors with views into its own, possibly fused, parameters. Loading
stores each straight into its view; nothing is concatenated in between.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stoop.ops.dense import DENSE, dense
from stoop.ops.weight import Scheme, Weight


class WeightSlot(NamedTuple):
    name: str  # in the checkpoint
    weight: Weight  # a view: all of a parameter, or some of its rows

    @property
    def view(self) -> Tensor:
        return self.weight.data

    @property
    def shape(self) -> tuple[int, ...]:
        """As the checkpoint has it."""
        return self.weight.scheme.shape(self.weight)

    def fill(self, values: Tensor) -> None:
        self.weight.scheme.store(self.weight, values)


def vector_slot(name: str, parameter: Tensor) -> WeightSlot:
    """Of a norm or a bias, which are dense whatever the matrices are."""
    return WeightSlot(name, dense(parameter.data))


def prefixed(prefix: str, slots: Iterator[WeightSlot]) -> Iterator[WeightSlot]:
    for slot in slots:
        yield WeightSlot(f"{prefix}.{slot.name}", slot.weight)


def empty_parameter(*shape: int) -> nn.Parameter:
    """A parameter in the default dtype and device, to be filled by a loader."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class MatrixLayer(nn.Module):
    """A layer around one matrix, which is an ordinary parameter called `name`.

    `matrix` is that parameter as a value for products. It is made in the default dtype, that of
    computation; `store_as` gives it another one.
    """

    def __init__(self, name: str, num_outputs: int, num_inputs: int, *, own: bool = True) -> None:
        """own: False for a layer that borrows its matrix"""
        super().__init__()
        self.compute_dtype: torch.dtype | None = None  # where the matrix is stored in another
        self._name, self._size = name, (num_outputs, num_inputs)
        self._matrix: Weight | None = None
        self.scheme: Scheme = DENSE
        self._hold(DENSE.empty(*self._size, torch.get_default_dtype()) if own else None)

    def _hold(self, weight: Weight | None) -> None:
        data, scales = (None, None) if weight is None else (weight.data, weight.scales)
        self.scheme = self.scheme if weight is None else weight.scheme
        for name, tensor in ((self._name, data), ("scales", scales)):
            parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(name, parameter)

    def store_as(self, dtype: torch.dtype, scheme: Scheme = DENSE) -> None:
        """Keep the matrix in another dtype than that of computation, or in another scheme; before
        it is filled."""
        parameter = self._parameters[self._name]
        if parameter is None or (parameter.dtype == dtype and scheme is self.scheme):
            return
        self.compute_dtype = parameter.dtype
        with parameter.device:
            self._hold(scheme.empty(*self._size, dtype))

    @property
    def matrix(self) -> Weight:
        """The value that products take; made again whenever the parameter is another one."""
        data, known = self._parameters[self._name], self._matrix
        if known is None or known.data is not data:
            assert data is not None
            known = self._matrix = Weight(data, self._parameters["scales"], self.scheme)
        return known

    def _slot(self, name: str, start: int, count: int) -> WeightSlot:
        """Of some of its rows. Without autograd, as `data` of parameters is."""
        data, scales, scheme = self.matrix
        detached = Weight(data.data, None if scales is None else scales.data, scheme)
        return WeightSlot(name, detached.rows(start, count))


def store_matrices_as(module: nn.Module, dtype: torch.dtype) -> None:
    """Of all layers; norms and biases keep the dtype of computation."""
    for layer in module.modules():
        if isinstance(layer, MatrixLayer):
            layer.store_as(dtype)
