"""Parts of the attention kernels: pages, the online softmax, splits, padding."""

import triton
import triton.language as tl

from stoop.ops.kernels.fp8 import from_fp8, unpack_fp8
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
def from_cache(values, dtype: tl.constexpr):
    """Convert keys or values to the dtype of products; bytes are fp8."""
    if values.dtype == tl.uint8:
        return from_fp8(values, dtype)
    return values.to(dtype)


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

    page: page numbers of the first keys. Exponentials are powers of 2: `scale` includes log2(e). It
    is a number, or has one for each row: [rows, 1].
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
        k = from_cache(load_tile(key_ptr, offset, live, column, MASKED, HEAD_DIM), q.dtype)
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
        v = from_cache(load_tile(value_ptr, offset, live, column, MASKED, HEAD_DIM), q.dtype)
        total = total * fade + tl.sum(weight, 1)
        acc = dot(weight.to(v.dtype), v, acc * fade[:, None], WIDE)
        peak = fresh
        key += BLOCK_N
    return peak, total, acc


@triton.jit
def attend_alone(
    q, position, page, start, stop, first, seq_len, window, scale, value_scale,
    table_ptr, key_ptr, value_ptr, page_stride, token_stride,
    WINDOWED: tl.constexpr, PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`attend`, masked, to keys that no others come before, in a cache of elements or of words."""
    peak, total, acc = nothing_seen(q.shape[0], q.shape[1])
    q, scale = fit_queries(q, scale, value_scale)
    if key_ptr.dtype.element_ty == tl.int32:
        peak, total, acc = attend_words(
            q, position, peak, total, page, start, stop, first, seq_len, window, scale,
            table_ptr, key_ptr, value_ptr, page_stride, token_stride,
            WINDOWED, PAGE, HEAD_DIM, BLOCK_N,
        )  # fmt: skip
    else:
        peak, total, acc = attend(
            q, position, peak, total, acc, page, start, stop, first, seq_len, window, scale,
            table_ptr, key_ptr, value_ptr, page_stride, token_stride,
            True, WINDOWED, PAGE, HEAD_DIM, BLOCK_N, WIDE,
        )  # fmt: skip
    return peak, total, undo_scale(acc, value_scale)


@triton.jit
def attend_words(
    q, position, peak, total, page, start, stop, first, seq_len, window, scale,
    table_ptr, key_ptr, value_ptr, page_stride, token_stride,
    WINDOWED: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`attend` over a cache in fp8 that is read as words of four elements.

    Tensor cores take values of two keys side by side, but bytes of one key are neighbours in
    memory: to read single bytes would cost more than the products. So a tile of words is taken
    apart into four tiles, each with every fourth column, and each has its own products.
    """
    WORDS: tl.constexpr = q.shape[1] // 4
    column = tl.arange(0, WORDS)[None, :]
    key = start + tl.arange(0, BLOCK_N)
    q0, q1, q2, q3 = every_fourth(q)
    acc0 = tl.zeros((q.shape[0], WORDS), tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    for _ in range(start, stop, BLOCK_N):
        live = key < seq_len
        if WINDOWED:
            live &= key >= first
        place = page.to(tl.int64) * page_stride + (key % PAGE) * token_stride
        offset = place[:, None] + column
        page = tl.load(table_ptr + (key + BLOCK_N) // PAGE, mask=key + BLOCK_N < seq_len, other=0)
        words = load_tile(key_ptr, offset, live, column, True, HEAD_DIM // 4)
        k0, k1, k2, k3 = unpack_fp8(tl.trans(words))
        scores = tl.dot(q0, k0)
        scores = tl.dot(q1, k1, scores)
        scores = tl.dot(q2, k2, scores)
        scores = tl.dot(q3, k3, scores) * scale
        seen = key[None, :] <= position[:, None]
        if WINDOWED:
            seen &= key[None, :] > position[:, None] - window
        scores = tl.where(seen, scores, float("-inf"))
        fresh = tl.maximum(peak, tl.max(scores, 1))
        weight = tl.exp2(scores - fresh[:, None])
        fade = tl.exp2(peak - fresh)
        v0, v1, v2, v3 = unpack_fp8(load_tile(value_ptr, offset, live, column, True, HEAD_DIM // 4))
        total = total * fade + tl.sum(weight, 1)
        weight = weight.to(tl.float16)
        acc0 = tl.dot(weight, v0, acc0 * fade[:, None])
        acc1 = tl.dot(weight, v1, acc1 * fade[:, None])
        acc2 = tl.dot(weight, v2, acc2 * fade[:, None])
        acc3 = tl.dot(weight, v3, acc3 * fade[:, None])
        peak = fresh
        key += BLOCK_N
    acc = tl.interleave(tl.interleave(acc0, acc2), tl.interleave(acc1, acc3))
    return peak, total, acc


@triton.jit
def every_fourth(x):
    """Take a tile apart: the columns 0, 4, 8 ..., then 1, 5, 9 ... and so on."""
    pairs = tl.reshape(x, (x.shape[0], x.shape[1] // 4, 2, 2))
    even, odd = tl.split(pairs)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def fit_queries(q, scale, value_scale):
    """Queries in the dtype of products, and the scale of their scores.

    For a cache in fp8 (`value_scale` is not None) bfloat16 becomes float16: fp8 is exact in it, and
    its conversion is one instruction. bfloat16 has a wider range, so each row is multiplied by a
    power of two, which the scale of its scores undoes. Elements above 2^-31 of their row's largest
    stay exact.
    """
    if value_scale is not None and q.dtype == tl.bfloat16:
        wide = q.to(tl.float32)
        peak = tl.max(tl.abs(wide), 1)
        exponent = tl.maximum(peak.to(tl.int32, bitcast=True) >> 23, 15)
        up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)  # the largest is near 2^14
        down = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
        return (wide * up[:, None]).to(tl.float16), (down * scale)[:, None]
    else:
        return q, scale


@triton.jit
def undo_scale(acc, value_scale):
    """Weighted values of a cache in fp8 times their scale; others, without one, as they are."""
    if value_scale is not None:
        return acc * value_scale
    else:
        return acc


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
    # Words hold four elements each.
    BITS: tl.constexpr = key_ptr.dtype.element_ty.primitive_bitwidth
    SIZE: tl.constexpr = HEAD_DIM * (8 if key_ptr.dtype.element_ty == tl.int32 else BITS) // 8
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
