"""A policy and a real scheduler, in steps that take as long as told."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stoop.core.step import PlannedRow, RowResult, StepResult
from stoop.engine.draft_policy import DraftPolicy
from stoop.engine.step_costs import StepTime
from support.scheduling import make_request, make_scheduler

DRAFTS = 3


@dataclass
class Served:
    """What some steps have done."""

    tokens: int = 0
    seconds: float = 0.0
    chosen: Counter[int] = field(default_factory=Counter)  # steps by number of drafts

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


class PolicyServer:
    """Requests follow one another, so many at once."""

    def __init__(
        self,
        policy: DraftPolicy,
        num_reqs: int,
        decode_seconds: Callable[[int, int], float],
        prompt_len: int = 1,
        answer_len: Callable[[random.Random], int] = lambda source: 59000,
        token_seconds: float = 0.001,
        draft_seconds: float = 0.0004,
        seed: int = 1,
        limits: Sequence[int] = (DRAFTS,),
        host_seconds: float | None = None,
    ) -> None:
        """decode_seconds: of a step, by requests and drafts; token_seconds: of a prompt's token;
        draft_seconds: of one draft for all requests, a part of the former; limits: drafts that
        requests ask for, in turns; host_seconds: of a step, for which it does not wait for a
        device; None: the host computes"""
        self.policy, self.num_reqs = policy, num_reqs
        self.decode_seconds = decode_seconds
        self.prompt_len, self.answer_len = prompt_len, answer_len
        self.token_seconds, self.draft_seconds = token_seconds, draft_seconds
        self.random, self.limits = random.Random(seed), limits
        self.host_seconds = host_seconds
        self.scheduler = make_scheduler(
            num_blocks=100_000,
            max_model_len=60_000,
            max_num_seqs=num_reqs,
            max_num_batched_tokens=4096,
            num_drafts=DRAFTS,
            drafter_has_kv=True,
            prefix_caching=False,
        )
        self.num_added = 0
        self.made: dict[tuple[str, int], int] = {}  # drafts for the next step, by request and stay

    def serve(self, rate: float, steps: int) -> Served:
        """rate: of drafts that are accepted"""
        served = Served()
        for _ in range(steps):
            while len(self.scheduler.open_requests) < self.num_reqs:
                self._add()
            self.policy.choose(self.scheduler)
            plan = self.scheduler.schedule()
            assert plan is not None
            served.chosen[self.scheduler.num_drafts] += 1
            taken = self._seconds(plan.rows, plan.num_drafts)
            rows = [self._answer(row, plan.num_drafts, rate) for row in plan.rows]
            result = StepResult(plan.index, rows)
            drafting = self.draft_seconds * plan.num_drafts
            waited = 0.0 if self.host_seconds is None else max(0.0, taken - self.host_seconds)
            self.policy.note(plan, result, StepTime(taken, waited, taken, drafting))
            before = self.scheduler.stats.num_generated_tokens
            self.scheduler.update(result)
            served.tokens += self.scheduler.stats.num_generated_tokens - before
            served.seconds += taken
        return served

    def _add(self) -> None:
        prompt = [self.random.randrange(1, 9) for _ in range(self.prompt_len)]
        length = self.answer_len(self.random)
        name, limit = f"{self.num_added}", self.limits[self.num_added % len(self.limits)]
        self.scheduler.add(make_request(name, prompt, max_tokens=length, num_drafts=limit))
        self.num_added += 1

    def _seconds(self, rows: list[PlannedRow], made: int) -> float:
        decodes = [row for row in rows if row.decodes]
        num_tokens = sum(row.num_tokens for row in rows if not row.decodes)
        verified = decodes[0].num_tokens - 1 if decodes else 0
        taken = self.decode_seconds(len(decodes), verified) - self.draft_seconds * verified
        return taken + self.draft_seconds * made + self.token_seconds * num_tokens

    def _answer(self, row: PlannedRow, made: int, rate: float) -> RowResult:
        if not row.samples:
            return RowResult(row.request_id, row.epoch, [])
        stay = row.request_id, row.epoch
        verified = min(self.made.get(stay, 0), row.num_tokens - 1) if row.decodes else 0
        accepted = 0
        while accepted < verified and self.random.random() < rate:
            accepted += 1
        (request,) = [r for r in self.scheduler.running if r.request_id == row.request_id]
        follows = request.num_drafter_kv is None
        self.made[stay] = min(made, row.rules.num_drafts) if follows else 0
        return RowResult(row.request_id, row.epoch, [7] * (accepted + 1), verified)
