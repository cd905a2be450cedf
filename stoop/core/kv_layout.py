"""The shape and price of the KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass

from stoop.config.schema import AttentionSpec

NULL_BLOCK = 0  # padded rows point at it; it is never handed out and never written
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class KVLayout:
    """One tensor a layer: [2, num_blocks, block_size, num_kv_heads, head_dim], keys then values.

    All layers share block numbers: a drafter's follow the target's.
    """

    block_size: int
    dtype: str
    layers: tuple[tuple[int, int], ...]  # KV heads and head size of each

    @staticmethod
    def of(models: Sequence[AttentionSpec], block_size: int, dtype: str) -> "KVLayout":
        layers = [(m.num_kv_heads, m.head_dim) for m in models for _ in range(m.num_layers)]
        return KVLayout(block_size, dtype, tuple(layers))

    def shapes(self, num_blocks: int) -> list[tuple[int, ...]]:
        return [(2, num_blocks, self.block_size, heads, size) for heads, size in self.layers]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        elements = sum(2 * self.block_size * heads * size for heads, size in self.layers)
        return elements * DTYPE_BYTES[self.dtype]
