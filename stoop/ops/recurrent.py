"""What all recurrent layers share: the rows of a step, and how drafts are undone.

A slot keeps a *checkpoint*, the state after some of its tokens, and a *log* of the tokens of its
last step. `pending` says how many of those count: the rest were rejected drafts. The next step
first applies the pending tokens to the checkpoint (it *folds* them), in the arithmetic of the step
that wrote them, so that the state has the bits it would have without drafts.

- A row with at most `log_len` query tokens is *short*, whatever it is: a decode with its drafts, or
  the end of a prompt. It folds, stores the checkpoint, then computes its tokens and logs them.
- A longer row is a chunk of a prompt. It folds, computes its tokens, stores the state after the
  last one, and logs nothing.
- A row without context starts from zeros, whatever its slot holds. Padding and dead tokens read and
  write no slot but the sink, and their outputs are zeros.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stoop.ops.dispatch import op
from stoop.ops.inputs import RowTensors, SlotTensors, StepTensors

SOFTPLUS_LINEAR = 20.0  # from here on softplus is its argument, as in torch


@dataclass(frozen=True)
class RecurrentRows:
    """What recurrent layers read of one step."""

    query_start_loc: Tensor  # [num_reqs + 1] int32
    context_lens: Tensor  # [num_reqs] int32: tokens before this step
    seq_lens: Tensor  # [num_reqs] int32: including the live tokens of this step
    slots: Tensor  # [num_reqs] int64; the sink for padding and ended requests
    pending: Tensor  # [slots + 1] int64: logged tokens that count
    short: bool  # no row has more than `log_len` query tokens, so that nothing needs scanning

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """In the order in which operations take them."""
        return (
            self.query_start_loc,
            self.context_lens,
            self.seq_lens,
            self.slots,
            self.pending,
        )


@dataclass(frozen=True)
class LiveRow:
    """One row that has live tokens, as numbers on the host."""

    slot: int
    begin: int  # its first token in the batch
    count: int  # live tokens
    context: int  # tokens before them
    fresh: bool  # without context: nothing in the slot counts
    pending: int
    logs: bool  # whether it is short

    @property
    def tokens(self) -> slice:
        return slice(self.begin, self.begin + self.count)


def live_rows(tensors: Sequence[Tensor], log_len: int) -> Iterator[LiveRow]:
    """The rows of a step, read on the host: for references that are registered operations.

    tensors: those of `RecurrentRows`
    """
    query_start_loc, context_lens, seq_lens, slots, pending = tensors
    starts, contexts = query_start_loc.tolist(), context_lens.tolist()
    lengths, waiting = seq_lens.tolist(), pending.tolist()
    for row, slot in enumerate(slots.tolist()):
        count = lengths[row] - contexts[row]
        if count > 0:
            logs = starts[row + 1] - starts[row] <= log_len
            fresh = contexts[row] == 0
            kept = 0 if fresh else waiting[slot]
            yield LiveRow(slot, starts[row], count, contexts[row], fresh, kept, logs)


# torch's own sigmoid, silu and softplus compute the end of a tensor otherwise than the rest, so a
# token's last bits depend on how many there are. Those of these do not.


def sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    return torch.where(x > SOFTPLUS_LINEAR, x, torch.log1p(torch.exp(x)))


@op("pending")
def commit_pending(
    slots: SlotTensors, rows: RowTensors, step: StepTensors, pending: Tensor, log_len: int
) -> None:
    """In phase U, after the step's tokens are counted: how many of the logged ones count.

    pending: [slots + 1] int64, written for the rows of the step. Chunks log nothing.
    """
    starts = rows.query_start_loc.long()
    logged = starts[1:] - starts[:-1] <= log_len
    confirmed = slots.num_computed[step.row_slots] - step.context_lens
    pending[step.row_slots] = torch.where(logged, confirmed, 0)
