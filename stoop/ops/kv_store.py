"""Writing keys and values into the paged cache."""

from torch import Tensor


def store_kv(k: Tensor, v: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Put each token's key and value into its KV slot; slot -1 writes nothing.

    k, v: [tokens, kv_heads, head_dim]
    cache: [2, num_blocks, block_size, kv_heads, head_dim]
    slot_mapping: [tokens] int64, block * block_size + offset
    """
    if not bool((slot_mapping >= 0).all()):
        live = slot_mapping >= 0
        k, v, slot_mapping = k[live], v[live], slot_mapping[live]
    keys, values = cache.flatten(1, 2)
    keys.index_copy_(0, slot_mapping, k)
    values.index_copy_(0, slot_mapping, v)
