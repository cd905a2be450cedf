"""Phase V: which drafts are accepted, and the token after them."""

import triton
import triton.language as tl
from torch import Tensor

from stoop.ops.inputs import SlotTensors, StepTensors
from stoop.ops.kernels.inputs import rows_per_warp
from stoop.ops.kernels.launch import overlapping, start_in_turn
from stoop.ops.library import register


@triton.jit(do_not_specialize=["count"])
def _write_verdict_kernel(
    chosen_ptr,
    accepts_ptr,
    token_ids_ptr,
    num_tokens_ptr,
    row_slots_ptr,
    row_drafts_ptr,
    samples_ptr,
    out_token_ids_ptr,
    out_num_tokens_ptr,
    out_num_drafts_ptr,
    count,
    max_reqs,
    chosen_stride,
    token_ids_stride,
    MATCHES: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """MATCHES: accept a draft if it is the token chosen at its position, otherwise by its flag."""
    start_in_turn(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.arange(0, COLUMNS)[None, :]
    given = row < count
    slot = tl.load(row_slots_ptr + row, mask=given, other=0)
    num_drafts = tl.load(row_drafts_ptr + row, mask=row < max_reqs, other=0)
    samples = tl.load(samples_ptr + row, mask=given, other=0).to(tl.int64)
    known = tl.load(num_tokens_ptr + slot, mask=given, other=0)
    place = row.to(tl.int64)[:, None]
    shown = given[:, None] & (number < WIDTH)
    chosen = tl.load(chosen_ptr + place * chosen_stride + number, mask=shown, other=0)
    drafted = given[:, None] & (number < tl.minimum(num_drafts, WIDTH - 1)[:, None])
    text = token_ids_ptr + (slot * token_ids_stride + known)[:, None]
    draft = tl.load(text + number, mask=drafted, other=0).to(tl.int64)
    if MATCHES:
        accepted = drafted & (draft == chosen)
    else:
        flag = tl.load(accepts_ptr + place * (WIDTH - 1) + number, mask=drafted, other=0)
        accepted = drafted & (flag != 0)
    num_accepted = tl.min(tl.where(accepted, WIDTH - 1, number), axis=1)
    last = num_accepted[:, None]
    newest = tl.where(number == last, chosen, 0)
    failed = tl.min(newest, axis=1) < 0
    token_ids = tl.where(number < last, draft, tl.maximum(newest, 0))
    inside = row < max_reqs
    out = out_token_ids_ptr + place * OUT_WIDTH + number
    tl.store(out, token_ids, mask=inside[:, None] & (number < OUT_WIDTH))
    counts = tl.where(failed, -1 - num_accepted, num_accepted + 1)
    tl.store(out_num_tokens_ptr + row, counts * samples, mask=inside)
    tl.store(out_num_drafts_ptr + row, num_drafts, mask=inside)


@register(
    "write_verdict_(Tensor chosen, Tensor? accepts, Tensor token_ids, Tensor num_tokens, "
    "Tensor row_slots, Tensor row_drafts, Tensor samples, Tensor(a!) out_token_ids, "
    "Tensor(b!) out_num_tokens, Tensor(c!) out_num_drafts) -> ()"
)
def write_verdict_(
    chosen: Tensor,
    accepts: Tensor | None,
    token_ids: Tensor,
    num_tokens: Tensor,
    row_slots: Tensor,
    row_drafts: Tensor,
    samples: Tensor,
    out_token_ids: Tensor,
    out_num_tokens: Tensor,
    out_num_drafts: Tensor,
) -> None:
    (count, width), (max_reqs, out_width) = chosen.shape, out_token_ids.shape
    assert count <= max_reqs and width <= out_width, (chosen.shape, out_token_ids.shape)
    assert chosen.stride(1) == 1 and out_token_ids.is_contiguous()
    flags = chosen if accepts is None else accepts
    assert accepts is None or (accepts.shape == (count, width - 1) and accepts.is_contiguous())
    columns = triton.next_power_of_2(out_width)
    block = rows_per_warp(columns)
    _write_verdict_kernel[(triton.cdiv(max_reqs, block),)](
        chosen, flags, token_ids, num_tokens, row_slots, row_drafts, samples, out_token_ids,
        out_num_tokens, out_num_drafts, count, max_reqs, chosen.stride(0), token_ids.stride(0),
        MATCHES=accepts is None, WIDTH=width, OUT_WIDTH=out_width, COLUMNS=columns,
        BLOCK=block, num_warps=1, **overlapping(chosen),
    )  # fmt: skip


def write_verdict(
    chosen: Tensor,
    accepts: Tensor | None,
    slots: SlotTensors,
    step: StepTensors,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_drafts: Tensor,
) -> None:
    """Write what a step yields: accepted drafts, the token after them, and zeros to the end.

    chosen: [n, width] int64 for the first n rows, the token for each position in case it comes
    last; width is one more than the places for drafts, 1 to K + 1
    accepts: [n, width - 1] bool or int8; None accepts drafts that equal the token chosen there
    token_ids: [max_reqs, K + 1], num_tokens, num_drafts: [max_reqs], all int64 and written
    """
    write_verdict_(
        chosen, accepts, slots.token_ids, slots.num_tokens, step.row_slots, step.row_drafts,
        step.samples, token_ids, num_tokens, num_drafts,
    )  # fmt: skip
