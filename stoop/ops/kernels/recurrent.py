"""What the kernels of recurrent layers share: their tiles of tokens; and the count of tokens that
count.

Kernels find their rows and lengths on the device, so that a captured graph serves any lengths. The
state of a slot was written in earlier steps, as KV is, and so may be read before `wait_for_inputs`
(launch.py), with `load_early`.
"""

import triton
import triton.language as tl
from torch import Tensor

from stoop.ops.inputs import RowTensors, SlotTensors, StepTensors
from stoop.ops.kernels.attention_parts import find_row, row_of
from stoop.ops.kernels.launch import load_early, overlapping, start_in_turn
from stoop.ops.library import register

ROWS_PER_PROGRAM = 32


@triton.jit
def read_tile(
    starts_ptr, contexts_ptr, seq_lens_ptr, slots_ptr, tile, num_reqs,
    SHORT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return of a tile of query tokens: its row's first token, its own place in the row, the row's
    query tokens, live tokens, context and slot.

    SHORT: every row is one tile. Otherwise wait for inputs before, and have `count_tiles`.
    """
    row = tile
    if not SHORT:
        row = find_row(starts_ptr, tile, num_reqs, TILE)
    begin, query_len, context, seq_len = row_of(starts_ptr, contexts_ptr, seq_lens_ptr, row)
    done = 0
    if not SHORT:
        done = (tile - begin // TILE - row) * TILE
    slot = load_early(slots_ptr + row)
    return begin.to(tl.int64), done, query_len, seq_len - context, context, slot


@triton.jit
def zero_rest(
    out_ptr, column, inside, starts_ptr, num_tokens, num_reqs, stride, TILE: tl.constexpr
):  # fmt: skip
    """Zero this tile's share of the tokens after the last row.

    column: [1, n], of which those `inside` are stored
    """
    end = load_early(starts_ptr + num_reqs)
    first = end + tl.program_id(0) * TILE
    for place in range(first, num_tokens, tl.num_programs(0) * TILE):
        token = place + tl.arange(0, TILE)[:, None]
        target = out_ptr + token.to(tl.int64) * stride + column
        zeros = tl.zeros(target.shape, out_ptr.dtype.element_ty)
        tl.store(target, zeros, mask=inside & (token < num_tokens))


def count_tiles(num_tokens: int, num_reqs: int, tile: int, *, short: bool) -> int:
    """Programs that serve all tiles of a step, whatever the lengths of its rows are."""
    return num_reqs if short else num_tokens // tile + num_reqs


@triton.jit(do_not_specialize=["max_reqs", "log_len"])
def _commit_pending_kernel(
    starts_ptr, row_slots_ptr, contexts_ptr, num_computed_ptr, pending_ptr, sink, max_reqs,
    log_len, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_in_turn(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(row_slots_ptr + row, mask=row < max_reqs, other=sink)
    live = slot != sink
    start = tl.load(starts_ptr + row, mask=live, other=0)
    end = tl.load(starts_ptr + row + 1, mask=live, other=0)
    context = tl.load(contexts_ptr + row, mask=live, other=0).to(tl.int64)
    computed = tl.load(num_computed_ptr + slot, mask=live, other=0)
    pending = tl.where(end - start <= log_len, computed - context, 0)
    tl.store(pending_ptr + slot, pending, mask=live)


@register(
    "commit_pending_(Tensor query_start_loc, Tensor row_slots, Tensor context_lens, "
    "Tensor num_computed, int log_len, Tensor(a!) pending) -> ()"
)
def commit_pending_(
    query_start_loc: Tensor,
    row_slots: Tensor,
    context_lens: Tensor,
    num_computed: Tensor,
    log_len: int,
    pending: Tensor,
) -> None:
    max_reqs = row_slots.shape[0]
    _commit_pending_kernel[(triton.cdiv(max_reqs, ROWS_PER_PROGRAM),)](
        query_start_loc, row_slots, context_lens, num_computed, pending, pending.shape[0] - 1,
        max_reqs, log_len, BLOCK=ROWS_PER_PROGRAM, num_warps=1, **overlapping(pending),
    )  # fmt: skip


def commit_pending(
    slots: SlotTensors, rows: RowTensors, step: StepTensors, pending: Tensor, log_len: int
) -> None:
    """In phase U: how many of the logged tokens count. The sink is not written."""
    commit_pending_(
        rows.query_start_loc, step.row_slots, step.context_lens, slots.num_computed, log_len,
        pending,
    )  # fmt: skip
