"""Phases I and U: a step's inputs out of slot state, and its tokens back into it.

Phase I writes each output over its whole extent, with harmless values past the live part. A kernel
that reads a padded extent therefore never sees values of an earlier, larger step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stoop.ops.dispatch import op


@dataclass(frozen=True)
class SlotTensors:
    """State by slot. The last row is a sink, which only padding reads and writes.

    Drafts follow the known tokens in `token_ids`, as if they were accepted already. So inputs,
    penalties and bad words read them from where they would read accepted tokens.
    """

    token_ids: Tensor  # [slots + 1, max_model_len] int32: prompt, output, then drafts
    num_tokens: Tensor  # [slots + 1] int64: known tokens
    num_computed: Tensor  # [slots + 1] int64: tokens whose KV is written
    num_prompt_tokens: Tensor  # [slots + 1] int64
    num_drafts: Tensor  # [slots + 1] int64: drafts after the known tokens
    draft_limit: Tensor  # [slots + 1] int64: the most drafts the request wants
    token_limit: Tensor  # [slots + 1] int64: known tokens at which it ends; 0: ended
    block_table: Tensor  # [slots + 1, max_blocks] int32

    @property
    def sink(self) -> int:
        return self.token_ids.shape[0] - 1


@dataclass(frozen=True)
class StopTensors:
    """Conditions that end a request before its token limit, by slot."""

    min_tokens: Tensor  # [slots + 1] int64: output tokens before a stop token counts
    stop_counts: Tensor  # [slots + 1] int64
    stop_ids: Tensor  # [slots + 1, width] int64; the first stop_counts are valid


@dataclass(frozen=True)
class RowTensors:
    """What the host writes: the slot of each row, and how many query tokens it has."""

    idx_mapping: Tensor  # [max_reqs] int64: row -> slot; -1 for padding
    query_start_loc: Tensor  # [max_reqs + 1] int32: flat past the live rows


@dataclass(frozen=True)
class StepTensors:
    """What phase I writes and the other phases read.

    If a row has more query tokens than known tokens and drafts, the rest are dead and look like
    padding. So does the whole row of a request that has ended, which the host may not know yet.
    """

    input_ids: Tensor  # [max_tokens] int32; padding 0
    positions: Tensor  # [max_tokens] int64; padding 0
    slot_mapping: Tensor  # [max_tokens] int64; padding -1
    context_lens: Tensor  # [max_reqs] int32: tokens before this step; padding 0
    seq_lens: Tensor  # [max_reqs] int32: including this step's live tokens; padding 0
    last_token_indices: Tensor  # [max_reqs] int64: index of the newest known token; padding 0
    samples: Tensor  # [max_reqs] int32: 1 if the row reaches its newest token; padding 0
    row_drafts: Tensor  # [max_reqs] int64: drafts after that token; padding 0
    row_slots: Tensor  # [max_reqs] int64: `idx_mapping`, the sink for padding and ended requests


# Values past the live extent; `row_slots` has the sink there.
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
TOKEN_BUFFERS = ("input_ids", "positions", "slot_mapping")  # the others have a row per request


@op("out.input_ids", native=True)
def prepare_inputs(slots: SlotTensors, rows: RowTensors, out: StepTensors, block_size: int) -> None:
    """Run phase I: write all of `out`."""
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

    # Tokens. Those past their row's live part, or past the last row's end, are dead.
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
    """Return [max_tokens] token indices and the row of each; the last row past the end."""
    token = torch.arange(max_tokens, device=query_start_loc.device)
    starts = query_start_loc.long()
    row = torch.searchsorted(starts[1:], token, right=True).clamp_(max=starts.shape[0] - 2)
    return token, row


@op("sampled", native=True)
def commit_tokens(
    slots: SlotTensors,
    stops: StopTensors,
    rows: RowTensors,
    step: StepTensors,
    sampled: Tensor,
    num_sampled: Tensor,
) -> None:
    """Run phase U: append the sampled tokens, advance the counters, drop the drafts. A stop token
    among the sampled ones ends its request.

    sampled: [max_reqs, K + 1] int64, contiguous
    num_sampled: [max_reqs] int64, 0 for rows that sample nothing; -1 - n for a row that fails after
    n tokens, which also ends its request
    """
    failed = num_sampled < 0
    num_sampled = torch.where(failed, -1 - num_sampled, num_sampled)
    row_slots, width = step.row_slots, slots.token_ids.shape[1]
    known = slots.num_tokens[row_slots]
    place = torch.arange(sampled.shape[1], device=sampled.device)
    taken = place < num_sampled[:, None]  # [max_reqs, K + 1]
    ended = (taken & _stops(slots, stops, row_slots, sampled)).any(dim=1) | failed
    slots.token_limit[torch.where(ended, row_slots, slots.sink)] = 0
    # Tokens that are not taken go into the sink, where they do no harm.
    writer = torch.where(taken, row_slots[:, None], slots.sink)
    where = (known[:, None] + place).clamp(max=width - 1)
    token_ids = torch.where(taken, sampled, 0)
    slots.token_ids[writer, where] = token_ids.to(slots.token_ids.dtype)
    slots.num_tokens.index_add_(0, row_slots, num_sampled)
    # All tokens but the newest have their KV; all tokens of a chunk do. KV of rejected drafts is
    # not counted and will be overwritten.
    starts = rows.query_start_loc.long()
    num_tokens = (starts[1:] - starts[:-1]) * (row_slots != slots.sink)
    computed = slots.num_computed[row_slots] + num_tokens
    newest = slots.num_tokens[row_slots] - 1
    slots.num_computed[row_slots] = torch.where(step.samples > 0, newest, computed)
    slots.num_drafts[row_slots] = 0


def _stops(slots: SlotTensors, stops: StopTensors, row_slots: Tensor, sampled: Tensor) -> Tensor:
    """[max_reqs, K + 1] bool: whether each token of `sampled` ends its request."""
    place = torch.arange(sampled.shape[1], device=sampled.device)
    num_output = (slots.num_tokens - slots.num_prompt_tokens)[row_slots][:, None] + place + 1
    ids = stops.stop_ids[row_slots]  # [max_reqs, width]
    given = torch.arange(ids.shape[1], device=ids.device) < stops.stop_counts[row_slots][:, None]
    found = ((sampled[:, :, None] == ids[:, None, :]) & given[:, None, :]).any(dim=2)
    return found & (num_output > stops.min_tokens[row_slots][:, None])
