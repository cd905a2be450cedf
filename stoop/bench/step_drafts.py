"""How many drafts steps made, from an engine's counters before and after a run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepDrafts:
    """Steps by the number of drafts that was chosen for each request."""

    num_steps: Mapping[int, int] = field(default_factory=dict)
    num_not_made: int = 0  # drafts that decodes asked for, in steps that made fewer

    @staticmethod
    def until_now(metrics: Mapping[str, Any]) -> "StepDrafts":
        return StepDrafts(dict(metrics["num_steps_by_drafts"]), metrics["num_drafts_not_made"])

    def since(self, before: "StepDrafts") -> "StepDrafts":
        found = {k: count - before.num_steps.get(k, 0) for k, count in self.num_steps.items()}
        steps = {k: count for k, count in found.items() if count}
        return StepDrafts(steps, self.num_not_made - before.num_not_made)

    @staticmethod
    def sum(parts: "Iterable[StepDrafts]") -> "StepDrafts":
        steps, num_not_made = dict[int, int](), 0
        for part in parts:
            num_not_made += part.num_not_made
            for k, count in part.num_steps.items():
                steps[k] = steps.get(k, 0) + count
        return StepDrafts(steps, num_not_made)

    @property
    def shares(self) -> dict[int, float]:
        """Of the steps, by number of drafts; the largest number first."""
        total = sum(self.num_steps.values())
        return {k: self.num_steps[k] / total for k in sorted(self.num_steps, reverse=True)}

    def as_record(self) -> dict[str, Any]:
        return {"steps_by_drafts": self.shares, "num_drafts_not_made": self.num_not_made}


def shown_shares(shares: Mapping[int, float]) -> str:
    """One a line, so that a table fits into a terminal; "-" if no step made any."""
    entries = [f"{k}: {_percent(share)}" for k, share in shares.items()]
    return "\n".join(entries) if any(shares) else "-"


def _percent(share: float) -> str:
    return "<1%" if share < 0.005 else f"{share:.0%}"
