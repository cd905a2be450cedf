"""The shape and price of the KV cache."""

from dataclasses import dataclass

from stoop.config.schema import ModelSpec

NULL_BLOCK = 0  # padded rows point at it; it is never handed out and never written
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class KVLayout:
    """One tensor a layer: [2, num_blocks, block_size, num_kv_heads, head_dim], keys then values."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @staticmethod
    def of(model: ModelSpec, block_size: int, dtype: str) -> "KVLayout":
        return KVLayout(model.num_layers, block_size, model.num_kv_heads, model.head_dim, dtype)

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        return (2, num_blocks, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        elements = 2 * self.block_size * self.num_kv_heads * self.head_dim
        return self.num_layers * elements * DTYPE_BYTES[self.dtype]
