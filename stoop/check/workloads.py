"""Workloads in which every past bug shows: for a target alone, and for one with a drafter.

The first has many lengths, chunks, preemption and all kinds of sampling. The second has arrivals
while others run, finishes, preemption, chunked prompts, prefix cache hits, requests with their own
number of drafts, requests that end at max_model_len, and greedy and seeded sampling.
"""

import random
from dataclasses import dataclass, field
from typing import Any

from stoop.core.outputs import CompletionOutput, RequestOutput
from stoop.core.sampling_params import SamplingParams
from stoop.core.step import StepPlan
from stoop.llm import LLM
from stoop.worker.output import LaunchedStep

# ---- a target alone ----

TARGET_SETTINGS: dict[str, Any] = {
    "max_model_len": 160,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 48,
    "block_size": 8,
    "num_kv_blocks": 22,  # too few for all: some are preempted
    "capture_sizes": "1,2,4,6,16,48",
}
TARGET_LENGTHS = (1, 7, 8, 9, 100, 33, 60, 16)
LONG = SamplingParams(temperature=0, max_tokens=26, ignore_eos=True, logprobs=0)
NOISE = SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True, logprobs=0)
FULL = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    top_k=40,
    seed=4,
    max_tokens=29,
    ignore_eos=True,
    frequency_penalty=0.6,
    repetition_penalty=1.2,
    logit_bias={3: 2.0},
    logprobs=0,
)


def random_prompts(lengths: tuple[int, ...], vocab_size: int) -> list[list[int]]:
    source = random.Random(7)
    return [[source.randrange(vocab_size) for _ in range(length)] for length in lengths]


def answer_batches(llm: LLM) -> list[CompletionOutput]:
    """Run a long prompt, then small batches; greedy, sampled and mixed."""
    outputs = []
    every = random_prompts(TARGET_LENGTHS, 128)
    for params in (LONG, [LONG, NOISE, FULL, LONG, NOISE, FULL, LONG, NOISE]):
        outputs += llm.generate(every, params, use_tqdm=False)
    outputs += llm.generate(every[:2], NOISE, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


# ---- a target with a drafter ----

DRAFT_SETTINGS: dict[str, Any] = {
    "max_model_len": 72,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 40,
    "block_size": 8,
    "num_kv_blocks": 16,  # too few for four long ones: some are preempted
    "capture_sizes": "1,2,4,40",
}
DRAFT_LENGTHS = (1, 7, 8, 9, 45, 16, 33)
GREEDY = SamplingParams(temperature=0, max_tokens=23, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=11, max_tokens=23, ignore_eos=True)
PENALISED = SEEDED.replace(
    top_p=0.95, frequency_penalty=0.3, repetition_penalty=1.1, seed=12, logit_bias={3: 1.0}
)


@dataclass
class Trace:
    """What an engine did: answers, and the drafts after each number of known tokens."""

    answers: list[list[int]] = field(default_factory=list)
    finish_reasons: list[str | None] = field(default_factory=list)
    drafts: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    per_position: list[int] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)


def watch_drafts(llm: LLM, trace: Trace) -> None:
    """Record the drafts after the known tokens of every request, after each step."""
    runner = llm.engine.runner
    launch = runner.launch

    def spy(plan: StepPlan) -> LaunchedStep:
        launched = launch(plan)
        slots = runner.target.state.tensors
        for row in plan.rows:
            known, count = int(slots.num_tokens[row.slot]), int(slots.num_drafts[row.slot])
            drafts = slots.token_ids[row.slot, known : known + count].tolist()
            if row.samples:
                trace.drafts[row.request_id, known] = drafts
            else:
                assert drafts == [], "a chunk drafts nothing"
        return launched

    runner.launch = spy  # type: ignore[method-assign]


def draft_requests(num_drafts: int, vocab_size: int) -> list[tuple[list[int], SamplingParams]]:
    """Every kind of request; `num_drafts` 0 for an engine that does not draft."""
    every = random_prompts(DRAFT_LENGTHS, vocab_size)
    shared = every[5] + every[6][:8]  # two blocks that others start with
    lower = {"num_speculative_tokens": num_drafts // 2} if num_drafts else {}
    none = {"num_speculative_tokens": 0} if num_drafts else {}
    return [
        (every[0], GREEDY),
        (every[4], GREEDY.replace(max_tokens=None)),  # to max_model_len
        (every[1], SEEDED),
        (every[2], PENALISED),
        (every[3], GREEDY.replace(**lower)),
        (shared, SEEDED.replace(seed=5, **none)),
        ([*shared, 9], GREEDY.replace(max_tokens=5)),
        (every[6], SEEDED.replace(seed=6, max_tokens=None)),
        ([*shared[:16], 1, 2], PENALISED.replace(seed=9, max_tokens=2)),
        (shared, GREEDY.replace(max_tokens=1)),
    ]


def answer_arrivals(llm: LLM, num_drafts: int, vocab_size: int) -> Trace:
    """Requests arrive while others run; then some of them once more, for the prefix cache."""
    trace = Trace()
    watch_drafts(llm, trace)
    every = draft_requests(num_drafts, vocab_size)
    outputs: dict[str, RequestOutput] = {}
    pending = list(enumerate(every))
    step = 0
    while pending or llm.engine.has_work:
        while pending and (step % 3 == 0 or not llm.engine.has_work):
            number, (prompt, params) = pending.pop(0)
            llm.engine.add_request(f"r{number}", prompt, params)
            if number >= 2:
                break
        for output in llm.engine.step():
            if output.finished:
                outputs[output.request_id] = output
        step += 1
    again = (4, 5, 7)
    repeated = [every[n] for n in again]
    answers = llm.generate([p for p, _ in repeated], [s for _, s in repeated], use_tqdm=False)
    outputs |= {f"again{n}": answer for n, answer in zip(again, answers, strict=True)}
    for name in sorted(outputs):
        trace.answers.append(list(outputs[name].outputs[0].token_ids))
        trace.finish_reasons.append(outputs[name].outputs[0].finish_reason)
    trace.metrics = llm.metrics()
    trace.per_position = trace.metrics["spec_decode_num_accepted_tokens_per_pos"]
    return trace
