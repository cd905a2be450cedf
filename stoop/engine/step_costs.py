"""What decode steps take, by numbers of requests and drafts, where each has a captured graph.

Graphs were timed when the engine started. What attention, prompts and the host add to that is
measured while requests are served.
"""

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from stoop.core.step import StepPlan
from stoop.engine.draft_costs import load_of

HOST_DRAFTING = 1.05  # times what a step without drafts takes the host
APART = 0.25  # share of the shorter of device and host time that does not overlap with the longer
AVERAGED = 16  # steps, roughly, whose times count
FEW_AVERAGED = 4  # steps of prompts alone
LONG_PROMPTS = 256  # tokens in a step that tell what each of them takes
MOST_PROMPTS = 0.5  # share of a step that prompts may take, so that the rest tells what decodes do
MUCH = 3  # times what a graph takes: more is due to long prompts, which come now and then
LEARNED = 32  # steps after which their mean time is known
FIRST_TRY, LAST_TRY = 256, 8192  # steps before fewer drafts are tried, to see what they take
UNSURE = 0.5  # share of a graph's time: where other things take more, fewer drafts may be faster
WORTH = 0.1  # share of a step's time that fewer drafts must save besides


class StepTime(NamedTuple):
    """What a step took."""

    seconds: float | None  # from result to result; None for the first one after a pause
    waited: float  # for the device: 0 if it had to wait for the host, or if the host computes
    inside: float = 0.0  # of the seconds, within the engine core
    drafting: float = 0.0  # of these, on the host and for the next step's drafts
    busy: bool = False  # whether other programs use the processor


class StepCosts(Protocol):
    """What a policy asks."""

    bounded: bool  # whether batches larger than all of `sizes` get no drafts

    def seconds(self, num_reqs: int, num_drafts: int) -> float | None:
        """What to expect of a decode step; None if no such step is possible."""
        ...

    def bare_seconds(self, num_reqs: int, num_drafts: int) -> float | None:
        """The same at its best, for a description."""
        ...

    @property
    def sizes(self) -> list[int]:
        """Numbers of requests that were measured."""
        ...

    @property
    def seconds_per_token(self) -> float:
        """Of prompts."""
        ...

    def plan(self, num_reqs: int, num_drafts: int) -> tuple[int, int]:
        """The drafts to verify and to make in a step for which the policy chose `num_drafts`."""
        ...

    def note(self, plan: StepPlan, time: StepTime) -> None: ...

    # A trial makes fewer drafts than chosen for a while.

    def tries(self, num_reqs: int) -> bool:
        """Whether one has begun with about so many requests."""
        ...

    def try_fewer(self, num_reqs: int, num_drafts: int, num_steps: int) -> int:
        """The drafts to make: fewer if a trial begins. num_steps: since this was asked last"""
        ...

    def goes_on(self, num_reqs: int, num_drafts: int, num_steps: int, any_drafts: bool) -> bool:
        """Whether the trial does. any_drafts: whether any request gets some"""
        ...


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


class GraphCosts:
    """The `StepCosts` of engines whose decode steps are captured."""

    bounded = True

    def __init__(
        self, times: StepTimes, counts: Sequence[int], host_computes: bool = False
    ) -> None:
        """counts: drafts that a step may make, in rising order; host_computes: there is no device
        to wait for"""
        self.times = times
        self.counts = tuple(counts)
        self.host_computes = host_computes
        self.added = 0.0  # seconds of a step beyond those of its graph
        self.host = 0.0  # seconds of the host in a step
        self.seconds_per_token = times.seconds_per_token  # until prompts show more
        self._trials: dict[int, TrialOfFewer] = {}  # by load
        self._load = 1

    def trial(self, num_reqs: int) -> "TrialOfFewer":
        """Of batches of about so many requests: what prompts beside them cost depends on that."""
        load = self._load_at(num_reqs)
        if load not in self._trials:
            self._trials[load] = TrialOfFewer()
        return self._trials[load]

    def _load_at(self, num_reqs: int) -> int:
        """A few requests more or fewer leave it as it is: others come while some end."""
        slack = self._load // 16
        same = self._load // 2 - slack < num_reqs <= self._load + slack
        return self._load if same else load_of(num_reqs)

    def bare_seconds(self, num_reqs: int, num_drafts: int) -> float | None:
        return self.times.at(num_reqs, num_drafts)

    def seconds(self, num_reqs: int, num_drafts: int) -> float | None:
        """Device and host work at the same time, if not all of it."""
        seconds = self.times.at(num_reqs, num_drafts)
        if seconds is None:
            return None
        host = self.host * HOST_DRAFTING if num_drafts else self.host
        less, more = sorted((seconds + self.added, host))
        return more + APART * less + self.trial(num_reqs).held.get(num_drafts, 0.0)

    @property
    def sizes(self) -> list[int]:
        return self.times.sizes

    def plan(self, num_reqs: int, num_drafts: int) -> tuple[int, int]:
        """In a graph of a whole step both are the same."""
        return num_drafts, num_drafts

    def note(self, plan: StepPlan, time: StepTime) -> None:
        num_reqs, first = len(plan.rows), plan.rows[0]  # decodes come first
        expected = self.times.at(num_reqs, plan.num_drafts)
        if expected is None or time.seconds is None:
            return
        if not self.host_computes:
            busy = min(time.seconds - time.waited, MUCH * expected)
            self.host += (busy - self.host) / AVERAGED
        prompts = itertools.takewhile(lambda row: not row.decodes, reversed(plan.rows))
        num_tokens = sum(row.num_tokens for row in prompts)
        if not first.decodes:
            self._note_prompts(num_tokens, time.seconds)
            return
        # Prompts are due to requests that ended. With more drafts these are more in each step, and
        # as many in all.
        beside = num_tokens * self.seconds_per_token
        if beside > MOST_PROMPTS * time.seconds:
            return
        excess = time.seconds - beside - expected
        most = MUCH * max(self.times.at(num_reqs, each) or 0.0 for each in self.counts)
        self.trial(num_reqs).note(first.num_tokens - 1, min(excess, most))
        added = min(max(excess, 0.0), MUCH * expected)
        if not self.host_computes and time.waited < 0.02 * time.seconds:
            added = min(added, self.added)  # the device waits for the host: it takes less than that
        self.added += (added - self.added) / AVERAGED

    def _note_prompts(self, num_tokens: int, seconds: float) -> None:
        """A step took so long that only computed prompts. The first ones load kernels, too."""
        if num_tokens >= LONG_PROMPTS:
            each = min(seconds / num_tokens, MUCH * self.times.seconds_per_token)
            self.seconds_per_token += (each - self.seconds_per_token) / FEW_AVERAGED

    def tries(self, num_reqs: int) -> bool:
        self._load = self._load_at(num_reqs)
        for load, trial in self._trials.items():
            if load != self._load:
                trial.interrupt()  # there are more requests now, or fewer
        return self.trial(num_reqs).left > 0

    def try_fewer(self, num_reqs: int, num_drafts: int, num_steps: int) -> int:
        """None at all are not tried: that would cost the drafter its KV."""
        place, graph = self.counts.index(num_drafts), self.times.at(num_reqs, num_drafts)
        if place <= 1 or graph is None:
            return num_drafts
        begins = self.trial(num_reqs).begin(num_drafts, num_steps, graph)
        return self.counts[place - 1] if begins else num_drafts

    def goes_on(self, num_reqs: int, num_drafts: int, num_steps: int, any_drafts: bool) -> bool:
        """It ends where nothing could be learned from it."""
        graph = self.times.at(num_reqs, self.counts[self.counts.index(num_drafts) + 1])
        if graph is None or not any_drafts:
            self.trial(num_reqs).interrupt()
            return False
        return self.trial(num_reqs).go_on(num_drafts, num_steps, graph)


class TrialOfFewer:
    """Finds out by trial what more drafts take that no graph was timed with.

    With many drafts, prompts make a batch too large for any graph, and attention may be bound by
    arithmetic. So where steps take much longer than their graphs, fewer drafts are made for a
    while. If that saves more than the graphs tell, the rest is held against the larger number for
    some time: longer each time, since to find it out again costs a few slow steps.

    A trial begins after slow steps, and those after them may be faster whatever the number of
    drafts: a long prompt has ended. So a second trial, which begins at any time, must agree.
    """

    def __init__(self) -> None:
        self.held: dict[int, float] = {}  # seconds, by number of drafts
        self.left = 0  # steps of a trial
        self._tried_at = 0  # number of drafts before the trial
        self._before = 0.0
        self._shown_of = 0  # number that the last trial spoke against: a second one has to agree
        self._count, self._num_noted, self._mean = 0, 0, 0.0  # excess seconds of the steps at hand
        self._gap, self._since = FIRST_TRY, 0
        self._lasts, self._age = FIRST_TRY, 0

    def note(self, count: int, excess: float) -> None:
        """A step took so much longer than its graph."""
        if count != self._count:
            self._count, self._num_noted, self._mean = count, 0, 0.0
        self._num_noted += 1
        self._mean += (excess - self._mean) / min(self._num_noted, LEARNED)
        self._age += 1
        if self.held and self._age > self._lasts:
            self.held.clear()
            self._lasts = min(2 * self._lasts, LAST_TRY)
            self._since = self._gap  # if it is as slow as before, that is found out soon

    def begin(self, count: int, num_steps: int, graph: float) -> bool:
        """Whether to make fewer than `count` drafts now. num_steps: since this was asked last"""
        self._since += num_steps
        if self._count != count or self._num_noted < LEARNED:
            return False
        if self._shown_of != count:
            if self._since < self._gap or self._mean < UNSURE * graph:
                return False
            self._gap = min(2 * self._gap, LAST_TRY)
        self._since = 0
        self._tried_at, self._before, self.left = count, self._mean, LEARNED
        return True

    def interrupt(self) -> None:
        """End a trial that has shown nothing; the next one begins soon, but not at once: the load
        may go on changing."""
        if self.left > 0:
            self.left = self._shown_of = 0
            self._since = self._gap - FIRST_TRY

    def go_on(self, count: int, num_steps: int, graph: float) -> bool:
        """Whether the trial, with `count` drafts, goes on. graph: of the larger number"""
        self.left -= num_steps
        if self.left > 0:
            return True
        saved = self._before - self._mean
        known = self._count == count and self._num_noted >= LEARNED // 2
        shows = known and saved > WORTH * (graph + self._before)
        agrees = self._shown_of == self._tried_at
        if shows and agrees:
            self.held[self._tried_at] = saved
            self._age = 0
        self._shown_of = self._tried_at if shows and not agrees else 0
        return False
