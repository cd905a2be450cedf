"""Weight matrices as values: the tensors of a matrix, and the scheme that says how to read them.

A scheme is one object in one file: a reference GEMM, the kernels that serve it, and how to load it.
GEMMs fused with a norm, an activation or the residual have defaults here, built on the reference; a
scheme with fused kernels overrides them.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from stoop.ops.norm import rms_norm, silu_and_mul


class Weight(NamedTuple):
    """A matrix [outputs, inputs], stored as its scheme defines."""

    data: Tensor
    scales: Tensor | None
    scheme: "Scheme"

    def rows(self, start: int, count: int) -> "Weight":
        """A view of some outputs. Schemes group values along inputs, so any rows can be taken."""
        scales = None if self.scales is None else self.scales[start : start + count]
        return Weight(self.data[start : start + count], scales, self.scheme)

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

    @abstractmethod
    def store(self, weight: Weight, values: Tensor) -> None:
        """Fill the matrix from the dense values of a checkpoint."""

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
