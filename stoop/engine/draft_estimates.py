"""What the choice of the number of drafts rests on: what steps take, and what they yield."""

import bisect
from collections.abc import Mapping, Sequence

USUAL = 0.7  # share of drafts that are accepted, where nothing is known
PRIOR = 6  # weight of what is usual, in drafts
WINDOW = 512  # drafts of a position that count, the newest
SURE = 0.98  # no rate is above
LEARNED = 32  # steps after which their mean time is known
FIRST_TRY, LAST_TRY = 256, 8192  # steps before fewer drafts are tried, to see what they take
UNSURE = 0.5  # share of a graph's time: where other things take more, fewer drafts may be faster
WORTH = 0.1  # share of a step's time that fewer drafts must save besides


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


class TrialOfFewer:
    """Finds out by trial what more drafts take that no graph was timed with.

    With many drafts, prompts make a batch too large for any graph, and attention may be bound by
    arithmetic. So where steps take much longer than their graphs, fewer drafts are made for a
    while. If that saves more than the graphs tell, the rest is held against the larger number for
    some time: longer each time, since to find it out again costs a few slow steps.
    """

    def __init__(self) -> None:
        self.held: dict[int, float] = {}  # seconds, by number of drafts
        self.left = 0  # steps of a trial
        self._tried_at = 0  # number of drafts before the trial
        self._before = 0.0
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
        known = self._count == count and self._num_noted >= LEARNED
        if self._since < self._gap or not known or self._mean < UNSURE * graph:
            return False
        self._gap, self._since = min(2 * self._gap, LAST_TRY), 0
        self._tried_at, self._before, self.left = count, self._mean, LEARNED
        return True

    def go_on(self, count: int, num_steps: int, graph: float) -> bool:
        """Whether the trial, with `count` drafts, goes on. graph: of the larger number"""
        self.left -= num_steps
        if self.left > 0:
            return True
        saved = self._before - self._mean
        known = self._count == count and self._num_noted >= LEARNED // 2
        if known and saved > WORTH * (graph + self._before):
            self.held[self._tried_at] = saved
            self._age = 0
        return False

    def forget(self) -> None:
        """For another load."""
        self.held.clear()
        self.left = self._since = self._num_noted = 0
        self._gap = self._lasts = FIRST_TRY


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
