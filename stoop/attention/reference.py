"""Attention in plain torch, on any device: the oracle of the other backends and what a CPU runs.

A step is cut into tiles: runs of neighbouring rows with equal query lengths and like sequence
lengths. For a tile, keys and values are gathered out of their pages and one masked product serves
all its rows. The tile plan (which slots to gather, which pairs to mask) depends on the batch, not
on the layer, so the first layer makes it and the others use it again.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stoop.attention.base import AttentionShape, GraphSupport
from stoop.batch.input_batch import InputBatch

# A tile's query length is cut here: it bounds the mask, and lets a window skip old keys.
MAX_TILE_QUERIES = 512
# Rows join a tile while the padding that they cause stays below this share of it.
MAX_TILE_PADDING = 0.25


@dataclass(frozen=True)
class Tile:
    first_token: int
    num_rows: int
    query_len: int
    kv_slots: Tensor  # [num_rows * kv_len] int64: where keys and values are gathered
    bias: Tensor | None  # [num_rows, 1, query_len, kv_len]: 0 or -inf; None if causal
    causal: bool  # the mask is plain causality over equal lengths


@dataclass
class ReferenceMetadata:
    block_size: int
    query_lens_cpu: np.ndarray  # [num_reqs]
    seq_lens_cpu: np.ndarray  # [num_reqs] upper bounds
    seq_lens: Tensor  # [num_reqs] int32
    block_rows: Tensor  # [num_reqs, max_blocks] int32
    # Made by the first layer of each window: {window: tiles}.
    plans: dict[int | None, list[Tile]] = field(default_factory=dict)


class ReferenceBackend:
    name = "reference"
    graph_support = GraphSupport.NEVER

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def build(self, batch: InputBatch, for_capture: bool = False) -> ReferenceMetadata:
        num_reqs = batch.num_reqs
        return ReferenceMetadata(
            block_size=self.block_size,
            query_lens_cpu=batch.query_lens_cpu,
            seq_lens_cpu=batch.seq_lens_cpu_upper_bound,
            seq_lens=batch.step.seq_lens[:num_reqs],
            block_rows=batch.step.block_rows[:num_reqs],
        )

    def forward(
        self, shape: AttentionShape, q: Tensor, cache: Tensor, metadata: ReferenceMetadata
    ) -> Tensor:
        tiles = metadata.plans.get(shape.window)
        if tiles is None:
            tiles = plan_tiles(metadata, shape.window, q.dtype)
            metadata.plans[shape.window] = tiles
        keys, values = cache.flatten(1, 2)  # [num_blocks * block_size, kv_heads, head_dim]
        parts = [_attend(tile, shape, q, keys, values) for tile in tiles]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(tile: Tile, shape: AttentionShape, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    num_tokens = tile.num_rows * tile.query_len
    queries = q[tile.first_token : tile.first_token + num_tokens]
    queries = queries.view(tile.num_rows, tile.query_len, shape.num_heads, shape.head_dim)
    pages = (tile.num_rows, -1, shape.num_kv_heads, shape.head_dim)
    out = F.scaled_dot_product_attention(
        queries.transpose(1, 2),
        keys.index_select(0, tile.kv_slots).view(pages).transpose(1, 2),
        values.index_select(0, tile.kv_slots).view(pages).transpose(1, 2),
        attn_mask=tile.bias,
        is_causal=tile.causal,
        scale=shape.scale,
        enable_gqa=shape.num_heads != shape.num_kv_heads,
    )
    return out.transpose(1, 2).reshape(num_tokens, shape.num_heads, shape.head_dim)


def plan_tiles(metadata: ReferenceMetadata, window: int | None, dtype: torch.dtype) -> list[Tile]:
    """Cut the batch into tiles. Shapes come from host bounds, contents from the device."""
    tiles: list[Tile] = []
    first_token = 0
    for start, stop in _runs(metadata.query_lens_cpu, metadata.seq_lens_cpu):
        query_len = int(metadata.query_lens_cpu[start])
        for offset in range(0, query_len, MAX_TILE_QUERIES):
            piece = min(MAX_TILE_QUERIES, query_len - offset)
            builder = _TileBuilder(metadata, slice(start, stop), window)
            tiles.append(builder.build(first_token, offset, piece, dtype))
            first_token += (stop - start) * piece
    return tiles


def _runs(query_lens: np.ndarray, seq_lens: np.ndarray) -> list[tuple[int, int]]:
    """Neighbouring rows [start, stop) that share a tile; long queries stay alone."""
    runs: list[tuple[int, int]] = []
    start = 0
    for row in range(1, len(query_lens) + 1):
        if row < len(query_lens) and _fits(query_lens, seq_lens, start, row):
            continue
        runs.append((start, row))
        start = row
    return runs


def _fits(query_lens: np.ndarray, seq_lens: np.ndarray, start: int, row: int) -> bool:
    if query_lens[row] != query_lens[start] or query_lens[row] > MAX_TILE_QUERIES:
        return False
    lengths = seq_lens[start : row + 1]
    padding = 1 - lengths.sum() / (lengths.max() * len(lengths))
    return bool(padding <= MAX_TILE_PADDING)


class _TileBuilder:
    """Makes the tiles of one run of rows."""

    def __init__(self, metadata: ReferenceMetadata, rows: slice, window: int | None) -> None:
        self.bounds = metadata.seq_lens_cpu[rows]
        self.row_query_len = int(metadata.query_lens_cpu[rows.start])
        self.seq_lens = metadata.seq_lens[rows].long()  # [rows]
        self.block_rows = metadata.block_rows[rows]
        self.block_size = metadata.block_size
        self.window = window

    def build(self, first_token: int, offset: int, query_len: int, dtype: torch.dtype) -> Tile:
        """The tile of queries [offset, offset + query_len) of each row."""
        num_after = self.row_query_len - offset - query_len  # queries past this tile's
        last = self.seq_lens - num_after  # [rows]: just past the tile's last query
        # Keys that some query of the tile can see: from `first`, `kv_len` of them at most.
        kv_len = int(self.bounds.max()) - num_after
        first = torch.zeros_like(last)
        if self.window is not None:
            kv_len = min(kv_len, self.window + query_len - 1)
            first = (last - query_len - self.window + 1).clamp(min=0)
        key = first[:, None] + torch.arange(kv_len, device=last.device)  # [rows, kv_len]
        query = last[:, None] - query_len + torch.arange(query_len, device=last.device)
        seen = key[:, None, :] <= query[:, :, None]  # [rows, query_len, kv_len]
        if self.window is not None:
            seen &= key[:, None, :] > query[:, :, None] - self.window
        # As many keys as queries: a prompt's start, whatever the bounds (a sequence is never
        # shorter than its queries).
        unwindowed = self.window is None or self.window >= kv_len
        causal = len(self.bounds) == 1 and query_len == kv_len and unwindowed
        return Tile(
            first_token=first_token,
            num_rows=len(self.bounds),
            query_len=query_len,
            kv_slots=self._kv_slots(key, last),
            bias=None if causal else self._bias(seen, dtype),
            causal=causal,
        )

    def _kv_slots(self, key: Tensor, last: Tensor) -> Tensor:
        """Masked places past a row's end read its newest key again: finite, unlike a stale page."""
        position = torch.minimum(key, (last - 1).clamp(min=0)[:, None])  # [rows, kv_len]
        blocks = self.block_rows.gather(1, position // self.block_size).long()
        return (blocks * self.block_size + position % self.block_size).flatten()

    @staticmethod
    def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
        bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return bias.masked_fill_(~seen, float("-inf"))[:, None]
