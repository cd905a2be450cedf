"""The dense scheme: a matrix of floating-point numbers.

GEMMs over few tokens are bound by reading the weights once. On a GPU our own kernels serve them,
with norm, activation and residual fused, wherever they are faster (ops/kernels/linear_choice.py).

On a CPU, BLAS libraries often run a GEMM with one to a few rows on a single core, which cannot use
the whole memory bandwidth. Here the outputs are split into as many bands as there are threads and
computed as a batched GEMM, so that all cores read weights. Measured on two cores of an AMD EPYC
with MKL, float32, 3072 x 576: from 617 to 226 us for one token, from 679 to 459 us for eight; a
matrix with more inputs than outputs gains only up to four tokens.

A matrix may be stored in another dtype than that of computation. Each GEMM then casts the whole
matrix first: this saves memory and costs time.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stoop.core.quantized import QuantizedRows
from stoop.ops.embedding import embed
from stoop.ops.kernels.linear_choice import HALF, uses_skinny
from stoop.ops.norm import rms_norm, silu_and_mul
from stoop.ops.weight import Scheme, Weight

MAX_BANDED_TOKENS = 4  # up to which bands are always faster
MAX_BANDED_TOKENS_TALL = 8  # the same for a matrix with more outputs than inputs
_BANDED = (torch.float32, torch.float64)


def kernels() -> Any:
    from stoop.ops.kernels import linear

    return linear


class Dense(Scheme):
    name = "dense"
    is_dense = True

    def empty(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> Weight:
        return Weight(torch.empty(num_outputs, num_inputs, dtype=dtype), None, self)

    def shape(self, weight: Weight) -> tuple[int, ...]:
        return tuple(weight.data.shape)

    def store(self, weight: Weight, values: Tensor | QuantizedRows) -> None:
        assert isinstance(values, Tensor), values
        weight.data.copy_(values)

    def embed(self, token_ids: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
        return embed(token_ids, weight.data).to(dtype)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        return _linear(x, _matrix(x, weight), bias)

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        """x @ weight.T in float32 or better; half-precision GEMMs on a GPU accumulate into it."""
        matrix = _matrix(x, weight)
        if uses_skinny("logits", x, matrix):
            return kernels().skinny_linear(x, matrix, dtype=torch.float32)
        if x.device.type == "cuda" and x.dtype in HALF:
            return torch.mm(x, matrix.t(), out_dtype=torch.float32)
        logits = _linear(x, matrix, None)
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
        matrix = _matrix(x, weight)
        if uses_skinny("add", x, matrix):
            return kernels().linear_add(x, matrix, bias, stream, prefetch_weight)
        if x.device.type == "cpu" or bias is not None:
            return stream + _linear(x, matrix, bias)
        if keep or torch.is_grad_enabled():
            return torch.addmm(stream, x, matrix.t())  # rounds once, at the price of a copy
        return stream.addmm_(x, matrix.t())

    def norm_linear(
        self, x: Tensor, norm_weight: Tensor, eps: float, weight: Weight, bias: Tensor | None
    ) -> Tensor:
        matrix = _matrix(x, weight)
        if uses_skinny("norm", x, matrix):
            return kernels().norm_linear(x, norm_weight, eps, matrix, bias)
        return _linear(rms_norm(x, norm_weight, eps), matrix, bias)

    def norm_linear_silu(
        self, x: Tensor, norm_weight: Tensor, eps: float, weight: Weight, bias: Tensor | None
    ) -> Tensor:
        matrix = _matrix(x, weight)
        if uses_skinny("gated", x, matrix):
            return kernels().norm_linear_silu(x, norm_weight, eps, matrix, bias)
        return silu_and_mul(_linear(rms_norm(x, norm_weight, eps), matrix, bias))


DENSE = Dense()


def dense(matrix: Tensor) -> Weight:
    """A tensor [outputs, inputs] as a `Weight`."""
    return Weight(matrix, None, DENSE)


def _matrix(x: Tensor, weight: Weight) -> Tensor:
    """The matrix in the dtype of x."""
    matrix = weight.data
    return matrix if matrix.dtype == x.dtype else matrix.to(x.dtype)


def _linear(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    if uses_skinny("linear", x, matrix):
        return kernels().skinny_linear(x, matrix, bias)
    num_bands = _num_bands(x, matrix)
    if num_bands < 2:
        return F.linear(x, matrix, bias)
    return banded_linear(x, matrix, bias, num_bands)


def banded_linear(x: Tensor, matrix: Tensor, bias: Tensor | None, num_bands: int) -> Tensor:
    num_tokens, num_inputs = x.shape
    bands = matrix.view(num_bands, -1, num_inputs)
    columns = x.t().expand(num_bands, num_inputs, num_tokens)
    out = torch.bmm(bands, columns).view(-1, num_tokens).t().contiguous()
    return out if bias is None else out.add_(bias)


def _num_bands(x: Tensor, matrix: Tensor) -> int:
    num_tokens = x.shape[0]
    num_outputs, num_inputs = matrix.shape
    limit = MAX_BANDED_TOKENS_TALL if num_outputs > num_inputs else MAX_BANDED_TOKENS
    if x.device.type != "cpu" or x.dtype not in _BANDED or not 0 < num_tokens <= limit:
        return 1
    num_threads = torch.get_num_threads()
    bands = 1 << (num_threads - 1).bit_length()  # a power of two divides more sizes
    return bands if num_outputs % bands == 0 else 1
