"""Weight matrices as values: the tensors of a matrix, and the scheme that says how to read them.

A scheme is one object in one file: a reference GEMM, the kernels that serve it, and how to load it.
GEMMs fused with a norm, an activation or the residual have defaults here, built on the reference; a
scheme with fused kernels overrides them.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from stoop.core.quantized import QuantizedRows
from stoop.ops.norm import rms_norm, silu_and_mul


class Weight(NamedTuple):
    """A matrix [outputs, inputs], stored as its scheme defines."""

    data: Tensor
    scales: Tensor | None
    scheme: "Scheme"

    def rows(self, start: int, count: int) -> "Weight":
        """A view of some outputs: those of a checkpoint's matrix, where several are stacked."""
        return self.scheme.rows(self, start, count)

    def is_plain(self, dtype: torch.dtype) -> bool:
        """Whether `data` is the matrix itself, in this dtype."""
        return self.scheme.is_dense and self.data.dtype == dtype


class Scheme(ABC):
    """How matrices are stored and multiplied."""

    name: str
    is_dense = False  # `data` is the matrix itself

    # ---- loading ----

    @abstractmethod
    def empty(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> Weight:
        """An unfilled matrix on the default device. dtype: of dense values, if it has any"""

    @abstractmethod
    def shape(self, weight: Weight) -> tuple[int, ...]:
        """The shape [outputs, inputs] that the matrix has in checkpoints."""

    def rows(self, weight: Weight, start: int, count: int) -> Weight:
        """`Weight.rows`, for schemes whose tensors have a row for each output."""
        scales = None if weight.scales is None else weight.scales[start : start + count]
        return Weight(weight.data[start : start + count], scales, self)

    def take(self, weight: Weight, rows: Tensor) -> Weight:
        """A copy of some outputs, in this order, for schemes whose tensors have a row for each.

        rows: [n] int64
        """
        scales = None if weight.scales is None else weight.scales[rows]
        return Weight(weight.data[rows], scales, self)

    @abstractmethod
    def store(self, weight: Weight, values: Tensor | QuantizedRows) -> None:
        """Fill the matrix from a checkpoint: from dense values, which every scheme takes, or from
        quantised ones."""

    # ---- the reference ----

    @abstractmethod
    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """x @ weight.T + bias, in the dtype of x"""

    @abstractmethod
    def embed(self, token_ids: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
        """The rows [tokens, inputs] of the matrix."""

    # ---- fused with what precedes or follows a GEMM in a decoder layer ----

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        logits = self.linear(x, weight, None)
        return logits if logits.dtype == torch.float64 else logits.float()

    def linear_add(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        stream: Tensor,
        *,
        keep: bool,
        prefetch_weight: bool,
    ) -> Tensor:
        return stream + self.linear(x, weight, bias)

    def norm_linear(
        self, x: Tensor, norm_weight: Tensor, eps: float, weight: Weight, bias: Tensor | None
    ) -> Tensor:
        return self.linear(rms_norm(x, norm_weight, eps), weight, bias)

    def norm_linear_silu(
        self, x: Tensor, norm_weight: Tensor, eps: float, weight: Weight, bias: Tensor | None
    ) -> Tensor:
        return silu_and_mul(self.norm_linear(x, norm_weight, eps, weight, bias))
