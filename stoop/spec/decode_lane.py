"""The batches of draft decodes: one token a row, in the rows of the target's batch."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from stoop.batch.input_batch import InputBatch
from stoop.config.schema import GraphConfig, ScheduleConfig
from stoop.core.sampling_kind import SamplingKind
from stoop.graph.buffers import Buffer, Lifetime
from stoop.graph.descriptor import BatchExecutionDescriptor, GraphMode, RunMode
from stoop.graph.dispatch import BatchShape, Dispatcher, default_sizes
from stoop.graph.phases import AttentionState
from stoop.graph.support import GraphSupport
from stoop.layers.stateful import ForwardContext
from stoop.model_state.base import ModelState
from stoop.ops.inputs import RowTensors, StepTensors


class DraftDecodeLane:
    """Input buffers, metadata and graph sizes of draft decodes.

    Their lengths are known to the device alone, which knows how many drafts were accepted; the host
    has upper bounds.
    """

    name = "draft decode"

    def __init__(
        self,
        model_state: ModelState,
        shared: StepTensors,
        rows: RowTensors,
        schedule: ScheduleConfig,
        prepare_padding: Callable[[int], InputBatch],
    ) -> None:
        """prepare_padding: loads so many rows of padding into all inputs; returns their batch"""
        self.model_state = model_state
        self.num_drafts = schedule.num_drafts
        self.max_reqs, self.max_model_len = schedule.max_num_seqs, schedule.max_model_len
        self.prepare_padding = prepare_padding
        device = shared.row_slots.device

        def zeros(size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.rows = RowTensors(rows.idx_mapping, zeros(self.max_reqs + 1, torch.int32))
        self.step: StepTensors = replace(
            shared,
            input_ids=zeros(self.max_reqs, torch.int32),
            positions=zeros(self.max_reqs),
            slot_mapping=zeros(self.max_reqs),
            context_lens=zeros(self.max_reqs, torch.int32),
            seq_lens=zeros(self.max_reqs, torch.int32),
        )
        self.descriptors: Sequence[BatchExecutionDescriptor] = ()
        self._dispatcher = Dispatcher(())

    def plan_graphs(self, graph: GraphConfig) -> None:
        """Draft decodes are captured whole where the target's decodes are, never in pieces.

        vLLM: init_cudagraph_manager, which allows FULL_DECODE_ONLY or NONE.
        """
        whole = GraphMode(graph.mode).decode_mode(GraphSupport.ALWAYS, 1) >= RunMode.FULL
        if whole and self.model_state.graph_support >= GraphSupport.SINGLE_TOKEN:
            sizes = graph.capture_sizes or default_sizes(min(self.max_reqs, graph.max_capture_size))
            self.descriptors = decode_descriptors(self.max_reqs, sizes)
            self._dispatcher = Dispatcher(self.descriptors)

    @property
    def advances(self) -> bool:
        return self.model_state.can_advance()

    def dispatch(self, num_reqs: int) -> BatchExecutionDescriptor:
        """vLLM: _dispatch_and_sync_dp; there is one rank, so nothing to sync."""
        return self._dispatcher.dispatch(BatchShape(num_reqs, num_reqs, True, SamplingKind.GREEDY))

    def capture_state(self, descriptor: BatchExecutionDescriptor) -> AttentionState:
        """Lengths are read on the device: the host's bound is the worst case."""
        assert descriptor.num_reqs is not None
        target = self.prepare_padding(descriptor.num_reqs)
        batch = self._batch(target, target.seq_lens_cpu_upper_bound, descriptor.num_reqs)
        return AttentionState(batch, self.model_state.prepare_attn(batch, for_capture=True))

    def live_state(
        self, target: InputBatch, descriptor: BatchExecutionDescriptor, number: int
    ) -> AttentionState:
        return self._build_draft_attn_metadata(target, descriptor, number)

    def _build_draft_attn_metadata(
        self, target: InputBatch, descriptor: BatchExecutionDescriptor, number: int
    ) -> AttentionState:
        """The batch of draft decode `number`, and metadata that fits its lengths.

        Metadata that advances on the device serves all decodes of a step, so its bounds are those
        of the last one.
        """
        number = self.num_drafts - 1 if self.advances else number
        bounds = target.seq_lens_cpu_upper_bound + number
        bounds = np.minimum(bounds, self.draft_max_seq_len(target))
        padded = target.num_reqs if descriptor.mode is RunMode.NONE else descriptor.num_tokens
        batch = self._batch(target, bounds, padded)
        return AttentionState(batch, self.model_state.prepare_attn(batch))

    def draft_max_seq_len(self, target: InputBatch) -> int:
        return min(target.max_seq_len + self.num_drafts, self.max_model_len)

    def advance(self, state: AttentionState) -> None:
        self.model_state.advance(state.metadata)

    def context(self, state: AttentionState) -> ForwardContext:
        return self.model_state.context(state.metadata)

    def _batch(self, target: InputBatch, bounds: np.ndarray, padded: int) -> InputBatch:
        return InputBatch(
            plan_rows=target.plan_rows,
            num_reqs=target.num_reqs,
            num_tokens=target.num_reqs,
            num_reqs_padded=padded,
            num_tokens_padded=padded,
            query_lens_cpu=np.ones(target.num_reqs, dtype=np.int64),
            query_len=1,
            seq_lens_cpu_upper_bound=bounds,
            rows=self.rows,
            step=self.step,
        )

    def buffers(self) -> list[Buffer]:
        """All are derived again for each draft decode, from lengths that have moved on."""
        step = self.step
        derived = {
            "query_start_loc": self.rows.query_start_loc,
            "input_ids": step.input_ids,
            "positions": step.positions,
            "slot_mapping": step.slot_mapping,
            "context_lens": step.context_lens,
            "seq_lens": step.seq_lens,
        }
        derived |= {buffer.name: buffer.tensor for buffer in self.model_state.metadata_buffers()}
        return [Buffer(f"draft {name}", t, Lifetime.DRAFT) for name, t in derived.items()]


def decode_descriptors(max_reqs: int, sizes: Sequence[int]) -> list[BatchExecutionDescriptor]:
    """One token a request: its tokens are its requests, padded together."""
    wanted = {size for size in sizes if size <= max_reqs}
    return [BatchExecutionDescriptor(RunMode.FULL, n, n, 1) for n in sorted(wanted)]
