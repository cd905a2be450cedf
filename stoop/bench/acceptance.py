"""Measures draft acceptance and speedup for several K while a model answers questions.

Speed needs an engine per K. Acceptance does not: a request may ask for fewer drafts than its
engine's maximum, so one engine measures every K that is not timed, in larger batches. Engines run
one after another, since each may take most of the device's memory.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoop.bench.questions import Prompts, check_room
from stoop.config.schema import Config
from stoop.core.outputs import DecodeSteps, SpecCounts
from stoop.core.sampling_params import SamplingParams
from stoop.llm import LLM

WARM_TOKENS = 16

StartWith = Callable[[int, int], LLM]  # num_drafts (0: plain decoding), max_num_seqs
Say = Callable[[str], None]


@dataclass(frozen=True)
class AcceptanceSettings:
    """What to measure; draft counts are values of K."""

    draft_counts: tuple[int, ...]  # measure acceptance
    timed_counts: tuple[int, ...]  # measure acceptance and speed
    temperatures: tuple[float, ...]
    max_tokens: int  # per answer
    batch_size: int  # concurrent requests when measuring speed
    acceptance_batch: int  # concurrent requests otherwise

    @property
    def untimed_counts(self) -> list[int]:
        return [count for count in self.draft_counts if count not in self.timed_counts]

    def params(
        self, temperature: float, number: int, num_drafts: int | None = None
    ) -> SamplingParams:
        """Return the sampling parameters of a question, whose number is the seed."""
        return SamplingParams(
            temperature=temperature,
            max_tokens=self.max_tokens,
            seed=number,
            num_speculative_tokens=num_drafts,
        )


@dataclass(frozen=True)
class Run:
    """The answers to all questions of a file."""

    counts: SpecCounts  # with one position per requested draft
    steps: DecodeSteps
    num_answers: int
    num_tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class Row:
    """The result for a file, temperature and K."""

    questions: str
    temperature: float
    num_drafts: int
    run: Run
    plain: Run | None  # without drafts; None if no speed is measured
    timed: bool

    def as_record(self) -> dict[str, Any]:
        speed = self.run.tokens_per_s if self.timed else None
        plain = self.plain.tokens_per_s if self.plain else None
        return {
            "questions": self.questions,
            "temperature": self.temperature,
            "k": self.num_drafts,
            "num_answers": self.run.num_answers,
            "num_tokens": self.run.num_tokens,
            "num_drafts": self.run.counts.num_drafts,  # steps that verified drafts
            "acceptance_rates": self.run.counts.acceptance_rates,
            "mean_acceptance_length": self.run.counts.mean_acceptance_length,
            "tokens_per_step": self.run.steps.tokens_per_step,
            "share_with_drafts": self.run.steps.share_with_drafts,
            "tokens_per_s": speed,
            "plain_tokens_per_s": plain,
            "speedup": speed / plain if speed and plain else None,
        }


@dataclass(frozen=True)
class AcceptanceReport:
    """The results for all files, temperatures and K."""

    settings: AcceptanceSettings
    config: Config  # of the first engine
    rows: list[Row]


def measure_acceptance(
    start: StartWith, questions: Prompts, settings: AcceptanceSettings, say: Say
) -> AcceptanceReport:
    """Measure all settings, one engine after another."""
    # Engines with drafters first, so that one that does not fit fails before any measurement.
    engines = [(count, settings.batch_size, [count]) for count in settings.timed_counts]
    if settings.untimed_counts:
        engines.append(
            (max(settings.untimed_counts), settings.acceptance_batch, settings.untimed_counts)
        )
    if settings.timed_counts:
        engines.append((0, settings.batch_size, [0]))
    runs: dict[tuple[str, float, int], Run] = {}
    config = None
    for number, (max_drafts, batch, counts) in enumerate(engines, start=1):
        llm = start(max_drafts, batch)
        config = config or llm.config
        for name, prompts in questions.items():
            check_room(llm.config, name, max(map(len, prompts)))
        _warm_up(llm, questions, settings)
        for place in itertools.product(questions, settings.temperatures, counts):
            runs[place] = _ask(llm, questions[place[0]], settings, *place[1:])
            say(f"engine {number} of {len(engines)}: {_summary(place, runs[place])}")
        del llm  # frees its memory for the next engine
    assert config is not None
    rows = [
        Row(name, t, k, runs[name, t, k], runs.get((name, t, 0)), k in settings.timed_counts)
        for name in questions
        for t in settings.temperatures
        for k in sorted({*settings.draft_counts, *settings.timed_counts})
    ]
    return AcceptanceReport(settings, config, rows)


def _ask(
    llm: LLM,
    prompts: Sequence[list[int]],
    settings: AcceptanceSettings,
    temperature: float,
    num_drafts: int,
) -> Run:
    params = [settings.params(temperature, number, num_drafts) for number in range(len(prompts))]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - started
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    counts, steps = SpecCounts.sum(outputs, num_drafts), DecodeSteps.of(outputs)
    return Run(counts, steps, len(outputs), num_tokens, seconds)


def _warm_up(llm: LLM, questions: Prompts, settings: AcceptanceSettings) -> None:
    prompts = next(iter(questions.values()))[: llm.config.schedule.max_num_seqs]
    for temperature in settings.temperatures:
        params = settings.params(temperature, 0).replace(max_tokens=WARM_TOKENS)
        llm.generate(prompts, params, use_tqdm=False)


def _summary(place: tuple[str, float, int], run: Run) -> str:
    name, temperature, num_drafts = place
    length = run.steps.tokens_per_step or 1
    kind = f"K = {num_drafts}, {length:.2f} tokens per step" if num_drafts else "plain"
    return (
        f"{Path(name).stem}, temperature {temperature:g}, {kind}, {run.num_tokens} tokens in "
        f"{run.seconds:.1f} s"
    )
