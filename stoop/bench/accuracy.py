"""Scores engines on questions with known answers, and compares each with an eager engine.

A small model finds few answers, so accuracy alone may not show that an engine is broken. Three
measures do: whether the answers are those of the eager engine token for token, where they first
differ, and the log-likelihood of the reference solutions. Two healthy engines may differ where
rounding decides between two tokens of nearly the same probability: the gap between the two in the
eager engine tells that from a bug.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from stoop.bench.questions import Task, check_room, find_number
from stoop.config.errors import ConfigError
from stoop.config.schema import Config
from stoop.core.outputs import CompletionOutput, RequestOutput, SpecCounts
from stoop.core.sampling_params import SamplingParams
from stoop.llm import LLM

MAX_TOKENS = 256
NUM_RIVALS = 8  # most likely tokens kept by position, to measure gaps
# By which the log-likelihood per token may differ between equal engines: float32 rounds sums
# differently in other batches.
LIKELIHOOD_NOISE = 1e-4

Say = Callable[[str], None]


@dataclass(frozen=True)
class Answer:
    """The answer to one question."""

    token_ids: tuple[int, ...]
    text: str
    number: Decimal | None  # that was found in the text
    correct: bool
    # By position, log-probabilities of the most likely tokens; empty if not asked for.
    rivals: tuple[dict[int, float], ...] = ()
    cut: bool = False  # by the limit on its length


@dataclass(frozen=True)
class Result:
    """What one engine made of all questions."""

    mode: str  # of graphs
    drafter: str | None  # its method; None for plain decoding
    answers: tuple[Answer, ...]
    loglikelihoods: tuple[float, ...]  # of the reference solutions
    num_solution_tokens: tuple[int, ...]
    counts: SpecCounts  # of drafts
    seconds: float  # to answer, without the reference solutions

    @property
    def num_correct(self) -> int:
        return sum(answer.correct for answer in self.answers)

    @property
    def accuracy(self) -> float:
        return self.num_correct / max(len(self.answers), 1)

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def num_cut(self) -> int:
        return sum(answer.cut for answer in self.answers)

    @property
    def loglikelihood_per_token(self) -> float:
        """The mean over all tokens of the reference solutions; NaN if they have none."""
        total = sum(self.num_solution_tokens)
        return sum(self.loglikelihoods) / total if total else math.nan

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step that verified drafts; 1 without a drafter."""
        return self.counts.mean_acceptance_length

    def as_record(self) -> dict[str, Any]:
        return {
            "graph_mode": self.mode,
            "drafter": self.drafter,
            "num_questions": len(self.answers),
            "num_correct": self.num_correct,
            "accuracy": self.accuracy,
            "num_tokens": self.num_tokens,
            "num_cut": self.num_cut,
            "loglikelihood_per_token": _finite(self.loglikelihood_per_token),
            "tokens_per_step": self.tokens_per_step,
            "acceptance_rates": self.counts.acceptance_rates,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class Difference:
    """Where an answer leaves that of the baseline."""

    question: int  # its index
    position: int  # of the first token that differs
    expected: int | None  # the baseline's token there; None if its answer has ended
    found: int | None
    # The lead of the expected token over the one found, in log-probability, in the baseline; None
    # if one of the answers has ended or the baseline kept no rivals.
    gap: float | None
    gap_is_bound: bool = False  # the token found was not among the rivals: the gap is at least this

    def as_record(self) -> dict[str, Any]:
        return {
            "question": self.question,
            "position": self.position,
            "expected": self.expected,
            "found": self.found,
            "gap": None if self.gap is None else _finite(self.gap),
            "gap_is_bound": self.gap_is_bound,
        }


@dataclass(frozen=True)
class Comparison:
    """A result beside the baseline's."""

    num_answers: int
    differences: tuple[Difference, ...]  # one for each answer that differs
    correct_change: int  # in the number of correct answers
    # The largest change of a solution's log-likelihood per token; NaN if one is not a number.
    loglikelihood_change: float

    @property
    def num_equal(self) -> int:
        return self.num_answers - len(self.differences)

    @property
    def first_position(self) -> int | None:
        """The first position at which any answer differs."""
        return min((each.position for each in self.differences), default=None)

    @property
    def largest_gap(self) -> float | None:
        return max((each.gap for each in self.differences if each.gap is not None), default=None)

    @property
    def same(self) -> bool:
        """Whether answers, score and log-likelihoods are the baseline's."""
        close = self.loglikelihood_change <= LIKELIHOOD_NOISE  # false for NaN
        return not self.differences and not self.correct_change and close

    def as_record(self) -> dict[str, Any]:
        return {
            "same": self.same,
            "num_equal": self.num_equal,
            "first_position": self.first_position,
            "largest_gap": None if self.largest_gap is None else _finite(self.largest_gap),
            "loglikelihood_change": _finite(self.loglikelihood_change),
            "differences": [each.as_record() for each in self.differences],
        }


# ---- scoring ----


def score(
    llm: LLM, tasks: Sequence[Task], max_tokens: int = MAX_TOKENS, *, with_rivals: bool = False
) -> Result:
    """Answer all questions greedily and score the reference solutions.

    with_rivals: keep the most likely tokens by position, which a baseline needs for gaps
    """
    if not tasks:
        raise ConfigError("there are no questions to score: give at least one")
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, logprobs=NUM_RIVALS if with_rivals else None
    )
    prompts = [list(task.prompt) for task in tasks]
    started = time.perf_counter()
    outputs = llm.generate(prompts, [params.replace(stop=task.stop) for task in tasks])
    seconds = time.perf_counter() - started
    spec = llm.config.spec
    return Result(
        mode=llm.config.graph.mode,
        drafter=None if spec is None else spec.method,
        answers=tuple(
            _answer(output.outputs[0], task) for output, task in zip(outputs, tasks, strict=True)
        ),
        loglikelihoods=_solution_loglikelihoods(llm, tasks),
        num_solution_tokens=tuple(len(task.solution) for task in tasks),
        counts=SpecCounts.sum(outputs, llm.config.schedule.num_drafts),
        seconds=seconds,
    )


def _answer(output: CompletionOutput, task: Task) -> Answer:
    number = find_number(output.text)
    rivals = tuple(
        {token: entry.logprob for token, entry in scores.items()}
        for scores in output.logprobs or ()
    )
    return Answer(
        token_ids=tuple(output.token_ids),
        text=output.text,
        number=number,
        correct=number == task.answer,
        rivals=rivals,
        cut=output.finish_reason == "length",
    )


def _solution_loglikelihoods(llm: LLM, tasks: Sequence[Task]) -> tuple[float, ...]:
    """Return the log-likelihood of each reference solution after its question."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([[*task.prompt, *task.solution] for task in tasks], params)
    return tuple(_loglikelihood(each, task) for each, task in zip(outputs, tasks, strict=True))


def _loglikelihood(output: RequestOutput, task: Task) -> float:
    assert output.prompt_logprobs is not None
    scores = output.prompt_logprobs[len(task.prompt) :]
    return math.fsum(
        entry[token].logprob
        for token, entry in zip(task.solution, scores, strict=True)
        if entry is not None  # the first token of an empty prompt
    )


# ---- comparing ----


def compare(result: Result, baseline: Result) -> Comparison:
    """Compare two results for the same questions."""
    pairs = list(zip(baseline.answers, result.answers, strict=True))
    changes = [
        abs(after - before) / max(count, 1)
        for before, after, count in zip(
            baseline.loglikelihoods,
            result.loglikelihoods,
            baseline.num_solution_tokens,
            strict=True,
        )
    ]
    return Comparison(
        num_answers=len(pairs),
        differences=tuple(
            _difference(number, expected, found)
            for number, (expected, found) in enumerate(pairs)
            if expected.token_ids != found.token_ids
        ),
        correct_change=result.num_correct - baseline.num_correct,
        loglikelihood_change=math.nan if any(map(math.isnan, changes)) else max(changes, default=0),
    )


def _difference(number: int, expected: Answer, found: Answer) -> Difference:
    ours, theirs = expected.token_ids, found.token_ids
    shorter = min(len(ours), len(theirs))
    position = next((n for n in range(shorter) if ours[n] != theirs[n]), shorter)
    wanted = ours[position] if position < len(ours) else None
    other = theirs[position] if position < len(theirs) else None
    if wanted is None or other is None or position >= len(expected.rivals):
        return Difference(number, position, wanted, other, None)
    rivals = expected.rivals[position]
    lowest = min(rivals.values())
    gap = rivals.get(wanted, lowest) - rivals.get(other, lowest)
    return Difference(number, position, wanted, other, gap, other not in rivals)


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None


# ---- several engines ----


@dataclass(frozen=True)
class EngineChoice:
    """A graph mode, with or without the drafter."""

    mode: str
    drafted: bool


BASELINE = EngineChoice("none", drafted=False)
Start = Callable[[EngineChoice], LLM]


@dataclass(frozen=True)
class Row:
    """One engine's result beside the baseline's."""

    asked: EngineChoice
    result: Result
    comparison: Comparison

    def as_record(self) -> dict[str, Any]:
        asked = {"asked_mode": self.asked.mode}
        return {**asked, **self.result.as_record(), **self.comparison.as_record()}


@dataclass(frozen=True)
class AccuracyReport:
    """The results of all engines; the first is the baseline."""

    config: Config  # of the baseline
    rows: list[Row]
    max_tokens: int

    @property
    def same(self) -> bool:
        return all(row.comparison.same for row in self.rows)


def measure_accuracy(
    start: Start,
    choices: Sequence[EngineChoice],
    name: str,
    tasks: Sequence[Task],
    max_tokens: int,
    say: Say,
) -> AccuracyReport:
    """Score the baseline, then every other engine, one after another. name: of the questions"""
    others = [choice for choice in dict.fromkeys(choices) if choice != BASELINE]
    longest = max(len(task.prompt) + len(task.solution) for task in tasks)
    rows: list[Row] = []
    config = None
    for number, choice in enumerate([BASELINE, *others], start=1):
        llm = start(choice)
        config = config or llm.config
        check_room(llm.config, name, longest, "a question with its solution")
        result = score(llm, tasks, max_tokens, with_rivals=choice == BASELINE)
        rows.append(Row(choice, result, compare(result, rows[0].result if rows else result)))
        say(f"engine {number} of {len(others) + 1}: {_summary(rows[-1])}")
        del llm  # frees its memory for the next engine
    assert config is not None
    return AccuracyReport(config, rows, max_tokens)


def _summary(row: Row) -> str:
    result, total = row.result, len(row.result.answers)
    return (
        f"{result.mode}, {result.drafter or 'plain'}, {result.num_correct} of {total} correct, "
        f"{row.comparison.num_equal} of {total} as eager, {result.num_tokens} tokens in "
        f"{result.seconds:.1f} s"
    )
