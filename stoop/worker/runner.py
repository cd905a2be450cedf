"""One device, one step: a plan in, a result out.

The phases between `prepare` and `collect` are functions over persistent buffers, take no host
decision, and are what a graph will capture.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stoop.attention.base import AttentionBackend, ForwardContext
from stoop.attention.reference import ReferenceBackend
from stoop.batch.input_batch import InputBatch, InputBuffers
from stoop.batch.request_state import RequestState
from stoop.batch.staging import StagedWrites
from stoop.checkpoint.report import Report
from stoop.config.schema import Config
from stoop.core.kv_layout import KVLayout
from stoop.core.step import PlannedRow, StepPlan, StepResult
from stoop.models.loader import load_model
from stoop.ops.inputs import commit_tokens
from stoop.sampling.sampler import Sampled, Sampler, SamplingNeeds
from stoop.sampling.state import SamplingState
from stoop.worker.device import prepare_device
from stoop.worker.memory import allocate_kv_caches, count_kv_blocks, free_bytes
from stoop.worker.output import PromptScores, collect

# Rows of logits made at once when a whole prompt is scored.
PROMPT_SCORE_ROWS = 128


@dataclass(frozen=True)
class Step:
    """A batch on its way through the phases."""

    batch: InputBatch
    needs: SamplingNeeds


class ModelRunner:
    def __init__(self, config: Config, report: Report | None = None) -> None:
        self.config = config
        self.device = torch.device(config.device.device)
        self.block_size = config.cache.block_size
        prepare_device(config.device.device, config.device.dtype)
        self.model = load_model(config, report)
        self._make_state(config)
        self.backend: AttentionBackend = ReferenceBackend(self.block_size)
        self.kv_layout = KVLayout.of(config.model, self.block_size, config.device.dtype)
        # A null block alone serves the dummy run that measures how much memory a step takes.
        self.kv_caches = allocate_kv_caches(config, self.kv_layout, 1)
        free = free_bytes(config, self._profile_peak_bytes())
        self.num_blocks = count_kv_blocks(config, self.kv_layout, free)
        self.kv_caches = allocate_kv_caches(config, self.kv_layout, self.num_blocks)

    def _make_state(self, config: Config) -> None:
        schedule, device = config.schedule, self.device
        num_slots = schedule.max_num_seqs
        self.state = RequestState(num_slots, schedule.max_model_len, self.block_size, device)
        self.sampling_state = SamplingState.make(num_slots, device)
        self.sampler = Sampler(self.sampling_state, self.state.tensors)
        self.buffers = InputBuffers(
            num_slots, schedule.max_num_batched_tokens, self.state.max_blocks, device
        )
        self.staged = StagedWrites(device)
        self.sampled = torch.zeros(num_slots, dtype=torch.int64, device=device)

    # ---- one step ----

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        step = self.prepare(plan)
        self.inputs()
        hidden = self.forward(step.batch)
        sampled = self.verify(hidden, step)
        prompt_scores = self._score_prompts(hidden, step.batch)
        self.update()
        return collect(plan, sampled, prompt_scores)

    def prepare(self, plan: StepPlan) -> Step:
        """Staged edits of slot state, and this step's rows, onto the device."""
        for admission in plan.admissions:
            self.state.admit(self.staged, admission)
            self.sampling_state.admit(self.staged, admission.slot, admission.rules)
        for append in plan.block_appends:
            self.state.append_blocks(self.staged, append)
        self.staged.apply()
        batch = self.buffers.load_rows(plan)
        return Step(batch, SamplingNeeds.of(row.rules for row in plan.rows))

    def inputs(self) -> None:
        """I: ids, positions, lengths and KV slots out of slot state."""
        self.buffers.fill(self.state, self.block_size)

    def forward(self, batch: InputBatch) -> Tensor:
        """C: [num_tokens, hidden_size]."""
        context = ForwardContext(
            backend=self.backend,
            metadata=self.backend.build(batch),
            slot_mapping=batch.slot_mapping,
            kv_caches=self.kv_caches,
        )
        hidden: Tensor = self.model(batch.input_ids, batch.positions, context)
        return hidden

    def verify(self, hidden: Tensor, step: Step) -> Sampled:
        """V: logits of each row's last token, and a token from them."""
        batch = step.batch
        logits = self.model.logits(hidden[batch.last_token_indices])
        sampled = self.sampler.sample(logits, batch.idx_mapping, step.needs, batch.max_seq_len)
        self.sampled[: batch.num_reqs].copy_(sampled.token_ids)
        return sampled

    def update(self) -> None:
        """U: counters and token history, on the device."""
        commit_tokens(self.state.tensors, self.buffers.rows, self.buffers.step, self.sampled)

    # ---- prompt log-probabilities ----

    def _score_prompts(self, hidden: Tensor, batch: InputBatch) -> dict[int, PromptScores]:
        """By row, for those that asked: scores of the prompt tokens that this chunk predicts."""
        scores = {}
        starts = np.concatenate(([0], np.cumsum(batch.query_lens_cpu)))
        for index, row in enumerate(batch.plan_rows):
            if row.rules.params.prompt_logprobs is not None and row.num_computed < (
                row.num_prompt_tokens - 1
            ):
                scores[index] = self._score_chunk(hidden, row, int(starts[index]))
        return scores

    def _score_chunk(self, hidden: Tensor, row: PlannedRow, start: int) -> PromptScores:
        """Position p scores token p + 1, as long as that is of the prompt."""
        count = min(row.num_tokens, row.num_prompt_tokens - 1 - row.num_computed)
        first = row.num_computed + 1
        targets = self.state.tensors.token_ids[row.slot, first : first + count].long()
        asked = row.rules.params.prompt_logprobs
        assert asked is not None
        num_best = self.config.model.vocab_size if asked == -1 else asked
        scores = PromptScores()
        for offset in range(0, count, PROMPT_SCORE_ROWS):
            stop = min(count, offset + PROMPT_SCORE_ROWS)
            logits = self.model.logits(hidden[start + offset : start + stop])
            scores.add(logits, targets[offset:stop], num_best)
        return scores

    # ---- start-up ----

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
        num_tokens = int(lengths.sum())
        step = self.buffers.step
        step.slot_mapping.fill_(-1)
        step.seq_lens.copy_(torch.from_numpy(lengths))
        batch = InputBatch(
            plan_rows=[],
            num_reqs=max_reqs,
            num_tokens=num_tokens,
            max_query_len=int(lengths.max()),
            query_lens_cpu=lengths,
            seq_lens_cpu_upper_bound=lengths,
            rows=self.buffers.rows,
            step=step,
        )
        hidden = self.forward(batch)
        logits = self.model.logits(hidden[:max_reqs])
        needs = SamplingNeeds(noise=True, top_p=True, penalties=True)
        sink = torch.full((max_reqs,), self.state.tensors.sink, device=self.device)
        self.sampler.sample(logits, sink, needs, schedule.max_model_len)
