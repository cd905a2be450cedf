"""Phase I on the device: from slot state to the tensors that a step reads.

Every output is written over its whole extent, with harmless values past the live part, so that a
reader of a padded extent never meets what an earlier, larger step left behind.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stoop.ops.kernels.choice import uses_kernels


@dataclass(frozen=True)
class SlotTensors:
    """State by slot. The last row is a sink: padding reads and writes it, nobody else.

    Drafts stand in `token_ids` right behind the known tokens, as if they were known: inputs,
    penalties and bad words find them where they would find accepted ones.
    """

    token_ids: Tensor  # [slots + 1, max_model_len] int32: prompt, output, then drafts
    num_tokens: Tensor  # [slots + 1] int64: known tokens
    num_computed: Tensor  # [slots + 1] int64: tokens whose KV is written
    num_prompt_tokens: Tensor  # [slots + 1] int64
    num_drafts: Tensor  # [slots + 1] int64: drafts behind the known tokens
    draft_limit: Tensor  # [slots + 1] int64: drafts that the request wants at most
    token_limit: Tensor  # [slots + 1] int64: known tokens at which the request ends; 0: has ended
    block_table: Tensor  # [slots + 1, max_blocks] int32

    @property
    def sink(self) -> int:
        return self.token_ids.shape[0] - 1


@dataclass(frozen=True)
class StopTensors:
    """What ends a request before its limit, by slot."""

    min_tokens: Tensor  # [slots + 1] int64: tokens of an answer before which nothing ends it
    stop_counts: Tensor  # [slots + 1] int64
    stop_ids: Tensor  # [slots + 1, width] int64, the first stop_counts count


@dataclass(frozen=True)
class RowTensors:
    """What the host writes: which slot each row serves, and how many query tokens it has."""

    idx_mapping: Tensor  # [max_reqs] int64: row -> slot; -1 for padding
    query_start_loc: Tensor  # [max_reqs + 1] int32: flat past the live rows


@dataclass(frozen=True)
class StepTensors:
    """What phase I writes and the other phases read.

    A row may have more query tokens than it has known tokens and drafts: the rest are dead, and
    look like padding. So does a whole row whose request has ended, which the host may not know yet.
    """

    input_ids: Tensor  # [max_tokens] int32; padding 0
    positions: Tensor  # [max_tokens] int64; padding 0
    slot_mapping: Tensor  # [max_tokens] int64; padding -1
    context_lens: Tensor  # [max_reqs] int32: tokens before this step's; padding 0
    seq_lens: Tensor  # [max_reqs] int32: with this step's live tokens; padding 0
    last_token_indices: Tensor  # [max_reqs] int64: the newest known token's place; padding 0
    samples: Tensor  # [max_reqs] int32: 1 if the row reaches its newest token; padding 0
    row_drafts: Tensor  # [max_reqs] int64: drafts behind that token; padding 0
    row_slots: Tensor  # [max_reqs] int64: `idx_mapping`, the sink for padding and ended requests


# What stands past the live extent; `row_slots` has the sink there.
PADDING = {
    "input_ids": 0,
    "positions": 0,
    "slot_mapping": -1,
    "context_lens": 0,
    "seq_lens": 0,
    "last_token_indices": 0,
    "samples": 0,
    "row_drafts": 0,
}
TOKEN_BUFFERS = ("input_ids", "positions", "slot_mapping")  # the others have a row a request


def prepare_inputs(slots: SlotTensors, rows: RowTensors, out: StepTensors, block_size: int) -> None:
    """Phase I."""
    if uses_kernels(out.input_ids):
        from stoop.ops.kernels import inputs as kernels

        kernels.prepare_inputs(slots, rows, out, block_size)
        return
    starts = rows.query_start_loc.long()  # [max_reqs + 1]
    row_slot = torch.where(rows.idx_mapping < 0, slots.sink, rows.idx_mapping)  # [max_reqs]
    row_live = (rows.idx_mapping >= 0) & (slots.num_tokens[row_slot] < slots.token_limit[row_slot])
    row_slot = torch.where(row_live, row_slot, slots.sink)
    out.row_slots.copy_(row_slot)

    # Rows.
    known, computed = slots.num_tokens[row_slot], slots.num_computed[row_slot]
    available = known + slots.num_drafts[row_slot] - computed
    live_lens = torch.minimum(starts[1:] - starts[:-1], available) * row_live  # [max_reqs]
    seq_lens = computed + live_lens
    samples = row_live & (seq_lens >= known)
    newest = starts[:-1] + torch.minimum(known - computed, live_lens) - 1
    out.context_lens.copy_(torch.where(row_live, computed, 0))
    out.seq_lens.copy_(torch.where(row_live, seq_lens, 0))
    out.samples.copy_(samples)
    out.row_drafts.copy_(torch.where(samples, seq_lens - known, 0))
    out.last_token_indices.copy_(torch.where(row_live, newest, 0))

    # Tokens. One past its row's live part, or past the last row's end, is dead.
    token, row = token_rows(rows.query_start_loc, out.input_ids.shape[0])
    offset = token - starts[row]
    live = (token < starts[-1]) & (offset < live_lens[row])
    slot = row_slot[row]
    positions = torch.where(live, computed[row] + offset, 0)
    blocks = slots.block_table[slot, positions // block_size].long()
    out.positions.copy_(positions)
    out.input_ids.copy_(torch.where(live, slots.token_ids[slot, positions], 0))
    kv_slot = blocks * block_size + positions % block_size
    out.slot_mapping.copy_(torch.where(live, kv_slot, -1))


def token_rows(query_start_loc: Tensor, max_tokens: int) -> tuple[Tensor, Tensor]:
    """[max_tokens] places in the batch, and the row of each; past the end, the last row."""
    token = torch.arange(max_tokens, device=query_start_loc.device)
    starts = query_start_loc.long()
    row = torch.searchsorted(starts[1:], token, right=True).clamp_(max=starts.shape[0] - 2)
    return token, row


def commit_tokens(
    slots: SlotTensors,
    stops: StopTensors,
    rows: RowTensors,
    step: StepTensors,
    sampled: Tensor,
    num_sampled: Tensor,
) -> None:
    """Phase U: a step's tokens are computed, its samples known, its drafts used up. A request with
    a stop token among them has ended.

    sampled: [max_reqs, K + 1] int64; num_sampled: [max_reqs] int64, 0 for rows that sample nothing
    """
    if uses_kernels(sampled):
        from stoop.ops.kernels import inputs as kernels

        kernels.commit_tokens(slots, stops, rows, step, sampled, num_sampled)
        return
    row_slots, width = step.row_slots, slots.token_ids.shape[1]
    known = slots.num_tokens[row_slots]
    place = torch.arange(sampled.shape[1], device=sampled.device)
    taken = place < num_sampled[:, None]  # [max_reqs, K + 1]
    ended = (taken & _stops(slots, stops, row_slots, sampled)).any(dim=1)
    slots.token_limit[torch.where(ended, row_slots, slots.sink)] = 0
    # What is not taken goes into the sink, where it does no harm.
    writer = torch.where(taken, row_slots[:, None], slots.sink)
    where = (known[:, None] + place).clamp(max=width - 1)
    token_ids = torch.where(taken, sampled, 0)
    slots.token_ids[writer, where] = token_ids.to(slots.token_ids.dtype)
    slots.num_tokens.index_add_(0, row_slots, num_sampled)
    # All but the newest token have their KV; of a chunk, all its tokens. KV of rejected drafts is
    # not counted, and will be written over.
    starts = rows.query_start_loc.long()
    num_tokens = (starts[1:] - starts[:-1]) * (row_slots != slots.sink)
    computed = slots.num_computed[row_slots] + num_tokens
    newest = slots.num_tokens[row_slots] - 1
    slots.num_computed[row_slots] = torch.where(step.samples > 0, newest, computed)
    slots.num_drafts[row_slots] = 0


def _stops(slots: SlotTensors, stops: StopTensors, row_slots: Tensor, sampled: Tensor) -> Tensor:
    """[max_reqs, K + 1] bool: whether a token ends its request. sampled: as large"""
    place = torch.arange(sampled.shape[1], device=sampled.device)
    num_output = (slots.num_tokens - slots.num_prompt_tokens)[row_slots][:, None] + place + 1
    ids = stops.stop_ids[row_slots]  # [max_reqs, width]
    given = torch.arange(ids.shape[1], device=ids.device) < stops.stop_counts[row_slots][:, None]
    found = ((sampled[:, :, None] == ids[:, None, :]) & given[:, None, :]).any(dim=2)
    return found & (num_output > stops.min_tokens[row_slots][:, None])
