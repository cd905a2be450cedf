"""Writing keys and values into the paged cache."""

from typing import NamedTuple

import torch
from torch import Tensor

from stoop.ops.library import register

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # the largest number that it can hold


class KVScales(NamedTuple):
    """What keys and values are divided by on their way into a cache in fp8."""

    k: float = 1.0
    v: float = 1.0


NO_SCALES = KVScales()


@register("store_kv(Tensor k, Tensor v, Tensor(a!) cache, Tensor slot_mapping) -> ()")
def store_kv(k: Tensor, v: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's key and value to its KV slot; slot -1 writes nothing.

    k, v: [tokens, kv_heads, head_dim]
    cache: [2, num_blocks, block_size, kv_heads, head_dim]
    slot_mapping: [tokens] int64, block * block_size + offset
    """
    _store(k.to(cache.dtype), v.to(cache.dtype), cache, slot_mapping)


@register(
    "store_kv_fp8(Tensor k, Tensor v, Tensor(a!) cache, Tensor slot_mapping, float k_scale, "
    "float v_scale) -> ()"
)
def store_kv_fp8(
    k: Tensor, v: Tensor, cache: Tensor, slot_mapping: Tensor, k_scale: float, v_scale: float
) -> None:
    """`store_kv` into a cache in fp8."""
    keys, values = to_fp8(k, k_scale), to_fp8(v, v_scale)
    _store(as_bytes(keys), as_bytes(values), as_bytes(cache), slot_mapping)


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """Divide by the scale, in float32, and round to the nearest number of fp8. NaN stays NaN.

    Larger numbers than fp8 can hold become its largest: whether torch's cast does this, or makes
    them NaN, depends on its version.
    """
    wide = x.float()
    if scale != 1.0:
        # By a tensor: CUDA would multiply by the reciprocal of a number, which rounds twice.
        wide = wide / torch.full((), scale, dtype=torch.float32, device=x.device)
    return wide.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def as_bytes(tensor: Tensor) -> Tensor:
    """fp8 as bytes, for the many operations of torch that do not know it; others as they are."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def read_cache(cache: Tensor, axis: int, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather a part of a cache and convert it. The scales of fp8 are left to the caller."""
    return as_bytes(cache).index_select(axis, index).view(cache.dtype).to(dtype)


def _store(k: Tensor, v: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    live = (slot_mapping >= 0)[:, None, None]
    # A dead token rewrites what the null block holds: shapes stay static, without a host sync.
    slots = slot_mapping.clamp(min=0)
    for part, fresh in zip(cache.flatten(1, 2), (k, v), strict=True):
        part.index_copy_(0, slots, torch.where(live, fresh, part[:1]))
