"""EAGLE drafting: phase P over the target's own rows, then K - 1 draft decodes, phase D.

After verification the head runs over every position of the step with the target's true features
(P): the last true slot of a row gives its first draft. Slots behind a rejected draft stay where
they are, dead, so that shapes are the target's and the host need not know how many were rejected.
Each draft decode then feeds the head its own feature and the newest draft, one token a row.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoop.attention.base import ForwardContext, PagedContext
from stoop.attention.breaking import BreakingContext
from stoop.batch.input_batch import InputBatch
from stoop.checkpoint.report import Report
from stoop.graph.descriptor import BatchExecutionDescriptor, GraphMode, RunMode, SamplingKind
from stoop.graph.manager import (
    CapturedAttentionState,
    CudaGraphManager,
    GraphBackend,
    GraphWatch,
    Prepare,
)
from stoop.graph.sanitizer import Buffer, Lifetime
from stoop.graph.support import GraphSupport
from stoop.models.base import DraftModel
from stoop.ops import drafting as ops
from stoop.ops.inputs import RowTensors, StepTensors
from stoop.ops.random import Purpose
from stoop.ops.sampling import NEVER, draw, greedy, temper_
from stoop.spec.base import DraftSetup, DraftStep
from stoop.spec.graphs import (
    DecodeEagleCudaGraphManager,
    PrefillEagleCudaGraphManager,
    decode_descriptors,
)

LARGE = 1e30  # stands for infinite draft logits of a head that overflowed


class EagleSpeculator:
    def __init__(self, setup: DraftSetup, head: DraftModel) -> None:
        spec, schedule = setup.config.spec, setup.config.schedule
        assert spec is not None and spec.head is not None
        self.setup = setup
        self.head = head
        self.num_tokens = spec.num_tokens
        self.coupled = spec.draft_sample_method == "coupled"
        self.max_reqs = schedule.max_num_seqs
        self.max_model_len = schedule.max_model_len
        self.position_limit = min(self.max_model_len, spec.head.max_position)
        self.watch: GraphWatch | None = None
        self._make_buffers(schedule.max_num_batched_tokens)
        self.advances = setup.draft_backend.advance is not None
        self.in_step_graph = self.advances or self.num_tokens == 1
        self.prefill_graphs: PrefillEagleCudaGraphManager | None = None
        self.decode_graphs: DecodeEagleCudaGraphManager | None = None

    def _make_buffers(self, max_tokens: int) -> None:
        shared, device = self.setup.buffers, self.setup.hidden.device

        def zeros(size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.prefill_inputs = ops.PrefillTensors(
            token_ids=zeros(max_tokens, torch.int32),
            last_token_indices=zeros(self.max_reqs),
            room=zeros(self.max_reqs),
        )
        size = self.head.spec.hidden_size
        self.features = torch.zeros(
            self.max_reqs, size, dtype=self.setup.hidden.dtype, device=device
        )
        # Draft decodes have one token a row, in the rows of the target's batch.
        self.rows = RowTensors(shared.rows.idx_mapping, zeros(self.max_reqs + 1, torch.int32))
        self.step: StepTensors = replace(
            shared.step,
            input_ids=zeros(self.max_reqs, torch.int32),
            positions=zeros(self.max_reqs),
            slot_mapping=zeros(self.max_reqs),
            context_lens=zeros(self.max_reqs, torch.int32),
            seq_lens=zeros(self.max_reqs, torch.int32),
        )

    def buffers(self) -> list[Buffer]:
        step, prefill = self.step, self.prefill_inputs
        own = {
            "draft token_ids": prefill.token_ids,
            "draft last_token_indices": prefill.last_token_indices,
            "draft room": prefill.room,
            "draft features": self.features,
        }
        # Derived anew for each draft decode, from lengths that have moved on.
        derived = {
            "draft query_start_loc": self.rows.query_start_loc,
            "draft input_ids": step.input_ids,
            "draft positions": step.positions,
            "draft slot_mapping": step.slot_mapping,
            "draft context_lens": step.context_lens,
            "draft seq_lens": step.seq_lens,
            **{f"draft {n}": t for n, t in self.setup.draft_backend.buffers().items()},
        }
        found = [Buffer(name, tensor, Lifetime.STEP) for name, tensor in own.items()]
        found += [Buffer(name, tensor, Lifetime.DRAFT) for name, tensor in derived.items()]
        if self.setup.draft_logits is not None:
            found.append(Buffer("draft logits", self.setup.draft_logits, Lifetime.SLOT))
        for name, weight in self.head.named_parameters():
            found.append(Buffer(f"draft {name}", weight.data, Lifetime.CONSTANT))
        return found

    # ---- phases ----

    def prefill(self, batch: InputBatch, context: ForwardContext, kind: SamplingKind) -> None:
        """P: the head over all of the step's positions; draft 1."""
        self._prepare_eagle_inputs()
        token_ids = self.prefill_inputs.token_ids[: batch.num_tokens_padded]
        features = self._target_features(batch.num_tokens_padded)
        stream = self.head(token_ids, features, batch.positions, context)
        last = self.prefill_inputs.last_token_indices[: batch.num_reqs_padded]
        # Into all of the buffer: a draft decode may take more rows.
        self._draft(self.head.take(stream, last, self.features), kind)

    def decode(self, batch: InputBatch, context: ForwardContext, kind: SamplingKind) -> None:
        """D: one more draft for each row that has room."""
        self._prepare_decode_inputs()
        features = self.features[: batch.num_reqs_padded]
        stream = self.head(batch.input_ids, features, batch.positions, context)
        self._draft(self.head.take(stream, None, features), kind)

    def _prepare_eagle_inputs(self) -> None:
        """Every buffer over its whole extent, with harmless values past the live part."""
        slots, shared = self.setup.slots, self.setup.buffers
        inputs, limit = self.prefill_inputs, self.position_limit
        ops.prepare_draft_prefill(slots, shared.rows, shared.step, inputs, limit)

    def _prepare_decode_inputs(self) -> None:
        ops.prepare_draft_decode(
            self.setup.slots,
            self.rows,
            self.setup.buffers.step,
            self.prefill_inputs.room,
            self.setup.config.cache.block_size,
            self.rows.query_start_loc,
            self.step,
        )

    def _target_features(self, num_tokens: int) -> Tensor:
        if self.setup.taps is None:
            return self.setup.hidden[:num_tokens]
        return self.head.condense(self.setup.taps[:num_tokens])

    def _draft(self, states: Tensor, kind: SamplingKind) -> None:
        """One draft for each of the first n rows. states: [n, hidden_size]"""
        logits = self.head.logits(states)
        drawn = kind is not SamplingKind.GREEDY
        if drawn and self.setup.draft_logits is not None:
            self._draw_draft(logits, self.setup.draft_logits)
            return
        slots, step, room = self.setup.slots, self.setup.buffers.step, self.prefill_inputs.room
        if drawn and self.coupled:
            how, filters = self.setup.sampling.draw, kind is SamplingKind.FULL
            picked = ops.draw_as_target(logits, slots, step, how, self.head.d2t, filters)
        else:
            picked = greedy(logits)
        ops.commit_draft(slots, step, room, picked, self.head.d2t)

    def _draw_draft(self, logits: Tensor, cache: Tensor) -> None:
        """Draw from what is cached, to the bit: temperature alone shapes it."""
        slots, sampling = self.setup.slots, self.setup.sampling
        slot = self.setup.buffers.step.row_slots[: logits.shape[0]]
        temperature = sampling.temperature[slot]
        full = cache.new_full((logits.shape[0], cache.shape[2]), NEVER)
        ids = torch.arange(logits.shape[1], device=logits.device)
        # Whatever is drawn from keeps the target's distribution, if only it is one.
        sane = logits.to(cache.dtype).nan_to_num_(nan=-LARGE, posinf=LARGE, neginf=-LARGE)
        full.index_copy_(1, self.head.target_ids(ids), sane)
        temper_(full, temperature)
        place = slots.num_tokens[slot] + slots.num_drafts[slot]
        token_ids = draw(full, temperature, sampling.seeds[slot], place, Purpose.DRAFT)
        number = ops.commit_draft(
            slots, self.setup.buffers.step, self.prefill_inputs.room, token_ids
        )
        cache[torch.where(number < 0, slots.sink, slot), number.clamp(min=0)] = full

    # ---- a step ----

    def propose(self, step: DraftStep, *, replay: bool = True) -> None:
        in_graph = replay and step.descriptor.mode is RunMode.STEP
        if not in_graph:
            self._prefill(step, replay)
        if not (in_graph and self.in_step_graph):
            self._decode_all(step, replay)

    def replays(self, step: DraftStep) -> bool:
        decode = self._decode_descriptor(step)
        return self._captured_prefill(step) or decode.mode is not RunMode.NONE

    def _captured_prefill(self, step: DraftStep) -> bool:
        """Such a graph holds the draw, in case that a request wants it, and so must its twin."""
        return self.prefill_graphs is not None and self.prefill_graphs.holds(step.descriptor)

    def _prefill(self, step: DraftStep, replay: bool) -> None:
        """With the target's metadata, which this step has refreshed."""
        batch = self._prefill_batch(step.batch, step.descriptor)
        context = self._context(step.batch, step.metadata)
        if replay and self._captured_prefill(step):
            assert self.prefill_graphs is not None
            self.prefill_graphs.replay(step.descriptor, context)
        else:
            captured = self._captured_prefill(step)
            self.prefill(batch, context, SamplingKind.FULL if captured else step.sampling)

    def _decode_all(self, step: DraftStep, replay: bool) -> None:
        descriptor = self._decode_descriptor(step)
        if replay and descriptor.mode is RunMode.FULL:
            self._replay_decodes(step.batch, descriptor)
            return
        kind = SamplingKind.FULL if descriptor.mode is RunMode.FULL else step.sampling
        for number in range(1, self.num_tokens):
            batch, metadata = self._build_draft_attn_metadata(step.batch, number, descriptor)
            self.decode(batch, self._draft_context(batch, metadata), kind)

    def _replay_decodes(self, target: InputBatch, descriptor: BatchExecutionDescriptor) -> None:
        """All at once where metadata follows on the device, else one by one, each planned anew."""
        assert self.decode_graphs is not None
        last = self.num_tokens - 1
        if self.advances:
            self._build_draft_attn_metadata(target, last, descriptor)
            self.decode_graphs.replay(descriptor)
            return
        for number in range(1, self.num_tokens):
            self._build_draft_attn_metadata(target, number, descriptor)
            self.decode_graphs.replay(descriptor, part=f" {number}")

    def _build_draft_attn_metadata(
        self, target: InputBatch, number: int, descriptor: BatchExecutionDescriptor
    ) -> tuple[InputBatch, Any]:
        """The batch of draft decode `number`, and metadata that fits its lengths."""
        if self.watch is not None:
            self.watch.begin_draft_decode()
        bounds = target.seq_lens_cpu_upper_bound + number
        bounds = np.minimum(bounds, self.draft_max_seq_len(target))
        padded = target.num_reqs if descriptor.mode is RunMode.NONE else descriptor.num_tokens
        batch = self._draft_batch(target, bounds, padded)
        return batch, self.setup.draft_backend.build(batch)

    def draft_max_seq_len(self, target: InputBatch) -> int:
        return min(target.max_seq_len + self.num_tokens, self.max_model_len)

    def _draft_batch(self, target: InputBatch, bounds: np.ndarray, padded: int) -> InputBatch:
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

    def _prefill_batch(self, batch: InputBatch, descriptor: BatchExecutionDescriptor) -> InputBatch:
        """Pieces serve any number of requests: they take all rows."""
        if descriptor.mode is RunMode.PIECEWISE:
            return replace(batch, num_reqs_padded=self.max_reqs)
        return batch

    def _decode_descriptor(self, step: DraftStep) -> BatchExecutionDescriptor:
        num_reqs = step.batch.num_reqs
        if step.descriptor.mode is RunMode.STEP and self.in_step_graph:
            # Its twin runs on the extent of the step's graph.
            num_reqs = step.batch.num_reqs_padded
            return BatchExecutionDescriptor(RunMode.STEP, num_reqs, num_reqs, 1)
        if self.decode_graphs is None or self.num_tokens == 1:
            return BatchExecutionDescriptor(RunMode.NONE, num_reqs, num_reqs)
        return self.decode_graphs.dispatch_rows(num_reqs)

    def _context(self, batch: InputBatch, metadata: Any) -> PagedContext:
        setup = self.setup
        return PagedContext(setup.backend, metadata, batch.slot_mapping, setup.kv_caches)

    def _draft_context(self, batch: InputBatch, metadata: Any) -> PagedContext:
        setup = self.setup
        return PagedContext(setup.draft_backend, metadata, batch.slot_mapping, setup.kv_caches)

    # ---- graphs ----

    def graph_managers(self) -> list[CudaGraphManager]:
        return [m for m in (self.prefill_graphs, self.decode_graphs) if m is not None]

    def init_cudagraph_manager(self, backend: GraphBackend, watch: GraphWatch | None) -> None:
        """Draft decode is captured whole where the target's decodes are; draft prefill wherever
        the target is."""
        graph = self.setup.config.graph
        self.watch = watch
        self._graph_backend = backend
        whole = GraphMode(graph.mode).decode_mode(GraphSupport.ALWAYS, 1) >= RunMode.FULL
        support = self.setup.draft_backend.graph_support
        if whole and support >= GraphSupport.SINGLE_TOKEN and self.num_tokens > 1:
            descriptors = decode_descriptors(self.max_reqs, graph.capture_sizes)
            self.decode_graphs = DecodeEagleCudaGraphManager(backend, descriptors, watch)

    def capture(
        self,
        attn_states: dict[BatchExecutionDescriptor, CapturedAttentionState],
        prepare: Prepare,
        report: Report | None = None,
    ) -> None:
        wanted = [d for d in attn_states if d.mode is not RunMode.STEP]
        if wanted:
            self.prefill_graphs = PrefillEagleCudaGraphManager(
                self._graph_backend, wanted, self.watch
            )
            self.prefill_graphs.capture_against(attn_states, prepare, self._run_prefill, report)
        if self.decode_graphs is not None:
            self.decode_graphs.capture(self._prepare_decode, self._run_decode, report)

    def prepare_step_graph(
        self, descriptor: BatchExecutionDescriptor
    ) -> CapturedAttentionState | None:
        assert descriptor.num_reqs is not None
        if not self.in_step_graph or self.num_tokens == 1:
            return None
        return self._padded_state(descriptor.num_reqs)

    def draft_in_step_graph(self, step: DraftStep, state: CapturedAttentionState | None) -> None:
        self.prefill(step.batch, self._context(step.batch, step.metadata), step.sampling)
        if state is not None:
            self._run_all_decodes(state, step.sampling)

    def refresh(self, batch: InputBatch) -> None:
        if self.in_step_graph and self.num_tokens > 1:
            descriptor = BatchExecutionDescriptor(RunMode.STEP, batch.num_reqs_padded)
            self._build_draft_attn_metadata(batch, self.num_tokens - 1, descriptor)

    def _run_prefill(
        self, descriptor: BatchExecutionDescriptor, state: CapturedAttentionState
    ) -> None:
        batch = self._prefill_batch(state.batch, descriptor)
        context: ForwardContext = self._context(state.batch, state.metadata)
        graphs = self.prefill_graphs
        if descriptor.mode is RunMode.PIECEWISE and graphs is not None and graphs.capturing:
            context = BreakingContext(graphs.backend)
        self.prefill(batch, context, SamplingKind.FULL)

    def _prepare_decode(self, descriptor: BatchExecutionDescriptor) -> CapturedAttentionState:
        """A batch of nothing but padding, and fresh metadata for it."""
        assert descriptor.num_reqs is not None
        return self._padded_state(descriptor.num_reqs)

    def _padded_state(self, num_reqs: int) -> CapturedAttentionState:
        """Lengths are read on the device: the host's bound is the worst case."""
        shared = self.setup.buffers
        target = shared.load_rows([], num_reqs, num_reqs)
        shared.fill(self.setup.slots, self.setup.config.cache.block_size)
        self._prepare_eagle_inputs()
        self._prepare_decode_inputs()
        batch = self._draft_batch(target, target.seq_lens_cpu_upper_bound, num_reqs)
        metadata = self.setup.draft_backend.build(batch, for_capture=True)
        return CapturedAttentionState(metadata, batch.slot_mapping, batch)

    def _run_decode(
        self, descriptor: BatchExecutionDescriptor, state: CapturedAttentionState
    ) -> None:
        if self.advances:
            self._run_all_decodes(state, SamplingKind.FULL)
        else:
            context = self._draft_context(state.batch, state.metadata)
            self.decode(state.batch, context, SamplingKind.FULL)

    def _run_all_decodes(self, state: CapturedAttentionState, kind: SamplingKind) -> None:
        for number in range(1, self.num_tokens):
            if number > 1:
                assert self.setup.draft_backend.advance is not None
                self.setup.draft_backend.advance(state.metadata)
            self.decode(state.batch, self._draft_context(state.batch, state.metadata), kind)
