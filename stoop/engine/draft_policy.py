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

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from stoop.core.request import Request
from stoop.core.step import StepPlan, StepResult
from stoop.scheduler.scheduler import Scheduler

USUAL = 0.7  # share of drafts that are accepted, where nothing is known
PRIOR = 6  # weight of what is usual, in drafts
WINDOW = 512  # drafts of a position that count, the newest
OWN_PRIOR = 8  # weight of all requests' rate in the rate of one, in drafts
SURE = 0.98  # no rate is above
EVERY = 4  # steps between decisions
MANY_REQS = 16  # a decision looks at each: with more requests, those against drafts last longer
MORE = 1.03  # gain that is worth more drafts; fewer are taken wherever they are faster
FIRST_GAP, LAST_GAP = 64, 1024  # steps without drafts before some are made to learn from
HOPEFUL = 0.9  # acceptance with which drafts must pay to be worth that
AVERAGED = 16  # steps, roughly, whose times count
LEARNED = 32  # steps after which a time is known
FIRST_TRY, LAST_TRY = 256, 8192  # steps before other numbers are tried, to see what they take
UNSURE = 0.5  # share of a graph's time: where other things take more, fewer drafts may be faster
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


class StepTimes:
    """Seconds of a decode step, by number of requests and number of drafts."""

    def __init__(self, seconds: Mapping[tuple[int, int], float]) -> None:
        self._sizes: dict[int, list[int]] = {}
        self._seconds = dict(seconds)
        for num_reqs, num_drafts in sorted(seconds):
            self._sizes.setdefault(num_drafts, []).append(num_reqs)

    def at(self, num_reqs: int, num_drafts: int) -> float | None:
        """Of the smallest graph that fits; None if there is none."""
        sizes = self._sizes.get(num_drafts, [])
        place = bisect.bisect_left(sizes, num_reqs)
        return self._seconds[sizes[place], num_drafts] if place < len(sizes) else None

    @property
    def sizes(self) -> list[int]:
        """The numbers of requests that were measured."""
        return sorted({num_reqs for num_reqs, _ in self._seconds})

    @property
    def seconds_per_token(self) -> float:
        """In the step with the most tokens a second."""
        return min(t / (reqs * (drafts + 1)) for (reqs, drafts), t in self._seconds.items())


class Overheads:
    """Seconds of a step that its graph does not take, by number of drafts.

    They depend on that number: with many drafts, prompts make a batch too large for any graph, and
    attention may be bound by arithmetic. What is seen of one number holds for the others, too, as
    far as they are not known themselves, and so does a change of it.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._num_noted: Counter[int] = Counter()  # in a row
        self._unseen: Counter[int] = Counter()  # steps since
        self._lasts: dict[int, int] = {}  # steps for which it is remembered

    def of(self, count: int) -> float:
        return self._seconds.get(self.source(count), 0.0)

    def source(self, count: int) -> int:
        """The number of drafts whose steps tell of those with `count`: itself, or the nearest."""
        return min(self._seconds, key=lambda known: abs(known - count), default=count)

    def note(self, count: int, seconds: float) -> None:
        known = self.of(count)
        change = (seconds - known) / AVERAGED
        for other in [each for each in self._seconds if each != count]:
            if self._num_noted[count] >= LEARNED:
                self._seconds[other] = max(self._seconds[other] + change, 0.0)
            self._pass_by(other)
        self._seconds[count] = known + change
        self._num_noted[count] += 1
        self._unseen[count] = 0
        if self._num_noted[count] > FIRST_TRY:
            self._lasts[count] = FIRST_TRY

    def _pass_by(self, count: int) -> None:
        """Forget it after a while, each time a later one: by then it may be faster."""
        self._num_noted[count] = 0
        self._unseen[count] += 1
        lasts = self._lasts.setdefault(count, FIRST_TRY)
        if self._unseen[count] > lasts:
            self._lasts[count] = min(2 * lasts, LAST_TRY)
            del self._seconds[count]


class Acceptance:
    """How often the draft of a position is accepted, given that all before it were."""

    def __init__(self, usual: Sequence[float]) -> None:
        self.usual = usual
        self._tried = [0.0] * len(usual)
        self._passed = [0.0] * len(usual)

    def add(self, num_drafts: int, num_accepted: int, times: int = 1) -> None:
        """Steps of a request that verified so many drafts."""
        for place in range(min(num_accepted + 1, num_drafts)):
            self._tried[place] += times
            self._passed[place] += times * (place < num_accepted)

    def limit(self) -> None:
        """Give older drafts less weight."""
        for place, tried in enumerate(self._tried):
            if tried > WINDOW:
                self._scale(place, WINDOW / tried)

    def forget(self, share: float) -> None:
        for place in range(len(self._tried)):
            self._scale(place, 1 - share)

    def _scale(self, place: int, factor: float) -> None:
        self._tried[place] *= factor
        self._passed[place] *= factor

    @property
    def rates(self) -> list[float]:
        found = zip(self.usual, self._tried, self._passed, strict=True)
        return [(PRIOR * usual + passed) / (PRIOR + tried) for usual, tried, passed in found]


def expected_tokens(rates: Sequence[float], num_drafts: int, scale: float = 1.0) -> float:
    """Tokens of a step that verifies so many drafts. scale: of the rates of the batch at hand"""
    tokens = reached = 1.0
    for rate in rates[:num_drafts]:
        reached *= min(rate * scale, SURE)
        tokens += reached
    return tokens


def usual_rates(lengths: Sequence[float], num_drafts: int) -> list[float]:
    """Acceptance by position from the tokens of a step with 1, 2 ... drafts, as benchmarks say."""
    rates: list[float] = []
    before = [0.0, 1.0, *lengths]
    for place in range(num_drafts):
        if place < len(lengths):
            gained, reached = lengths[place] - before[place + 1], before[place + 1] - before[place]
            rates.append(min(max(gained / reached, 0.0), SURE) if reached > 0 else 0.0)
        else:
            rates.append(rates[-1] if rates else USUAL)
    return rates


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
        self.added = Overheads()  # of the device
        self.host = Overheads()  # the host's own time, which overlaps with the device's
        self._trying = 0  # steps that are left of a trial of fewer drafts
        self._try_gap, self._untried = FIRST_TRY, 0  # steps until a trial, and so far
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
        if self._trying > 0 and batch.drafted and self._speed_known(batch.num_reqs):
            self._trying -= num_steps
            if self._trying > 0:
                return False
        speeds = self._speeds(batch, batch.drafted)
        best, current = max(speeds, key=lambda count: speeds[count]), self.num_drafts
        if not any(speeds.values()):  # more requests than any graph has
            self.num_drafts = 0
        elif speeds[best] > (MORE if best > current else 1.0) * speeds[current]:
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
        host = self.host.of(num_drafts)
        if bool(num_drafts) != bool(self.host.source(num_drafts)):
            host *= HOST_DRAFTING if num_drafts else 1 / HOST_DRAFTING
        less, more = sorted((seconds + self.added.of(num_drafts), host))
        return more + APART * less

    def _try_fewer(self, batch: Batch, num_steps: int) -> None:
        """Now and then, where a step takes much that no graph was timed with."""
        place = self.counts.index(self.num_drafts)
        if place < 2:  # none at all would cost the drafter its KV
            return
        self._untried += num_steps
        graph = self.times.at(batch.num_reqs, self.num_drafts)
        other = self.host.of(self.num_drafts) + self.added.of(self.num_drafts)
        if self._untried < self._try_gap or graph is None or other < UNSURE * graph:
            return
        self._try_gap, self._untried = min(2 * self._try_gap, LAST_TRY), 0
        self.num_drafts, self._trying = self.counts[place - 1], LEARNED

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
        expected = self.times.at(len(plan.rows), plan.num_drafts)
        if expected is None:
            return
        if not self.host_computes:
            busy = min(time.seconds - time.waited, MUCH * expected)
            self.host.note(plan.num_drafts, busy)
            if time.waited < 0.02 * time.seconds:
                return  # the device waits for the host: what it takes itself is not known
        added = min(max(time.seconds - expected, 0.0), MUCH * expected)
        self.added.note(plan.num_drafts, added)

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
