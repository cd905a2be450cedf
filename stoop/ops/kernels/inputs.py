"""Phases I and U: a step's inputs out of slot state, and its tokens back into it."""

import triton
import triton.language as tl
from torch import Tensor

from stoop.ops.inputs import RowTensors, SlotTensors, StepTensors, StopTensors
from stoop.ops.kernels.launch import overlapping, start_in_turn
from stoop.ops.library import register

TOKENS_PER_PROGRAM = 128
ROWS_PER_WARP = 32


def rows_per_warp(columns: int) -> int:
    """Rows of a tile in which a thread holds at most four elements, for up to 128 columns."""
    return max(1, min(ROWS_PER_WARP, 128 // columns))


@triton.jit
def find_row(starts_ptr, token, max_reqs, BITS: tl.constexpr):
    """The last row that starts at or before a token; BITS: bits of the largest row index"""
    row = token * 0
    for index in tl.static_range(BITS):
        further = row + (1 << (BITS - 1 - index))
        inside = further < max_reqs
        start = tl.load(starts_ptr + further, mask=inside, other=0)
        row = tl.where(inside & (start <= token), further, row)
    return row


@triton.jit
def _read_row(
    row,
    inside,
    idx_mapping_ptr,
    starts_ptr,
    num_tokens_ptr,
    num_computed_ptr,
    num_drafts_ptr,
    token_limit_ptr,
):
    """Return slot (-1 for padding), first query token, live query tokens, known and computed
    tokens of a row."""
    slot = tl.load(idx_mapping_ptr + row, mask=inside, other=-1)
    known = tl.load(num_tokens_ptr + slot, mask=slot >= 0, other=0)
    limit = tl.load(token_limit_ptr + slot, mask=slot >= 0, other=0)
    live = known < limit  # otherwise the request has ended
    slot = tl.where(live, slot, -1)
    known = tl.where(live, known, 0)
    start = tl.load(starts_ptr + row, mask=inside, other=0).to(tl.int64)
    end = tl.load(starts_ptr + row + 1, mask=inside, other=0).to(tl.int64)
    computed = tl.load(num_computed_ptr + slot, mask=live, other=0)
    drafts = tl.load(num_drafts_ptr + slot, mask=live, other=0)
    live_len = tl.minimum(end - start, known + drafts - computed)
    return slot, start, live_len, known, computed


@triton.jit
def _prepare_inputs_kernel(
    token_ids_ptr, num_tokens_ptr, num_computed_ptr, num_drafts_ptr, token_limit_ptr,
    block_table_ptr, idx_mapping_ptr, starts_ptr, input_ids_ptr, positions_ptr, slot_mapping_ptr,
    context_lens_ptr, seq_lens_ptr, last_token_indices_ptr, samples_ptr, row_drafts_ptr,
    row_slots_ptr, sink, token_ids_stride, block_table_stride, max_reqs, max_tokens,
    BLOCK_SIZE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block of rows and a block of tokens per program; tokens do not wait for row results."""
    start_in_turn(PDL)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    inside = place < max_reqs
    slot, start, live_len, known, computed = _read_row(
        place, inside, idx_mapping_ptr, starts_ptr, num_tokens_ptr, num_computed_ptr,
        num_drafts_ptr, token_limit_ptr,
    )  # fmt: skip
    live = slot >= 0
    seq_len = computed + live_len
    samples = live & (seq_len >= known)
    newest = start + tl.minimum(known - computed, live_len) - 1
    tl.store(row_slots_ptr + place, tl.where(live, slot, sink), mask=inside)
    tl.store(context_lens_ptr + place, computed, mask=inside)
    tl.store(seq_lens_ptr + place, tl.where(live, seq_len, 0), mask=inside)
    tl.store(samples_ptr + place, samples.to(tl.int32), mask=inside)
    tl.store(row_drafts_ptr + place, tl.where(samples, seq_len - known, 0), mask=inside)
    tl.store(last_token_indices_ptr + place, tl.where(live, newest, 0), mask=inside)

    inside = place < max_tokens
    row = find_row(starts_ptr, place, max_reqs, BITS)
    slot, start, live_len, known, computed = _read_row(
        row, inside, idx_mapping_ptr, starts_ptr, num_tokens_ptr, num_computed_ptr,
        num_drafts_ptr, token_limit_ptr,
    )  # fmt: skip
    offset = place - start
    # No live token lies past the last row: a row's live tokens end where the row does, or before.
    live = (slot >= 0) & (offset < live_len)
    position = tl.where(live, computed + offset, 0)
    token_id = tl.load(token_ids_ptr + slot * token_ids_stride + position, mask=live, other=0)
    table = block_table_ptr + slot * block_table_stride
    block = tl.load(table + position // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    kv_slot = tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(input_ids_ptr + place, token_id, mask=inside)
    tl.store(positions_ptr + place, position, mask=inside)
    tl.store(slot_mapping_ptr + place, kv_slot, mask=inside)


@register(
    "prepare_inputs_(Tensor token_ids, Tensor num_tokens, Tensor num_computed, Tensor num_drafts, "
    "Tensor token_limit, Tensor block_table, Tensor idx_mapping, Tensor query_start_loc, "
    "int block_size, Tensor(a!) input_ids, Tensor(b!) positions, Tensor(c!) slot_mapping, "
    "Tensor(d!) context_lens, Tensor(e!) seq_lens, Tensor(f!) last_token_indices, "
    "Tensor(g!) samples, Tensor(h!) row_drafts, Tensor(i!) row_slots) -> ()"
)
def prepare_inputs_(
    token_ids: Tensor,
    num_tokens: Tensor,
    num_computed: Tensor,
    num_drafts: Tensor,
    token_limit: Tensor,
    block_table: Tensor,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    block_size: int,
    input_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    context_lens: Tensor,
    seq_lens: Tensor,
    last_token_indices: Tensor,
    samples: Tensor,
    row_drafts: Tensor,
    row_slots: Tensor,
) -> None:
    max_reqs, max_tokens = idx_mapping.shape[0], input_ids.shape[0]
    grid = (triton.cdiv(max(max_reqs, max_tokens), TOKENS_PER_PROGRAM),)
    _prepare_inputs_kernel[grid](
        token_ids, num_tokens, num_computed, num_drafts, token_limit, block_table, idx_mapping,
        query_start_loc, input_ids, positions, slot_mapping, context_lens, seq_lens,
        last_token_indices, samples, row_drafts, row_slots, token_ids.shape[0] - 1,
        token_ids.stride(0), block_table.stride(0), max_reqs, max_tokens, BLOCK_SIZE=block_size,
        BITS=(max_reqs - 1).bit_length(), BLOCK=TOKENS_PER_PROGRAM, num_warps=4,
        **overlapping(input_ids),
    )  # fmt: skip


def prepare_inputs(slots: SlotTensors, rows: RowTensors, out: StepTensors, block_size: int) -> None:
    """Run phase I: write all of `out`, over its whole extent."""
    prepare_inputs_(
        slots.token_ids, slots.num_tokens, slots.num_computed, slots.num_drafts, slots.token_limit,
        slots.block_table, rows.idx_mapping, rows.query_start_loc, block_size, out.input_ids,
        out.positions, out.slot_mapping, out.context_lens, out.seq_lens, out.last_token_indices,
        out.samples, out.row_drafts, out.row_slots,
    )  # fmt: skip


@triton.jit
def _commit_tokens_kernel(
    starts_ptr, row_slots_ptr, samples_ptr, sampled_ptr, num_sampled_ptr, num_prompt_tokens_ptr,
    min_tokens_ptr, stop_counts_ptr, stop_ids_ptr, token_ids_ptr, num_tokens_ptr, num_computed_ptr,
    num_drafts_ptr, token_limit_ptr, sink, token_ids_stride, stop_ids_stride, max_len, max_reqs,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One warp per block of rows; everything is read before anything is written."""
    start_in_turn(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(row_slots_ptr + row, mask=row < max_reqs, other=sink)
    live = slot != sink
    num_sampled = tl.load(num_sampled_ptr + row, mask=live, other=0)
    failed = num_sampled < 0
    num_sampled = tl.where(failed, -1 - num_sampled, num_sampled)
    known = tl.load(num_tokens_ptr + slot, mask=live, other=0)
    computed = tl.load(num_computed_ptr + slot, mask=live, other=0)
    samples = tl.load(samples_ptr + row, mask=live, other=0)
    start = tl.load(starts_ptr + row, mask=live, other=0)
    end = tl.load(starts_ptr + row + 1, mask=live, other=0)
    number = tl.arange(0, COLUMNS)[None, :]
    taken = live[:, None] & (number < tl.minimum(num_sampled, WIDTH)[:, None])
    token_ids = tl.load(sampled_ptr + row[:, None] * WIDTH + number, mask=taken, other=0)
    num_prompt = tl.load(num_prompt_tokens_ptr + slot, mask=live, other=0)
    min_tokens = tl.load(min_tokens_ptr + slot, mask=live, other=0)
    num_stops = tl.load(stop_counts_ptr + slot, mask=live, other=0)
    num_output = (known - num_prompt)[:, None] + number + 1
    may_stop = taken & (num_output > min_tokens[:, None])
    hits = tl.zeros([BLOCK, COLUMNS], tl.int32)
    for index in range(tl.max(num_stops)):
        stop_id = tl.load(
            stop_ids_ptr + slot * stop_ids_stride + index, mask=index < num_stops, other=-1
        )
        hits |= (may_stop & (token_ids == stop_id[:, None])).to(tl.int32)
    ended = (tl.max(hits, axis=1) > 0) | failed
    tl.debug_barrier()
    tl.store(token_limit_ptr + slot, tl.zeros_like(slot), mask=live & ended)
    where = known[:, None] + number
    text = token_ids_ptr + slot[:, None] * token_ids_stride
    tl.store(text + where, token_ids, mask=taken & (where < max_len))
    newest = known + num_sampled - 1
    tl.store(num_tokens_ptr + slot, newest + 1, mask=live)
    # All tokens but the newest have their KV; all tokens of a chunk do.
    computed = tl.where(samples > 0, newest, computed + (end - start))
    tl.store(num_computed_ptr + slot, computed, mask=live)
    tl.store(num_drafts_ptr + slot, tl.zeros_like(slot), mask=live)


@register(
    "commit_tokens_(Tensor query_start_loc, Tensor row_slots, Tensor samples, Tensor sampled, "
    "Tensor num_sampled, Tensor num_prompt_tokens, Tensor min_tokens, Tensor stop_counts, "
    "Tensor stop_ids, Tensor(a!) token_ids, Tensor(b!) num_tokens, Tensor(c!) num_computed, "
    "Tensor(d!) num_drafts, Tensor(e!) token_limit) -> ()"
)
def commit_tokens_(
    query_start_loc: Tensor,
    row_slots: Tensor,
    samples: Tensor,
    sampled: Tensor,
    num_sampled: Tensor,
    num_prompt_tokens: Tensor,
    min_tokens: Tensor,
    stop_counts: Tensor,
    stop_ids: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_computed: Tensor,
    num_drafts: Tensor,
    token_limit: Tensor,
) -> None:
    assert sampled.is_contiguous()
    (max_reqs, width), (rows, max_len) = sampled.shape, token_ids.shape
    columns = triton.next_power_of_2(width)
    block = rows_per_warp(columns)
    _commit_tokens_kernel[(triton.cdiv(max_reqs, block),)](
        query_start_loc, row_slots, samples, sampled, num_sampled, num_prompt_tokens, min_tokens,
        stop_counts, stop_ids, token_ids, num_tokens, num_computed, num_drafts, token_limit,
        rows - 1, token_ids.stride(0), stop_ids.stride(0), max_len, max_reqs,
        WIDTH=width, COLUMNS=columns, BLOCK=block, num_warps=1, **overlapping(sampled),
    )  # fmt: skip


def commit_tokens(
    slots: SlotTensors,
    stops: StopTensors,
    rows: RowTensors,
    step: StepTensors,
    sampled: Tensor,
    num_sampled: Tensor,
) -> None:
    """Run phase U: append the sampled tokens, advance the counters, drop the drafts. A stop token
    ends its request. The sink is not written.

    sampled: [max_reqs, K + 1] int64, contiguous; num_sampled: [max_reqs] int64
    """
    commit_tokens_(
        rows.query_start_loc, step.row_slots, step.samples, sampled, num_sampled,
        slots.num_prompt_tokens, stops.min_tokens, stops.stop_counts, stops.stop_ids,
        slots.token_ids, slots.num_tokens, slots.num_computed, slots.num_drafts, slots.token_limit,
    )  # fmt: skip
