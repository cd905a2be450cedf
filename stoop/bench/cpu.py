"""Compares engines without a GPU on one GGUF file: stoop, llama.cpp and transformers.

Each engine has a process of its own that stays up, and rounds alternate between them, so that
changes of the machine's speed meet all of them. Only one computes at a time. All get the same
token ids, one request at a time, and generate the same number of tokens greedily, past the end of
the text. The first round warms up.
"""

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from typing import Any

from stoop.bench.cpu_process import (
    BUSY_CORES,
    LLAMA_CPP,
    EngineFailed,
    EngineProcess,
    EngineSpec,
    Watch,
    start_engine,
)
from stoop.core.report import Report

PLAIN, DRAFTED, DENSE = "stoop", "stoop, drafts", "stoop, dense"
COARSE = "stoop, 8-bit"  # activations
NO_DRAFTS = (
    "not measured: no head ships with this model, or earlier runs here found that it does not pay"
)

# Short questions of several kinds, for runs without a file.
QUESTIONS = (
    "Explain in one paragraph why the sky is blue.",
    "Write a Python function that checks whether a word is a palindrome.",
    "A train travels 60 km in 40 minutes. What is its speed in km/h? Explain each step.",
    "Write a short poem about a falcon that dives.",
    "List five things to pack for a week in the mountains, with a reason for each.",
)


@dataclass(frozen=True)
class Work:
    """What every engine does in a round, as token ids."""

    questions: Sequence[Sequence[int]]
    prompt: Sequence[int]  # of which only the first token is asked for
    num_tokens: int  # of an answer

    @staticmethod
    def of(questions: Sequence[Sequence[int]], prompt_len: int, num_tokens: int) -> "Work":
        """The long prompt is made of the questions, one after another."""
        every = cycle([token for question in questions for token in question])
        return Work(questions, list(islice(every, prompt_len)), num_tokens)

    @property
    def context(self) -> int:
        """Tokens of the longest request."""
        return max(len(self.prompt), *map(len, self.questions)) + self.num_tokens


@dataclass(frozen=True)
class Plan:
    """What is measured, and how often."""

    work: Work
    rounds: int  # after one that warms up
    threads: int | None = None  # None: as many as stoop chooses
    retries: int = 3  # of a round that others disturb

    @property
    def watch(self) -> Watch:
        return Watch(retries=self.retries)


@dataclass(frozen=True)
class Round:
    """What one engine did in one round."""

    answers: list[list[int]]
    decode_tokens_per_s: float  # first tokens of answers are not counted
    tokens_per_step: float | None
    ttft_s: float  # of the long prompt
    memory: dict[str, int] | None  # bytes after an answer


@dataclass
class EngineResult:
    """All rounds of one engine."""

    name: str
    version: str
    drafts: int
    threads: int
    import_s: float  # from the start of the process
    load_s: float
    start_others: float | None  # cores that others used meanwhile
    prompt_len: int
    rounds: list[Round] = field(default_factory=list)
    others: list[float | None] = field(default_factory=list)  # by round

    def median(self, figure: Callable[[Round], float | None]) -> float | None:
        found = [value for value in map(figure, self.rounds) if value is not None]
        return statistics.median(found) if found else None

    @property
    def decode_tokens_per_s(self) -> float:
        return _decode_speed(self.rounds)

    @property
    def ttft_s(self) -> float:
        return _first_token(self.rounds)

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prompt_len / self.ttft_s

    def memory(self, part: str) -> float | None:
        """Bytes. part: rss, file or anon"""
        return self.median(lambda each: None if each.memory is None else each.memory[part])

    @property
    def disturbed(self) -> list[int]:
        """The numbers of rounds, from 1, in which others used the cores."""
        return [number for number, cores in enumerate(self.others, start=1) if is_busy(cores)]


@dataclass(frozen=True)
class Together:
    """Tokens/s with several requests at once."""

    name: str
    num_requests: int
    tokens_per_s: list[float]  # by round, prompts included
    decode_tokens_per_s: list[float]  # by round, from when all requests have their first token
    others: list[float | None]


@dataclass
class CpuReport:
    engines: list[EngineResult]
    missing: dict[str, str]  # why an engine was not measured
    together: list[Together] = field(default_factory=list)

    def find(self, name: str) -> EngineResult | None:
        return next((each for each in self.engines if each.name == name), None)

    def equal_share(self, name: str) -> float | None:
        """The share of an engine's answers that equal those of plain stoop, token for token."""
        plain, other = self.find(PLAIN), self.find(name)
        if plain is None or other is None or other is plain:
            return None
        pairs = [
            (ours, theirs)
            for mine, their in zip(plain.rounds, other.rounds, strict=True)
            for ours, theirs in zip(mine.answers, their.answers, strict=False)
        ]
        return sum(ours == theirs for ours, theirs in pairs) / len(pairs)

    def ratios(self, result: EngineResult) -> tuple[float, float] | None:
        """Decoding and prefill speed relative to llama.cpp's, from undisturbed rounds.

        On busy cores engines slow down by very different factors, so other rounds say nothing.
        """
        peer = self.find(LLAMA_CPP)
        if peer is None or peer is result:
            return None
        disturbed = {*result.disturbed, *peer.disturbed}
        pairs = zip(result.rounds, peer.rounds, strict=True)
        calm = [pair for number, pair in enumerate(pairs, start=1) if number not in disturbed]
        if not calm:
            return None
        ours, theirs = zip(*calm, strict=True)
        return (
            _decode_speed(ours) / _decode_speed(theirs),
            _first_token(theirs) / _first_token(ours),
        )


def _decode_speed(rounds: Sequence[Round]) -> float:
    return statistics.median(each.decode_tokens_per_s for each in rounds)


def _first_token(rounds: Sequence[Round]) -> float:
    return statistics.median(each.ttft_s for each in rounds)


def is_busy(cores: float | None) -> bool:
    return cores is not None and cores > BUSY_CORES


def measure_cpu(specs: Sequence[EngineSpec], plan: Plan, report: Report) -> CpuReport:
    """Measure all engines in alternating rounds. specs: stoop's first"""
    found = CpuReport([], {})
    with ExitStack() as stack:
        running = _start_all(specs, plan, found, stack, report)
        for turn in range(plan.rounds + 1):
            stage = f"round {turn} of {plan.rounds}" if turn else "warming up"
            for number, (process, result) in enumerate(zip(running, found.engines, strict=True)):
                report(stage, number, len(running))
                if turn == 0:
                    run_round(process, plan.work)
                    continue
                measured, cores = plan.watch.calmly(partial(run_round, process, plan.work))
                result.rounds.append(measured)
                result.others.append(cores)
            report(stage, len(running), len(running))
    return found


def _start_all(
    specs: Sequence[EngineSpec], plan: Plan, found: CpuReport, stack: ExitStack, report: Report
) -> list[EngineProcess]:
    """Start engines one after another; notes why one is missing."""
    running: list[EngineProcess] = []
    threads = plan.threads
    for number, spec in enumerate(specs):
        report("starting engines", number, len(specs))
        try:
            process, others = start_engine(spec, plan.work.context, threads, plan.watch)
        except EngineFailed as error:
            if spec.asked:
                raise
            found.missing[spec.name] = f"not measured: {error}"
            continue
        stack.callback(process.close)
        threads = threads or process.threads
        if spec.name == DRAFTED and not process.drafts:
            found.missing[spec.name] = NO_DRAFTS
            process.close()
            continue
        found.engines.append(_result(process, others, len(plan.work.prompt)))
        running.append(process)
    report("starting engines", len(specs), len(specs))
    return running


def _result(process: EngineProcess, others: float | None, prompt_len: int) -> EngineResult:
    return EngineResult(
        process.spec.name,
        process.version,
        process.drafts,
        process.threads,
        process.import_s,
        process.load_s,
        others,
        prompt_len,
    )


def run_round(process: Any, work: Work) -> tuple[Round, float]:
    """One round of one engine, and the seconds that it computed."""
    before = process.cpu_s
    name, limit = process.spec.name, process.spec.max_questions
    replies = []
    for question in work.questions[:limit]:
        replies.append(_answer(process, question, work.num_tokens))
    first = _answer(process, work.prompt, 1)
    seconds = sum(each["times"][-1] - each["times"][0] for each in replies)
    num_decoded = len(replies) * (work.num_tokens - 1)
    if seconds <= 0:
        raise EngineFailed(f"{name} gave all tokens of an answer at once: raise --max-tokens")
    steps = [each["steps"] for each in replies]
    return (
        Round(
            answers=[each["tokens"] for each in replies],
            decode_tokens_per_s=num_decoded / seconds,
            tokens_per_step=None if None in steps else num_decoded / sum(steps),
            ttft_s=first["times"][0],
            memory=replies[-1]["memory"],
        ),
        process.cpu_s - before,
    )


def _answer(process: Any, prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
    reply: dict[str, Any] = process.ask(do="answer", prompt=list(prompt), num_tokens=num_tokens)
    if len(reply["tokens"]) != num_tokens or len(reply["times"]) != num_tokens:
        raise EngineFailed(
            f"{process.spec.name} generated {len(reply['tokens'])} tokens instead of {num_tokens}: "
            "ask for shorter answers or questions"
        )
    return reply


# ---- several requests at once ----


def measure_together(
    specs: Sequence[EngineSpec], sizes: Sequence[int], plan: Plan, report: Report
) -> list[Together]:
    """Tokens/s of stoop's engines with so many requests at once."""
    found: list[Together] = []
    with ExitStack() as stack:
        running = []
        for spec in specs:
            running.append(EngineProcess(spec, plan.work.context, plan.threads))
            stack.callback(running[-1].close)
        for size in sizes:
            results = [Together(process.spec.name, size, [], [], []) for process in running]
            found += results
            for turn in range(plan.rounds + 1):
                report(f"{size} at once", turn, plan.rounds + 1)
                for process, result in zip(running, results, strict=True):
                    run = partial(run_together, process, size, plan.work)
                    if turn == 0:
                        run()
                        continue
                    (speed, decoding), cores = plan.watch.calmly(run)
                    result.tokens_per_s.append(speed)
                    result.decode_tokens_per_s.append(decoding)
                    result.others.append(cores)
            report(f"{size} at once", plan.rounds + 1, plan.rounds + 1)
    return found


def run_together(process: Any, size: int, work: Work) -> tuple[tuple[float, float], float]:
    """Tokens/s with prompts and without, and the seconds that the engine computed."""
    before = process.cpu_s
    prompts = [list(question) for question in islice(cycle(work.questions), size)]
    reply = process.ask(do="together", prompts=prompts, num_tokens=work.num_tokens)
    times = [time for each in reply["times"] for time in each]
    started, end = max(each[0] for each in reply["times"]), max(times)
    if end <= started:
        raise EngineFailed(f"{process.spec.name} ended too early: raise --max-tokens")
    decoding = sum(time > started for time in times) / (end - started)
    return (len(times) / end, decoding), process.cpu_s - before
