"""The speedup of speculation with toy heads that are always right or always wrong."""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stoop.bench.offline import Load, run
from stoop.checkpoint import toy
from stoop.llm import LLM

Start = Callable[[str, dict[str, Any]], LLM]


@dataclass(frozen=True)
class SpecResult:
    """The result for one head and K."""

    drafter: str  # none, right or useless
    num_drafts: int
    tokens_per_s: float
    tokens_per_step: float
    speedup: float  # over plain decoding in the same run

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


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
        speeds: dict[tuple[str, int], list[float]] = {key: [] for key in llms}
        for turn in range(repeat + 1):
            for key, llm in llms.items():
                speed = run(llm, load).tokens_per_s
                if turn:  # the first round warms up
                    speeds[key].append(speed)
        median = {key: statistics.median(each) for key, each in speeds.items()}
        return [
            SpecResult(
                drafter=name,
                num_drafts=num_drafts,
                tokens_per_s=median[name, num_drafts],
                tokens_per_step=llm.metrics()["spec_decode_mean_acceptance_length"],
                speedup=median[name, num_drafts] / median["none", 0],
            )
            for (name, num_drafts), llm in llms.items()
        ]


def _start_all(
    root: Path, draft_counts: Sequence[int], num_layers: int, options: dict[str, Any], start: Start
) -> dict[tuple[str, int], LLM]:
    target = str(toy.write_target(root / "target", num_layers))
    right = toy.write_head(root / "right", "eagle3")
    # A head that knows only one token is almost always wrong.
    useless = toy.write_head(root / "useless", "eagle3", knows=frozenset({0}))
    llms = {("none", 0): start(target, options)}
    for name, head in (("right", right), ("useless", useless)):
        for num_drafts in draft_counts:
            spec = {"method": "eagle3", "model": str(head), "adaptive": False}
            spec["num_speculative_tokens"] = num_drafts
            llms[name, num_drafts] = start(target, {**options, "speculative_config": spec})
    return llms
