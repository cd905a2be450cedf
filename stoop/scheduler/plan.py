"""A step's plan while the scheduler makes it, what comes of its results, and what was counted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stoop.core.messages import Delta
from stoop.core.outputs import SpecCounts
from stoop.core.request import Request
from stoop.core.step import Admission, BlockAppend, PlannedRow, RowResult


@dataclass
class SchedulerStats:
    """Counters since the start."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_computed_again: int = 0  # requests, so that the drafter gets the KV it lacks
    num_finished: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    spec: SpecCounts = field(default_factory=SpecCounts)
    num_steps_by_drafts: dict[int, int] = field(default_factory=dict)  # chosen for each request
    num_drafts_not_made: int = 0  # for decodes, in steps that made fewer than these asked for
    _last: tuple[int, int] = (0, 0)  # of the last step: drafts made, and not made

    def add_step(
        self, rows: Sequence[PlannedRow], same_rows: bool, num_drafts: int, most: int
    ) -> None:
        """rows: decodes first, maybe the same as in the last step; most: drafts that any step may
        make"""
        self.num_steps += 1
        self.num_steps_by_drafts[num_drafts] = self.num_steps_by_drafts.get(num_drafts, 0) + 1
        if not same_rows or self._last[0] != num_drafts:
            self._last = num_drafts, _count_not_made(rows, num_drafts) if num_drafts < most else 0
        self.num_drafts_not_made += self._last[1]


def _count_not_made(rows: Sequence[PlannedRow], num_drafts: int) -> int:
    return sum(max(row.rules.num_drafts - num_drafts, 0) for row in rows if row.decodes)


def place_in_batch(row: PlannedRow) -> tuple[bool, int, int, int]:
    """Decodes first, similar lengths together: attention backends tile the batch in this order.

    Then by slot, so that a batch of the same requests keeps the order of its rows.
    """
    return not row.decodes, row.num_tokens, row.seq_len >> 8, row.slot


class RowWatch:
    """Tells whether a step has the rows of the step before: most do, and few things change then.

    An epoch stands for a request and what it asks for.
    """

    def __init__(self) -> None:
        self._key: list[tuple[int, int, bool]] = []

    def same(self, rows: Sequence[PlannedRow]) -> bool:
        last, self._key = self._key, [(row.epoch, row.num_tokens, row.decodes) for row in rows]
        return self._key == last


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

    def block_appends(self) -> Iterator[BlockAppend]:
        for request in self.admitted:
            yield BlockAppend(request.slot, 0, list(request.block_ids))
        for request, start in self.appended.items():
            if request not in self.admitted:
                yield BlockAppend(request.slot, start, request.block_ids[start:])

    def new_blocks(self) -> list[int]:
        """The blocks that this step allocates, by their holders at the end of planning.

        A request that was preempted again has none, and its blocks may have another holder.
        """
        return [
            block for request, start in self.appended.items() for block in request.block_ids[start:]
        ]

    def remove(self, request: Request) -> None:
        self.budget += self.num_scheduled.pop(request, 0)
        self.admitted.pop(request, None)
        self.appended.pop(request, None)


def make_admission(request: Request) -> Admission:
    """What the device has to know of a request that got a slot."""
    return Admission(
        slot=request.slot,
        token_ids=list(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed=request.num_computed,
        rules=request.rules,
        token_limit=request.token_limit,
    )


def make_delta(request: Request, row: RowResult, new_ids: list[int]) -> Delta:
    """What a step's result adds to a request, which has taken it in.

    new_ids: the result's tokens up to one that ends the request
    """
    delta = Delta(
        row.request_id,
        new_ids,
        request.finish_reason,
        request.stop_reason,
        request.num_cached,
        row.num_drafts,
        len(row.token_ids) - (not row.failed) if row.num_drafts else 0,
    )
    if row.scores or row.prompt_scores:
        delta.scores = row.scores[: len(new_ids)]
        delta.prompt_scores = row.prompt_scores
        delta.prompt_scores_start = row.prompt_scores_start
    if request.admitted is not None:
        delta.admitted, request.admitted = request.admitted, None
    return delta
