"""The speedup of speculation with toy heads that are always right or always wrong.

Each K is made in every step. Where the number of drafts can vary, an engine that chooses it, up to
the largest K, runs beside them with each head.
"""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from stoop.bench.offline import Load, run
from stoop.bench.step_drafts import StepDrafts
from stoop.checkpoint import toy
from stoop.core.outputs import DecodeSteps
from stoop.engine.choose_drafter import may_vary
from stoop.llm import LLM

Start = Callable[[str, dict[str, Any]], LLM]


class Drafting(NamedTuple):
    """What an engine drafts."""

    drafter: str  # none, right or useless
    num_drafts: int  # the most, if it varies
    adaptive: bool = False


PLAIN = Drafting("none", 0)


@dataclass(frozen=True)
class Turn:
    """One run of an engine."""

    tokens_per_s: float
    steps: DecodeSteps
    made: StepDrafts


@dataclass(frozen=True)
class SpecResult:
    """The result for one head and K."""

    drafting: Drafting
    tokens_per_s: float
    steps: DecodeSteps  # of all runs
    made: StepDrafts
    speedup: float  # over plain decoding in the same run

    def as_record(self) -> dict[str, Any]:
        return {
            **self.drafting._asdict(),
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_step": self.steps.tokens_per_step,
            "share_with_drafts": self.steps.share_with_drafts,
            **self.made.as_record(),
            "speedup": self.speedup,
        }


def measure_drafts(
    draft_counts: Sequence[int],
    load: Load,
    num_layers: int,
    options: dict[str, Any],
    repeat: int,
    start: Start,
) -> list[SpecResult]:
    """Measure plain decoding and every K with both heads, in alternating runs."""
    with tempfile.TemporaryDirectory() as root:
        llms = _start_all(Path(root), draft_counts, num_layers, options, start)
        turns: dict[Drafting, list[Turn]] = {key: [] for key in llms}
        for number in range(repeat + 1):
            for key, llm in llms.items():
                turn = _take_turn(llm, load)
                if number:  # the first round warms up
                    turns[key].append(turn)
    median = {key: statistics.median(t.tokens_per_s for t in each) for key, each in turns.items()}
    return [
        SpecResult(
            drafting=key,
            tokens_per_s=median[key],
            steps=DecodeSteps.sum(turn.steps for turn in each),
            made=StepDrafts.sum(turn.made for turn in each),
            speedup=median[key] / median[PLAIN],
        )
        for key, each in turns.items()
    ]


def _take_turn(llm: LLM, load: Load) -> Turn:
    before = StepDrafts.until_now(llm.metrics())
    found = run(llm, load)
    made = StepDrafts.until_now(llm.metrics()).since(before)
    return Turn(found.tokens_per_s, found.steps, made)


def _start_all(
    root: Path, draft_counts: Sequence[int], num_layers: int, options: dict[str, Any], start: Start
) -> dict[Drafting, LLM]:
    target = str(toy.write_target(root / "target", num_layers))
    right = toy.write_head(root / "right", "eagle3")
    # A head that knows only one token is almost always wrong.
    useless = toy.write_head(root / "useless", "eagle3", knows=frozenset({0}))
    plain = start(target, options)
    config = plain.config
    chosen = [(num_drafts, False) for num_drafts in draft_counts]
    if may_vary(config.graph.mode, config.device.device, config.schedule.run_ahead):
        chosen.append((max(draft_counts), True))
    llms = {PLAIN: plain}
    for name, head in (("right", right), ("useless", useless)):
        for num_drafts, adaptive in chosen:
            spec = {"method": "eagle3", "model": str(head), "adaptive": adaptive}
            spec["num_speculative_tokens"] = num_drafts
            llm = start(target, {**options, "speculative_config": spec})
            llms[Drafting(name, num_drafts, adaptive)] = llm
    return llms
