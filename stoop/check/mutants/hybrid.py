"""Bugs in the state of recurrent layers (docs/hybrid.md).

They are in eager steps as well as in graphs: answers differ from those of an engine without them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from stoop.batch.staging import StagedWrites
from stoop.check.mutants.base import Mutant, Replaces
from stoop.core.step import Admission
from stoop.model_state.mamba_hybrid import MambaHybridModelState
from stoop.ops import causal_conv, delta_net, mamba, recurrent
from stoop.ops.recurrent import LiveRow


def forget_the_reset(patch: Replaces) -> None:
    """A new holder of a slot has the accepted count of the last one, and believes it."""

    def admit(self: MambaHybridModelState, staged: StagedWrites, admission: Admission) -> None:
        pass

    patch.setattr(MambaHybridModelState, "admit", admit)
    ignore_the_context(patch)


def ignore_the_context(patch: Replaces) -> None:
    """A request without context starts from what its slot holds."""
    real = recurrent.live_rows

    def stale(tensors: Sequence[Tensor], log_len: int) -> Iterator[LiveRow]:
        pending = tensors[4].tolist()
        for row in real(tensors, log_len):
            yield replace(row, fresh=False, pending=pending[row.slot])

    for module in (causal_conv, delta_net, mamba):
        patch.setattr(module, "live_rows", stale)


def keep_rejected_drafts(patch: Replaces) -> None:
    """All logged tokens count, accepted or not."""

    def commit(self: MambaHybridModelState) -> None:
        step = self.setup.buffers.step
        lengths = (step.seq_lens - step.context_lens).long()
        self.pending[step.row_slots] = torch.where(lengths <= self.log_len, lengths, 0)

    patch.setattr(MambaHybridModelState, "commit", commit)


def never_commit(patch: Replaces) -> None:
    """No logged token ever counts."""

    def commit(self: MambaHybridModelState) -> None:
        pass

    patch.setattr(MambaHybridModelState, "commit", commit)


def clamp_padding_to_slot_0(patch: Replaces) -> None:
    """The counter of padded rows is that of a live slot."""
    commit = MambaHybridModelState.commit

    def clamped(self: MambaHybridModelState) -> None:
        commit(self)
        padded = self.setup.buffers.rows.idx_mapping < 0
        self.pending[0] = torch.where(padded.any(), 0, self.pending[0])

    patch.setattr(MambaHybridModelState, "commit", clamped)


def commit_chunks_as_steps(patch: Replaces) -> None:
    """After a chunk, which logs nothing, the log counts."""

    def commit(self: MambaHybridModelState) -> None:
        slots, step = self.setup.slots, self.setup.buffers.step
        confirmed = slots.num_computed[step.row_slots] - step.context_lens
        self.pending[step.row_slots] = confirmed.clamp(max=self.log_len)

    patch.setattr(MambaHybridModelState, "commit", commit)


# With the dummy weights of the tiny hybrids, states of Mamba-2 weigh most in the logits.
_mutant = partial(Mutant, mode="step", drafter="ngram", num_drafts=3)
_named = partial(_mutant, model="tiny-granite-h", buffer="hidden")
_by_answers = partial(_mutant, by_sanitizer=False)

MUTANTS = (
    _named("accepted count not reset", forget_the_reset),
    _named("stale state in a reused slot", ignore_the_context),
    _by_answers("rejected drafts kept", keep_rejected_drafts, model="tiny-qwen3.5"),
    _by_answers("nothing committed", never_commit, model="tiny-granite-h"),
    _by_answers("padding clamped to slot 0", clamp_padding_to_slot_0, model="tiny-qwen3.5"),
    _named("a chunk counted as logged", commit_chunks_as_steps),
)
