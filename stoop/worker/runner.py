"""One device, one step: a plan in, a result out."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from stoop.attention.base import AttentionSetup, AttentionShape
from stoop.attention.registry import make_backend, make_draft_backend
from stoop.batch.staging import StagedWrites
from stoop.config.schema import Config
from stoop.core.report import Report
from stoop.core.step import PlannedRow, StepPlan, StepResult
from stoop.grammar.compiler import GrammarStore
from stoop.grammar.masks import GrammarMasks
from stoop.graph.buffers import Buffer
from stoop.graph.cuda import CudaGraphBackend
from stoop.graph.descriptor import BatchExecutionDescriptor, RunMode
from stoop.graph.dispatch import BatchShape
from stoop.graph.phases import check_order
from stoop.graph.tape import TapeBackend
from stoop.layers.attention import Attention
from stoop.layers.stateful import StatefulLayer, number_layers, stateful_layers
from stoop.model_state.base import ModelStateSetup
from stoop.model_state.default import DefaultModelState
from stoop.model_state.mamba_hybrid import MambaHybridModelState
from stoop.models.base import DraftModel, Model
from stoop.models.head_loader import load_head
from stoop.models.loader import load_model
from stoop.sampling.sampler import SamplingNeeds
from stoop.spec.base import DraftSetup, Speculator
from stoop.spec.registry import make_speculator
from stoop.worker.device import check_sizes, prepare_device
from stoop.worker.executor import PhaseExecutor, Step
from stoop.worker.memory import (
    allocate_slots,
    allocate_states,
    check_room,
    count_kv_blocks,
    count_snapshots,
    describe_states,
    free_bytes,
)
from stoop.worker.new_blocks import NewBlocks
from stoop.worker.output import LaunchedStep, OutputRing, ScoreReader, StepOutput
from stoop.worker.phases import step_phases
from stoop.worker.profiling import follow_measured_products, measure_work_bytes, time_decodes
from stoop.worker.sanitized import StepSanitizer
from stoop.worker.snapshots import SnapshotPool
from stoop.worker.target import MASK_BUFFERS, Target, TargetLane

log = logging.getLogger(__name__)

# Written by the host: rows before each step, masks before phase V.
HOST_BUFFERS = ("idx_mapping", "query_start_loc", *MASK_BUFFERS)


@dataclass
class StepCounts:
    """How the target's batches ran, since the start."""

    by_mode: dict[RunMode, int] = field(default_factory=dict)
    num_tokens: int = 0  # of live rows
    num_padded: int = 0  # computed besides, because graphs have fixed sizes

    def note(self, descriptor: BatchExecutionDescriptor, num_tokens: int) -> None:
        self.by_mode[descriptor.mode] = self.by_mode.get(descriptor.mode, 0) + 1
        self.num_tokens += num_tokens
        self.num_padded += descriptor.num_tokens - num_tokens

    def as_metrics(self) -> dict[str, Any]:
        return {
            "num_steps_by_mode": {mode.name.lower(): n for mode, n in self.by_mode.items()},
            "num_tokens_computed": self.num_tokens,
            "num_tokens_padded": self.num_padded,
        }


@dataclass(frozen=True)
class _Dispatched:
    """How batches of the same rows run; looked up again only when the rows change."""

    needs: SamplingNeeds
    descriptor: BatchExecutionDescriptor
    query_len: int | None
    wants_scores: bool
    num_tokens: int


class ModelRunner:
    """Loads a model and its drafter, sizes their states, captures graphs, runs planned steps."""

    num_snapshots = 0  # of recurrent state; without any, plans have no copies
    snapshots: SnapshotPool

    def __init__(self, config: Config, report: Report | None = None) -> None:
        self.config = config
        self.device = torch.device(config.device.device)
        self.block_size = config.cache.block_size
        if config.device.num_threads is not None:
            torch.set_num_threads(config.device.num_threads)
        check_sizes(config)
        prepare_device(config.device.device, config.device.dtype)
        if self.device.type == "cuda":
            follow_measured_products(self.device)
        check_room(config)
        self.model = load_model(config, report)
        self.draft_model = _load_draft_model(config, self.model, report)
        modules = (self.model, self.draft_model) if self.draft_model else (self.model,)
        self.layers = stateful_layers(*modules)
        number_layers(self.layers)
        self.state_layout = describe_states(config, self.layers)
        self.target = Target(config, self.model, self.device)
        self._make_model_states(config)
        self.speculator = self._make_speculator(config)
        self.grammars = self._make_grammars(config)
        phases = step_phases(self.target, self.speculator, {})
        check_order(phases, self.declare_buffers(), by_host=HOST_BUFFERS)
        self.lane = TargetLane(config, self.target)
        cuda = self.device.type == "cuda"
        backend = CudaGraphBackend(self.device) if cuda else TapeBackend()
        counts = config.schedule.draft_counts
        self.executor = PhaseExecutor(phases, self.lane, backend, draft_counts=counts)
        self._size_states(config)
        self.sanitizer: StepSanitizer | None = None
        if config.graph.sanitize:
            self.sanitizer = StepSanitizer(self.target, self.executor, self.declare_buffers)
            self.executor.watch = self.sanitizer
        self.executor.capture(report)
        self.staged = StagedWrites(self.device)
        most = self.num_blocks if config.cache.zero_new_blocks else 0
        self.new_blocks = NewBlocks(self.kv_caches, most, self.device)
        self.outputs = OutputRing(self.target.verdict, config.schedule.run_ahead + 1)
        tokens = self.target.state.tensors.token_ids
        self.score_reader = ScoreReader(self.model, self.target.hidden, tokens)
        self.draft_seconds = 0.0  # that the host spent on the last step's drafts
        self.counts = StepCounts()
        self._dispatched: _Dispatched | None = None

    # ---- start-up ----

    def _make_model_states(self, config: Config) -> None:
        """The target's, and one over the same states for draft decodes."""
        schedule, device = config.schedule, config.device
        setup = AttentionSetup(
            device=self.device,
            block_size=self.block_size,
            max_reqs=schedule.max_num_seqs,
            max_model_len=schedule.max_model_len,
            slots=self.target.state.tensors,
            dtype=getattr(torch, device.dtype),
            kv_dtype=getattr(torch, self.state_layout.dtype),
            shapes=_attention_shapes(self.layers),
            query_len=schedule.query_len,
        )
        # A null block alone serves the dummy run that measures how much memory a step takes.
        self.slot_rows = allocate_slots(config, self.state_layout)
        self.states = allocate_states(config, self.state_layout, 1, self.slot_rows)
        parts = ModelStateSetup(
            layout=self.state_layout,
            states=self.states,
            backend=make_backend(config.attention_backend, setup),
            slots=self.target.state.tensors,
            buffers=self.target.buffers,
        )
        self.target.model_state = self.model.make_model_state(parts)
        if config.spec is not None:
            if self.draft_model is not None:
                setup = replace(setup, shapes=_attention_shapes(stateful_layers(self.draft_model)))
            backend = make_draft_backend(config.attention_backend, setup)
            self.draft_state = DefaultModelState(replace(parts, backend=backend))

    def _make_speculator(self, config: Config) -> Speculator | None:
        if config.spec is None:
            return None
        target = self.target
        setup = DraftSetup(
            config=config,
            slots=target.state.tensors,
            buffers=target.buffers,
            sampling=target.sampling_state,
            model_state=target.model_state,
            draft_state=self.draft_state,
            hidden=target.hidden,
            taps=target.taps,
            draft_logits=target.verifier.draft_logits,
        )
        return make_speculator(setup, self.draft_model)

    def _make_grammars(self, config: Config) -> GrammarMasks:
        target = self.target
        store = GrammarStore(config.load.tokenizer, config.model.vocab_size)
        slots, num_drafts = target.state.tensors, config.schedule.num_drafts
        made = GrammarMasks(store, target.masks, slots, num_drafts)
        target.fill_masks = made.fill
        return made

    def _size_states(self, config: Config) -> None:
        """KV gets the memory that weights, recurrent states, their snapshots and the largest step
        leave."""
        free = free_bytes(config, measure_work_bytes(self.target, self.executor, config))
        state = self.target.model_state
        if isinstance(state, MambaHybridModelState):  # all that it keeps by slot is known
            count = count_snapshots(config, self.state_layout, free)
            self.snapshots = SnapshotPool(self.slot_rows, state.pending, count)
            self.num_snapshots = count
            free -= count * self.state_layout.slot_bytes
        self.num_blocks = count_kv_blocks(config, self.state_layout, free)
        self.states[:] = allocate_states(config, self.state_layout, self.num_blocks, self.slot_rows)

    def time_decodes(self) -> dict[tuple[int, int], float]:
        """Seconds of every captured decode step, by number of requests and number of drafts."""
        return time_decodes(self.lane, self.executor)

    def declare_buffers(self) -> list[Buffer]:
        """Every persistent buffer that phases hand to each other."""
        drafter = self.speculator.buffers() if self.speculator else []
        return self.target.declare_buffers() + drafter

    @property
    def kv_caches(self) -> list[Tensor]:
        """Of the layers that have one."""
        return [state for state in self.states if isinstance(state, Tensor)]

    # ---- one step ----

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Hand a step to the device; nothing here waits for it. Results are read in order."""
        step = self.prepare(plan)
        output = self.run(step)
        if plan.copies is not None:
            self.snapshots.save(plan.copies)
        grammars = None
        if step.needs.masked:
            grammars = self.grammars
            grammars.send_drafts(plan.rows)
        return LaunchedStep(
            plan.index, step.batch, output, self.score_reader, step.wants_scores, grammars
        )

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    def prepare(self, plan: StepPlan) -> Step:
        """Staged edits of slot state, and this step's rows, onto the device."""
        target = self.target
        for admission in plan.admissions:
            target.state.admit(self.staged, admission)
            target.sampling_state.admit(self.staged, admission.slot, admission.rules)
            target.model_state.admit(self.staged, admission)
            self.grammars.admit(admission)
        for append in plan.block_appends:
            target.state.append_blocks(self.staged, append)
        for slot in plan.no_drafts:
            target.state.stop_drafts(self.staged, slot)
        self.new_blocks.stage(self.staged, plan.blocks_to_zero)
        if plan.copies is not None:
            self.snapshots.stage(self.staged, plan.copies)
        self.staged.apply()
        if plan.copies is not None:
            self.snapshots.save_ended(plan.copies)
        if self.sanitizer is not None:
            self.sanitizer.begin_step(plan)
        self.new_blocks.zero(len(plan.blocks_to_zero))
        if plan.copies is not None:
            self.snapshots.restore(plan.copies)
        found = self._dispatch(plan)
        descriptor = found.descriptor
        self.counts.note(descriptor, found.num_tokens)
        sizes = descriptor.num_reqs, descriptor.num_tokens, found.query_len
        batch = target.buffers.load_rows(plan.rows, *sizes, key=found)
        metadata = target.model_state.prepare_attn(batch)
        return Step(batch, descriptor, metadata, found.needs, plan.num_drafts, found.wants_scores)

    def forget_rows(self) -> None:
        """Drop edits of slot state that a failed step left staged; rows are copied again."""
        self.staged.clear()
        self.target.buffers.forget_rows()
        self._dispatched = None

    def _dispatch(self, plan: StepPlan) -> _Dispatched:
        if self._dispatched is not None and plan.same_rows:
            return self._dispatched
        rows = plan.rows
        needs = SamplingNeeds.of(row.rules for row in rows)
        shape = _shape(rows, needs)
        descriptor = self.lane.dispatch(shape)
        # A graph bounds query lengths as it was captured; other steps by what they hold.
        query_len = descriptor.query_len
        if shape.decode and descriptor.mode < RunMode.FULL:
            query_len = shape.num_tokens // shape.num_reqs
        wants_scores = any(row.rules.params.wants_scores for row in rows)
        self._dispatched = _Dispatched(needs, descriptor, query_len, wants_scores, shape.num_tokens)
        return self._dispatched

    def run(self, step: Step) -> StepOutput:
        """The phases, by graphs where there are some. What the step yields is sent to the host
        before drafts for the next one are made, unless one graph does both."""
        if self.sanitizer is not None and self.executor.replays(step):
            self.sanitizer.run(step)
            return self.outputs.send()
        sent: list[tuple[StepOutput, float]] = []
        self.executor.run(step, lambda: sent.append((self.outputs.send(), time.perf_counter())))
        ((output, since),) = sent
        self.draft_seconds = time.perf_counter() - since
        return output


def _attention_shapes(layers: Iterable[StatefulLayer]) -> tuple[AttentionShape, ...]:
    shapes = (layer.shape for layer in layers if isinstance(layer, Attention))
    return tuple(dict.fromkeys(shapes))


def _load_draft_model(config: Config, target: Model, report: Report | None) -> DraftModel | None:
    if config.spec is None or config.spec.head is None:
        return None
    return load_head(
        config.spec.head,
        config.spec.folder,
        device=config.device,
        target=target,
        num_positions=config.schedule.max_model_len,
        dummy_seed=config.load.seed if config.load.dummy else None,
        report=report,
    )


def _shape(rows: list[PlannedRow], needs: SamplingNeeds) -> BatchShape:
    return BatchShape(
        num_reqs=len(rows),
        num_tokens=sum(row.num_tokens for row in rows),
        decode=all(row.decodes for row in rows),
        sampling=needs.kind,
        masked=needs.masked,
    )
