"""Measures the harm that known bugs do: a broken engine beside a healthy one with the same options.

Every engine answers questions and is compared with an eager engine without drafts. Bugs whose harm
is time are timed with and without the bug in turn, in one engine. An error that a broken engine
raises is a result. On a GPU each engine runs in a process of its own, because an illegal access
ends the process's CUDA context.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from stoop.bench.accuracy import Result, compare, score
from stoop.bench.apart import describe, run_apart
from stoop.bench.harm_bugs import EVERY_BUG, Bug, Workload
from stoop.bench.harm_rows import HarmRow, Outcome
from stoop.bench.questions import Task
from stoop.bench.shape_configs import SHAPES
from stoop.bench.shapes import open_shape
from stoop.check.mutants.base import applied
from stoop.check.steps import StepWork, watch_steps
from stoop.core.sampling_params import SamplingParams
from stoop.graph.sanitizer import SanitizerError
from stoop.llm import LLM

NUM_FEW = 4  # requests of the workload FEW; a size that graphs are captured for
FEW_TOKENS = 12
ROUNDS = 5  # of timings, with and without the bug in turn
LIMIT_ROUNDS, LIMIT_STEPS, LIMIT_PROMPT = 3, 4, 32

Report = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Setting:
    """What all engines of a table have in common."""

    model: str
    engine: dict[str, Any]  # options
    drafter: dict[str, Any]  # speculative_config without the number of drafts
    num_drafts: int
    tasks: tuple[Task, ...]
    max_tokens: int
    shape: str = "smollm2-135m"  # model of the workload LIMITS: dummy weights, or a path
    limits: tuple[int, int] = (2048, 131072)

    @property
    def device(self) -> str:
        return str(self.engine["device"])

    @property
    def exact(self) -> bool:
        """Whether healthy engines must answer as the eager one to the last token."""
        dtype = self.engine["dtype"]
        # A difference in the last bit may be rounded to another number of fp8.
        narrow = self.engine.get("kv_cache_dtype", "auto") not in ("auto", dtype)
        return self.device == "cpu" and (dtype == "float64" or (dtype == "float32" and not narrow))


@dataclass(frozen=True)
class EngineKey:
    """A kind of engine: its healthy outcome serves all bugs that share it."""

    mode: str
    backend: str
    num_drafts: int
    sanitize: bool


# ---- all bugs ----


def measure_harm(setting: Setting, bugs: Sequence[Bug], report: Report) -> list[HarmRow]:
    """Run the baseline, then for each bug a healthy engine (once a kind) and a broken one."""
    apart = setting.device != "cpu"
    total, done = _count_engines(setting, bugs), 0

    def advance(what: str) -> None:
        nonlocal done
        report(f"{done + 1} of {total}: {what}", done, total)
        done += 1

    advance("eager, without drafts")
    baseline = run_apart(_baseline, setting) if apart else _baseline(setting)
    if isinstance(baseline, str):
        raise RuntimeError(f"the eager engine fails: {baseline}")
    healthy: dict[EngineKey, Outcome] = {}
    rows = []
    for bug in bugs:
        key = _key(bug, setting)
        if bug.workload in (Workload.FIRST_TOKENS, Workload.LIMITS):
            advance(f"{bug.label}, healthy and broken in turn")
            pair = _run(apart, _run_in_turn, setting, bug, baseline)
            if bug.workload is Workload.FIRST_TOKENS:
                healthy.setdefault(key, replace(pair[0], figures={}))
        else:
            if key not in healthy:
                advance(f"healthy ({key.mode}, {key.backend}{_suffix(key)})")
                healthy[key] = _run(apart, _run_engine, setting, bug, baseline, False)
            advance(bug.label)
            broken = _run(apart, _run_engine, setting, bug, baseline, True)
            pair = healthy[key], broken
        rows.append(HarmRow(bug, pair[0], pair[1], setting.exact, setting.engine["dtype"]))
    return rows


def _count_engines(setting: Setting, bugs: Sequence[Bug]) -> int:
    in_turn = [bug for bug in bugs if bug.workload in (Workload.FIRST_TOKENS, Workload.LIMITS)]
    known = {_key(bug, setting) for bug in in_turn if bug.workload is Workload.FIRST_TOKENS}
    needed = {_key(bug, setting) for bug in bugs if bug not in in_turn}
    return 1 + len(bugs) + len(needed - known)


def _suffix(key: EngineKey) -> str:
    sanitized = ", sanitized" if key.sanitize else ""
    return f", K = {key.num_drafts}{sanitized}" if key.num_drafts else f", no drafts{sanitized}"


def _key(bug: Bug, setting: Setting) -> EngineKey:
    mutant = bug.mutant
    num_drafts = 0
    if bug.drafts:
        num_drafts = min(setting.num_drafts, bug.most_drafts or setting.num_drafts)
    return EngineKey(mutant.mode, mutant.backend, num_drafts, bug.sanitize)


def _run(apart: bool, function: Callable[..., Any], setting: Setting, bug: Bug, *args: Any) -> Any:
    number = EVERY_BUG.index(bug) if bug in EVERY_BUG else bug
    if not apart:
        return function(setting, number, *args)
    found = run_apart(function, setting, number, *args)
    if isinstance(found, str):
        failed = Outcome(error=found)
        return (failed, failed) if function is _run_in_turn else failed
    return found


# ---- one engine ----


def _baseline(setting: Setting) -> Result:
    llm = _start(setting, EngineKey("none", "auto", 0, False))
    return score(llm, setting.tasks, setting.max_tokens, with_rivals=True)


def _start(setting: Setting, key: EngineKey) -> LLM:
    options: dict[str, Any] = {
        **setting.engine,
        "graph_mode": key.mode,
        "attention_backend": key.backend,
        "sanitize": key.sanitize,
        "speculative_config": None,
        "enable_prefix_caching": False,
    }
    if key.mode == "none":
        del options["capture_sizes"]
    if key.num_drafts:
        drafter = {**setting.drafter, "num_speculative_tokens": key.num_drafts, "adaptive": False}
        options["speculative_config"] = drafter
    return LLM(setting.model, **options)


def _find(number: "int | Bug") -> Bug:
    """Mutants hold functions that cannot be sent to another process: a bug goes by its number."""
    return EVERY_BUG[number] if isinstance(number, int) else number


def _run_engine(
    setting: Setting, number: "int | Bug", baseline: Result, is_broken: bool
) -> Outcome:
    bug = _find(number)
    try:
        with applied(bug.mutant) if is_broken else nullcontext():
            llm = _start(setting, _key(bug, setting))
            few = _answer_few(llm, setting, baseline)
            if bug.sanitize or (is_broken and bug.workload is Workload.FEW):
                return few
            every = _answer_all(llm, setting, baseline)
            return every if few.same or is_broken else replace(every, same=False)
    except Exception as error:  # a broken engine may fail in any way
        stale = getattr(error, "buffer", None) if isinstance(error, SanitizerError) else None
        named = "sanitizer" if isinstance(error, SanitizerError) else None
        return Outcome(error=describe(error), stale=stale or named)


def _answer_all(llm: LLM, setting: Setting, baseline: Result) -> Outcome:
    result = score(llm, setting.tasks, setting.max_tokens)
    found = compare(result, baseline)
    drafted = result.drafter is not None
    return Outcome(
        num_answers=found.num_answers,
        num_equal=found.num_equal,
        first_position=found.first_position,
        largest_gap=found.largest_gap,
        num_correct=result.num_correct,
        loglikelihood=result.loglikelihood_per_token,
        same=found.same,
        tokens_per_step=result.tokens_per_step if drafted else None,
        acceptance=tuple(result.counts.acceptance_rates),
    )


def _answer_few(llm: LLM, setting: Setting, baseline: Result) -> Outcome:
    """Four requests at most. The last one ends at its first token, so the step after it has fewer
    rows than its graph, and buffers may still hold what its long prompt left."""
    tasks = setting.tasks[:NUM_FEW]
    num_tokens = min(FEW_TOKENS, setting.max_tokens)
    limits = [num_tokens] * (len(tasks) - 1) + [1]
    params = [
        SamplingParams(temperature=0, max_tokens=limit, stop=task.stop)
        for limit, task in zip(limits, tasks, strict=True)
    ]
    outputs = llm.generate([list(task.prompt) for task in tasks], params, use_tqdm=False)
    equal = [
        list(output.outputs[0].token_ids) == list(answer.token_ids[:limit])
        for output, answer, limit in zip(outputs, baseline.answers, limits, strict=False)
    ]
    num_equal = sum(equal)
    return Outcome(num_answers=len(equal), num_equal=num_equal, same=num_equal == len(equal))


# ---- bugs whose harm is time ----


def _run_in_turn(
    setting: Setting, number: "int | Bug", baseline: Result
) -> tuple[Outcome, Outcome]:
    """Time one engine with and without the bug, which must be one of steps, not of captures."""
    bug = _find(number)
    try:
        if bug.workload is Workload.LIMITS:
            return _time_limits(setting, bug)
        return _time_first_tokens(setting, bug, baseline)
    except Exception as error:
        failed = Outcome(error=describe(error))
        return failed, failed


@contextmanager
def _maybe(bug: Bug, is_broken: bool) -> Iterator[None]:
    with applied(bug.mutant) if is_broken else nullcontext():
        yield


def _time_first_tokens(setting: Setting, bug: Bug, baseline: Result) -> tuple[Outcome, Outcome]:
    llm = _start(setting, _key(bug, setting))
    tasks = setting.tasks[:NUM_FEW]
    waits: dict[bool, list[float]] = {False: [], True: []}
    work: dict[bool, list[StepWork]] = {False: [], True: []}
    _first_token(llm, tasks[0])  # warm up
    for turn in range(ROUNDS):
        for is_broken in (False, True) if turn % 2 else (True, False):
            with _maybe(bug, is_broken), watch_steps(llm) as steps:
                every = [_first_token(llm, task) for task in tasks]
            waits[is_broken].append(statistics.mean(every))
            work[is_broken] += steps
    outcomes = []
    for is_broken in (False, True):
        with _maybe(bug, is_broken):
            outcome = _answer_all(llm, setting, baseline)
        steps = work[is_broken]
        figures = {
            "builds a step": max(step.target_builds for step in steps),
            "ms of building": min(_build_ms(steps)),
            "ms to the first token": min(waits[is_broken]) * 1000,
        }
        outcomes.append(replace(outcome, figures=figures))
    return outcomes[0], outcomes[1]


def _build_ms(steps: Sequence[StepWork]) -> list[float]:
    """The host's time for metadata, by round: the mean of its steps."""
    size = max(len(steps) // ROUNDS, 1)
    chunks = [steps[start : start + size] for start in range(0, len(steps), size)]
    return [statistics.mean(step.build_seconds for step in chunk) * 1000 for chunk in chunks]


def _first_token(llm: LLM, task: Task) -> float:
    """Seconds to the first token of an answer; one more follows, so that the step drafts."""
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    outputs = llm.stream(list(task.prompt), params)
    next(outputs)
    waited = time.perf_counter() - started
    for _ in outputs:
        pass
    return waited


def _time_limits(setting: Setting, bug: Bug) -> tuple[Outcome, Outcome]:
    """A short request at both limits. One engine a limit: that of the longer one needs much KV."""
    figures: dict[bool, dict[str, float]] = {False: {}, True: {}}
    for limit in setting.limits:
        with ExitStack() as stack:
            llm = stack.enter_context(_short_engine(setting, bug, limit))
            times: dict[bool, list[float]] = {False: [], True: []}
            _step_ms(llm)  # warm up
            for _ in range(LIMIT_ROUNDS):
                for is_broken in (False, True):
                    with _maybe(bug, is_broken):
                        times[is_broken].append(_step_ms(llm))
            for is_broken, found in times.items():
                figures[is_broken][f"ms a step at {limit:,}"] = min(found)
            del llm
    return Outcome(figures=figures[False]), Outcome(figures=figures[True])


@contextmanager
def _short_engine(setting: Setting, bug: Bug, limit: int) -> Iterator[LLM]:
    with open_shape(setting.shape, 0, limit) as (folder, shaped):
        options: dict[str, Any] = {
            **shaped,
            "device": setting.device,
            "dtype": setting.engine["dtype"],
            "max_model_len": limit,
            "max_num_seqs": 1,
            "max_num_batched_tokens": 2 * LIMIT_PROMPT,
            "capture_sizes": "1",
            "graph_mode": bug.mutant.mode,
            "attention_backend": bug.mutant.backend,
            "speculative_config": None,
            "enable_prefix_caching": False,
            "run_ahead": 0,  # no step is launched before the clock starts
        }
        if setting.shape in SHAPES:
            options["kv_cache_dtype"] = "bfloat16"  # half the memory
        yield LLM(folder, **options)


def _step_ms(llm: LLM) -> float:
    """Milliseconds of a decode step of one short request."""
    params = SamplingParams(
        temperature=0, max_tokens=LIMIT_STEPS + 1, ignore_eos=True, detokenize=False
    )
    outputs = llm.stream(list(range(3, 3 + LIMIT_PROMPT)), params)
    next(outputs)
    _synchronize(llm)
    started = time.perf_counter()
    for _ in outputs:
        pass
    _synchronize(llm)
    return (time.perf_counter() - started) / LIMIT_STEPS * 1000


def _synchronize(llm: LLM) -> None:
    if llm.config.device.device != "cpu":
        torch.cuda.synchronize()
