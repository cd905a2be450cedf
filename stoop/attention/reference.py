"""Attention in plain torch, on any device: the oracle of the other backends and what a CPU runs.

A step is split into tiles: runs of neighbouring rows with equal query lengths and similar sequence
lengths. For each tile, keys and values are gathered from their pages, and one masked attention
serves all its rows. The tile plan (which KV slots to gather, which pairs to mask) depends on the
batch, not on the layer, so the first layer makes it and the others reuse it.

On a CPU both the plan and the attention are operations that read lengths when they run, so that a
captured graph serves any lengths. On a GPU reading them would be a sync, so the plan is made from
host bounds and cannot be captured.
"""

import weakref
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stoop.attention.base import AttentionSetup, AttentionShape
from stoop.batch.input_batch import InputBatch
from stoop.graph.support import GraphSupport
from stoop.ops.kv_store import read_cache
from stoop.ops.library import register

# The most queries of a row in one tile: it bounds the mask, and lets a window skip old keys.
MAX_TILE_QUERIES = 512
# Rows join a tile while the padding that they cause is below this fraction of it.
MAX_TILE_PADDING = 0.25
FULL_ATTENTION = 0  # the window value of layers that have none


@dataclass(frozen=True)
class Tile:
    first_token: int
    num_rows: int
    query_len: int
    kv_slots: Tensor  # [num_rows * kv_len] int64: KV slots to gather
    bias: Tensor | None  # [num_rows, 1, query_len, kv_len]: 0 or -inf; None if causal
    causal: bool  # a plain causal mask over equal lengths


@dataclass(frozen=True)
class Lengths:
    """The lengths that tiles are made from: exact on a CPU, upper bounds on a GPU.

    `query_lens` are always exact.
    """

    query_lens: np.ndarray  # [num_reqs], dead tokens included
    contexts: np.ndarray  # [num_reqs]
    seq_lens: np.ndarray  # [num_reqs]


@dataclass
class ReferenceMetadata:
    query_start_loc: Tensor  # [num_reqs + 1] int32
    context_lens: Tensor  # [num_reqs] int32
    seq_lens: Tensor  # [num_reqs] int32
    row_slots: Tensor  # [num_reqs] int64
    # Windows that this step has planned already; vLLM: FlashMLASchedMeta.tile_scheduler_metadata.
    planned: set[int] = field(default_factory=set)


class ReferenceBackend:
    name = "reference"

    def __init__(self, setup: AttentionSetup) -> None:
        self.setup = setup
        self.block_size = setup.block_size
        self.block_table = setup.slots.block_table
        self.reads_lengths = setup.device.type == "cpu"
        self.graph_support = GraphSupport.ALWAYS if self.reads_lengths else GraphSupport.NEVER
        self.plans: dict[int, list[Tile]] = {}  # of the last step, by window
        self.host_lengths: Lengths | None = None
        # Represents `plans` where operations declare what they read and write.
        self.plan_version = torch.zeros(1, dtype=torch.int64, device=setup.device)
        self.num_plans = 0
        self.handle = _register_backend(self)

    def buffers(self) -> dict[str, Tensor]:
        return {"plan_version": self.plan_version}

    def build(self, batch: InputBatch, for_capture: bool = False) -> ReferenceMetadata:
        num_reqs = batch.num_reqs_padded
        if not self.reads_lengths:
            bounds = batch.seq_lens_cpu_upper_bound
            contexts = np.maximum(bounds - batch.query_lens_cpu, 0)
            self.host_lengths = Lengths(batch.query_lens_cpu, contexts, bounds)
        return ReferenceMetadata(
            query_start_loc=batch.rows.query_start_loc[: num_reqs + 1],
            context_lens=batch.step.context_lens[:num_reqs],
            seq_lens=batch.step.seq_lens[:num_reqs],
            row_slots=batch.row_slots,
        )

    def advance(self, metadata: ReferenceMetadata) -> None:
        """Make the next layer plan again, from the lengths at that time."""
        metadata.planned.clear()

    def forward(
        self, shape: AttentionShape, q: Tensor, cache: Tensor, metadata: ReferenceMetadata
    ) -> Tensor:
        window = shape.window or FULL_ATTENTION
        if window not in metadata.planned:
            plan_tiles(
                metadata.query_start_loc,
                metadata.context_lens,
                metadata.seq_lens,
                metadata.row_slots,
                self.block_table,
                self.plan_version,
                q.dtype,
                window,
                self.handle,
            )
            metadata.planned.add(window)
        out = q.new_empty(q.shape)
        scales = (shape.scale, shape.value_scale)
        attend_tiles(q, cache, self.plan_version, *scales, window, self.handle, out)
        return out

    def lengths(self, query_start_loc: Tensor, context_lens: Tensor, seq_lens: Tensor) -> Lengths:
        if self.reads_lengths:
            query_lens = np.diff(query_start_loc.numpy())
            return Lengths(query_lens, context_lens.numpy(), seq_lens.numpy())
        assert self.host_lengths is not None
        return self.host_lengths


# A plan holds Python objects, which an operation cannot take, so it takes an index into this list.
_BACKENDS: "weakref.WeakValueDictionary[int, ReferenceBackend]" = weakref.WeakValueDictionary()


def _register_backend(backend: ReferenceBackend) -> int:
    handle = id(backend)
    _BACKENDS[handle] = backend
    return handle


@register(
    "plan_tiles(Tensor query_start_loc, Tensor context_lens, Tensor seq_lens, Tensor row_slots, "
    "Tensor block_table, Tensor(a!) version, ScalarType dtype, int window, int backend) -> ()"
)
def plan_tiles(  # noqa: PLR0913
    query_start_loc: Tensor,
    context_lens: Tensor,
    seq_lens: Tensor,
    row_slots: Tensor,
    block_table: Tensor,
    version: Tensor,
    dtype: torch.dtype,
    window: int,
    backend: int,
) -> None:
    """Split the batch into tiles for the layers of one window."""
    owner = _BACKENDS[backend]
    lengths = owner.lengths(query_start_loc, context_lens, seq_lens)
    rows = RowState(context_lens, seq_lens, row_slots, block_table)
    planner = _Planner(lengths, rows, owner.block_size, window)
    owner.plans[window] = planner.tiles(dtype)
    owner.num_plans += 1
    version.fill_(owner.num_plans)


@register(
    "attend_tiles(Tensor q, Tensor cache, Tensor version, float scale, float value_scale, "
    "int window, int backend, Tensor(a!) out) -> ()"
)
def attend_tiles(
    q: Tensor,
    cache: Tensor,
    version: Tensor,
    scale: float,
    value_scale: float,
    window: int,
    backend: int,
    out: Tensor,
) -> None:
    """Attend by the plan; tokens in no tile are padding, and their outputs are zeros."""
    keys, values = cache.flatten(1, 2)  # [num_blocks * block_size, kv_heads, head_dim]
    end = 0
    for tile in _BACKENDS[backend].plans[window]:
        end = tile.first_token + tile.num_rows * tile.query_len
        attended = _attend(tile, q[tile.first_token : end], keys, values, scale)
        out[tile.first_token : end] = attended if value_scale == 1.0 else attended * value_scale
    out[end:].zero_()


def _attend(tile: Tile, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = keys.shape[1]
    queries = q.view(tile.num_rows, tile.query_len, num_heads, head_dim)
    pages = (tile.num_rows, -1, num_kv_heads, head_dim)
    attended = F.scaled_dot_product_attention(
        queries.transpose(1, 2),
        read_cache(keys, 0, tile.kv_slots, q.dtype).view(pages).transpose(1, 2),
        read_cache(values, 0, tile.kv_slots, q.dtype).view(pages).transpose(1, 2),
        attn_mask=tile.bias,
        is_causal=tile.causal,
        scale=scale,
        enable_gqa=num_heads != num_kv_heads,
    )
    return attended.transpose(1, 2).reshape(q.shape)


@dataclass(frozen=True)
class RowState:
    """The state of each row on the device."""

    context_lens: Tensor  # [num_reqs] int32
    seq_lens: Tensor  # [num_reqs] int32
    row_slots: Tensor  # [num_reqs] int64
    block_table: Tensor  # [slots + 1, max_blocks] int32


class _Planner:
    """Plans tiles: their shapes come from `lengths`, their contents from the device."""

    def __init__(self, lengths: Lengths, rows: RowState, block_size: int, window: int) -> None:
        # Padded rows have no queries, and follow the live rows.
        self.num_rows = int(np.count_nonzero(lengths.query_lens))
        self.query_lens = lengths.query_lens[: self.num_rows]
        self.contexts = lengths.contexts[: self.num_rows]
        self.bounds = lengths.seq_lens[: self.num_rows]
        self._sums = np.concatenate(([0], np.cumsum(self.bounds)))
        self.rows = rows
        self.block_size = block_size
        self.window = window

    def tiles(self, dtype: torch.dtype) -> list[Tile]:
        tiles: list[Tile] = []
        first_token = 0
        for rows in self._runs():
            row_query_len = int(self.query_lens[rows.start])
            for offset in range(0, row_query_len, MAX_TILE_QUERIES):
                query_len = min(MAX_TILE_QUERIES, row_query_len - offset)
                tiles.append(self._tile(rows, first_token, offset, query_len, dtype))
                first_token += (rows.stop - rows.start) * query_len
        return tiles

    def _runs(self) -> list[slice]:
        """Runs of neighbouring rows that share a tile; a long query has its own."""
        runs: list[slice] = []
        start = 0
        for row in range(1, self.num_rows + 1):
            if row < self.num_rows and self._fits(start, row):
                continue
            runs.append(slice(start, row))
            start = row
        return runs

    def _fits(self, start: int, row: int) -> bool:
        query_lens = self.query_lens
        if query_lens[row] != query_lens[start] or query_lens[row] > MAX_TILE_QUERIES:
            return False
        num_rows = row + 1 - start
        total = self._sums[row + 1] - self._sums[start]
        longest = max(self.bounds[start], self.bounds[row])  # rows come sorted by length
        return bool(total >= (1 - MAX_TILE_PADDING) * longest * num_rows)

    def _tile(
        self, rows: slice, first_token: int, offset: int, query_len: int, dtype: torch.dtype
    ) -> Tile:
        """A tile of `query_len` queries per row, after the row's first `offset` queries."""
        seq_lens = self.rows.seq_lens[rows].long()
        first_query = self.rows.context_lens[rows].long() + offset  # [rows]
        # Keys that some query of the tile can see: at most `kv_len` of them, from `first` on.
        past_queries = self.contexts[rows] + offset + query_len
        kv_len = int(np.minimum(self.bounds[rows], past_queries).max())
        first = torch.zeros_like(seq_lens)
        if self.window:
            kv_len = min(kv_len, self.window + query_len - 1)
            first = (first_query - self.window + 1).clamp(min=0)
        key = first[:, None] + torch.arange(kv_len, device=first.device)  # [rows, kv_len]
        query = first_query[:, None] + torch.arange(query_len, device=first.device)
        query = torch.minimum(query, seq_lens[:, None] - 1)  # a dead one sees what the last sees
        seen = key[:, None, :] <= query[:, :, None]  # [rows, query_len, kv_len]
        if self.window:
            seen &= key[:, None, :] > query[:, :, None] - self.window
        # The start of a prompt: no context, and as many keys as queries. GPU bounds are no lower.
        num_rows = rows.stop - rows.start
        unwindowed = not self.window or self.window >= kv_len
        starts = self.contexts[rows.start] + offset == 0
        causal = bool(starts) and num_rows == 1 and query_len == kv_len and unwindowed
        return Tile(
            first_token=first_token,
            num_rows=num_rows,
            query_len=query_len,
            kv_slots=self._kv_slots(key, seq_lens, self.rows.row_slots[rows]),
            bias=None if causal else _bias(seen, dtype),
            causal=causal,
        )

    def _kv_slots(self, key: Tensor, seq_lens: Tensor, row_slots: Tensor) -> Tensor:
        """The KV slots of keys; past a row's end they repeat its newest key, which is finite,
        unlike a stale page."""
        position = torch.minimum(key, (seq_lens - 1).clamp(min=0)[:, None])  # [rows, kv_len]
        blocks = self.rows.block_table[row_slots[:, None], position // self.block_size].long()
        return (blocks * self.block_size + position % self.block_size).flatten()


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return bias.masked_fill_(~seen, float("-inf"))[:, None]
