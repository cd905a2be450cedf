"""Runs mutants on tiny engines, and says what caught each."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch

from stoop.check.graphs import TINY, TINY_CONFIGS
from stoop.check.mutants import drafts, graphs, hybrid, pieces, planned, prefill
from stoop.check.mutants.base import Mutant, Patch, applied, is_stray
from stoop.check.steps import watch_steps
from stoop.check.workloads import (
    DRAFT_SETTINGS,
    TARGET_SETTINGS,
    Trace,
    answer_arrivals,
    answer_batches,
)
from stoop.checkpoint import toy
from stoop.config.backends import serving_backends
from stoop.config.errors import ConfigError
from stoop.core.report import Report
from stoop.graph.sanitizer import SanitizerError
from stoop.llm import LLM

DRAFT_MUTANTS = (*prefill.MUTANTS, *drafts.MUTANTS, *pieces.MUTANTS, *planned.MUTANTS)
MUTANTS = (*graphs.MUTANTS, *DRAFT_MUTANTS, *hybrid.MUTANTS)
# How strongly attention perturbs a head named "noisy": its drafts are right or wrong depending on
# its KV. One named "right" always is.
HEAD_NOISE = {"eagle": 0.15, "eagle3": 0.0008}
# Of hybrids: it finds drafts in most texts, and many are wrong.
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2}
MIN_LIKENESS = 0.7  # of a mistyped name


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    error: Exception | None = None
    differs: str | None = None  # from eager steps without the bug
    min_builds: int = 0  # of the target's metadata: the fewest in any step
    max_builds: int = 0  # the most

    @property
    def failed(self) -> bool:
        return self.error is not None or self.differs is not None


@dataclass(frozen=True)
class Finding:
    """What a mutant did, without the sanitizer and with it."""

    mutant: Mutant
    plain: Outcome
    watched: Outcome
    exact: bool  # in float64: whether equality tells a bug from rounding

    @property
    def buffer(self) -> str | None:
        """The buffer that the sanitizer named."""
        return getattr(self.watched.error, "buffer", None)

    @property
    def cells(self) -> tuple[str, str]:
        """What caught it, as in `Mutant.cells`."""
        if self.mutant.refusal is not None and self.plain.error is not None:
            return "refused", "refused"
        equality = ("yes" if self.plain.failed else "no") if self.exact else "-"
        sanitizer = "no, but built twice" if self.plain.max_builds == 2 else "no"
        if self.watched.error is not None:
            sanitizer = f"`{self.buffer}`" if self.buffer is not None else "yes"
        return equality, sanitizer

    def problems(self) -> list[str]:
        """What is not as the mutant declares."""
        mutant, found = self.mutant, []
        for error in (self.plain.error, self.watched.error):
            if is_stray(type(error).__name__):
                found.append(f"the mutant no longer fits the code: {error!r}")
        if self.exact and self.plain.failed != mutant.by_equality:
            found.append(_wrongly("equality", self.plain.failed, self.plain))
        if (self.watched.error is not None) != mutant.by_sanitizer:
            found.append(_wrongly("the sanitizer", not mutant.by_sanitizer, self.watched))
        if mutant.buffer is not None and not self._names(mutant.buffer):
            found.append(f"the sanitizer does not name `{mutant.buffer}`: {self.watched.error!r}")
        for error in (self.plain.error, self.watched.error):
            if mutant.refusal is not None and mutant.refusal not in str(error):
                found.append(f"not refused with {mutant.refusal!r}: {error!r}")
        if not self.plain.failed and (self.plain.max_builds > 1) != mutant.by_builds:
            found.append(f"{self.plain.max_builds} builds of the target's metadata in a step")
        return found

    def record(self) -> dict[str, Any]:
        """For JSON."""
        mutant = self.mutant
        equality, sanitizer = self.cells
        return {
            "mutant": mutant.name,
            "drafts": mutant.part == "draft",
            "model": mutant.model,
            "mode": mutant.mode,
            "backend": mutant.backend,
            "mechanism": mutant.mechanism,
            "report": mutant.report,
            "equality": equality,
            "sanitizer": sanitizer,
            "builds": self.plain.max_builds,
            "messages": [str(o.error or o.differs) for o in (self.plain, self.watched) if o.failed],
        }

    def _names(self, buffer: str) -> bool:
        error = self.watched.error
        named = isinstance(error, SanitizerError) and self.buffer == buffer
        return named and f"`{buffer}`" in str(error)


def _wrongly(how: str, caught: bool, outcome: Outcome) -> str:
    reason = repr(outcome.error) if outcome.error is not None else outcome.differs
    return f"caught by {how}, which it should not be: {reason}" if caught else f"missed by {how}"


class TinyEngines:
    """Tiny models and heads, made in a folder on first use, and engines of them."""

    def __init__(self, root: Path, device: str = "cpu") -> None:
        self.root = root
        self.device = device
        self.exact = device == "cpu"  # in lower precision, a logit's last bits depend on the batch
        self._expected: dict[tuple[str | None, str | None, int], Trace] = {}

    def expected(self, mutant: Mutant) -> Trace:
        """What eager steps do without the bug."""
        key = (mutant.model, mutant.drafter, mutant.num_drafts)
        if key not in self._expected:
            options = {"graph_mode": "none", "attention_backend": "reference"}
            self._expected[key] = self._answer(self._make(mutant, **options), mutant)
        return self._expected[key]

    def run(self, mutant: Mutant, *, sanitize: bool) -> Outcome:
        """Run the workload with the engine as it is now; see `applied`."""
        expected = self.expected(mutant)
        options = {"graph_mode": mutant.mode, "attention_backend": mutant.backend}
        try:
            llm = self._make(mutant, sanitize=sanitize, **options)
            with watch_steps(llm) as steps:
                trace = self._answer(llm, mutant)
        except Exception as error:  # a stale graph may fail in any way
            return Outcome(error)
        differs = None
        if trace.answers != expected.answers:
            differs = "other answers"
        elif trace.drafts != expected.drafts:
            differs = "other drafts"
        builds = [step.target_builds for step in steps]
        return Outcome(None, differs, min(builds), max(builds))

    def _make(self, mutant: Mutant, **options: Any) -> LLM:
        settings = DRAFT_SETTINGS if mutant.drafter else TARGET_SETTINGS
        options = {**settings, "skip_tokenizer_init": True, "device": self.device, **options}
        options["dtype"] = "float64" if self.exact else "float32"  # kernels have no float64
        if options["graph_mode"] == "none":
            del options["capture_sizes"]
        if mutant.model is not None:
            options["speculative_config"] = NGRAM | {"num_speculative_tokens": mutant.num_drafts}
            return LLM(self._tiny(mutant.model), load_format="dummy", **options)
        if mutant.drafter is None:
            return LLM(self._tiny(TINY), load_format="dummy", speculative_config=None, **options)
        options["speculative_config"] = {
            "method": mutant.drafter.partition("-")[0],
            "model": self._head(mutant.drafter),
            "num_speculative_tokens": mutant.num_drafts,
            "adaptive": False,  # a toy's drafts may not pay
        }
        return LLM(self._toy(), **options)

    def _answer(self, llm: LLM, mutant: Mutant) -> Trace:
        if mutant.drafter is not None:
            return answer_arrivals(llm, mutant.num_drafts, toy.SIZE)
        return Trace([list(answer.token_ids) for answer in answer_batches(llm)])

    def _tiny(self, name: str) -> str:
        folder = self.root / name
        if not folder.exists():
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps(TINY_CONFIGS[name]))
        return str(folder)

    def _toy(self) -> str:
        folder = self.root / "toy"
        return str(folder if folder.exists() else toy.write_target(folder))

    def _head(self, name: str) -> str:
        folder = self.root / name
        method, _, quality = name.partition("-")
        noise = HEAD_NOISE[method] if quality == "noisy" else 0.0
        return str(folder if folder.exists() else toy.write_head(folder, method, noise=noise))


def choose_mutants(only: str, device: str) -> tuple[list[Mutant], str]:
    """The mutants that run on a device and have `only` in their label or report number.

    The second value says how many others have it too and why they do not run; "" for none.
    """
    asked = [
        mutant
        for mutant in (_placed(mutant, device) for mutant in MUTANTS)
        if only.lower() in f"{mutant.report or ''} {mutant.label}".lower()
    ]
    if not asked:
        close = _close_names(only)
        advice = f"did you mean {' or '.join(close)}?" if close else "leave it out to see them all"
        raise ConfigError(f"--only {only!r} is in no mutant's name or report number: {advice}")
    if device == "cpu":
        serving = serving_backends("cpu", "float64", [toy.SIZE // toy.HEADS])
        chosen = [mutant for mutant in asked if mutant.backend in serving]
    else:
        chosen = [mutant for mutant in asked if mutant.any_backend]
    left_out = _describe_left_out([mutant for mutant in asked if mutant not in chosen], device)
    if not chosen:
        raise ConfigError(
            f"--only {only!r}: none of these mutants runs on {device} ({left_out}): use another"
        )
    return chosen, left_out


def _placed(mutant: Mutant, device: str) -> Mutant:
    """The mutant with the backend that it has on a device."""
    return replace(mutant, backend="triton") if device != "cpu" and mutant.any_backend else mutant


def _describe_left_out(mutants: Sequence[Mutant], device: str) -> str:
    if not mutants:
        return ""
    one = len(mutants) == 1
    if device != "cpu":
        return f"{len(mutants)} left out: {'does' if one else 'do'} not run on {device}"
    backends = ", ".join(sorted({mutant.backend for mutant in mutants}))
    needs = "needs" if one else "need"
    return f"{len(mutants)} left out: {needs} {backends}, which does not run on {device}"


def _close_names(only: str) -> list[str]:
    """At most three names with words like those of `only`."""
    wanted = only.lower()
    count = len(wanted.split())

    def likeness(name: str) -> float:
        words = name.lower().split()
        parts = (words[n : n + count] for n in range(max(len(words) - count + 1, 1)))
        return max(SequenceMatcher(None, wanted, " ".join(part)).ratio() for part in parts)

    scores = {mutant.name: likeness(mutant.name) for mutant in MUTANTS}
    best = sorted(scores, key=lambda name: -scores[name])[:3]
    return [name for name in best if scores[name] >= MIN_LIKENESS]


def healthy(mutant: Mutant) -> Mutant:
    """The same engine without a bug: nothing may be caught."""
    return Mutant(
        "no bug",
        _change_nothing,
        mutant.mode,
        mutant.backend,
        by_sanitizer=False,
        by_equality=False,
        drafter=mutant.drafter,
        num_drafts=mutant.num_drafts,
        model=mutant.model,
    )


def _change_nothing(patch: Patch) -> None:
    pass


def run_mutants(mutants: Sequence[Mutant], device: str, report: Report) -> Iterator[Finding]:
    """Yield findings: of healthy engines with the options of each mutant first."""
    torch.set_num_threads(1)  # more threads only slow down such small models
    controls = dict.fromkeys(healthy(mutant) for mutant in mutants)
    every = [*controls, *mutants]
    count = "1 mutant" if len(mutants) == 1 else f"{len(mutants)} mutants"
    with tempfile.TemporaryDirectory() as root:
        engines = TinyEngines(Path(root), device)
        for done, mutant in enumerate(every):
            report(f"running {count}", done, len(every))
            yield run_mutant(mutant, engines)


def run_mutant(mutant: Mutant, engines: TinyEngines) -> Finding:
    """Run a mutant without and with the sanitizer."""
    engines.expected(mutant)
    with applied(mutant):
        plain = engines.run(mutant, sanitize=False)
        watched = engines.run(mutant, sanitize=True)
    return Finding(mutant, plain, watched, engines.exact)
