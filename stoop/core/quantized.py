"""Rows of a quantised matrix as a checkpoint stores them."""

from dataclasses import dataclass
from typing import Any

# GGUF types that stay quantised: values and bytes of a block
BLOCKS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
}


@dataclass(frozen=True)
class QuantizedRows:
    kind: str  # GGUF's name
    data: Any  # [rows, bytes of a row] uint8

    @property
    def block_bytes(self) -> int:
        return BLOCKS[self.kind][1]

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""
        num_rows, num_bytes = self.data.shape
        values, block_bytes = BLOCKS[self.kind]
        return num_rows, num_bytes // block_bytes * values

    def taken(self, rows: Any) -> "QuantizedRows":
        """Some rows in another order. rows: an index of the first axis"""
        return QuantizedRows(self.kind, self.data[rows])
