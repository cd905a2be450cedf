"""A row of the harm table: what two engines did, and whether that is the harm the bug declares."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stoop.bench.harm_bugs import Bug, Measure
from stoop.check.mutants.base import is_stray

# By which share acceptance must fall, and the step time at the larger limit must rise.
LEAST_FALL, LEAST_RISE = 0.05, 1.5
# The largest gap that rounding explains, on devices where sums depend on the batch.
ROUNDING = {"float64": 1e-6, "float32": 1e-2, "bfloat16": 0.5, "float16": 0.1}


@dataclass(frozen=True)
class Outcome:
    """What an engine did. Fields are None where it failed or its workload does not have them."""

    error: str | None = None
    stale: str | None = None  # the buffer that the sanitizer named
    num_answers: int | None = None
    num_equal: int | None = None  # answers of the eager engine
    first_position: int | None = None  # at which any answer differs
    largest_gap: float | None = None
    num_correct: int | None = None
    loglikelihood: float | None = None  # of a token of the reference solutions
    same: bool | None = None  # answers, score and likelihoods
    tokens_per_step: float | None = None
    acceptance: tuple[float, ...] = ()  # by position
    figures: dict[str, float] = field(default_factory=dict)  # timings and counts, by name

    def as_record(self) -> dict[str, Any]:
        record = {name: getattr(self, name) for name in self.__dataclass_fields__}
        finite = self.loglikelihood is None or math.isfinite(self.loglikelihood)
        # JSON has no NaN.
        return record | {
            "loglikelihood": self.loglikelihood if finite else None,
            "acceptance": list(self.acceptance),
        }


@dataclass(frozen=True)
class HarmRow:
    """A bug: the healthy engine and the broken one."""

    bug: Bug
    healthy: Outcome
    broken: Outcome
    exact: bool
    dtype: str

    def problems(self) -> list[str]:
        """Why the healthy engine is not healthy, or the bug does not do the harm it declares."""
        return [each for each in (self._sickness(), self._missing_harm()) if each is not None]

    def _sickness(self) -> str | None:
        healthy = self.healthy
        if healthy.error is not None:
            return f"the healthy engine fails: {healthy.error}"
        if self.exact and healthy.same is False:
            return f"the healthy engine differs from eager: {_equal(healthy)} answers are equal"
        gap = healthy.largest_gap
        if not self.exact and gap is not None and gap > ROUNDING[self.dtype]:
            return f"the healthy engine differs from eager by a gap of {gap:.3g}: not by rounding"
        if healthy.loglikelihood is not None and not math.isfinite(healthy.loglikelihood):
            return f"the healthy engine's log-likelihood is {healthy.loglikelihood}"
        return None

    @property
    def harmful(self) -> bool:
        """Whether the bug does the harm that it declares."""
        return not is_stray(self.broken.error) and _HARM[self.bug.measure](self)

    def _missing_harm(self) -> str | None:
        if is_stray(self.broken.error):
            return f"the mutant no longer fits the code: {self.broken.error}"
        return None if self.harmful else f"the bug does not show as {self.bug.measure.value!r}"

    def as_record(self) -> dict[str, Any]:
        mutant = self.bug.mutant
        return {
            "report": self.bug.report,
            "bug": self.bug.name,
            "mode": mutant.mode,
            "backend": mutant.backend,
            "measure": self.bug.measure.value,
            "healthy": self.healthy.as_record(),
            "broken": self.broken.as_record(),
            "problems": self.problems(),
        }


def _equal(outcome: Outcome) -> str:
    return f"{outcome.num_equal} of {outcome.num_answers}"


# ---- the harm that a bug declares ----


def _answers_change(row: HarmRow) -> bool:
    """More than in the healthy engine, which rounding may change; an error gives no answers."""
    broken, healthy = row.broken, row.healthy
    if broken.error is not None:
        return True
    return None not in (broken.num_equal, healthy.num_equal) and (
        (broken.num_equal or 0) < (healthy.num_equal or 0)
    )


def _fewer_drafts(row: HarmRow) -> bool:
    """Drafts cost acceptance; the answers stay those of the target."""
    healthy, broken = row.healthy.tokens_per_step, row.broken.tokens_per_step
    if healthy is None or broken is None:
        return False
    kept = not row.exact or row.broken.num_equal == row.broken.num_answers
    return kept and broken < healthy * (1 - LEAST_FALL)


def _refused(row: HarmRow) -> bool:
    refusal = row.bug.mutant.refusal
    return refusal is not None and refusal in (row.broken.error or "")


def _built_twice(row: HarmRow) -> bool:
    builds = "builds a step"
    return row.healthy.figures.get(builds) == 1 and row.broken.figures.get(builds) == 2


def _named(row: HarmRow) -> bool:
    """By the sanitizer; an index that it has poisoned may fail before it is named."""
    wanted = row.bug.mutant.buffer
    if wanted is None:
        return row.bug.sanitize and row.broken.error is not None
    return row.broken.stale == wanted


def _slower(row: HarmRow) -> bool:
    healthy, broken = _growth(row.healthy), _growth(row.broken)
    return healthy is not None and broken is not None and broken > LEAST_RISE * healthy


def _growth(outcome: Outcome) -> float | None:
    """The step time at the larger limit by that at the smaller one."""
    times = [value for name, value in outcome.figures.items() if name.startswith("ms a step")]
    return times[1] / times[0] if len(times) == 2 else None


_HARM: dict[Measure, Callable[[HarmRow], bool]] = {
    Measure.ANSWERS: _answers_change,
    Measure.DRAFTS: _fewer_drafts,
    Measure.ERROR: lambda row: row.broken.error is not None,
    Measure.DRAFTS_OR_ERROR: lambda row: row.broken.error is not None or _fewer_drafts(row),
    Measure.REFUSED: _refused,
    Measure.STALE: _named,
    Measure.BUILDS: _built_twice,
    Measure.TIME: _slower,
    Measure.NONE: lambda row: row.broken.error is None and not _slower(row),
}
