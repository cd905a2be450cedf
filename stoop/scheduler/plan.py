"""A step's plan while the scheduler makes it, and what it has counted."""

from dataclasses import dataclass, field

from stoop.core.outputs import SpecCounts
from stoop.core.request import Request


@dataclass
class SchedulerStats:
    """Counters since the start."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    spec: SpecCounts = field(default_factory=SpecCounts)


class PlanBuilder:
    """Collects a step's plan. A preemption may remove rows again."""

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens that the step may still compute
        self.num_scheduled: dict[Request, int] = {}
        self.admitted: dict[Request, None] = {}
        self.appended: dict[Request, int] = {}  # number of blocks that it held before this step
        self.preempted = False

    def add(self, request: Request, num_tokens: int) -> None:
        self.num_scheduled[request] = num_tokens
        self.budget -= num_tokens

    def remove(self, request: Request) -> None:
        self.budget += self.num_scheduled.pop(request, 0)
        self.admitted.pop(request, None)
        self.appended.pop(request, None)
