"""Phase I on the device: from slot state to the tensors that a step reads.

Every output is written over its whole extent, with harmless values past the live part, so that a
reader of a padded extent never meets what an earlier, larger step left behind.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SlotTensors:
    """State by slot. The last row is a sink: padding reads and writes it, nobody else."""

    token_ids: Tensor  # [slots + 1, max_model_len] int32: prompt, then output
    num_tokens: Tensor  # [slots + 1] int64: known tokens
    num_computed: Tensor  # [slots + 1] int64: tokens whose KV is written
    num_prompt_tokens: Tensor  # [slots + 1] int64
    block_table: Tensor  # [slots + 1, max_blocks] int32

    @property
    def sink(self) -> int:
        return self.token_ids.shape[0] - 1


@dataclass(frozen=True)
class RowTensors:
    """What the host writes: which slot each row serves, and how many query tokens it has."""

    idx_mapping: Tensor  # [max_reqs] int64: row -> slot; -1 for padding
    query_start_loc: Tensor  # [max_reqs + 1] int32: flat past the live rows


@dataclass(frozen=True)
class StepTensors:
    """What phase I writes and the other phases read."""

    input_ids: Tensor  # [max_tokens] int32; padding 0
    positions: Tensor  # [max_tokens] int64; padding 0
    slot_mapping: Tensor  # [max_tokens] int64; padding -1
    seq_lens: Tensor  # [max_reqs] int32, this step's tokens included; padding 0
    block_rows: Tensor  # [max_reqs, max_blocks] int32; padding 0, the null block
    last_token_indices: Tensor  # [max_reqs] int64: a row's last token in the batch; padding 0
    samples: Tensor  # [max_reqs] int32: 1 if the row reaches its newest token; padding 0
    row_slots: Tensor  # [max_reqs] int64: `idx_mapping` with the sink for padding


# What stands past the live extent; `row_slots` has the sink there.
PADDING = {
    "input_ids": 0,
    "positions": 0,
    "slot_mapping": -1,
    "seq_lens": 0,
    "block_rows": 0,
    "last_token_indices": 0,
    "samples": 0,
}
TOKEN_BUFFERS = ("input_ids", "positions", "slot_mapping")  # the others have a row a request


def prepare_inputs(slots: SlotTensors, rows: RowTensors, out: StepTensors, block_size: int) -> None:
    max_reqs = rows.idx_mapping.shape[0]
    starts = rows.query_start_loc.long()  # [max_reqs + 1]
    row_slot = torch.where(rows.idx_mapping < 0, slots.sink, rows.idx_mapping)  # [max_reqs]
    row_live = rows.idx_mapping >= 0
    out.row_slots.copy_(row_slot)
    query_lens = starts[1:] - starts[:-1]

    # Rows.
    seq_lens = torch.where(row_live, slots.num_computed[row_slot] + query_lens, 0)
    out.seq_lens.copy_(seq_lens)
    out.samples.copy_(row_live & (seq_lens == slots.num_tokens[row_slot]))
    out.last_token_indices.copy_(torch.where(row_live, starts[1:] - 1, 0))
    out.block_rows.copy_(slots.block_table[row_slot] * row_live[:, None])

    # Tokens. A token past the last row's end is padding.
    token = torch.arange(out.input_ids.shape[0], device=starts.device)
    row = torch.searchsorted(starts[1:], token, right=True).clamp_(max=max_reqs - 1)
    live = token < starts[-1]
    slot = row_slot[row]
    positions = torch.where(live, slots.num_computed[slot] + token - starts[row], 0)
    blocks = slots.block_table[slot, positions // block_size].long()
    out.positions.copy_(positions)
    out.input_ids.copy_(torch.where(live, slots.token_ids[slot, positions], 0))
    kv_slot = blocks * block_size + positions % block_size
    out.slot_mapping.copy_(torch.where(live, kv_slot, -1))


def commit_tokens(slots: SlotTensors, rows: RowTensors, step: StepTensors, sampled: Tensor) -> None:
    """Phase U: a step's tokens are computed and its samples known.

    sampled: [max_reqs] int64, read where `step.samples`
    """
    starts = rows.query_start_loc.long()
    slots.num_computed.index_add_(0, step.row_slots, starts[1:] - starts[:-1])
    # A row that sampled nothing writes a harmless token into the sink.
    writer = torch.where(step.samples > 0, step.row_slots, slots.sink)
    where = slots.num_tokens[writer].clamp(max=slots.token_ids.shape[1] - 1)
    token_ids = torch.where(step.samples > 0, sampled, 0)
    slots.token_ids[writer, where] = token_ids.to(slots.token_ids.dtype)
    slots.num_tokens.index_add_(0, step.row_slots, step.samples.long())
