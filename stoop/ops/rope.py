"""Rotary position embedding, in the half-split layout of Hugging Face checkpoints, and the way of
keys and values into the cache."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stoop.ops.kernels.choice import uses_kernels
from stoop.ops.kv_store import store_kv
from stoop.ops.norm import rms_norm


@dataclass(frozen=True)
class Rotation:
    """Where the tokens of a pass stand, and how their head vectors turn there."""

    table: Tensor  # [2, num_positions, head_dim / 2]: cosines, then sines
    positions: Tensor  # [tokens] int64

    @functools.cached_property
    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """Each [tokens, 1, head_dim / 2]; looked up once for all layers."""
        cos, sin = self.table.index_select(1, self.positions)[:, :, None]
        return cos, sin


class HeadNorms(NamedTuple):
    """Norms of queries and keys, head by head, before they turn."""

    q: Tensor  # [head_dim]
    k: Tensor  # [head_dim]
    eps: float


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim/2).

    x: [tokens, heads, head_dim], cos and sin: [tokens, 1, head_dim/2]
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotate(
    qkv: Tensor, num_kv_heads: int, rotation: Rotation, norms: HeadNorms | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, normalised and turned, and values: [tokens, heads, head_dim] each.

    qkv: [tokens, heads + 2 * num_kv_heads, head_dim]
    """
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    qk, v = qkv.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    cos, sin = rotation.cos_sin
    if norms is None:
        q, k = apply_rope(qk, cos, sin).split((num_heads, num_kv_heads), dim=1)
        return q, k, v
    q, k = qk.split((num_heads, num_kv_heads), dim=1)
    q = apply_rope(rms_norm(q, norms.q, norms.eps), cos, sin)
    k = apply_rope(rms_norm(k, norms.k, norms.eps), cos, sin)
    return q, k, v


def rotate_and_store(
    qkv: Tensor,
    num_kv_heads: int,
    rotation: Rotation,
    norms: HeadNorms | None,
    cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Queries of all tokens, ready to attend; keys and values go into their KV slots."""
    if uses_kernels(qkv):
        from stoop.ops.kernels import rope as kernels

        return kernels.rotate_and_store(qkv, num_kv_heads, rotation, norms, cache, slot_mapping)
    q, k, v = rotate(qkv, num_kv_heads, rotation, norms)
    store_kv(k, v, cache, slot_mapping)
    return q
