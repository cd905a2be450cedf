"""One device, one step: a plan in, a result out.

The phases are functions over persistent buffers and take no host decision: inputs, forward, verify,
update, and the drafter's. A graph mode is a way of cutting that list: eager runs each, FULL has a
graph of each forward pass, STEP replays all as one graph.
"""

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoop.attention.base import (
    AttentionSetup,
    ForwardContext,
    PagedContext,
    attention_shapes,
)
from stoop.attention.registry import make_backend, make_draft_backend
from stoop.batch.input_batch import InputBatch, InputBuffers
from stoop.batch.request_state import RequestState
from stoop.batch.staging import StagedWrites
from stoop.checkpoint.report import Report
from stoop.config.schema import AttentionSpec, Config
from stoop.core.kv_layout import KVLayout
from stoop.core.step import PlannedRow, StepPlan, StepResult
from stoop.graph.descriptor import BatchExecutionDescriptor, RunMode, SamplingKind
from stoop.graph.dispatch import BatchShape
from stoop.models.loader import load_model
from stoop.ops.inputs import commit_tokens
from stoop.ops.kernels.linear_choice import LinearShape, recording
from stoop.sampling.sampler import Positions, Sampler, SamplingNeeds
from stoop.sampling.state import SamplingState
from stoop.sampling.verifier import Verdict, Verifier
from stoop.spec.base import DraftSetup, DraftStep, Speculator
from stoop.spec.registry import make_speculator
from stoop.worker.device import prepare_device
from stoop.worker.graphs import StepGraphs
from stoop.worker.memory import allocate_kv_caches, check_room, count_kv_blocks, free_bytes
from stoop.worker.output import LaunchedStep, Outcome, OutcomeRing, ScoreReader
from stoop.worker.sanitized import StepSanitizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """A batch, and how it goes through the phases."""

    batch: InputBatch
    descriptor: BatchExecutionDescriptor
    metadata: Any  # the attention backend's
    needs: SamplingNeeds
    wants_scores: bool = False

    def as_drafted(self) -> DraftStep:
        """As the drafter sees it; a graph of the whole step draws by kind, not by need."""
        kind = self.descriptor.sampling or self.needs.kind
        return DraftStep(self.batch, self.descriptor, self.metadata, kind)


@dataclass(frozen=True)
class _Way:
    """How batches of the same rows go through the phases."""

    key: list[tuple[int, int, bool]]
    needs: SamplingNeeds
    descriptor: BatchExecutionDescriptor
    query_len: int | None
    wants_scores: bool


class ModelRunner:
    def __init__(self, config: Config, report: Report | None = None) -> None:
        self.config = config
        self.device = torch.device(config.device.device)
        self.block_size = config.cache.block_size
        prepare_device(config.device.device, config.device.dtype)
        if self.device.type == "cuda":
            follow_measured_products(self.device)
        specs: list[Any] = [config.model, config.head]
        decoders = [specs[0]] + ([specs[1].decoder] if config.head else [])
        self.kv_layout = KVLayout.of(decoders, self.block_size, config.device.dtype)
        check_room(config, self.kv_layout)
        self.model = load_model(config, report)
        self._make_state(config)
        self.attention_setup = self._make_attention_setup(config, decoders)
        self.backend = make_backend(config.attention_backend, self.attention_setup)
        # A null block alone serves the dummy run that measures how much memory a step takes.
        self.kv_caches = allocate_kv_caches(config, self.kv_layout, 1)
        self.speculator = self._make_speculator(config, report)
        free = free_bytes(config, self._work_bytes())
        self.num_blocks = count_kv_blocks(config, self.kv_layout, free)
        self.kv_caches[:] = allocate_kv_caches(config, self.kv_layout, self.num_blocks)
        self.sanitizer = StepSanitizer(self) if config.graph.sanitize else None
        self.graphs = StepGraphs(self, config)
        self.graphs.capture(report)

    def _make_state(self, config: Config) -> None:
        schedule, device = config.schedule, self.device
        num_slots, max_tokens = schedule.max_num_seqs, schedule.max_num_batched_tokens
        self.query_len = schedule.query_len
        self.state = RequestState(num_slots, schedule.max_model_len, self.block_size, device)
        self.sampling_state = SamplingState.make(num_slots, device)
        sampler = Sampler(self.sampling_state, self.state.tensors)
        self.verifier = Verifier(sampler, config.spec, config.model.vocab_size)
        self.buffers = InputBuffers(num_slots, max_tokens, device)
        self.staged = StagedWrites(device)
        self._way: _Way | None = None
        self.drafting = True  # whether steps make drafts; all do, unless the engine sees no gain
        self.draft_seconds = 0.0  # that the host spent on the last step's drafts
        # What phases hand over to each other.
        dtype, size = getattr(torch, config.device.dtype), config.model.hidden_size
        self.hidden = torch.zeros(max_tokens, size, dtype=dtype, device=device)
        self.verdict = Verdict.make(num_slots, self.query_len, device)
        self.outcomes = OutcomeRing(self.verdict, schedule.run_ahead + 1)
        self.score_reader = ScoreReader(self.model, self.hidden, self.state.tensors.token_ids)
        self.tap_layers = config.head.taps if config.head else ()
        self.taps: Tensor | None = None
        if self.tap_layers:
            shape = (max_tokens, len(self.tap_layers), size)
            self.taps = torch.zeros(shape, dtype=dtype, device=device)

    def _make_attention_setup(
        self, config: Config, decoders: list[AttentionSpec]
    ) -> AttentionSetup:
        schedule = config.schedule
        return AttentionSetup(
            device=self.device,
            block_size=self.block_size,
            max_reqs=schedule.max_num_seqs,
            max_model_len=schedule.max_model_len,
            slots=self.state.tensors,
            dtype=getattr(torch, config.device.dtype),
            shapes=attention_shapes(decoders),
            query_len=schedule.query_len,
        )

    def _make_speculator(self, config: Config, report: Report | None) -> Speculator | None:
        if config.spec is None:
            return None
        setup = DraftSetup(
            config=config,
            slots=self.state.tensors,
            buffers=self.buffers,
            sampling=self.sampling_state,
            kv_caches=self.kv_caches,
            backend=self.backend,
            draft_backend=make_draft_backend(config.attention_backend, self.attention_setup),
            hidden=self.hidden,
            taps=self.taps,
            draft_logits=self.verifier.draft_logits,
        )
        return make_speculator(setup, self.model, report)

    # ---- one step ----

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Hand a step to the device; nothing here waits for it. Results are read in order."""
        step = self.prepare(plan)
        outcome = self.run(step)
        return LaunchedStep(plan.index, step.batch, outcome, self.score_reader, step.wants_scores)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    def prepare(self, plan: StepPlan) -> Step:
        """Staged edits of slot state, and this step's rows, onto the device."""
        if self.sanitizer is not None:
            self.sanitizer.begin_step()
        for admission in plan.admissions:
            self.state.admit(self.staged, admission)
            self.sampling_state.admit(self.staged, admission.slot, admission.rules)
        for append in plan.block_appends:
            self.state.append_blocks(self.staged, append)
        self.staged.apply()
        way = self._find_way(plan.rows)
        batch = self.buffers.load_rows(
            plan.rows, way.descriptor.num_reqs, way.descriptor.num_tokens, way.query_len
        )
        metadata = self.backend.build(batch)
        return Step(batch, way.descriptor, metadata, way.needs, way.wants_scores)

    def forget_rows(self) -> None:
        """Drop edits of slot state that a failed step left staged; rows are copied again."""
        self.staged.clear()
        self.buffers.forget_rows()
        self._way = None

    def _find_way(self, rows: list[PlannedRow]) -> "_Way":
        """Found again for every change of the batch alone: an epoch stands for a request."""
        key = [(row.epoch, row.num_tokens, row.decodes) for row in rows]
        if self._way is not None and self._way.key == key:
            return self._way
        needs = SamplingNeeds.of(row.rules for row in rows)
        shape = _shape(rows, needs)
        descriptor = self.graphs.dispatch(shape)
        # A graph bounds query lengths as it was captured; other steps by what they hold.
        query_len = descriptor.query_len
        if shape.decode and descriptor.mode < RunMode.FULL:
            query_len = self.query_len
        wants_scores = any(row.rules.params.wants_scores for row in rows)
        self._way = _Way(key, needs, descriptor, query_len, wants_scores)
        return self._way

    def run(self, step: Step) -> Outcome:
        """The phases, by graphs where there are some. What the step yields is known, and sent to
        the host, before drafts for the next one are made, unless one graph does both."""
        if self.sanitizer is not None and self.replays(step):
            self.sanitizer.run(step)
            return self.outcomes.send()
        self._decide(step, step.metadata, replay=True)
        outcome = self.outcomes.send()
        self._propose(step, step.metadata, replay=True)
        return outcome

    def replays(self, step: Step) -> bool:
        if step.descriptor.mode is not RunMode.NONE:
            return True
        return self.speculator is not None and self.speculator.replays(step.as_drafted())

    def run_phases(self, step: Step, metadata: Any, *, replay: bool) -> None:
        """All phases in order, cut as the descriptor says; without `replay`, its eager twin."""
        self._decide(step, metadata, replay=replay)
        self._propose(step, metadata, replay=replay)

    def _decide(self, step: Step, metadata: Any, *, replay: bool) -> None:
        batch, mode = step.batch, step.descriptor.mode
        if replay and mode is RunMode.STEP:
            if self.speculator is not None:
                self.speculator.refresh(batch)
            self.graphs.replay(step.descriptor)
        else:
            self.inputs()
            if replay and mode is not RunMode.NONE:
                self.graphs.replay(step.descriptor, self.context(batch, metadata))
            else:
                self.forward(batch, self.context(batch, metadata))
            self._verify_eagerly(step)
            self.update()

    def _propose(self, step: Step, metadata: Any, *, replay: bool) -> None:
        if self.speculator is not None and self.drafting:
            started = time.perf_counter()
            self.speculator.propose(replace(step.as_drafted(), metadata=metadata), replay=replay)
            self.draft_seconds = time.perf_counter() - started

    def _verify_eagerly(self, step: Step) -> None:
        """On the live rows, or, as the twin of a graph that holds it, on the graph's extent."""
        if step.descriptor.sampling is not None:
            needs = SamplingNeeds.of_kind(step.descriptor.sampling)
            max_model_len = self.config.schedule.max_model_len
            self.verify(step.batch, needs, max_model_len, self.query_len)
        else:
            batch = step.batch.without_padded_rows()
            width = self.query_len if batch.decodes else 1
            self.verify(batch, step.needs, batch.max_seq_len, width)

    def context(self, batch: InputBatch, metadata: Any) -> PagedContext:
        return PagedContext(self.backend, metadata, batch.slot_mapping, self.kv_caches)

    # ---- phases ----

    def inputs(self) -> None:
        """I: ids, positions, lengths and KV slots out of slot state."""
        self.buffers.fill(self.state.tensors, self.block_size)

    def forward(self, batch: InputBatch, context: ForwardContext) -> None:
        """C: hidden states of all tokens, and the streams that the drafter taps."""
        hidden = self.hidden[: batch.num_tokens_padded]
        _, streams = self.model(batch.input_ids, batch.positions, context, self.tap_layers, hidden)
        if self.taps is not None:
            torch.stack(streams, dim=1, out=self.taps[: batch.num_tokens_padded])

    def verify(self, batch: InputBatch, needs: SamplingNeeds, max_seq_len: int, width: int) -> None:
        """V: logits behind each row's newest token and behind each of its drafts; which drafts
        stand, and the token that follows.

        width: positions of a row, K + 1, or 1 if no row has drafts
        """
        rows = batch.num_reqs_padded
        if width == batch.query_len:  # the very tokens of a decode batch; nobody asks dead ones
            hidden = self.hidden[: rows * width]
        else:
            token = batch.last_token_indices[:, None] + self._behind(batch, width)
            hidden = self.hidden[token.flatten()]
        where = None
        if needs.kind is not SamplingKind.GREEDY:
            slot = batch.row_slots.repeat_interleave(width)
            known = self.state.tensors.num_tokens[slot]
            where = Positions(slot, known + self._behind(batch, width).flatten(), max_seq_len)
        self.verifier.verify(self.model.logits(hidden), batch, where, needs, self.verdict)

    def _behind(self, batch: InputBatch, width: int) -> Tensor:
        """[num_reqs, width] int64: drafts before each position; past the last one, all."""
        number = torch.arange(width, device=self.device)
        return torch.minimum(number, batch.row_drafts[:, None])

    def update(self) -> None:
        """U: counters and token history, on the device."""
        verdict = self.verdict
        commit_tokens(
            self.state.tensors,
            self.sampling_state.stops,
            self.buffers.rows,
            self.buffers.step,
            verdict.token_ids,
            verdict.num_tokens,
        )

    # ---- start-up ----

    def _work_bytes(self) -> int:
        """Memory to keep free of KV: a step's, and as much again for the pool of the graphs."""
        peak = self._profile_peak_bytes()
        return peak if self.config.graph.mode == "none" else 2 * peak

    @torch.inference_mode()
    def _profile_peak_bytes(self) -> int:
        """Memory that the largest step takes beside weights and KV; a GPU is measured."""
        if self.device.type != "cuda":
            return 0
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self._dummy_run()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        torch.cuda.empty_cache()
        return peak

    @torch.inference_mode()
    def find_products(self) -> list[LinearShape]:
        """The matrix products of a step, for whoever wants to measure them."""
        with recording() as found:
            self._dummy_run()
        return list(found)

    def _dummy_run(self) -> None:
        """A step of the largest size whose rows are all padding: only the null block is read."""
        schedule = self.config.schedule
        max_reqs, max_tokens = schedule.max_num_seqs, schedule.max_num_batched_tokens
        lengths = np.full(max_reqs, max_tokens // max_reqs, dtype=np.int64)
        lengths[: max_tokens % max_reqs] += 1
        lengths = lengths.clip(max=schedule.max_model_len)
        rows, step = self.buffers.rows, self.buffers.step
        step.slot_mapping.fill_(-1)
        step.row_slots.fill_(self.state.tensors.sink)
        step.seq_lens.copy_(torch.from_numpy(lengths))
        rows.query_start_loc[1:].copy_(torch.from_numpy(lengths.cumsum()))
        self.buffers.forget_rows()
        batch = InputBatch(
            plan_rows=[],
            num_reqs=max_reqs,
            num_tokens=int(lengths.sum()),
            num_reqs_padded=max_reqs,
            num_tokens_padded=int(lengths.sum()),
            query_lens_cpu=lengths,
            query_len=None,
            seq_lens_cpu_upper_bound=lengths,
            rows=rows,
            step=step,
        )
        metadata = self.backend.build(batch)
        self.forward(batch, self.context(batch, metadata))
        needs = SamplingNeeds(noise=True, top_p=True, penalties=True)
        self.verify(batch, needs, schedule.max_model_len, self.query_len)
        if self.speculator is not None:
            descriptor = BatchExecutionDescriptor(RunMode.NONE, batch.num_tokens, max_reqs)
            self.speculator.propose(DraftStep(batch, descriptor, metadata, SamplingKind.FULL))


def follow_measured_products(device: torch.device) -> None:
    """Decide who multiplies few tokens as `stoop tune` found it on this GPU, if it was run."""
    from stoop.ops.kernels.linear_tuning import follow_measured

    count = follow_measured(device)
    how = f"{count} measured here" if count else "by rules, until `stoop tune` measures them"
    log.info("matrix products of few tokens: %s", how)


def _shape(rows: list[PlannedRow], needs: SamplingNeeds) -> BatchShape:
    return BatchShape(
        num_reqs=len(rows),
        num_tokens=sum(row.num_tokens for row in rows),
        decode=all(row.decodes for row in rows),
        sampling=needs.kind,
    )
