"""Writing keys and values into the paged cache."""

import torch
from torch import Tensor

from stoop.ops.library import register


@register("store_kv(Tensor k, Tensor v, Tensor(a!) cache, Tensor slot_mapping) -> ()")
def store_kv(k: Tensor, v: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's key and value to its KV slot; slot -1 writes nothing.

    k, v: [tokens, kv_heads, head_dim]
    cache: [2, num_blocks, block_size, kv_heads, head_dim]
    slot_mapping: [tokens] int64, block * block_size + offset
    """
    live = (slot_mapping >= 0)[:, None, None]
    # A dead token rewrites what the null block holds: shapes stay static, without a host sync.
    slots = slot_mapping.clamp(min=0)
    for part, fresh in zip(cache.flatten(1, 2), (k, v), strict=True):
        part.index_copy_(0, slots, torch.where(live, fresh.to(part.dtype), part[:1]))
