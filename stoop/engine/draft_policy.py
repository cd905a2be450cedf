"""Chooses how many drafts each step makes: as many as give the most tokens a second.

What a step takes is known from graphs that were timed at the start (`GraphCosts`), or measured
while requests are served (`EagerCosts`). What it yields is estimated from the drafts that were
accepted so far, by position, for all requests and for those in the batch. All of this is on the
host in any case, one step old, so nothing is waited for.

A step without drafts leaves the drafter out, and costs what it costs without a drafter. From then
on the drafter lacks KV of the step's requests, and they get no drafts until their last tokens are
computed again, as after a preemption. That happens when the time lost by going without drafts has
added up to what it costs.

The text does not depend on any of this, as far as logits do not depend on how many tokens a pass
has.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from stoop.core.request import Request
from stoop.core.step import StepPlan, StepResult
from stoop.engine.draft_estimates import USUAL, Acceptance, expected_tokens
from stoop.engine.step_costs import StepCosts, StepTime
from stoop.scheduler.scheduler import Scheduler

OWN_PRIOR = 8  # weight of all requests' rate in the rate of one, in drafts
EVERY = 4  # steps between decisions
MANY_REQS = 16  # a decision looks at each: with more, those against drafts last longer
MORE = 1.03  # gain that is worth more drafts; fewer are taken wherever they are faster
FIRST_GAP, LAST_GAP = 64, 1024  # steps without drafts before some are made to learn from
PROBE_SHARE = 1 / 64  # of the time, at most, to compute tokens again only to learn from drafts
PROBE_DRAFTS = 16  # to learn from then
HOPEFUL = 0.9  # acceptance with which drafts must pay to be worth that
REFILL = 3  # steps that computing tokens again costs besides: the pipeline runs empty
MOST_PATIENCE = 64
FORGET = 1 / 4096  # of what is known, by a step without drafts
FORGET_LATER = 1 / 512  # of what is known of later drafts, by a step that makes fewer
FORGET_OTHERS = 0.9  # of what is known, by an idle time


class DraftPolicy(Protocol):
    """Decides before each step is planned, and hears of its result."""

    def choose(self, scheduler: Scheduler) -> None:
        """Set the scheduler's `num_places`, `num_drafts` and `redraft`."""
        ...

    def note(self, plan: StepPlan, result: StepResult, time: StepTime) -> None: ...

    def note_idle(self) -> None:
        """No requests are left."""
        ...

    def metrics(self) -> dict[str, Any]: ...


class HeldDrafts:
    """The same number in every step, for checks."""

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts

    def choose(self, scheduler: Scheduler) -> None:
        scheduler.num_places = scheduler.num_drafts = self.num_drafts

    def note(self, plan: StepPlan, result: StepResult, time: StepTime) -> None:
        pass

    def note_idle(self) -> None:
        pass

    def metrics(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Batch:
    """What a decision depends on, of the running requests."""

    num_reqs: int
    drafted: Counter[int]  # how many get drafts, by the most that each asked for
    lacking: Counter[int] = field(default_factory=Counter)  # would, had the drafter their KV
    tokens_lacking: int = 0  # of these, to compute again
    scale: float = 1.0  # of acceptance, relative to that of all requests so far


class AdaptiveDrafts:
    """The `DraftPolicy` of engines that vary the number of drafts."""

    def __init__(
        self,
        costs: StepCosts,
        counts: Sequence[int],
        usual: Sequence[float] = (),
        has_kv: bool = True,
        keeps_prefixes: bool = True,
        starts_over: bool = False,
    ) -> None:
        """counts: drafts that a step may make, in rising order; usual: acceptance by position;
        has_kv: the drafter always drafts where it may; keeps_prefixes: only what it lacks is
        computed again; starts_over: requests after an idle time are taken for others than those
        before it"""
        self.costs = costs
        self.counts = tuple(counts)
        self.acceptance = Acceptance(usual or [USUAL] * self.counts[-1])
        self.has_kv = has_kv
        self.keeps_prefixes = keeps_prefixes
        self.starts_over = starts_over
        self.hopeless = self._can_never_pay()
        self.num_drafts = 0 if self.hopeless else self.counts[-1]
        self._steps = EVERY  # from the last decision to the next
        self._countdown = 0
        self._decided_at = 0  # number of requests at the last decision
        self._made = False  # whether the last step that was noted made drafts
        self._lost = 0.0  # seconds, since some requests get no drafts
        self._patience, self._kept = 1, 0  # after tokens were computed again for nothing
        self._gap, self._since = FIRST_GAP, 0  # steps without drafts: until a probe, and so far
        self._held = 0  # steps for which a probe goes on

    # ---- before a step ----

    def choose(self, scheduler: Scheduler) -> None:
        if scheduler.redraft:
            return  # decided, and waits for results
        num_reqs = len(scheduler.running)
        scheduler.keeps_drafter_kv = self.num_drafts > 0 or not self.hopeless
        if not _any_wants_drafts(scheduler):
            # What was decided stays as it is for the next request.
            scheduler.num_places, scheduler.num_drafts = self.costs.plan(num_reqs, 0)
            return
        self._countdown -= 1
        # A batch of another size is decided on at once.
        far = not self._decided_at <= 2 * num_reqs <= 4 * self._decided_at
        if num_reqs and far:
            self.hopeless, self._held = self._can_never_pay(), 0
        if num_reqs and (self._countdown <= 0 or far or not self._speed_known(num_reqs)):
            if self.decide(self._read_batch(scheduler), self._steps - max(self._countdown, 0)):
                scheduler.redraft = True
            self._steps = EVERY if self.num_drafts else EVERY * max(1, num_reqs // MANY_REQS)
            self._countdown, self._decided_at = self._steps, num_reqs
        scheduler.num_places, scheduler.num_drafts = self.costs.plan(num_reqs, self.num_drafts)
        scheduler.keeps_drafter_kv = self.num_drafts > 0 or not self.hopeless

    def _can_never_pay(self) -> bool:
        """Whether drafts could not pay for a single request, even if most were accepted."""
        if not self.starts_over or 1 not in self.costs.sizes:
            return False
        return self._best(1, [HOPEFUL] * self.counts[-1]) == 0

    def _speed_known(self, num_reqs: int) -> bool:
        return self.costs.seconds(num_reqs, self.num_drafts) is not None

    def _read_batch(self, scheduler: Scheduler) -> Batch:
        running, limit = scheduler.running, scheduler.config.drafter_max_len
        # One at its last token gets no draft, but the next in its place will.
        drafted = [r for r in running if r.num_drafter_kv is None and r.wants_drafts(limit)]
        # Where blocks are short, others may take what a request gives up to be computed again.
        lacking = scheduler.undrafted if scheduler.pool.num_free >= len(running) else []
        return Batch(
            len(running),
            Counter(each.rules.num_drafts for each in drafted),
            Counter(each.rules.num_drafts for each in lacking),
            sum(self._tokens_lacking(each) for each in lacking),
            self._scale(drafted + lacking),
        )

    def _tokens_lacking(self, request: Request) -> int:
        """Tokens to compute again: prompts whose tokens are scored skip no cached prefix."""
        found = self.keeps_prefixes and request.rules.params.prompt_logprobs is None
        return request.num_tokens - ((request.num_drafter_kv or 0) if found else 0)

    def _scale(self, requests: Sequence[Request]) -> float:
        """First drafts of these requests that are accepted, relative to those of all so far.

        Without KV a drafter may find no draft. A request does not count that, so its own rate
        says too much.
        """
        mean = self.acceptance.rates[0]
        if not self.has_kv or not requests or not mean:
            return 1.0
        own = sum(
            (each.num_first_accepted + OWN_PRIOR * mean) / (each.num_drafted + OWN_PRIOR)
            for each in requests
        )
        return own / (len(requests) * mean)

    def decide(self, batch: Batch, num_steps: int = EVERY) -> bool:
        """Set `num_drafts`. Returns whether to compute again what the drafter lacks.

        num_steps: since the last decision
        """
        if self._held > 0 and self._speed_known(batch.num_reqs):
            self._held -= num_steps
            return False
        num_reqs, tried = batch.num_reqs, self.costs.tries(batch.num_reqs)
        if tried and self.costs.goes_on(num_reqs, self.num_drafts, num_steps, bool(batch.drafted)):
            return False
        speeds = self._speeds(batch, batch.drafted)
        best, current = max(speeds, key=lambda count: speeds[count]), self.num_drafts
        if not any(speeds.values()):  # more requests than any graph has
            self.num_drafts = 0
        elif speeds[best] > (MORE if best > current and not tried else 1.0) * speeds[current]:
            self.num_drafts = best
        if self._lacks_too_much(batch, speeds[self.num_drafts], num_steps):
            with_all = self._speeds(batch, batch.drafted + batch.lacking)
            self.num_drafts = max(with_all, key=lambda count: with_all[count])
            return True
        share = num_steps * (FORGET_LATER if self.num_drafts else FORGET)
        self.acceptance.forget(min(share, 1.0), beyond=self.num_drafts)
        if self.num_drafts:
            self._gap, self._since = FIRST_GAP, 0
            self._kept += num_steps
            if self._kept >= FIRST_GAP:
                self._patience = 1
            self.num_drafts = self.costs.try_fewer(batch.num_reqs, self.num_drafts, num_steps)
            return False
        self._kept = 0
        return self._go_without(batch, num_steps)

    def _speeds(self, batch: Batch, drafted: Counter[int]) -> dict[int, float]:
        """Tokens a second by number of drafts. drafted: requests that get drafts, as in `Batch`"""
        rates, found = self.acceptance.rates, {}
        for count in self.counts:
            seconds = self.costs.seconds(batch.num_reqs, count)
            gained = sum(
                num_reqs * (expected_tokens(rates, min(most, count), batch.scale) - 1)
                for most, num_reqs in drafted.items()
            )
            found[count] = (batch.num_reqs + gained) / seconds if seconds else 0.0
        return found

    def _lacks_too_much(self, batch: Batch, speed: float, num_steps: int) -> bool:
        """Whether requests without drafts have cost as much time as it takes to mend that.

        Each time that drafts did not last after it, it takes twice as much.
        """
        possible = max(self._speeds(batch, batch.drafted + batch.lacking).values())
        if not batch.lacking or possible <= MORE * speed:
            self._lost = 0.0
            return False
        seconds = self.costs.seconds(batch.num_reqs, self.num_drafts) or 0.0
        self._lost += num_steps * seconds * (1 - speed / possible)
        cost = batch.tokens_lacking * self.costs.seconds_per_token + REFILL * seconds
        if self._lost < self._patience * cost:
            return False
        self._lost = 0.0
        self._patience, self._kept = min(2 * self._patience, MOST_PATIENCE), 0
        return True

    def _go_without(self, batch: Batch, num_steps: int) -> bool:
        """Make a few drafts now and then: they may be accepted more often by now.

        Returns whether to compute again what the drafter lacks, if no request gets drafts without
        that. Such probes take a small share of the time.
        """
        self._since += num_steps
        few = self.counts[1]
        plain, drafted = (self.costs.seconds(batch.num_reqs, count) for count in (0, few))
        if self._since < self._gap or plain is None or drafted is None:
            return False
        if expected_tokens([HOPEFUL] * few, few) * plain <= drafted:
            return False
        if not batch.drafted:
            lasts = EVERY + PROBE_DRAFTS // batch.num_reqs
            cost = batch.tokens_lacking * self.costs.seconds_per_token + REFILL * plain
            cost += lasts * (drafted - plain)
            rarer = self._gap // FIRST_GAP  # each time
            if not batch.lacking or self._since * plain * PROBE_SHARE < rarer * cost:
                return False
            self._held = lasts
        self.num_drafts = few
        self._gap, self._since = min(2 * self._gap, LAST_GAP), 0
        return not batch.drafted

    # ---- after a step ----

    def note(self, plan: StepPlan, result: StepResult, time: StepTime) -> None:
        self.costs.note(plan, time)
        had_drafts, self._made = self._made, plan.num_drafts > 0
        first = plan.rows[0]  # decodes come first
        if not first.decodes or first.num_tokens == 1:
            return
        found = Counter(
            (row.num_drafts, len(row.token_ids) - (not row.failed))
            for row in result.rows
            if row.num_drafts
        )
        if not self.has_kv and had_drafts:
            # To find no draft is as good as a wrong one. An ended row has no tokens.
            found[1, 0] += sum(
                row.decodes and row.rules.num_drafts > 0 and bool(each.token_ids)
                for row, each in zip(plan.rows, result.rows, strict=True)
                if not each.num_drafts
            )
        for (num_drafts, num_accepted), times in found.items():
            self.acceptance.add(num_drafts, num_accepted, times)
        if found:
            self.acceptance.limit()

    def note_idle(self) -> None:
        """The next requests' drafts may be better than those of the last ones."""
        self._held = 0
        if self.starts_over:
            self.acceptance.forget(FORGET_OTHERS)
            self.hopeless = self._can_never_pay()
            self._countdown = 0

    # ---- what it says ----

    def metrics(self) -> dict[str, Any]:
        return {"spec_decode_policy": self.describe()}

    def describe(self) -> str:
        """How many drafts at how many requests, with the usual acceptance."""
        sizes, bounded = self.costs.sizes, self.costs.bounded
        if not sizes:
            return f"{_drafts(self.counts[-1])} until it is known what they cost"
        chosen: list[tuple[int, int, int]] = []  # number of drafts, at so many requests
        for size in sizes:
            best, first = self._best(size, self.acceptance.usual), size
            if chosen and chosen[-1][0] == best:
                first = chosen.pop()[1]
            chosen.append((best, first, size))
        if bounded and chosen[-1][0] == 0:
            chosen.pop()
        parts: list[str] = []
        for count, first, last in chosen:
            where = f"up to {last}" if bounded else f"at {_span(first, last)}"
            if not parts:
                where = f"at {_span(1, last)} request{'s' if last > 1 else ''}"
            parts.append(f"{_drafts(count)} {where}")
        if not bounded:
            return ", ".join(parts) + ", as far as measured"
        if chosen:
            parts.append(f"none above {chosen[-1][2]}")
        return ", ".join(parts or ["none at any number of requests"])

    def _best(self, num_reqs: int, rates: Sequence[float]) -> int:
        """The number of drafts that is fastest with this acceptance by position."""
        speeds = {
            count: expected_tokens(rates, count) / seconds
            for count in self.counts
            if (seconds := self.costs.bare_seconds(num_reqs, count)) is not None
        }
        # Another thread may ask while a load is measured again.
        return max(speeds, key=lambda count: speeds[count], default=0)


def _any_wants_drafts(scheduler: Scheduler) -> bool:
    """Whether a request of the next step may get drafts, in this step or later."""
    running, config = scheduler.running, scheduler.config
    limit = config.drafter_max_len
    if any(each.wants_drafts(limit) for each in running):
        return True
    joins = len(running) < config.max_num_seqs and scheduler.waiting
    return bool(joins) and scheduler.waiting.peek().wants_drafts(limit)


def _drafts(count: int) -> str:
    return f"{count} draft{'s' if count > 1 else ''}" if count else "none"


def _span(first: int, last: int) -> str:
    return f"{first} to {last}" if first < last else f"{last}"
