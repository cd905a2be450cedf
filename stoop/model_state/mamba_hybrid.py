"""The state of models that have recurrent layers beside attention."""

import torch

from stoop.batch.input_batch import InputBatch
from stoop.batch.staging import StagedWrites
from stoop.core.state import RecurrentState
from stoop.core.step import Admission
from stoop.graph.buffers import Buffer, Extent, Lifetime
from stoop.model_state.base import Metadata, ModelStateSetup
from stoop.model_state.default import DefaultModelState
from stoop.ops.recurrent import RecurrentRows, commit_pending


class MambaHybridModelState(DefaultModelState):
    """Recurrent layers move their state in phase C, for drafts that may be rejected, too. One
    counter a slot, shared by all layers, says how many tokens of the last step count
    (ops/recurrent.py)."""

    def __init__(self, setup: ModelStateSetup) -> None:
        super().__init__(setup)
        self.pending = torch.zeros_like(setup.slots.num_tokens)
        self.log_len = setup.layout.query_len

    def admit(self, staged: StagedWrites, admission: Admission) -> None:
        staged.put(self.pending, admission.slot, 0)

    def prepare_attn(self, batch: InputBatch, for_capture: bool = False) -> Metadata:
        num_reqs, step = batch.num_reqs_padded, batch.step
        rows = RecurrentRows(
            query_start_loc=batch.rows.query_start_loc[: num_reqs + 1],
            context_lens=step.context_lens[:num_reqs],
            seq_lens=step.seq_lens[:num_reqs],
            slots=step.row_slots[:num_reqs],
            pending=self.pending,
            short=batch.query_len is not None and batch.query_len <= self.log_len,
        )
        return {**super().prepare_attn(batch, for_capture), RecurrentState: rows}

    def commit(self) -> None:
        buffers = self.setup.buffers
        commit_pending(self.setup.slots, buffers.rows, buffers.step, self.pending, self.log_len)

    def state_buffers(self) -> list[Buffer]:
        pending = Buffer("pending", self.pending, Lifetime.SLOT, Extent.SLOTS)
        return [*super().state_buffers(), pending]
