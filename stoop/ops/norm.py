"""RMSNorm, alone and with the row copies that surround it, and the gated activation."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from stoop.ops.dispatch import op


@op("x")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis; half precisions are squared and summed in float32.

    x: [..., n]; weight: [n], in the dtype of x or a wider one, which is then that of all arithmetic
    """
    if weight.dtype == x.dtype:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps).to(x.dtype)


@op("x")
def rms_norm_into(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Write `rms_norm(x)` into `out`, which has x's shape and may be rows of a buffer."""
    out.copy_(rms_norm(x, weight, eps))


@op("parts.0")
def join_norms(parts: Sequence[Tensor], weights: Sequence[Tensor], eps: float) -> Tensor:
    """Normalise each part by its own weight and concatenate the results.

    parts: [tokens, n_i] each; returns [tokens, sum of n_i]
    """
    normed = [rms_norm(x, weight, eps) for x, weight in zip(parts, weights, strict=True)]
    return torch.cat(normed, dim=-1)


@op("features")
def join_embedded(
    token_ids: Tensor,
    table: Tensor,
    table_norm: Tensor,
    features: Tensor,
    feature_norm: Tensor,
    eps: float,
) -> Tensor:
    """Concatenate the tokens' embeddings with their features, each normalised by its own weight.

    token_ids: [tokens], table: [vocab_size, n], features: [tokens, n]; returns [tokens, 2n]
    """
    embedded = F.embedding(token_ids, table)
    return join_norms((embedded, features), (table_norm, feature_norm), eps)


def take_rows(x: Tensor, index: Tensor | None, out: Tensor) -> None:
    """Copy the rows of x that `index` names, or all of them, and zero the rest of `out`.

    x: [tokens, n], index: [m] int64, out: [at least m, n]
    """
    count = x.shape[0] if index is None else index.shape[0]
    out[:count].copy_(x if index is None else x[index])
    out[count:].zero_()


@op("x")
def take_and_norm(
    x: Tensor, index: Tensor | None, out: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """Do what `take_rows` does, and return the copied rows normalised. weight: [n]"""
    count = x.shape[0] if index is None else index.shape[0]
    take_rows(x, index, out)
    return rms_norm(out[:count], weight, eps)


@op("gate_up")
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up of a fused [..., 2n] projection."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.mul(F.silu(gate), up)


@op("x")
def mul_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """Compute x * sigmoid(gate). x: [tokens, n], contiguous; gate: the same, rows may lie apart"""
    return x * torch.sigmoid(gate)
