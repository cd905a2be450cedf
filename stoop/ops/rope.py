"""Rotary position embedding in the half-split layout of Hugging Face checkpoints."""

import torch
from torch import Tensor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim/2).

    x: [tokens, heads, head_dim], cos and sin: [tokens, 1, head_dim/2]
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
