"""Draft decodes captured in pieces: tokens are padded to the captured size, requests are not."""

from dataclasses import replace
from typing import Any

from stoop.attention.hostplan import HostPlanBackend
from stoop.batch.input_batch import InputBatch
from stoop.check.mutants.base import Patch, draft_mutant
from stoop.graph.descriptor import BatchExecutionDescriptor, RunMode
from stoop.graph.dispatch import Dispatcher
from stoop.graph.phases import Segment
from stoop.spec.decode_lane import DraftDecodeLane, decode_descriptors
from stoop.worker.executor import PhaseExecutor


def decode_in_pieces(patch: Patch) -> None:
    """A backend plans the requests that it is told of, and its decode kernel has a row per token:
    it reads index pointers past those that were planned."""
    batch_of, state_of = DraftDecodeLane._batch, DraftDecodeLane.capture_state
    replay = PhaseExecutor._replay

    def plan_pieces(self: DraftDecodeLane, graph: Any) -> None:
        sizes = [d.num_tokens for d in decode_descriptors(self.max_reqs, graph.capture_sizes)]
        self.descriptors = [BatchExecutionDescriptor(RunMode.PIECEWISE, size) for size in sizes]
        self._dispatcher = Dispatcher(self.descriptors)

    def capture_state(self: DraftDecodeLane, descriptor: BatchExecutionDescriptor) -> Any:
        return state_of(self, replace(descriptor, num_reqs=descriptor.num_tokens))

    def unpadded(self: DraftDecodeLane, target: InputBatch, bounds: Any, padded: int) -> InputBatch:
        batch = batch_of(self, target, bounds, padded)
        return replace(batch, num_reqs_padded=target.num_reqs) if target.num_reqs else batch

    def replay_pieces(self: PhaseExecutor, segment: Segment, step: Any, descriptor: Any) -> None:
        lane = segment.lane
        if lane is None:
            replay(self, segment, step, descriptor)
            return
        for number in range(1, segment.phases[0].times + 1):
            state = self._refresh(lane, step, descriptor, number)
            manager = self.managers[segment.name]
            manager.replay(descriptor, lane.context(state), part=f" {number}")

    patch.setattr(DraftDecodeLane, "plan_graphs", plan_pieces)
    patch.setattr(DraftDecodeLane, "capture_state", capture_state)
    patch.setattr(DraftDecodeLane, "_batch", unpadded)
    patch.setattr(PhaseExecutor, "_replay", replay_pieces)
    _plan_a_row_per_token(patch)


def _plan_a_row_per_token(patch: Patch) -> None:
    build = HostPlanBackend.build

    def planned(self: HostPlanBackend, batch: InputBatch, for_capture: bool = False) -> Any:
        if batch.query_len != 1:
            return build(self, batch, for_capture)
        told, rows = batch.num_reqs_padded + 1, batch.num_tokens_padded
        rest = self.page_indptr[told:].clone()
        metadata = build(self, batch, for_capture)
        self.page_indptr[told:] = rest
        return replace(
            metadata,
            query_start_loc=batch.rows.query_start_loc[: rows + 1],
            context_lens=batch.step.context_lens[:rows],
            seq_lens=batch.step.seq_lens[:rows],
            page_indptr=self.page_indptr[: rows + 1],
        )

    patch.setattr(HostPlanBackend, "build", planned)


MUTANTS = (
    draft_mutant(
        "draft decodes in pieces",
        decode_in_pieces,
        "piecewise",
        "hostplan",
        buffer="draft page_indptr",
        by_equality=False,
        mechanism=3,
        report=39773,
    ),
)
