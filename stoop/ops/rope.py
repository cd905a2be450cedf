"""Rotary position embedding, in the half-split layout of Hugging Face checkpoints, and the write of
keys and values into the paged cache."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stoop.ops.dispatch import op
from stoop.ops.kv_store import FP8, NO_SCALES, KVScales, store_kv, store_kv_fp8
from stoop.ops.norm import rms_norm


@dataclass(frozen=True)
class Rotation:
    """Positions of a pass's tokens, and the table of angles that rotate their heads."""

    # [2, num_positions, half]: cosines, then sines. The first 2 * half dimensions of a head are
    # rotated: all of them, some, or none.
    table: Tensor
    positions: Tensor  # [tokens] int64

    @functools.cached_property
    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each [tokens, 1, half]; looked up once for all layers."""
        cos, sin = self.table.index_select(1, self.positions)[:, :, None]
        return cos, sin


class HeadNorms(NamedTuple):
    """Norms of queries and keys, head by head, before the rotation."""

    q: Tensor  # [head_dim]
    k: Tensor  # [head_dim]
    eps: float


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + half); dimensions from 2 * half on stay as they are.

    x: [tokens, heads, head_dim], cos and sin: [tokens, 1, half]
    """
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return torch.cat(parts, dim=-1)


def rotate(
    qkv: Tensor, num_kv_heads: int, rotation: Rotation, norms: HeadNorms | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, normalised and rotated, and values: [tokens, heads, head_dim] each.

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


@op("qkv")
def rotate_and_store(
    qkv: Tensor,
    num_kv_heads: int,
    rotation: Rotation,
    norms: HeadNorms | None,
    cache: Tensor,
    slot_mapping: Tensor,
    scales: KVScales = NO_SCALES,
) -> Tensor:
    """Rotate queries and keys, write keys and values to the cache, and return the queries.

    qkv: [tokens, heads + 2 * num_kv_heads, head_dim]; tokens may lie apart
    cache, slot_mapping: as in `store_kv`; scales: of a cache in fp8
    """
    q, k, v = rotate(qkv, num_kv_heads, rotation, norms)
    if cache.dtype == FP8:
        store_kv_fp8(k, v, cache, slot_mapping, *scales)
    else:
        store_kv(k, v, cache, slot_mapping)
    return q
