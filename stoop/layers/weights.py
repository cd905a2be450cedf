"""Weights of layers: the values that GEMMs take, and where each checkpoint tensor is loaded.

A module lists its checkpoint tensors as views into its own, possibly fused, parameters. Loading
copies each tensor straight into its view; nothing is concatenated.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stoop.core.quantized import QuantizedRows
from stoop.ops.dense import DENSE, dense
from stoop.ops.weight import Scheme, Weight


class WeightView(NamedTuple):
    """A checkpoint tensor's name, and the part of a parameter that it is loaded into."""

    name: str
    weight: Weight  # all of a parameter, or some of its rows
    layer: "MatrixLayer | None" = None  # whose matrix it is a part of; None for a vector
    order: Tensor | None = None  # [rows] int64: the checkpoint's row for each row of the weight
    offset: float = 0.0  # is added to the checkpoint's values

    @property
    def data(self) -> Tensor:
        return self.weight.data

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the checkpoint."""
        return self.weight.scheme.shape(self.weight)

    def fill(self, values: Tensor | QuantizedRows) -> None:
        if self.order is not None:
            order = self.order
            values = values[order] if isinstance(values, Tensor) else values.taken(order)
        if self.offset:
            assert isinstance(values, Tensor), values
            values = values.to(self.data.dtype) + self.offset
        self.weight.scheme.store(self.weight, values)


def vector_view(name: str, parameter: Tensor) -> WeightView:
    """The view of a norm or a bias, which is dense whatever scheme the matrices have."""
    return WeightView(name, dense(parameter.data))


def prefixed(prefix: str, views: Iterator[WeightView]) -> Iterator[WeightView]:
    for view in views:
        yield view._replace(name=f"{prefix}.{view.name}")


def renamed(names: Mapping[str, str], views: Iterator[WeightView]) -> Iterator[WeightView]:
    """Views of some modules under the names that a family's checkpoints have for them."""
    for view in views:
        module, _, rest = view.name.partition(".")
        yield view._replace(name=f"{names.get(module, module)}.{rest}")


def empty_parameter(*shape: int, wide: bool = False) -> nn.Parameter:
    """An unfilled parameter on the default device, in the default dtype.

    wide: in float32 if that is narrower
    """
    dtype = torch.get_default_dtype()
    dtype = torch.promote_types(dtype, torch.float32) if wide else dtype
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class MatrixLayer(nn.Module):
    """A layer with one matrix, which is an ordinary parameter called `name`.

    `matrix` is that parameter as a `Weight`. It is created in the default dtype, that of
    computation; `store_as` changes it.
    """

    def __init__(self, name: str, num_outputs: int, num_inputs: int, *, own: bool = True) -> None:
        """own: False for a layer that uses another layer's matrix"""
        super().__init__()
        self.compute_dtype: torch.dtype | None = None  # set if the matrix has another dtype
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
        """Store the matrix in another dtype or scheme. Call this before it is filled."""
        parameter = self._parameters[self._name]
        if parameter is None or (parameter.dtype == dtype and scheme is self.scheme):
            return
        self.compute_dtype = self.compute_dtype or parameter.dtype
        with parameter.device:
            self._hold(scheme.empty(*self._size, dtype))

    def take_rows(self, source: Weight, rows: Tensor) -> None:
        """Replace the matrix by some rows of another one, stored as they are there.

        rows: [n] int64
        """
        self._hold(source.scheme.take(source, rows))

    @property
    def num_outputs(self) -> int:
        """0 for a layer that uses another layer's matrix."""
        return 0 if self._parameters[self._name] is None else self._size[0]

    @property
    def num_inputs(self) -> int:
        return self._size[1]

    @property
    def matrix(self) -> Weight:
        """The parameter as a `Weight`, cached until the parameter is replaced."""
        data, known = self._parameters[self._name], self._matrix
        if known is None or known.data is not data:
            assert data is not None
            known = self._matrix = Weight(data, self._parameters["scales"], self.scheme)
        return known

    def _view(self, name: str, start: int, count: int) -> WeightView:
        """A view of some rows of the matrix, detached from autograd."""
        data, scales, scheme = self.matrix
        detached = Weight(data.data, None if scales is None else scales.data, scheme)
        return WeightView(name, detached.rows(start, count), self)


def store_matrices_as(module: nn.Module, dtype: torch.dtype) -> None:
    """Store the matrices of all layers in `dtype`; norms and biases keep that of computation."""
    for layer in module.modules():
        if isinstance(layer, MatrixLayer):
            layer.store_as(dtype)
