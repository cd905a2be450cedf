"""Choose the number of drafts by chance, whatever it costs."""

import random
from collections.abc import Sequence
from typing import Any

from stoop.core.step import StepPlan, StepResult
from stoop.engine.step_costs import StepTime
from stoop.scheduler.scheduler import Scheduler


class RandomDrafts:
    """Holds a number for a few steps; now and then what the drafter lacks is computed again."""

    def __init__(self, counts: Sequence[int], seed: int, eager: bool = False) -> None:
        """eager: steps may verify fewer drafts than they make, as no graph holds both"""
        self.eager = eager
        self.counts = counts
        self.random = random.Random(seed)
        self.num_drafts = 0
        self.left = 0  # steps
        self.chosen: list[int] = []
        self.query_lens: set[int] = set()  # of steps in which all rows decode

    def choose(self, scheduler: Scheduler) -> None:
        if self.left == 0:
            self.left = self.random.choice((1, 1, 2, 5))
            self.num_drafts = self.random.choice(self.counts)
            lacking = any(each.num_drafter_kv is not None for each in scheduler.running)
            scheduler.redraft |= lacking and self.random.random() < 0.3
        self.left -= 1
        self.chosen.append(self.num_drafts)
        scheduler.keeps_drafter_kv = self.random.random() < 0.7
        scheduler.num_places = scheduler.num_drafts = self.num_drafts
        if self.eager:
            fewer = [count for count in self.counts if count <= self.num_drafts]
            scheduler.num_places = self.random.choice([*fewer, self.num_drafts, self.num_drafts])

    def note(self, plan: StepPlan, result: StepResult, time: StepTime) -> None:
        assert plan.num_drafts <= self.counts[-1] and len(result.rows) == len(plan.rows)
        if all(row.decodes for row in plan.rows):
            self.query_lens.add(plan.rows[0].num_tokens)

    def note_idle(self) -> None:
        pass

    def metrics(self) -> dict[str, Any]:
        return {}
