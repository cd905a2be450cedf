"""One device, one step: a plan in, a result out.

The phases (inputs, forward, verify, update) are functions over persistent buffers and take no host
decision. A graph mode is a way of cutting that list: eager runs each, FULL replays the forward
pass, STEP replays all four as one graph.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stoop.attention.base import AttentionBackend, AttentionSetup, ForwardContext, PagedContext
from stoop.attention.registry import make_backend
from stoop.batch.input_batch import InputBatch, InputBuffers
from stoop.batch.request_state import RequestState
from stoop.batch.staging import StagedWrites
from stoop.checkpoint.report import Report
from stoop.config.schema import Config
from stoop.core.kv_layout import KVLayout
from stoop.core.step import PlannedRow, StepPlan, StepResult
from stoop.graph.descriptor import BatchExecutionDescriptor, RunMode
from stoop.graph.dispatch import BatchShape
from stoop.models.loader import load_model
from stoop.ops.inputs import commit_tokens
from stoop.sampling.sampler import Sampler, SamplingNeeds
from stoop.sampling.state import SamplingState
from stoop.worker.device import prepare_device
from stoop.worker.graphs import StepGraphs
from stoop.worker.memory import allocate_kv_caches, count_kv_blocks, free_bytes
from stoop.worker.output import ScoreReader, collect
from stoop.worker.sanitized import StepSanitizer


@dataclass(frozen=True)
class Step:
    """A batch, and how it goes through the phases."""

    batch: InputBatch
    descriptor: BatchExecutionDescriptor
    metadata: Any  # the attention backend's
    needs: SamplingNeeds


class ModelRunner:
    def __init__(self, config: Config, report: Report | None = None) -> None:
        self.config = config
        self.device = torch.device(config.device.device)
        self.block_size = config.cache.block_size
        prepare_device(config.device.device, config.device.dtype)
        self.model = load_model(config, report)
        self._make_state(config)
        self.backend = self._make_backend(config)
        self.kv_layout = KVLayout.of(config.model, self.block_size, config.device.dtype)
        # A null block alone serves the dummy run that measures how much memory a step takes.
        self.kv_caches = allocate_kv_caches(config, self.kv_layout, 1)
        free = free_bytes(config, self._work_bytes())
        self.num_blocks = count_kv_blocks(config, self.kv_layout, free)
        self.kv_caches = allocate_kv_caches(config, self.kv_layout, self.num_blocks)
        self.sanitizer = StepSanitizer(self) if config.graph.sanitize else None
        self.graphs = StepGraphs(self, config)
        self.graphs.capture(report)

    def _make_state(self, config: Config) -> None:
        schedule, device = config.schedule, self.device
        num_slots, max_tokens = schedule.max_num_seqs, schedule.max_num_batched_tokens
        self.state = RequestState(num_slots, schedule.max_model_len, self.block_size, device)
        self.sampling_state = SamplingState.make(num_slots, device)
        self.sampler = Sampler(self.sampling_state, self.state.tensors)
        self.buffers = InputBuffers(num_slots, max_tokens, self.state.max_blocks, device)
        self.staged = StagedWrites(device)
        # What phases hand over to each other.
        dtype = getattr(torch, config.device.dtype)
        self.hidden = torch.zeros(max_tokens, config.model.hidden_size, dtype=dtype, device=device)
        self.sampled = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def _make_backend(self, config: Config) -> AttentionBackend:
        schedule = config.schedule
        setup = AttentionSetup(
            device=self.device,
            block_size=self.block_size,
            max_reqs=schedule.max_num_seqs,
            max_model_len=schedule.max_model_len,
            slots=self.state.tensors,
        )
        return make_backend(config.attention_backend, setup)

    # ---- one step ----

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        step = self.prepare(plan)
        self.run(step)
        reader = ScoreReader(self.model, self.hidden, self.state.tensors.token_ids)
        return collect(plan.index, step.batch, self.sampled, reader)

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
        needs = SamplingNeeds.of(row.rules for row in plan.rows)
        descriptor = self.graphs.dispatch(_shape(plan.rows, needs))
        batch = self.buffers.load_rows(plan.rows, descriptor.num_reqs, descriptor.num_tokens)
        return Step(batch, descriptor, self.backend.build(batch), needs)

    def run(self, step: Step) -> None:
        """The phases, cut as the descriptor says."""
        mode = step.descriptor.mode
        if mode is not RunMode.NONE and self.sanitizer is not None:
            self.sanitizer.run(step)
            return
        if mode is not RunMode.STEP:
            self.inputs()
        if mode is RunMode.NONE:
            self.run_eagerly(step, step.metadata)
        else:
            self.replay(step)

    def run_eagerly(self, step: Step, metadata: Any) -> None:
        """What follows the inputs, phase by phase; for STEP, the inputs too."""
        batch, sampling = step.batch, step.descriptor.sampling
        if sampling is not None:
            self.inputs()
        self.forward(batch, self.context(batch, metadata))
        if sampling is not None:
            max_model_len = self.config.schedule.max_model_len
            self.verify(batch, SamplingNeeds.of_kind(sampling), max_model_len)
        else:
            self.verify(batch.without_padded_rows(), step.needs, batch.max_seq_len)
        self.update()

    def replay(self, step: Step) -> None:
        """The same with the descriptor's graph in place of the phases that it holds."""
        self.graphs.replay(step.descriptor, self.context(step.batch, step.metadata))
        if step.descriptor.mode is not RunMode.STEP:
            batch = step.batch.without_padded_rows()
            self.verify(batch, step.needs, batch.max_seq_len)
            self.update()

    def context(self, batch: InputBatch, metadata: Any) -> PagedContext:
        return PagedContext(self.backend, metadata, batch.slot_mapping, self.kv_caches)

    # ---- phases ----

    def inputs(self) -> None:
        """I: ids, positions, lengths and KV slots out of slot state."""
        self.buffers.fill(self.state, self.block_size)

    def forward(self, batch: InputBatch, context: ForwardContext) -> None:
        """C: hidden states of all tokens."""
        hidden = self.model(batch.input_ids, batch.positions, context)
        self.hidden[: batch.num_tokens_padded].copy_(hidden)

    def verify(self, batch: InputBatch, needs: SamplingNeeds, max_seq_len: int) -> None:
        """V: logits of each row's last token, and a token from them."""
        hidden = self.hidden[: batch.num_tokens_padded]
        logits = self.model.logits(hidden[batch.last_token_indices])
        token_ids = self.sampler.sample(logits, batch.row_slots, needs, max_seq_len)
        self.sampled[: batch.num_reqs_padded].copy_(token_ids)
        self.sampled[batch.num_reqs_padded :].zero_()

    def update(self) -> None:
        """U: counters and token history, on the device."""
        commit_tokens(self.state.tensors, self.buffers.rows, self.buffers.step, self.sampled)

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
        batch = InputBatch(
            plan_rows=[],
            num_reqs=max_reqs,
            num_tokens=int(lengths.sum()),
            num_reqs_padded=max_reqs,
            num_tokens_padded=int(lengths.sum()),
            query_lens_cpu=lengths,
            seq_lens_cpu_upper_bound=lengths,
            rows=rows,
            step=step,
        )
        self.forward(batch, self.context(batch, self.backend.build(batch)))
        needs = SamplingNeeds(noise=True, top_p=True, penalties=True)
        self.verify(batch, needs, schedule.max_model_len)


def _shape(rows: list[PlannedRow], needs: SamplingNeeds) -> BatchShape:
    return BatchShape(
        num_reqs=len(rows),
        num_tokens=sum(row.num_tokens for row in rows),
        decode=all(row.decodes for row in rows),
        sampling=needs.kind,
    )
