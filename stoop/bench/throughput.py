"""Throughput by the number of requests at once and of drafts per step.

There is one engine for each K. Engines take turns, run by run, so that whatever slows the machine
down now and then slows all of them; where they do not fit into memory together, they run one after
another. Random prompts and their answers have equal lengths, so they run in groups: as many
requests as the load says start together, and the next group starts when all of them have ended, as
in calls of vLLM's `LLM.generate`. Answers to questions end when they end, so there the next request
starts as soon as one has ended.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stoop.bench.offline import Load, check_length, random_prompts
from stoop.bench.questions import check_room, spread
from stoop.bench.step_drafts import StepDrafts
from stoop.config.errors import MemoryShortage
from stoop.config.schema import CacheConfig, Config, SpecConfig
from stoop.config.speculation import MAX_DRAFTS
from stoop.core.outputs import DecodeSteps, RequestOutput, SpecCounts
from stoop.core.sampling_params import SamplingParams
from stoop.llm import LLM

Drafts = int | str  # K, or "auto"
StartWith = Callable[[Drafts], LLM]
Say = Callable[[str], None]

USUAL_SHARE = CacheConfig.gpu_memory_utilization
_SIZES = ("num_kv_blocks", "kv_cache_memory")
WARM_TOKENS = 8
GROUPS = 4  # of requests in a run
MAX_REQUESTS = 256  # of a run, unless the load is larger


@dataclass(frozen=True)
class Traffic:
    """The requests of all runs."""

    loads: tuple[int, ...]  # requests at once
    input_len: int  # of random prompts
    output_len: int  # the most, of answers to questions
    num_requests: int | None = None  # of a run; None: by load
    questions: Sequence[list[int]] = ()  # their token ids, instead of random prompts
    file: str = ""  # of the questions

    def count(self, load: int) -> int:
        """How many requests a run has."""
        return self.num_requests or load * max(1, min(GROUPS, MAX_REQUESTS // load))

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its answer, at most."""
        return max(map(len, self.questions), default=self.input_len) + self.output_len

    def groups(self, load: int) -> list[int]:
        """The sizes of the groups of a run, where requests run in groups."""
        whole, rest = divmod(self.count(load), load)
        return [load] * whole + [rest] * (rest > 0)

    def prompts(self, llm: LLM, count: int, seed: int) -> list[list[int]]:
        """seed: of random prompts, which decide how many drafts are accepted"""
        if not self.questions:
            return random_prompts(llm, Load(count, self.input_len, self.output_len), seed)
        if count < len(self.questions):  # files sort by category
            return spread(self.questions, count)
        return list(itertools.islice(itertools.cycle(self.questions), count))

    def check_room(self, config: Config) -> None:
        """Refuse prompts that are too long for an engine."""
        if self.questions:
            check_room(config, self.file, max(map(len, self.questions)))
        else:
            check_length(config, Load(1, self.input_len, self.output_len))


@dataclass(frozen=True)
class LoadRun:
    """One run: all requests of a load."""

    seconds: float
    num_tokens: int
    counts: SpecCounts
    steps: DecodeSteps
    made: StepDrafts

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class LoadRow:
    """The runs of one load and K."""

    load: int
    drafts: Drafts
    num_requests: int
    runs: list[LoadRun]
    adaptive: bool = False  # steps may make fewer drafts

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(run.tokens_per_s for run in self.runs)

    def draft_record(self) -> dict[str, Any]:
        """Tokens per step of a request, and how many drafts steps made; None without a drafter."""
        num_drafts = sum(run.counts.num_drafts for run in self.runs)
        num_accepted = sum(run.counts.num_accepted_tokens for run in self.runs)
        steps = DecodeSteps.sum(run.steps for run in self.runs)
        made = StepDrafts.sum(run.made for run in self.runs)
        found = {
            "tokens_per_step": steps.tokens_per_step,
            "share_with_drafts": steps.share_with_drafts,
            "mean_acceptance_length": 1 + num_accepted / num_drafts if num_drafts else None,
            **made.as_record(),
        }
        return found if self.drafts else dict.fromkeys(found)


@dataclass(frozen=True)
class PeerSpeeds:
    """What another engine reached."""

    engine: str
    tokens_per_s: dict[tuple[int, Drafts], list[float]]  # by load and K, of each run


@dataclass(frozen=True)
class LoadReport:
    """All rows, and what they are compared with."""

    traffic: Traffic
    config: Config  # of the first engine
    rows: list[LoadRow] = field(default_factory=list)
    peer: PeerSpeeds | None = None
    spec: SpecConfig | None = None  # of the first engine that drafts

    def records(self) -> list[dict[str, Any]]:
        return [self._record(row) for row in self.rows]

    def _record(self, row: LoadRow) -> dict[str, Any]:
        beside = [each for each in self.rows if each.load == row.load and not each.adaptive]
        fixed = {each.drafts: each.tokens_per_s for each in beside}
        plain, best = fixed.get(0), max(fixed.values(), default=None)
        record = {
            "load": row.load,
            "k": row.drafts,
            "adaptive": row.adaptive,
            "num_requests": row.num_requests,
            "tokens_per_s": row.tokens_per_s,
            "tokens_per_s_all": [run.tokens_per_s for run in row.runs],
            **row.draft_record(),
            "of_plain": row.tokens_per_s / plain if plain else None,
            "of_best_fixed": row.tokens_per_s / best if best else None,
        }
        if self.peer is not None:
            theirs = self.peer.tokens_per_s.get((row.load, row.drafts))
            median = statistics.median(theirs) if theirs else None
            record["peer_tokens_per_s"] = median
            record["peer_tokens_per_s_all"] = theirs
            record["of_peer"] = row.tokens_per_s / median if median else None
        return record


def measure_loads(
    start: StartWith, traffic: Traffic, drafts: Sequence[Drafts], repeat: int, say: Say
) -> LoadReport:
    """Measure every load with every K."""
    rows, configs = list[LoadRow](), list[Config]()
    for llms in _start(start, drafts, say):
        configs += [llm.config for llm in llms.values()]
        for load in traffic.loads:
            measured = _measure(llms, traffic, load, repeat)
            for row in measured:
                name = f"K = {row.drafts}" if row.drafts else "plain"
                say(f"{name}, {load} at once, {row.tokens_per_s:.1f} tokens/s")
            rows += measured
        llms.clear()  # frees memory for the next engine
    rows.sort(key=lambda row: traffic.loads.index(row.load))
    spec = next((config.spec for config in configs if config.spec), None)
    return LoadReport(traffic, configs[0], rows, spec=spec)


def _start(start: StartWith, drafts: Sequence[Drafts], say: Say) -> Iterator[dict[Drafts, LLM]]:
    """All engines together, or one at a time. Clear what was yielded before the next.

    On a CPU one at a time: a KV cache that is not written yet does not show in the memory in use,
    so that too many engines would be noticed too late, and threads of engines that wait their turn
    spin on the cores at first.
    """
    llms: dict[Drafts, LLM] = {drafts[0]: start(drafts[0])}
    together = llms[drafts[0]].config.device.device != "cpu"
    if together:
        try:
            for each in drafts[1:]:
                llms[each] = start(each)
        except (MemoryShortage, torch.OutOfMemoryError):
            say("note: the engines do not fit into memory together, so they run one after another")
            together = False
            llms.clear()
    if together:
        yield llms
        return
    for each in drafts:
        if each not in llms:
            llms[each] = start(each)
        yield llms


def _measure(llms: Mapping[Drafts, LLM], traffic: Traffic, load: int, repeat: int) -> list[LoadRow]:
    in_groups, count = not traffic.questions, traffic.count(load)
    params = SamplingParams(temperature=0, max_tokens=traffic.output_len, ignore_eos=in_groups)
    warm = params.replace(max_tokens=min(WARM_TOKENS, traffic.output_len))
    runs: dict[Drafts, list[LoadRun]] = {each: [] for each in llms}
    for llm in llms.values():
        _run(llm, traffic.prompts(llm, load, seed=0), warm, load, in_groups)
    for number in range(1, repeat + 1):
        for each, llm in llms.items():
            prompts = traffic.prompts(llm, count, seed=number)
            runs[each].append(_run(llm, prompts, params, load, in_groups))
    return [
        LoadRow(load, each, count, runs[each], llm.config.schedule.adaptive)
        for each, llm in llms.items()
    ]


def _run(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, load: int, in_groups: bool
) -> LoadRun:
    engine, outputs = llm.engine, list[RequestOutput]()
    waiting: Iterator[tuple[int, list[int]]] = enumerate(prompts)
    num_running, before = 0, StepDrafts.until_now(llm.metrics())
    started = time.perf_counter()
    while len(outputs) < len(prompts):
        if not (in_groups and num_running):
            for number, prompt in itertools.islice(waiting, load - num_running):
                engine.add_request(f"bench-{number}", prompt, params, final_only=True)
                num_running += 1
        ended = engine.step()
        num_running -= len(ended)
        outputs += ended
    seconds = time.perf_counter() - started
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    made = StepDrafts.until_now(llm.metrics()).since(before)
    counts, steps = SpecCounts.sum(outputs, 0), DecodeSteps.of(outputs)
    return LoadRun(seconds, num_tokens, counts, steps, made)


def shaped_sizes(traffic: Traffic, engine: dict[str, Any]) -> dict[str, Any]:
    """Engine sizes with room for the largest load and no more; the user's own come first.

    The same for every K: the maximum length decides how attention is divided.
    """
    length = engine["max_model_len"] or traffic.longest + MAX_DRAFTS
    batch = engine["max_num_seqs"] or max(traffic.loads)
    given = {"max_model_len": length, "max_num_seqs": batch}
    return given | sized_cache(traffic, engine, length)


def sized_cache(traffic: Traffic, engine: dict[str, Any], max_model_len: int) -> dict[str, int]:
    """A KV cache for the largest load, so that several engines fit, unless the user sizes it."""
    share = engine.get("gpu_memory_utilization", USUAL_SHARE)
    if share != USUAL_SHARE or any(engine[name] is not None for name in _SIZES):
        return {}
    length = min(max_model_len, traffic.longest + MAX_DRAFTS)
    batch = max(traffic.loads)
    block_size = max(1, engine["block_size"])  # the engine refuses smaller ones
    # It must hold a request of the maximum length, too.
    num_blocks = max(batch * -(-length // block_size), -(-max_model_len // block_size))
    return {"num_kv_blocks": num_blocks + 1}
