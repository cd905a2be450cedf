"""Root-mean-square normalisation."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stoop.ops.kernels.choice import uses_kernels


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


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add a branch to the residual stream; returns its normalised form and the new stream."""
    if uses_kernels(x):
        return kernels().add_rms_norm(x, residual, weight, eps)
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def join_norms(parts: Sequence[Tensor], weights: Sequence[Tensor], eps: float) -> Tensor:
    """Normalise each part by its own weight, and lay them side by side.

    parts: [tokens, n_i] each; returns [tokens, sum of n_i]
    """
    if uses_kernels(parts[0]):
        return kernels().join_norms(parts, weights, eps)
    normed = [rms_norm(x, weight, eps) for x, weight in zip(parts, weights, strict=True)]
    return torch.cat(normed, dim=-1)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a fused [..., 2n] projection."""
    if uses_kernels(gate_up):
        return kernels().silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.mul(F.silu(gate), up)
