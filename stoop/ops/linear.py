"""Matrix products, and what stands before and after them in a decoder layer.

Those of few tokens are bound by reading the weights once. On a GPU our own kernels serve them, with
norm, activation and residual inside, wherever they are faster (ops/kernels/linear_choice.py).

On a CPU, BLAS libraries often leave a product with one to a few rows to a single core, which cannot
use the whole memory bandwidth. Cut into as many bands of outputs as there are threads, and handed
over as a batch of products, the same weights are read by all cores. Measured on two cores of an AMD
EPYC with MKL, float32, 3072 x 576: 617 to 226 us for one token, 679 to 459 us for eight; wide
inputs gain for up to four tokens only.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stoop.ops.kernels.linear_choice import HALF, uses_skinny
from stoop.ops.norm import rms_norm, silu_and_mul

FEW = 4  # tokens for which bands always pay
SOME = 8  # and for which they pay if outputs outnumber inputs
_BANDED = (torch.float32, torch.float64)


def kernels() -> Any:
    from stoop.ops.kernels import linear

    return linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias. x: [tokens, inputs], weight: [outputs, inputs]"""
    if uses_skinny("linear", x, weight):
        return kernels().skinny_linear(x, weight, bias)
    num_bands = _num_bands(x, weight)
    if num_bands < 2:
        return F.linear(x, weight, bias)
    return banded_linear(x, weight, bias, num_bands)


def logits_of(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in float32 or better, not rounded to less where that costs nothing."""
    if uses_skinny("logits", x, weight):
        return kernels().skinny_linear(x, weight, dtype=torch.float32)
    if x.device.type == "cuda" and x.dtype in HALF:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    logits = linear(x, weight)
    return logits if logits.dtype == torch.float64 else logits.float()


def linear_add(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stream: Tensor,
    *,
    keep: bool = False,
    idle: bool = False,
) -> Tensor:
    """stream + x @ weight.T + bias

    stream: [tokens, outputs]; keep: its memory must not be taken for the sum
    idle: until x is there, nothing else reads much memory
    """
    if uses_skinny("add", x, weight):
        return kernels().linear_add(x, weight, bias, stream, idle)
    if x.device.type == "cpu" or bias is not None:
        return stream + linear(x, weight, bias)
    if keep or torch.is_grad_enabled():
        return torch.addmm(stream, x, weight.t())  # rounded once, but begun with a copy
    return stream.addmm_(x, weight.t())


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """rms_norm(x) @ weight.T + bias"""
    if uses_skinny("norm", x, weight):
        return kernels().norm_linear(x, norm_weight, eps, weight, bias)
    return linear(rms_norm(x, norm_weight, eps), weight, bias)


def norm_linear_silu(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """silu(gate) * up, with [gate, up] = rms_norm(x) @ weight.T + bias

    weight: [2n, inputs], bias: [2n]; returns [tokens, n]
    """
    if uses_skinny("gated", x, weight):
        return kernels().norm_linear_silu(x, norm_weight, eps, weight, bias)
    return silu_and_mul(linear(rms_norm(x, norm_weight, eps), weight, bias))


def banded_linear(x: Tensor, weight: Tensor, bias: Tensor | None, num_bands: int) -> Tensor:
    num_tokens, num_inputs = x.shape
    bands = weight.view(num_bands, -1, num_inputs)
    columns = x.t().expand(num_bands, num_inputs, num_tokens)
    out = torch.bmm(bands, columns).view(-1, num_tokens).t().contiguous()
    return out if bias is None else out.add_(bias)


def _num_bands(x: Tensor, weight: Tensor) -> int:
    num_tokens = x.shape[0]
    num_outputs, num_inputs = weight.shape
    limit = SOME if num_outputs > num_inputs else FEW
    if x.device.type != "cpu" or x.dtype not in _BANDED or not 0 < num_tokens <= limit:
        return 1
    num_threads = torch.get_num_threads()
    bands = 1 << (num_threads - 1).bit_length()  # a power of two divides more sizes
    return bands if num_outputs % bands == 0 else 1
