"""Chooses how many drafts each step makes: as many as give the most tokens a second.

What a step takes is known: every captured graph was timed when the engine started (`StepTimes`),
and what the host, attention and prompts add to that is measured while requests are served. What it
yields is estimated from the drafts that were accepted so far, by position, for all requests and for
those in the batch. All of this is on the host in any case, one step old, so nothing is waited for.

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
from typing import Any, NamedTuple, Protocol

from stoop.core.request import Request
from stoop.core.step import StepPlan, StepResult
from stoop.engine.draft_estimates import (
    USUAL,
    Acceptance,
    StepTimes,
    TrialOfFewer,
    expected_tokens,
)
from stoop.scheduler.scheduler import Scheduler

OWN_PRIOR = 8  # weight of all requests' rate in the rate of one, in drafts
EVERY = 4  # steps between decisions
MANY_REQS = 16  # a decision looks at each: with more, those against drafts last longer
MORE = 1.03  # gain that is worth more drafts; fewer are taken wherever they are faster
FIRST_GAP, LAST_GAP = 64, 1024  # steps without drafts before some are made to learn from
HOPEFUL = 0.9  # acceptance with which drafts must pay to be worth that
AVERAGED = 16  # steps, roughly, whose times count
REFILL = 3  # steps that computing tokens again costs besides: the pipeline runs empty
HOST_DRAFTING = 1.05  # times what a step without drafts takes the host
APART = 0.25  # share of the shorter of device and host time that does not overlap with the longer
MOST_PATIENCE = 64
MUCH = 3  # times what a graph takes: more is due to long prompts, which come now and then
FORGET = 1 / 4096  # of what is known, by a step without drafts


class StepTime(NamedTuple):
    """What a step took, from result to result."""

    seconds: float
    waited: float  # for the device: 0 if it had to wait for the host, or if the host computes


class DraftPolicy(Protocol):
    """Decides before each step is planned, and hears of its result."""

    def choose(self, scheduler: Scheduler) -> None:
        """Set the scheduler's `num_places`, `num_drafts` and `redraft`."""
        ...

    def note(self, plan: StepPlan, result: StepResult, time: "StepTime | None") -> None:
        """time: None for the first step after a pause"""
        ...

    def metrics(self) -> dict[str, Any]: ...


class HeldDrafts:
    """The same number in every step, for checks."""

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts

    def choose(self, scheduler: Scheduler) -> None:
        scheduler.num_places = scheduler.num_drafts = self.num_drafts

    def note(self, plan: StepPlan, result: StepResult, time: StepTime | None) -> None:
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
    """The `DraftPolicy` of engines whose decode steps are captured."""

    def __init__(
        self,
        times: StepTimes,
        counts: Sequence[int],
        usual: Sequence[float] = (),
        host_computes: bool = False,
        has_kv: bool = True,
        keeps_prefixes: bool = True,
    ) -> None:
        """counts: drafts that a step may make, in rising order; usual: acceptance by position;
        host_computes: there is no device to wait for; has_kv: the drafter always drafts where it
        may; keeps_prefixes: only what it lacks is computed again"""
        self.times = times
        self.counts = tuple(counts)
        self.acceptance = Acceptance(usual or [USUAL] * self.counts[-1])
        self.host_computes = host_computes
        self.has_kv = has_kv
        self.keeps_prefixes = keeps_prefixes
        self.num_drafts = self.counts[-1]
        self._steps = EVERY  # from the last decision to the next
        self._countdown = 0
        self._decided_at = 0  # number of requests at the last decision
        self.added = 0.0  # seconds of a step beyond those of its graph
        self.host = 0.0  # seconds of the host in a step
        self.trial = TrialOfFewer()
        self._made = False  # whether the last step that was noted made drafts
        self._lost = 0.0  # seconds, since some requests get no drafts
        self._patience, self._kept = 1, 0  # after tokens were computed again for nothing
        self._gap, self._since = FIRST_GAP, 0  # steps without drafts: until a probe, and so far

    # ---- before a step ----

    def choose(self, scheduler: Scheduler) -> None:
        if scheduler.redraft:
            return  # decided, and waits for results
        num_reqs = len(scheduler.running)
        self._countdown -= 1
        # A batch of another size is decided on at once.
        far = not self._decided_at <= 2 * num_reqs <= 4 * self._decided_at
        if num_reqs and far:
            self.trial.forget()
        if num_reqs and (self._countdown <= 0 or far or not self._speed_known(num_reqs)):
            if self.decide(self._read_batch(scheduler), self._steps - max(self._countdown, 0)):
                scheduler.redraft = True
            self._steps = EVERY if self.num_drafts else EVERY * max(1, num_reqs // MANY_REQS)
            self._countdown, self._decided_at = self._steps, num_reqs
        scheduler.num_places = scheduler.num_drafts = self.num_drafts

    def _speed_known(self, num_reqs: int) -> bool:
        return self.times.at(num_reqs, self.num_drafts) is not None

    def _read_batch(self, scheduler: Scheduler) -> Batch:
        running, limit = scheduler.running, scheduler.config.drafter_max_len
        drafted = [r for r in running if r.num_drafter_kv is None and r.may_draft(limit)]
        lacking = scheduler.undrafted
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
        tried = self.trial.left > 0
        if tried and self._goes_on(batch, num_steps):
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
        if self.num_drafts:
            self._gap, self._since = FIRST_GAP, 0
            self._kept += num_steps
            if self._kept >= FIRST_GAP:
                self._patience = 1
            self._try_fewer(batch, num_steps)
        else:
            self._kept = 0
            self._go_without(batch, num_steps)
        return False

    def _speeds(self, batch: Batch, drafted: Counter[int]) -> dict[int, float]:
        """Tokens a second by number of drafts. drafted: requests that get drafts, as in `Batch`"""
        rates, found = self.acceptance.rates, {}
        for count in self.counts:
            seconds = self._seconds(batch.num_reqs, count)
            gained = sum(
                num_reqs * (expected_tokens(rates, min(most, count), batch.scale) - 1)
                for most, num_reqs in drafted.items()
            )
            found[count] = (batch.num_reqs + gained) / seconds if seconds else 0.0
        return found

    def _seconds(self, num_reqs: int, num_drafts: int) -> float | None:
        """Device and host work at the same time, if not all of it."""
        seconds = self.times.at(num_reqs, num_drafts)
        if seconds is None:
            return None
        host = self.host * HOST_DRAFTING if num_drafts else self.host
        less, more = sorted((seconds + self.added, host))
        return more + APART * less + self.trial.held.get(num_drafts, 0.0)

    def _try_fewer(self, batch: Batch, num_steps: int) -> None:
        """None at all are not tried: that would cost the drafter its KV."""
        place = self.counts.index(self.num_drafts)
        graph = self.times.at(batch.num_reqs, self.num_drafts)
        if place > 1 and graph is not None and self.trial.begin(self.num_drafts, num_steps, graph):
            self.num_drafts = self.counts[place - 1]

    def _goes_on(self, batch: Batch, num_steps: int) -> bool:
        """Whether a trial does; it ends where nothing could be learned from it."""
        more = self.counts[self.counts.index(self.num_drafts) + 1]
        graph = self.times.at(batch.num_reqs, more)
        if graph is None or not batch.drafted:
            self.trial.left = 0
            return False
        return self.trial.go_on(self.num_drafts, num_steps, graph)

    def _lacks_too_much(self, batch: Batch, speed: float, num_steps: int) -> bool:
        """Whether requests without drafts have cost as much time as it takes to mend that.

        Each time that drafts did not last after it, it takes twice as much.
        """
        possible = max(self._speeds(batch, batch.drafted + batch.lacking).values())
        if not batch.lacking or possible <= MORE * speed:
            self._lost = 0.0
            return False
        seconds = self._seconds(batch.num_reqs, self.num_drafts) or 0.0
        self._lost += num_steps * seconds * (1 - speed / possible)
        cost = batch.tokens_lacking * self.times.seconds_per_token + REFILL * seconds
        if self._lost < self._patience * cost:
            return False
        self._lost = 0.0
        self._patience, self._kept = min(2 * self._patience, MOST_PATIENCE), 0
        return True

    def _go_without(self, batch: Batch, num_steps: int) -> None:
        """Make a few drafts now and then: they may be accepted more often by now."""
        self._since += num_steps
        self.acceptance.forget(num_steps * FORGET)
        if self._since < self._gap or not batch.drafted:
            return
        few = self.counts[1]
        plain, drafted = (self._seconds(batch.num_reqs, count) for count in (0, few))
        if plain is None or drafted is None:
            return
        if expected_tokens([HOPEFUL] * few, few) * plain > drafted:
            self.num_drafts = few
            self._gap, self._since = min(2 * self._gap, LAST_GAP), 0

    # ---- after a step ----

    def note(self, plan: StepPlan, result: StepResult, time: StepTime | None = None) -> None:
        if time is not None:
            self._note_time(plan, time)
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

    def _note_time(self, plan: StepPlan, time: StepTime) -> None:
        num_reqs, first = len(plan.rows), plan.rows[0]  # decodes come first
        expected = self.times.at(num_reqs, plan.num_drafts)
        if expected is None:
            return
        if first.decodes:
            most = MUCH * max(self.times.at(num_reqs, each) or 0.0 for each in self.counts)
            self.trial.note(first.num_tokens - 1, min(time.seconds - expected, most))
        if not self.host_computes:
            busy = min(time.seconds - time.waited, MUCH * expected)
            self.host += (busy - self.host) / AVERAGED
        added = min(max(time.seconds - expected, 0.0), MUCH * expected)
        if not self.host_computes and time.waited < 0.02 * time.seconds:
            added = min(added, self.added)  # the device waits for the host: it takes less than that
        self.added += (added - self.added) / AVERAGED

    # ---- what it says ----

    def metrics(self) -> dict[str, Any]:
        return {"spec_decode_policy": self.describe()}

    def describe(self) -> str:
        """How many drafts at how many requests, with the usual acceptance.

        More requests than were measured get none.
        """
        chosen: list[tuple[int, int]] = []  # number of drafts, up to this number of requests
        usual = self.acceptance.usual
        for size in self.times.sizes:
            speeds = {
                count: expected_tokens(usual, count) / seconds
                for count in self.counts
                if (seconds := self.times.at(size, count)) is not None
            }
            best = max(speeds, key=lambda count: speeds[count])
            if chosen and chosen[-1][0] == best:
                chosen.pop()
            chosen.append((best, size))
        if chosen[-1][0] == 0:
            chosen.pop()
        parts: list[str] = []
        for count, most in chosen:
            drafts = f"{count} draft{'s' if count > 1 else ''}" if count else "none"
            where = f"up to {most}"
            if not parts:
                where = f"at 1 to {most} requests" if most > 1 else "at 1 request"
            parts.append(f"{drafts} {where}")
        parts.append(f"none above {chosen[-1][1]}" if chosen else "none at any number of requests")
        return ", ".join(parts)
