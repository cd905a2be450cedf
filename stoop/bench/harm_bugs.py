"""The bugs of the harm table: each with the engine that it breaks and the harm that it must do."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from stoop.check.mutants.base import Mutant
from stoop.check.mutants.graphs import pass_max_model_len_anywhere
from stoop.check.mutants.harness import MUTANTS
from stoop.config.errors import ConfigError

REPORTS = (40410, 38311, 39773, 42444, 43991)  # pull requests of vLLM that mended these bugs


class Measure(StrEnum):
    """The harm that a bug declares; without it the command fails."""

    ANSWERS = "answers change"
    DRAFTS = "fewer drafts accepted"
    ERROR = "an error"
    DRAFTS_OR_ERROR = "fewer drafts accepted, or an error"
    REFUSED = "refused"
    STALE = "a stale read"  # named by the sanitizer
    BUILDS = "built twice"
    TIME = "slower steps"
    NONE = "no harm"


class Workload(StrEnum):
    """What an engine is given to do."""

    QUESTIONS = "questions"  # all of them are answered and scored
    FEW = "few"  # four questions, and one of them ends at its first token
    FIRST_TOKENS = "first tokens"  # timed with and without the bug in one engine; then questions
    LIMITS = "limits"  # a short request, timed at two values of max_model_len


@dataclass(frozen=True)
class Bug:
    """A mutant, what the broken engine does, and the harm to expect."""

    mutant: Mutant
    measure: Measure
    workload: Workload = Workload.QUESTIONS
    sanitize: bool = False
    most_drafts: int | None = None  # a step, where the bug shows only with few

    @property
    def report(self) -> int:
        assert self.mutant.report is not None
        return self.mutant.report

    @property
    def name(self) -> str:
        drafts = ", in draft decodes" if self._is_twin_in_drafts else ""
        return f"{self.mutant.name}{drafts}{', sanitized' if self.sanitize else ''}"

    @property
    def label(self) -> str:
        return f"{self.name} ({self.mutant.mode}, {self.mutant.backend})"

    @property
    def drafts(self) -> bool:
        """Whether its engine drafts: a bug in the target's graphs is shown without drafts."""
        return self.mutant.drafter is not None

    @property
    def _is_twin_in_drafts(self) -> bool:
        twins = [each for each in MUTANTS if each.name == self.mutant.name and not each.drafter]
        return self.drafts and bool(twins)


def _mutant(
    report: int, name: str, mode: str, backend: str = "reference", drafts: bool = True
) -> Mutant:
    """The mutant of this name in this mode; `backend` is the one that the table runs it with."""
    found = [
        each
        for each in MUTANTS
        if (each.report, each.name, each.mode) == (report, name, mode)
        and (each.drafter is not None) == drafts
        and (each.backend == backend or each.any_backend)
    ]
    assert found, (report, name, mode, backend)
    return replace(found[0], backend=backend)


_REBUILD = _mutant(40410, "metadata built again for prefill", "full", "hostplan")
_PRIVATE = "prefill with a private builder"
_UNGUARDED = f"{_PRIVATE}, unguarded"
_LENGTHS = "lengths of the capture"
_SHARED = "shared warm-up and capture state"
_LIMIT = _mutant(43991, "max_model_len at run time", "full", "hostplan", drafts=False)

CPU_BUGS = (
    Bug(_REBUILD, Measure.BUILDS, Workload.FIRST_TOKENS),
    Bug(_mutant(40410, _PRIVATE, "full", "hostplan"), Measure.REFUSED, Workload.FEW),
    Bug(_mutant(40410, _UNGUARDED, "full_decode_only", "hostplan"), Measure.DRAFTS),
    Bug(_mutant(38311, _LENGTHS, "full"), Measure.DRAFTS),
    Bug(_mutant(38311, _LENGTHS, "step"), Measure.DRAFTS),
    Bug(_mutant(39773, "last indices unpadded", "full"), Measure.ERROR, Workload.FEW),
    Bug(
        _mutant(39773, "draft decodes in pieces", "piecewise", "hostplan"),
        Measure.STALE,
        Workload.FEW,
        sanitize=True,
    ),
    Bug(_mutant(42444, _SHARED, "full", drafts=False), Measure.ANSWERS),
    Bug(_mutant(42444, _SHARED, "step", drafts=False), Measure.ANSWERS),
    # A third draft's decode would plan again inside the graph.
    Bug(_mutant(42444, _SHARED, "full"), Measure.DRAFTS, most_drafts=2),
    Bug(_LIMIT, Measure.TIME, Workload.LIMITS),
    Bug(
        _mutant(43991, "max_model_len at run time", "full", "hostplan"),
        Measure.STALE,
        Workload.FEW,
        sanitize=True,
    ),
)

_KEY = "prefill captured under another key"
_PLAN = "plan of draft decodes not refreshed"
_PADDING = "padding of draft decodes not planned"

# On a GPU only FlashInfer's draft decodes derive anything lazily (42444), and triton takes no bound
# (43991).
CUDA_BUGS = (
    Bug(replace(_REBUILD, backend="triton"), Measure.BUILDS, Workload.FIRST_TOKENS),
    Bug(_mutant(40410, _KEY, "full_decode_only", "triton"), Measure.REFUSED, Workload.FEW),
    Bug(_mutant(38311, _LENGTHS, "full", "triton"), Measure.DRAFTS),
    Bug(_mutant(38311, _LENGTHS, "step", "triton"), Measure.DRAFTS),
    Bug(
        replace(_LIMIT, apply=pass_max_model_len_anywhere, backend="triton"),
        Measure.NONE,
        Workload.LIMITS,
    ),
)
FLASHINFER_BUGS = (
    Bug(replace(_REBUILD, backend="flashinfer"), Measure.BUILDS, Workload.FIRST_TOKENS),
    Bug(_mutant(40410, _PRIVATE, "full", "flashinfer"), Measure.REFUSED, Workload.FEW),
    Bug(_mutant(38311, _PLAN, "full", "flashinfer"), Measure.DRAFTS_OR_ERROR),
    Bug(_mutant(38311, _PLAN, "step", "flashinfer"), Measure.DRAFTS_OR_ERROR),
    Bug(
        _mutant(39773, _PADDING, "full", "flashinfer"),
        Measure.STALE,
        Workload.FEW,
        sanitize=True,
    ),
    # The graph lacks the lengths that the first layer writes: keys up to the bounds are read.
    Bug(
        replace(_mutant(42444, _SHARED, "full"), backend="flashinfer", buffer=None),
        Measure.STALE,
        Workload.FEW,
        sanitize=True,
        most_drafts=2,
    ),
)
EVERY_BUG = (*CPU_BUGS, *CUDA_BUGS, *FLASHINFER_BUGS)


def choose_bugs(device: str, only: str = "", modes: Sequence[str] = ()) -> list[Bug]:
    """The bugs of a device, those of some modes or with `only` in the report's number or name."""
    bugs = list(CPU_BUGS)
    if device != "cpu":
        found = importlib.util.find_spec("flashinfer") is not None
        bugs = [*CUDA_BUGS, *(FLASHINFER_BUGS if found else ())]
    chosen = [
        bug
        for bug in sorted(bugs, key=lambda bug: REPORTS.index(bug.report))
        if only.lower() in f"{bug.report} {bug.label}".lower()
        and (not modes or bug.mutant.mode in modes)
    ]
    if not chosen:
        labels = ", ".join(f"{bug.report} {bug.label}" for bug in bugs)
        raise ConfigError(
            f"no bug is left: use other --modes, or a part of one as --only: {labels}"
        )
    return chosen
