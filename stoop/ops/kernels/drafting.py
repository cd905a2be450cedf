"""Phases P and D: a drafter's inputs out of slot state, and its drafts back into it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoop.ops.drafting import PrefillTensors
from stoop.ops.inputs import RowTensors, SlotTensors, StepTensors
from stoop.ops.kernels.inputs import ROWS_PER_WARP, TOKENS_PER_PROGRAM, find_row
from stoop.ops.kernels.launch import overlapping, start_in_turn
from stoop.ops.library import register

HISTORY_BLOCK = 2048


@triton.jit
def _room(slot, inside, samples, num_tokens_ptr, draft_limit_ptr, token_limit_ptr, position_limit):
    known = tl.load(num_tokens_ptr + slot, mask=inside, other=0)
    room = tl.load(draft_limit_ptr + slot, mask=inside, other=0)
    room = tl.minimum(room, tl.load(token_limit_ptr + slot, mask=inside, other=0) - 1 - known)
    room = tl.minimum(room, position_limit - known)
    return tl.maximum(room, 0) * samples


@triton.jit
def _draft_room_kernel(
    num_tokens_ptr,
    draft_limit_ptr,
    token_limit_ptr,
    row_slots_ptr,
    samples_ptr,
    room_ptr,
    position_limit,
    max_reqs,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < max_reqs
    slot = tl.load(row_slots_ptr + row, mask=inside, other=0)
    samples = tl.load(samples_ptr + row, mask=inside, other=0)
    room = _room(
        slot, inside, samples, num_tokens_ptr, draft_limit_ptr, token_limit_ptr, position_limit
    )
    tl.store(room_ptr + row, room, mask=inside)


@register(
    "draft_room_(Tensor num_tokens, Tensor draft_limit, Tensor token_limit, Tensor row_slots, "
    "Tensor samples, int position_limit, Tensor(a!) room) -> ()"
)
def draft_room_(
    num_tokens: Tensor,
    draft_limit: Tensor,
    token_limit: Tensor,
    row_slots: Tensor,
    samples: Tensor,
    position_limit: int,
    room: Tensor,
) -> None:
    max_reqs = row_slots.shape[0]
    _draft_room_kernel[(triton.cdiv(max_reqs, ROWS_PER_WARP),)](
        num_tokens, draft_limit, token_limit, row_slots, samples, room, position_limit, max_reqs,
        BLOCK=ROWS_PER_WARP, num_warps=1,
    )  # fmt: skip


def draft_room(slots: SlotTensors, step: StepTensors, position_limit: int) -> Tensor:
    """[max_reqs] int64: the most drafts that each row may have after its known tokens."""
    room = torch.empty_like(step.row_slots)
    draft_room_(
        slots.num_tokens, slots.draft_limit, slots.token_limit, step.row_slots, step.samples,
        position_limit, room,
    )  # fmt: skip
    return room


# ---- draft prefill ----


@triton.jit
def _prepare_draft_prefill_kernel(
    token_ids_ptr,
    num_tokens_ptr,
    num_computed_ptr,
    draft_limit_ptr,
    token_limit_ptr,
    starts_ptr,
    positions_ptr,
    slot_mapping_ptr,
    context_lens_ptr,
    samples_ptr,
    row_slots_ptr,
    out_token_ids_ptr,
    last_token_indices_ptr,
    room_ptr,
    position_limit,
    token_ids_stride,
    max_reqs,
    max_tokens,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of rows and a block of tokens per program."""
    start_in_turn(PDL)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    inside = place < max_reqs
    slot = tl.load(row_slots_ptr + place, mask=inside, other=0)
    samples = tl.load(samples_ptr + place, mask=inside, other=0)
    start = tl.load(starts_ptr + place, mask=inside, other=0)
    context = tl.load(context_lens_ptr + place, mask=inside, other=0)
    computed = tl.load(num_computed_ptr + slot, mask=inside, other=0)
    last = tl.maximum(computed - 1 + start - context, start)  # a failed row may have no valid one
    tl.store(last_token_indices_ptr + place, tl.where(samples > 0, last, 0), mask=inside)
    room = _room(
        slot, inside, samples, num_tokens_ptr, draft_limit_ptr, token_limit_ptr, position_limit
    )
    tl.store(room_ptr + place, room, mask=inside)

    inside = place < max_tokens
    row = find_row(starts_ptr, place, max_reqs, BITS)
    slot = tl.load(row_slots_ptr + row, mask=inside, other=0)
    known = tl.load(num_tokens_ptr + slot, mask=inside, other=0)
    following = tl.load(positions_ptr + place, mask=inside, other=0) + 1
    live = tl.load(slot_mapping_ptr + place, mask=inside, other=-1) >= 0
    live = live & (following < known)
    token_id = tl.load(token_ids_ptr + slot * token_ids_stride + following, mask=live, other=0)
    tl.store(out_token_ids_ptr + place, token_id, mask=inside)


@register(
    "prepare_draft_prefill_(Tensor token_ids, Tensor num_tokens, Tensor num_computed, "
    "Tensor draft_limit, Tensor token_limit, Tensor query_start_loc, Tensor positions, "
    "Tensor slot_mapping, Tensor context_lens, Tensor samples, Tensor row_slots, "
    "int position_limit, Tensor(a!) out_token_ids, Tensor(b!) last_token_indices, "
    "Tensor(c!) room) -> ()"
)
def prepare_draft_prefill_(
    token_ids: Tensor,
    num_tokens: Tensor,
    num_computed: Tensor,
    draft_limit: Tensor,
    token_limit: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    context_lens: Tensor,
    samples: Tensor,
    row_slots: Tensor,
    position_limit: int,
    out_token_ids: Tensor,
    last_token_indices: Tensor,
    room: Tensor,
) -> None:
    max_reqs, max_tokens = row_slots.shape[0], out_token_ids.shape[0]
    grid = (triton.cdiv(max(max_reqs, max_tokens), TOKENS_PER_PROGRAM),)
    _prepare_draft_prefill_kernel[grid](
        token_ids, num_tokens, num_computed, draft_limit, token_limit, query_start_loc, positions,
        slot_mapping, context_lens, samples, row_slots, out_token_ids, last_token_indices, room,
        position_limit, token_ids.stride(0), max_reqs, max_tokens,
        BITS=(max_reqs - 1).bit_length(), BLOCK=TOKENS_PER_PROGRAM, num_warps=4,
        **overlapping(room),
    )  # fmt: skip


def prepare_draft_prefill(
    slots: SlotTensors,
    rows: RowTensors,
    step: StepTensors,
    out: PrefillTensors,
    position_limit: int,
) -> None:
    """Write the token ids shifted by one, each row's last valid index, and its room."""
    prepare_draft_prefill_(
        slots.token_ids, slots.num_tokens, slots.num_computed, slots.draft_limit,
        slots.token_limit, rows.query_start_loc, step.positions, step.slot_mapping,
        step.context_lens, step.samples, step.row_slots, position_limit, out.token_ids,
        out.last_token_indices, out.room,
    )  # fmt: skip


# ---- draft decode ----


@triton.jit
def _prepare_draft_decode_kernel(
    token_ids_ptr,
    num_tokens_ptr,
    num_drafts_ptr,
    block_table_ptr,
    idx_mapping_ptr,
    row_slots_ptr,
    room_ptr,
    starts_ptr,
    input_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    context_lens_ptr,
    seq_lens_ptr,
    token_ids_stride,
    block_table_stride,
    max_reqs,
    BLOCK_SIZE: tl.constexpr,
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of rows per program; each program counts the live rows itself."""
    start_in_turn(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < max_reqs
    slot = tl.load(row_slots_ptr + row, mask=inside, other=0)
    live = tl.load(idx_mapping_ptr + row, mask=inside, other=-1) >= 0
    known = tl.load(num_tokens_ptr + slot, mask=inside, other=0)
    drafted = tl.load(num_drafts_ptr + slot, mask=inside, other=0)
    active = drafted < tl.load(room_ptr + row, mask=inside, other=0)
    newest = tl.where(active, known - 1 + drafted, 0)
    position = tl.maximum(newest - 1, 0)
    token_id = tl.load(token_ids_ptr + slot * token_ids_stride + newest, mask=active, other=0)
    table = block_table_ptr + slot * block_table_stride
    block = tl.load(table + position // BLOCK_SIZE, mask=active, other=0).to(tl.int64)
    kv_slot = tl.where(active, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(input_ids_ptr + row, token_id, mask=inside)
    tl.store(positions_ptr + row, position, mask=inside)
    tl.store(context_lens_ptr + row, position, mask=inside)
    tl.store(seq_lens_ptr + row, tl.where(live, position + 1, 0), mask=inside)
    tl.store(slot_mapping_ptr + row, kv_slot, mask=inside)

    every = tl.arange(0, ALL)
    slots = tl.load(idx_mapping_ptr + every, mask=every < max_reqs, other=-1)
    num_live = tl.sum((slots >= 0).to(tl.int32), axis=0)
    tl.store(starts_ptr + row, tl.minimum(row, num_live), mask=row < max_reqs + 1)


@register(
    "prepare_draft_decode_(Tensor token_ids, Tensor num_tokens, Tensor num_drafts, "
    "Tensor block_table, Tensor idx_mapping, Tensor row_slots, Tensor room, int block_size, "
    "Tensor(a!) query_start_loc, Tensor(b!) input_ids, Tensor(c!) positions, "
    "Tensor(d!) slot_mapping, Tensor(e!) context_lens, Tensor(f!) seq_lens) -> ()"
)
def prepare_draft_decode_(
    token_ids: Tensor,
    num_tokens: Tensor,
    num_drafts: Tensor,
    block_table: Tensor,
    idx_mapping: Tensor,
    row_slots: Tensor,
    room: Tensor,
    block_size: int,
    query_start_loc: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    context_lens: Tensor,
    seq_lens: Tensor,
) -> None:
    max_reqs = row_slots.shape[0]
    _prepare_draft_decode_kernel[(triton.cdiv(max_reqs + 1, ROWS_PER_WARP),)](
        token_ids, num_tokens, num_drafts, block_table, idx_mapping, row_slots, room,
        query_start_loc, input_ids, positions, slot_mapping, context_lens, seq_lens,
        token_ids.stride(0), block_table.stride(0), max_reqs, BLOCK_SIZE=block_size,
        ALL=triton.next_power_of_2(max_reqs), BLOCK=ROWS_PER_WARP, num_warps=1, **overlapping(room),
    )  # fmt: skip


def prepare_draft_decode(
    slots: SlotTensors,
    rows: RowTensors,
    step: StepTensors,
    room: Tensor,
    block_size: int,
    query_start_loc: Tensor,
    out: StepTensors,
) -> None:
    """Write the inputs of a draft decode: one token per row, its newest draft.

    room: [max_reqs] int64; query_start_loc: [max_reqs + 1] int32, written
    out: the fields that are not written here are shared with `step`
    """
    prepare_draft_decode_(
        slots.token_ids, slots.num_tokens, slots.num_drafts, slots.block_table, rows.idx_mapping,
        step.row_slots, room, block_size, query_start_loc, out.input_ids, out.positions,
        out.slot_mapping, out.context_lens, out.seq_lens,
    )  # fmt: skip


# ---- drafts ----


@triton.jit(do_not_specialize=["count"])
def _commit_draft_kernel(
    row_slots_ptr,
    room_ptr,
    drafts_ptr,
    d2t_ptr,
    num_tokens_ptr,
    token_ids_ptr,
    num_drafts_ptr,
    number_ptr,
    sink,
    token_ids_stride,
    max_len,
    count,
    MAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One lane per row, so that only it reads and writes the slot; rows without room write
    nothing."""
    start_in_turn(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    slot = tl.load(row_slots_ptr + row, mask=inside, other=sink)
    drafted = tl.load(num_drafts_ptr + slot, mask=inside, other=0)
    active = (drafted < tl.load(room_ptr + row, mask=inside, other=0)) & (slot != sink)
    where = tl.load(num_tokens_ptr + slot, mask=active, other=0) + drafted
    token_id = tl.load(drafts_ptr + row, mask=active, other=0)
    if MAPS:
        token_id += tl.load(d2t_ptr + token_id, mask=active, other=0)
    text = token_ids_ptr + slot * token_ids_stride
    tl.store(text + where, token_id, mask=active & (where < max_len))
    tl.store(num_drafts_ptr + slot, drafted + 1, mask=active)
    tl.store(number_ptr + row, tl.where(active, drafted, -1), mask=inside)


@register(
    "commit_draft_(Tensor row_slots, Tensor room, Tensor drafts, Tensor? d2t, Tensor num_tokens, "
    "Tensor(a!) token_ids, Tensor(b!) num_drafts, Tensor(c!) number) -> ()"
)
def commit_draft_(
    row_slots: Tensor,
    room: Tensor,
    drafts: Tensor,
    d2t: Tensor | None,
    num_tokens: Tensor,
    token_ids: Tensor,
    num_drafts: Tensor,
    number: Tensor,
) -> None:
    count, (rows, max_len) = drafts.shape[0], token_ids.shape
    assert count <= row_slots.shape[0], (count, row_slots.shape[0])
    _commit_draft_kernel[(triton.cdiv(count, ROWS_PER_WARP),)](
        row_slots, room, drafts, drafts if d2t is None else d2t, num_tokens, token_ids, num_drafts,
        number, rows - 1, token_ids.stride(0), max_len, count, MAPS=d2t is not None,
        BLOCK=ROWS_PER_WARP, num_warps=1, **overlapping(drafts),
    )  # fmt: skip


def commit_draft(
    slots: SlotTensors,
    step: StepTensors,
    room: Tensor,
    token_ids: Tensor,
    d2t: Tensor | None = None,
) -> Tensor:
    """Append one draft to each row that has room; return its index among the drafts, [n] int64.

    token_ids: [n] int64 for the first n rows; rows without room get index -1
    d2t: [draft vocabulary] int64, added to the ids
    """
    number = torch.empty_like(token_ids)
    commit_draft_(
        step.row_slots, room, token_ids, d2t, slots.num_tokens, slots.token_ids, slots.num_drafts,
        number,
    )  # fmt: skip
    return number


# ---- n-gram lookup ----


@triton.jit
def _look_up_ngrams_kernel(
    row_slots_ptr,
    room_ptr,
    num_tokens_ptr,
    token_ids_ptr,
    num_drafts_ptr,
    sink,
    token_ids_stride,
    max_len,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row per program. It reads known tokens and writes after them, so no barrier is needed."""
    row = tl.program_id(0)
    slot = tl.load(row_slots_ptr + row)
    if slot != sink:
        text = token_ids_ptr + slot * token_ids_stride
        known = tl.load(num_tokens_ptr + slot).to(tl.int32)
        room = tl.load(room_ptr + row).to(tl.int32)
        # Each lane keeps the longest run it has seen, the first of equal ones.
        best = tl.zeros((BLOCK,), tl.int32)
        place = tl.zeros((BLOCK,), tl.int32)
        for begin in range(0, tl.where(room > 0, known - 1, 0), BLOCK):
            end = begin + tl.arange(0, BLOCK)
            earlier = end < known - 1
            equal = earlier
            run = tl.zeros((BLOCK,), tl.int32)
            for back in tl.static_range(MOST):
                inside = earlier & (end >= back)
                tail = tl.load(text + known - 1 - back, mask=known > back, other=0)
                token_id = tl.load(text + end - back, mask=inside, other=0)
                equal = equal & inside & (token_id == tail)
                run += equal.to(tl.int32)
            longer = (run >= LEAST) & (run > best)
            best = tl.where(longer, run, best)
            place = tl.where(longer, end, place)
        longest = tl.max(best, axis=0)
        first = tl.min(tl.where(best == longest, place, max_len), axis=0)
        found = tl.where(longest > 0, tl.minimum(room, known - 1 - first), 0)
        number = tl.arange(0, COLUMNS)
        taken = number < tl.minimum(found, COUNT)
        token_id = tl.load(text + first + 1 + number, mask=taken, other=0)
        where = known + number
        tl.store(text + where, token_id, mask=taken & (where < max_len))
        tl.store(num_drafts_ptr + slot, found.to(tl.int64))


@register(
    "look_up_ngrams_(Tensor row_slots, Tensor room, Tensor num_tokens, int least, int most, "
    "int count, Tensor(a!) token_ids, Tensor(b!) num_drafts) -> ()"
)
def look_up_ngrams_(
    row_slots: Tensor,
    room: Tensor,
    num_tokens: Tensor,
    least: int,
    most: int,
    count: int,
    token_ids: Tensor,
    num_drafts: Tensor,
) -> None:
    rows, max_len = token_ids.shape
    block = min(HISTORY_BLOCK, triton.next_power_of_2(max_len))
    _look_up_ngrams_kernel[(row_slots.shape[0],)](
        row_slots, room, num_tokens, token_ids, num_drafts, rows - 1, token_ids.stride(0), max_len,
        LEAST=least, MOST=most, COUNT=count, COLUMNS=triton.next_power_of_2(count), BLOCK=block,
        num_warps=max(1, min(8, block // 128)),
    )  # fmt: skip


def look_up_ngrams(
    slots: SlotTensors, step: StepTensors, room: Tensor, sizes: tuple[int, int], count: int
) -> None:
    """Find the longest n-gram that ends a row's tokens and occurs earlier, and draft what followed.

    sizes: smallest and largest n; count: the most drafts of a row. Of several occurrences of the
    same n the earliest is used.
    """
    least, most = sizes
    look_up_ngrams_(
        step.row_slots, room, slots.num_tokens, least, most, count, slots.token_ids,
        slots.num_drafts,
    )  # fmt: skip
