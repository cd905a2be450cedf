"""Root-mean-square normalisation."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis; half precisions are squared and summed in float32.

    x: [..., n], weight: [n]
    """
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add a branch to the residual stream; returns its normalised form and the new stream."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a fused [..., 2n] projection."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.mul(F.silu(gate), up)
