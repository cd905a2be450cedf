"""Parts of the attention kernels: pages, the online softmax, splits, padding."""

import triton
import triton.language as tl

from stoop.ops.kernels.launch import load_early, prefetch

PREFETCHED_TILES = tl.constexpr(1)
ROW_CHUNK = tl.constexpr(256)  # rows per block of the search for a tile's row


@triton.jit
def dot(a, b, acc, WIDE: tl.constexpr):
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def load_tile(ptr, offset, mask, column, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr):
    """[keys, columns]; masked elements are 0, which also keeps a stale NaN out of products."""
    if MASKED:
        return tl.load(ptr + offset, mask=mask[:, None] & (column < HEAD_DIM), other=0.0)
    if column.shape[1] != HEAD_DIM:
        return tl.load(ptr + offset, mask=column < HEAD_DIM, other=0.0)
    return tl.load(ptr + offset)


@triton.jit
def pages(table_ptr, start, first, seq_len, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page numbers of the keys from `start` on. None outside of first..seq_len is read."""
    key = start + tl.arange(0, BLOCK_N)
    return load_early(table_ptr + key // PAGE, mask=(key >= first) & (key < seq_len), other=0)


@triton.jit
def nothing_seen(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """The softmax before any key: the maximum, the sum of weights, the weighted values."""
    peak, total = tl.full((BLOCK_M,), -1e30, tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    return peak, total, tl.zeros((BLOCK_M, BLOCK_D), tl.float32)


@triton.jit
def attend(
    q, position, peak, total, acc, page, start, stop, first, seq_len, window, scale,
    table_ptr, key_ptr, value_ptr, page_stride, token_stride,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add the keys from start to stop to the online softmax of the queries at `position`.

    page: page numbers of the first keys. Exponentials are powers of 2: `scale` includes log2(e).
    """
    column = tl.arange(0, q.shape[1])[None, :]
    key = start + tl.arange(0, BLOCK_N)
    for _ in range(start, stop, BLOCK_N):
        live = key < seq_len
        if WINDOWED:
            live &= key >= first
        place = page.to(tl.int64) * page_stride + (key % PAGE) * token_stride
        offset = place[:, None] + column
        # One tile ahead: the loads below are pipelined only if their page numbers are known.
        page = tl.load(table_ptr + (key + BLOCK_N) // PAGE, mask=key + BLOCK_N < seq_len, other=0)
        k = load_tile(key_ptr, offset, live, column, MASKED, HEAD_DIM).to(q.dtype)
        zero = tl.zeros((q.shape[0], BLOCK_N), tl.float32)
        scores = dot(q, tl.trans(k), zero, WIDE) * scale
        if MASKED:
            seen = key[None, :] <= position[:, None]
            if WINDOWED:
                seen &= key[None, :] > position[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        fresh = tl.maximum(peak, tl.max(scores, 1))
        weight = tl.exp2(scores - fresh[:, None])
        fade = tl.exp2(peak - fresh)
        v = load_tile(value_ptr, offset, live, column, MASKED, HEAD_DIM).to(q.dtype)
        total = total * fade + tl.sum(weight, 1)
        acc = dot(weight.to(v.dtype), v, acc * fade[:, None], WIDE)
        peak = fresh
        key += BLOCK_N
    return peak, total, acc


@triton.jit
def first_key(position, window, WINDOWED: tl.constexpr):
    """The oldest key that a query attends to."""
    if WINDOWED:
        return tl.maximum(position - window + 1, 0)
    return position * 0


@triton.jit
def splits(context, seq_len, window, num_splits, WINDOWED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first key, the start of the first split, and keys per split. The split and the
    reduce kernel both use this."""
    first = first_key(tl.minimum(context, seq_len - 1), window, WINDOWED)
    start = first // BLOCK_N * BLOCK_N
    size = tl.cdiv(tl.cdiv(seq_len - start, num_splits), BLOCK_N) * BLOCK_N
    return first, start, tl.maximum(size, BLOCK_N)


@triton.jit
def store_zeros(
    out_ptr, begin, end, num_tokens, kv_head, out_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Zero the output of padding: of the tile of tokens at `begin`, those from `end` on."""
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)[None, :]
    token = begin + row // GROUP
    padding = (token >= end) & (token < num_tokens) & (row // GROUP < BLOCK_M // GROUP)
    offset = token.to(tl.int64) * out_stride + (kv_head * GROUP + row % GROUP) * HEAD_DIM
    zero = tl.zeros((BLOCK_M, BLOCK_D), out_ptr.dtype.element_ty)
    tl.store(out_ptr + offset[:, None] + column, zero, padding[:, None] & (column < HEAD_DIM))


@triton.jit
def zero_padding(
    out_ptr, row, end, num_tokens, num_reqs, max_len, kv_head, out_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Zero a row's share of the padding tokens after `end`, if there are any."""
    limit = tl.where(num_tokens > end, num_tokens, 0)
    for place in range(row * max_len, limit, num_reqs * max_len):
        stop = tl.minimum(num_tokens, place + max_len)
        store_zeros(
            out_ptr, place, end, stop, kv_head, out_stride, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D
        )


@triton.jit
def row_of(start_loc_ptr, context_ptr, seq_len_ptr, row):
    """Return first query token, query tokens, context length and sequence length of a row."""
    begin = load_early(start_loc_ptr + row)
    query_len = load_early(start_loc_ptr + row + 1) - begin
    return begin, query_len, load_early(context_ptr + row), load_early(seq_len_ptr + row)


@triton.jit
def prefetch_keys(
    key_ptr, table_ptr, start, stop, first, value_stride, page_stride, token_stride,
    PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Prefetch the first keys and values from start to stop: those of earlier steps are on their
    way while the previous kernel computes those of this step."""
    SIZE: tl.constexpr = HEAD_DIM * key_ptr.dtype.element_ty.primitive_bitwidth // 8
    if SIZE % 16 == 0:
        lane = tl.arange(0, 2 * BLOCK_N)  # keys, then values: about one per thread
        for tile in tl.static_range(PREFETCHED_TILES):
            key = start + tile * BLOCK_N + lane % BLOCK_N
            wanted = (key >= first) & (key < stop)
            page = load_early(table_ptr + key // PAGE, mask=wanted, other=0)
            place = page.to(tl.int64) * page_stride + (key % PAGE) * token_stride
            place += tl.where(lane < BLOCK_N, 0, value_stride)
            prefetch(key_ptr + place, tl.where(wanted, SIZE, 0))


@triton.jit
def store_part(
    part_ptr, part_size, part, inside, alive, peak, total, acc, column, HEAD_DIM: tl.constexpr
):
    """Store a split's part of the softmax: weighted values, maximum and sum of weights."""
    tl.store(part_ptr + part[:, None] * HEAD_DIM + column, acc, mask=inside)
    sums_ptr = part_ptr + part_size * HEAD_DIM
    tl.store(sums_ptr + part, peak, mask=alive)
    tl.store(sums_ptr + part_size + part, total, mask=alive)


@triton.jit
def first_part(row, begin, max_len):
    """Index of the first partial result of a row of at most max_len tokens, out of
    min(tokens, rows * max_len). By either bound, it lies past those of the row before."""
    return tl.minimum(begin, row * max_len)


@triton.jit
def find_row(start_loc_ptr, tile, num_reqs, BLOCK_Q: tl.constexpr):
    """The row of a tile. Row r has tiles from starts[r] // BLOCK_Q + r on: as many as it needs, or
    one more, which is empty."""
    row = -1
    for begin in range(0, num_reqs, ROW_CHUNK):
        number = begin + tl.arange(0, ROW_CHUNK)
        start = tl.load(start_loc_ptr + number, mask=number < num_reqs, other=0)
        row += tl.sum(((start // BLOCK_Q + number <= tile) & (number < num_reqs)).to(tl.int32), 0)
    return row
