"""Root-mean-square normalisation."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stoop.ops.kernels.choice import uses_kernels

if TYPE_CHECKING:
    from stoop.ops.weight import Weight


def kernels() -> Any:
    from stoop.ops.kernels import norm

    return norm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis; half precisions are squared and summed in float32.

    x: [..., n], weight: [n]
    """
    if uses_kernels(x):
        return kernels().rms_norm(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rms_norm_into(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """As `rms_norm`, into rows of a buffer. out: as x"""
    if uses_kernels(x):
        kernels().rms_norm_(x, weight, eps, out)
    else:
        out.copy_(rms_norm(x, weight, eps))


def join_norms(parts: Sequence[Tensor], weights: Sequence[Tensor], eps: float) -> Tensor:
    """Normalise each part by its own weight, and lay them side by side.

    parts: [tokens, n_i] each; returns [tokens, sum of n_i]
    """
    if uses_kernels(parts[0]):
        return kernels().join_norms(parts, weights, eps)
    normed = [rms_norm(x, weight, eps) for x, weight in zip(parts, weights, strict=True)]
    return torch.cat(normed, dim=-1)


def join_embedded(
    token_ids: Tensor,
    table: "Weight",
    table_norm: Tensor,
    features: Tensor,
    feature_norm: Tensor,
    eps: float,
) -> Tensor:
    """Tokens' embeddings and features, each normalised by its own weight, side by side.

    token_ids: [tokens], table: [vocab_size, n], features: [tokens, n]; returns [tokens, 2n]
    """
    if uses_kernels(features) and table.is_plain(features.dtype):
        norms = (table_norm, features, feature_norm)
        return kernels().join_embedded(token_ids, table.data, *norms, eps)
    embedded = table.scheme.embed(token_ids, table, features.dtype)
    return join_norms((embedded, features), (table_norm, feature_norm), eps)


def take_rows(x: Tensor, index: Tensor | None, out: Tensor) -> None:
    """The rows of x that `index` names, or all, then zeros to the end.

    x: [tokens, n], index: [m] int64, out: [at least m, n]
    """
    count = x.shape[0] if index is None else index.shape[0]
    out[:count].copy_(x if index is None else x[index])
    out[count:].zero_()


def take_and_norm(
    x: Tensor, index: Tensor | None, out: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """As `take_rows`; returns the rows that were taken, normalised. weight: [n]"""
    count = x.shape[0] if index is None else index.shape[0]
    if uses_kernels(x):
        return kernels().take_and_norm(x, index, out, count, weight, eps)
    take_rows(x, index, out)
    return rms_norm(out[:count], weight, eps)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a fused [..., 2n] projection."""
    if uses_kernels(gate_up):
        return kernels().silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.mul(F.silu(gate), up)
