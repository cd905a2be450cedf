"""Attention over the paged cache: split over keys for few query tokens per row, tiled for prompts.

Both kernels put all query heads of one KV head into a tile, so that each key is read once. Grids
depend on padded counts only: programs find their row, keys and splits on the device, and those
without work exit at once. So a captured graph serves any lengths.
"""

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoop.ops.kernels.attention_parts import (
    attend,
    attend_alone,
    find_row,
    first_key,
    first_part,
    fit_queries,
    nothing_seen,
    pages,
    prefetch_keys,
    row_of,
    splits,
    store_part,
    store_zeros,
    undo_scale,
    zero_padding,
)
from stoop.ops.kernels.choice import has_large_tiles
from stoop.ops.kernels.launch import (
    SHARED_FIRST,
    divide_memory,
    let_next_start,
    load_early,
    overlapping,
    wait_for_inputs,
)
from stoop.ops.kv_store import FP8
from stoop.ops.library import register

INTERPRETED = triton.knobs.runtime.interpret
FULL_ATTENTION = 0  # the window of layers without one
ANY_LENGTH = 0  # the max_query_len of batches whose rows have any number of query tokens

# In batches of any lengths, requests with at most this many query rows count as decodes.
SHORT_ROWS = 64
MAX_SPLITS = 64
# In a graph, most rows of a mixed batch are padding: the live ones are split nevertheless.
MIN_MIXED_SPLITS = 4
MAX_PARTIAL_BYTES = 128 * 2**20
REDUCE_PROGRAMS = 16  # per row and KV head
# With small heads and few rows a step is bound by the latency of its kernels. They overlap best if
# attention takes no more shared memory than one program per SM needs.
ONE_PER_SM = 43


@triton.jit(do_not_specialize=["part_size", "max_len", "num_tokens", "num_reqs"])
def _split_kernel(
    q_ptr, cache_ptr, start_loc_ptr, context_ptr, seq_len_ptr, slot_ptr, table_ptr, out_ptr,
    part_ptr, part_size, max_len, scale, value_scale, window, num_tokens, num_reqs,
    q_token_stride, q_head_stride, out_stride, table_stride,
    value_stride, page_stride, token_stride, head_stride,
    ALONE: tl.constexpr, SPLIT: tl.constexpr, DIVISION: tl.constexpr, WINDOWED: tl.constexpr,
    GROUP: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One split of the keys of one row of at most max_len query tokens, for one KV head.

    ALONE: no other kernel serves the batch, so padding is zeroed here. DIVISION: see launch.py.
    """
    let_next_start(PDL)
    # Lengths and pages were written before this kernel could start: see launch.py.
    kv_head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, query_len, context, seq_len = row_of(start_loc_ptr, context_ptr, seq_len_ptr, row)
    table_ptr += load_early(slot_ptr + row) * table_stride
    served = (query_len > 0) & (query_len <= max_len)
    num_splits = tl.num_programs(1)
    first, start, size = splits(context, seq_len, window, num_splits, WINDOWED, BLOCK_N)
    start += split * size
    stop = tl.minimum(start + size, seq_len) if SPLIT else seq_len
    page = pages(table_ptr, start, first, seq_len, PAGE, BLOCK_N)
    key_ptr = cache_ptr + kv_head.to(tl.int64) * head_stride
    if PDL:
        prefetch_keys(
            key_ptr, table_ptr, start, tl.where(served, stop, 0), first,
            value_stride, page_stride, token_stride, PAGE, HEAD_DIM, BLOCK_N,
        )  # fmt: skip
    end = load_early(start_loc_ptr + num_reqs)
    wait_for_inputs(PDL)
    if ALONE:
        zero_padding(
            out_ptr, row, tl.where(split == 0, end, num_tokens), num_tokens, num_reqs, max_len,
            kv_head, out_stride, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D,
        )  # fmt: skip
    if ~served | (SPLIT & (start >= seq_len)):
        return
    m, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)[None, :]
    inside = (m < query_len * GROUP)[:, None] & (column < HEAD_DIM)
    head, token = kv_head * GROUP + m % GROUP, begin + m // GROUP
    q_place = token.to(tl.int64) * q_token_stride + head * q_head_stride
    q = tl.load(q_ptr + q_place[:, None] + column, mask=inside, other=0.0)
    position = tl.minimum(context + m // GROUP, seq_len - 1)  # a dead one sees what the last does
    peak, total, acc = attend_alone(
        q, position, page, start, stop, first, seq_len, window, scale, value_scale,
        table_ptr, key_ptr, key_ptr + value_stride, page_stride, token_stride,
        WINDOWED, PAGE, HEAD_DIM, BLOCK_N, WIDE,
    )  # fmt: skip
    if not SPLIT:
        out = (acc / tl.where(total > 0, total, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
        out_place = token.to(tl.int64) * out_stride + head * HEAD_DIM
        tl.store(out_ptr + out_place[:, None] + column, out, mask=inside)
    else:
        part = first_part(row, begin, max_len) + m // GROUP
        part = (part * (tl.num_programs(0) * GROUP) + head).to(tl.int64) * num_splits + split
        alive = m < query_len * GROUP
        store_part(part_ptr, part_size, part, inside, alive, peak, total, acc, column, HEAD_DIM)


@triton.jit(do_not_specialize=["part_size", "max_len", "num_splits"])
def _reduce_kernel(
    start_loc_ptr, context_ptr, seq_len_ptr, out_ptr, part_ptr, part_size, max_len, window,
    num_splits, out_stride, BLOCK_S: tl.constexpr, WINDOWED: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Reduce the splits of a row, one query head of one token at a time."""
    let_next_start(PDL)
    kv_head, lane, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, query_len, context, seq_len = row_of(start_loc_ptr, context_ptr, seq_len_ptr, row)
    wait_for_inputs(PDL)
    if query_len > max_len:
        return
    _, start, size = splits(context, seq_len, window, num_splits, WINDOWED, BLOCK_N)
    split = tl.arange(0, BLOCK_S)
    column = tl.arange(0, BLOCK_D)
    live = start + split * size < seq_len  # of no more than num_splits
    wanted = live[:, None] & (column < HEAD_DIM)[None, :]
    sums_ptr = part_ptr + part_size * HEAD_DIM
    for m in range(lane, query_len * GROUP, tl.num_programs(1)):
        head = kv_head * GROUP + m % GROUP
        part = first_part(row, begin, max_len) + m // GROUP
        part = (part * (tl.num_programs(0) * GROUP) + head).to(tl.int64) * num_splits + split
        peak = tl.load(sums_ptr + part, mask=live, other=-1e30)
        total = tl.load(sums_ptr + part_size + part, mask=live, other=0.0)
        acc = tl.load(part_ptr + part[:, None] * HEAD_DIM + column[None, :], wanted, other=0.0)
        weight = tl.exp2(peak - tl.max(peak, 0))
        summed = tl.sum(total * weight, 0)
        out = tl.sum(acc * weight[:, None], 0) / tl.where(summed > 0, summed, 1.0)
        where = (begin + m // GROUP).to(tl.int64) * out_stride + head * HEAD_DIM
        out = out.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + where + column, out, mask=column < HEAD_DIM)


@triton.jit(do_not_specialize=["short", "num_tokens", "num_reqs"])
def _tile_kernel(
    q_ptr, cache_ptr, start_loc_ptr, context_ptr, seq_len_ptr, slot_ptr, table_ptr, out_ptr,
    short, scale, value_scale, window, num_tokens, num_reqs,
    q_token_stride, q_head_stride, out_stride, table_stride,
    value_stride, page_stride, token_stride, head_stride,
    WINDOWED: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """A tile of neighbouring query tokens of a row with more than `short`, for one KV head."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # most work first: a prompt's end
    kv_head = tl.program_id(1)
    end = tl.load(start_loc_ptr + num_reqs)
    if (tile + 1) * BLOCK_Q > end:
        store_zeros(
            out_ptr, tile * BLOCK_Q, end, num_tokens, kv_head, out_stride,
            GROUP, HEAD_DIM, BLOCK_M, BLOCK_D,
        )  # fmt: skip
    row = find_row(start_loc_ptr, tile, num_reqs, BLOCK_Q)
    begin, query_len, context, seq_len = row_of(start_loc_ptr, context_ptr, seq_len_ptr, row)
    done = (tile - begin // BLOCK_Q - row) * BLOCK_Q  # query tokens of the row in tiles before
    if (done >= query_len) | (query_len <= short):
        return
    m = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)[None, :]
    nth = done + m // GROUP
    inside = ((m < BLOCK_Q * GROUP) & (nth < query_len))[:, None] & (column < HEAD_DIM)
    head, token = kv_head * GROUP + m % GROUP, (begin + nth).to(tl.int64)
    where = token * q_token_stride + head * q_head_stride
    q = tl.load(q_ptr + where[:, None] + column, mask=inside, other=0.0)
    position = tl.minimum(context + nth, seq_len - 1)  # a dead one sees what the last does
    lowest = tl.minimum(context + done, seq_len - 1)
    first = first_key(lowest, window, WINDOWED)
    start = first // BLOCK_N * BLOCK_N
    stop = tl.minimum(context + tl.minimum(done + BLOCK_Q, query_len), seq_len)
    q, scale = fit_queries(q, scale, value_scale)
    peak, total, acc = nothing_seen(BLOCK_M, BLOCK_D)
    table_ptr += tl.load(slot_ptr + row) * table_stride
    key_ptr = cache_ptr + kv_head.to(tl.int64) * head_stride
    if not WINDOWED:  # keys before the first query: all of them are seen
        middle = (lowest + 1) // BLOCK_N * BLOCK_N
        page = pages(table_ptr, start, first, seq_len, PAGE, BLOCK_N)
        peak, total, acc = attend(
            q, position, peak, total, acc, page, start, middle, first, seq_len, window, scale,
            table_ptr, key_ptr, key_ptr + value_stride, page_stride, token_stride,
            False, WINDOWED, PAGE, HEAD_DIM, BLOCK_N, WIDE,
        )  # fmt: skip
        start = middle
    page = pages(table_ptr, start, first, seq_len, PAGE, BLOCK_N)
    peak, total, acc = attend(
        q, position, peak, total, acc, page, start, stop, first, seq_len, window, scale,
        table_ptr, key_ptr, key_ptr + value_stride, page_stride, token_stride,
        True, WINDOWED, PAGE, HEAD_DIM, BLOCK_N, WIDE,
    )  # fmt: skip
    out = undo_scale(acc, value_scale) / tl.where(total > 0, total, 1.0)[:, None]
    where = token * out_stride + head * HEAD_DIM
    tl.store(out_ptr + where[:, None] + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class AttentionTiling:
    """Tile sizes and launch options of an attention kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def split_tiling(
    rows: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> AttentionTiling:
    """For `rows` query rows per KV head, bound by the memory bandwidth of reading keys and values.

    Two programs of 128 columns fit an SM, each with two tiles of keys and values in flight.
    kv_dtype: of the cache; None: as `dtype`. Where registers allow, a tile of fp8 has the bytes of
    one in half precision, and so twice the keys.
    """
    block_m = max(16, triton.next_power_of_2(rows))
    if dtype == torch.float32:
        return AttentionTiling(block_m, 32 if block_m == 16 else 16, 8, 2)
    block_n = 64 if head_dim <= 128 else 32
    if kv_dtype == FP8 and reads_words(block_m, head_dim, dtype):
        return AttentionTiling(block_m, 2 * block_n, 4, 3)
    if kv_dtype == FP8 and block_m * head_dim <= 2048:
        block_n *= 2
    return AttentionTiling(block_m, block_n, 8 if block_m > 64 else 4, 4 if block_m <= 32 else 3)


def reads_words(block_m: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the split kernel reads a cache in fp8 as words of four elements.

    Each product then has a fourth of the columns. Triton divides products with fewer rows than
    columns among the warps of a program by columns; others it would compute in each of them.
    """
    columns = triton.next_power_of_2(head_dim) // 4
    return head_dim % 4 == 0 and block_m < columns and dtype != torch.float32


def prompt_tiling(group: int, head_dim: int, dtype: torch.dtype) -> AttentionTiling:
    """For prompts. float32 has no tensor cores: its tiles are small enough to stay in registers."""
    if dtype == torch.float32:
        return AttentionTiling(max(32, triton.next_power_of_2(group)), 16, 8, 2)
    return AttentionTiling(128 if head_dim <= 128 else 64, 64 if head_dim <= 128 else 32, 8, 3)


def _fitting(tiling: AttentionTiling, device: torch.device) -> AttentionTiling:
    """With fewer keys in flight where shared memory is small."""
    return tiling if has_large_tiles(device) else replace(tiling, num_stages=2)


def max_decode_rows(head_dim: int, dtype: torch.dtype) -> int:
    """The most query rows per KV head that the split kernel serves: more are no longer bound by
    reading keys, or do not fit."""
    if dtype == torch.float32:
        return 32
    return 128 if head_dim <= 128 else 64


@dataclass(frozen=True)
class AttentionPlan:
    """How a batch is split; it depends only on counts that a graph's descriptor fixes."""

    max_query_len: int  # of rows that the split kernel serves; 0: none
    mixed: bool  # longer rows go to the prompt kernel
    num_splits: int
    num_parts: int  # partial results: query heads of tokens, times splits

    def partial_size(self, head_dim: int) -> int:
        """Floats of the partial results: weighted values, maximum and sum of each part."""
        return self.num_parts * (head_dim + 2)


def count_sms(device: torch.device) -> int:
    """SMs of a GPU; without one, those of an H200."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _division(head_dim: int, num_rows: int) -> int:
    """Shared memory carveout: room for as many programs per SM as fit, unless there are few.

    num_rows: KV heads of all requests
    """
    return ONE_PER_SM if head_dim <= 64 and num_rows <= 4 else SHARED_FIRST


def plan_attention(
    q: Tensor, num_kv_heads: int, num_reqs: int, max_query_len: int, num_sms: int
) -> AttentionPlan:
    """Choose the kernels of a batch and its splits.

    q: [tokens, heads, head_dim], padded; num_reqs: padded; num_sms: SMs to keep busy
    """
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // num_kv_heads
    max_rows = max_decode_rows(head_dim, q.dtype)
    mixed = max_query_len == ANY_LENGTH or max_query_len * group > max_rows
    if mixed:
        # A batch of one row that is not a decode is a prompt.
        max_query_len = 0 if num_reqs == 1 else max(1, min(SHORT_ROWS, max_rows) // group)
    if max_query_len == 0:
        return AttentionPlan(0, True, 1, 0)
    programs = num_sms * (4 if head_dim <= 64 else 2)  # that run at the same time
    wanted = programs // (num_reqs * num_kv_heads)
    places = min(num_tokens, num_reqs * max_query_len) * num_heads
    room = MAX_PARTIAL_BYTES // max(places * (head_dim + 2) * 4, 1)
    wanted = max(wanted, MIN_MIXED_SPLITS if mixed else 1)
    splits = max(1, min(wanted, room, MAX_SPLITS))
    return AttentionPlan(max_query_len, mixed, splits, places * splits if splits > 1 else 0)


@register(
    "paged_attention(Tensor q, Tensor cache, Tensor query_start_loc, Tensor context_lens, "
    "Tensor seq_lens, Tensor row_slots, Tensor block_table, float scale, float value_scale, "
    "int window, int max_query_len, bool mixed, int num_splits, Tensor(a!) partials, "
    "Tensor(b!) out) -> ()"
)
def paged_attention(
    q: Tensor,
    cache: Tensor,
    query_start_loc: Tensor,
    context_lens: Tensor,
    seq_lens: Tensor,
    row_slots: Tensor,
    block_table: Tensor,
    scale: float,
    value_scale: float,
    window: int,
    max_query_len: int,
    mixed: bool,
    num_splits: int,
    partials: Tensor,
    out: Tensor,
) -> None:
    """Serve rows of up to `max_query_len` query tokens by the split kernel, others by the tiles.

    q: [tokens, heads, head_dim], heads contiguous; out: the same, contiguous
    cache: [2, num_blocks, block_size, kv_heads, head_dim]
    query_start_loc: [rows + 1] int32; context_lens, seq_lens: [rows] int32; row_slots: [rows] int64
    block_table: [slots, max_blocks] int32, by slot
    value_scale: of values in a cache in fp8; other caches have none
    max_query_len, mixed, num_splits: as in `AttentionPlan`; without `mixed` no row has more tokens
    partials: [AttentionPlan.partial_size] float32, written before it is read
    """
    assert q.stride(2) == 1 and cache.stride(4) == 1 and block_table.stride(1) == 1
    assert out.is_contiguous() and out.dtype == q.dtype
    call = _Call(
        q=q,
        cache=cache,
        metadata=(query_start_loc, context_lens, seq_lens, row_slots, block_table),
        out=out,
        scales=(scale * math.log2(math.e), value_scale if cache.dtype == FP8 else None),
        window=window,
    )
    if mixed:
        call.launch_tiles(max_query_len)
    if max_query_len:
        call.launch_splits(max_query_len, num_splits, partials, alone=not mixed)


@dataclass(frozen=True)
class _Call:
    """Arguments that the kernels share."""

    q: Tensor
    cache: Tensor
    metadata: tuple[Tensor, ...]  # query_start_loc, context_lens, seq_lens, row_slots, block_table
    out: Tensor
    scales: tuple[float, float | None]  # of scores, with log2(e), and of values
    window: int

    def launch_tiles(self, short: int) -> None:
        q, options = self.q, self._options()
        tiling = _fitting(prompt_tiling(options["GROUP"], q.shape[2], q.dtype), q.device)
        num_tiles = triton.cdiv(q.shape[0], tiling.block_m // options["GROUP"]) + self.num_reqs
        cache = self._cache(words=False)
        _tile_kernel[(num_tiles, q.shape[1] // options["GROUP"])](
            q, cache, *self.metadata, self.out, short, *self._numbers(), *self._strides(cache),
            **options, BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n,
            num_warps=tiling.num_warps, num_stages=tiling.num_stages,
        )  # fmt: skip

    def launch_splits(self, max_len: int, splits: int, partials: Tensor, *, alone: bool) -> None:
        q, num_reqs, options = self.q, self.num_reqs, self._options()
        rows, head_dim = max_len * options["GROUP"], q.shape[2]
        tiling = _fitting(split_tiling(rows, head_dim, q.dtype, self.cache.dtype), q.device)
        cache = self._cache(words=reads_words(tiling.block_m, head_dim, q.dtype))
        num_kv_heads = q.shape[1] // options["GROUP"]
        part_size = partials.numel() // (head_dim + 2)
        division = _division(head_dim, num_kv_heads * num_reqs)
        kernel = _split_kernel[(num_kv_heads, splits, num_reqs)](
            q, cache, *self.metadata, self.out, partials, part_size, max_len, *self._numbers(),
            *self._strides(cache), ALONE=alone, SPLIT=splits > 1, DIVISION=division, **options,
            BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n,
            num_warps=tiling.num_warps, num_stages=tiling.num_stages, **overlapping(q),
        )  # fmt: skip
        divide_memory(kernel, division)
        if splits == 1:
            return
        lanes = min(REDUCE_PROGRAMS, rows)
        _reduce_kernel[(num_kv_heads, lanes, num_reqs)](
            *self.metadata[:3], self.out, partials, part_size, max_len, self.window,
            splits, self.out.stride(0), BLOCK_S=triton.next_power_of_2(splits),
            BLOCK_N=tiling.block_n,
            **{name: options[name] for name in ("WINDOWED", "GROUP", "HEAD_DIM", "BLOCK_D")},
            num_warps=4 if splits >= 16 else 1, **overlapping(q),
        )  # fmt: skip

    @property
    def num_reqs(self) -> int:
        return self.metadata[3].shape[0]

    def _cache(self, words: bool) -> Tensor:
        """The cache as kernels take it: fp8 as bytes, or as words of four."""
        if self.cache.dtype != FP8:
            return self.cache
        return self.cache.view(torch.int32 if words else torch.uint8)

    def _numbers(self) -> tuple[float | None, ...]:
        return (*self.scales, self.window, self.q.shape[0], self.num_reqs)

    def _strides(self, cache: Tensor) -> tuple[int, ...]:
        table = self.metadata[4]
        strides = (*self.q.stride()[:2], self.out.stride(0), table.stride(0))
        return (*strides, *cache.stride()[:4])

    def _options(self) -> dict[str, int]:
        q, cache = self.q, self.cache
        return {
            "WINDOWED": self.window != FULL_ATTENTION,
            "GROUP": q.shape[1] // cache.shape[3],
            "PAGE": cache.shape[2],
            "HEAD_DIM": q.shape[2],
            "BLOCK_D": max(16, triton.next_power_of_2(q.shape[2])),
            # Triton's interpreter cannot multiply in bfloat16.
            "WIDE": INTERPRETED and q.dtype == torch.bfloat16,
        }
