"""What decode steps take, by numbers of requests and drafts, where no graphs could be timed.

Steps are timed while requests are served. Those with the number of drafts that the policy chose
show how fast the machine is at the moment: other programs may slow it down, and contexts grow. Now
and then a step takes another number, which shows what that takes in comparison, if the steps around
it took as long as usual. A step can verify no drafts and still make some, so that nothing is lost
but that step's drafts. What was found is kept for the next start (`draft_costs`).
"""

import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from stoop.core.step import StepPlan
from stoop.engine.draft_costs import SURE, DraftCosts, between, load_of
from stoop.engine.step_costs import StepTime

WARM_STEPS = 3  # the first steps of a process take longer and are not counted
ENOUGH = 2  # steps that tell what a number of drafts takes
NEWEST = 8  # steps that count
STEADY = 1.5  # times as long, at most: the machine is as fast as it was
STUBBORN = 6  # tries in a row that did not count, after which one does: the load itself varies
# Steps between those with another number: at first, with several requests, where drafts pay less
# often, if earlier runs have measured it, and later.
EARLY_GAP, SEVERAL_GAP, KNOWN_GAP, LATE_GAP = 4, 3, 25, 100
ATTEMPTS = 3  # steps of a try: the first may have too few drafts, and the second not count
RETRY = 4096  # steps without drafts after which what they take is measured again
# With several requests, steps without drafts count as shorter than they are: drafts also lengthen
# steps with prompts, which are not timed.
UNTIMED = 0.95
PROMPT_SHARE = 0.25  # of what a decode step takes, by a token of a prompt, until that is measured
MOST_PROMPTS = 0.5  # share of a step that prompts may take, so that the rest tells what decodes do


class LoadSamples:
    """Steps of one load: those with the chosen number of drafts, and others relative to these."""

    def __init__(self, known: DraftCosts | None = None) -> None:
        self._known = {count: ms / 1e3 for count, ms in known.ms.items()} if known else {}
        self._chosen = -1
        self._recent = _newest()  # seconds of steps with this number
        self._relative: dict[int, deque[float]] = {}  # of others: times as long as those
        self._carried: dict[int, float] = {}  # the same, as it was with the number chosen before
        self._tried_at: dict[int, int] = {}
        self._num_tries: Counter[int] = Counter()
        self._trying = -1  # the number that the step before tried, and did not count
        self._pending: tuple[int, float, float] | None = None  # a try: number, seconds, step before
        self.since_try = 0  # steps with the chosen number
        self.attempts = 0  # steps planned for the try at hand
        self._num_unsteady = 0  # tries in a row that did not count
        self.num_without = 0  # steps without drafts, since drafts were made
        # What was kept: whether undisturbed, how many numbers of drafts, and whether all are sure.
        self.kept = (False, 1, False)
        self.num_disturbed = 0  # tries to come until none counts that other programs slowed down

    @property
    def busy(self) -> bool:
        return self.num_disturbed > 0

    def choose(self, num_drafts: int) -> None:
        """From now on, steps take this number."""
        if num_drafts == self._chosen:
            return
        before, level, certain = self._chosen, self.level, self.has_measured(num_drafts)
        found, others, times_before = self.seconds(num_drafts), self._relative, self._all_times()
        self._chosen = num_drafts
        self.since_try = self.attempts = 0
        self._pending = None
        self._recent.clear()
        self._relative, self._carried = {}, {}
        if level is None or found is None:
            return
        times = found / level
        times_before.pop(num_drafts, None)
        self._carried = {count: each / times for count, each in times_before.items()}
        self._recent.append(found)
        if not certain:
            return  # it lay between others, which are tried again
        for count, samples in others.items():
            if count != num_drafts:
                self._relative[count] = _newest(each / times for each in samples)
        if before >= 0:
            self._relative[before] = _newest([1 / times] * ENOUGH)

    def note_chosen(self, seconds: float) -> None:
        if self._pending is not None:
            self._compare(*self._pending, seconds)
            self._pending = None
        self._recent.append(seconds)
        self._trying = -1
        self.since_try += 1

    def note_tried(self, num_drafts: int, seconds: float) -> None:
        """The first step with another number takes longer than those that follow. So it only
        counts until there is something better: the second one, in later tries."""
        early = self._num_tries[num_drafts] < ENOUGH
        if not early and num_drafts != self._trying:
            self._trying = num_drafts
            return
        self._trying = -1
        self.since_try = self.attempts = 0
        if self._recent:
            self._pending = num_drafts, seconds, self._recent[-1]

    def _compare(self, num_drafts: int, seconds: float, before: float, after: float) -> None:
        """A try took so long, and so did the steps before and after it, with the chosen number.

        It does not count if these show that the machine became slower or faster meanwhile.
        """
        level = self.level
        assert level is not None, "there are steps with the chosen number"
        around = (before, after, level)
        if max(around) > STEADY * min(around) and self._num_unsteady < STUBBORN:
            self._num_unsteady += 1
            return
        self._num_unsteady = 0
        self.num_disturbed = max(self.num_disturbed - 1, 0)
        self._num_tries[num_drafts] += 1
        self._tried_at[num_drafts] = self._num_tries.total()
        times, samples = seconds / level, self._relative.setdefault(num_drafts, _newest())
        if self._num_tries[num_drafts] == ENOUGH + 1 and samples:
            least = min(samples)
            samples.clear()
            samples.append(least)
        samples.append(times)

    @property
    def level(self) -> float | None:
        """Seconds of a step with the chosen number."""
        recent = list(self._recent)
        if recent or len(self._known) < 2:
            return statistics.median(recent) if recent else None
        return between(self._known, self._chosen)

    def _times(self, num_drafts: int) -> float | None:
        """How many times as long as with the chosen number a step takes, if that is known."""
        if num_drafts == self._chosen:
            return 1.0
        samples = list(self._relative.get(num_drafts, ()))
        if len(samples) >= ENOUGH:
            return _typical(samples)
        carried = self._carried  # another thread may ask, and it is replaced
        if num_drafts in carried:
            return carried[num_drafts]
        if num_drafts in self._known and len(self._known) > 1:
            return self._known[num_drafts] / between(self._known, self._chosen)
        return None

    def _all_times(self) -> dict[int, float]:
        numbers = {*list(self._relative), *list(self._carried), *self._known, self._chosen}
        return {k: times for k in numbers if (times := self._times(k)) is not None}

    def has_measured(self, num_drafts: int) -> bool:
        """In this run."""
        if num_drafts == self._chosen:
            return len(self._recent) >= ENOUGH
        return len(self._relative.get(num_drafts, ())) >= ENOUGH

    def knows(self, num_drafts: int) -> bool:
        return self.level is not None and self._times(num_drafts) is not None

    def seconds(self, num_drafts: int) -> float | None:
        """Of a step with so many drafts, known or between known ones; None if it is not known what
        a step takes with drafts and without."""
        if self._chosen < 0:  # none of its steps was planned so far
            usable = 0 in self._known and len(self._known) > 1
            return between(self._known, num_drafts) if usable else None
        level, found = self.level, self._all_times()
        if level is None or 0 not in found or len(found) < 2:
            return None
        return level * between(found, num_drafts)

    def last_try(self, num_drafts: int) -> int:
        return self._tried_at.get(num_drafts, 0)

    def is_sure(self, num_drafts: int) -> bool:
        return self._num_tries[num_drafts] >= SURE

    def costs(self, load: int, counts: Iterable[int]) -> DraftCosts:
        """What was measured in this run."""
        measured = [count for count in counts if self.has_measured(count)]
        ms = {count: 1e3 * taken for count in measured if (taken := self.seconds(count))}
        tries = [self._num_tries[count] for count in measured if count != self._chosen]
        return DraftCosts(ms, self.busy, load, min(tries, default=0))


def _typical(samples: Sequence[float]) -> float:
    """Of two that differ much, one was disturbed: it took too long."""
    steady = len(samples) > 2 or max(samples) <= STEADY * min(samples)
    return statistics.median(samples) if steady else min(samples)


def _newest(samples: Iterable[float] = ()) -> deque[float]:
    return deque(samples, maxlen=NEWEST)


class PromptTime(NamedTuple):
    """Of a step that only computes prompts."""

    seconds: float
    drafting: float  # of these
    num_tokens: int


class EagerCosts:
    """The `StepCosts` of engines that run one step at a time, on a CPU and without graphs."""

    bounded = False

    def __init__(
        self,
        counts: Sequence[int],
        known: Iterable[DraftCosts] = (),
        keep: Callable[[DraftCosts], None] = lambda costs: None,
    ) -> None:
        """counts: drafts that a step may make, in rising order; known: what earlier runs found;
        keep: called with what this one finds"""
        self.counts = tuple(counts)
        self._keep = keep
        self._loads = {each.load: LoadSamples(each) for each in known}
        self._chosen = self.counts[-1]
        self._made = 0  # drafts that the step before made
        self._counted = False  # whether the step before shows what decodes take
        self._warm = WARM_STEPS
        self._any_step = 1.0  # seconds of the newest decode step
        self._prompts: deque[PromptTime] = deque(maxlen=NEWEST)

    def _of(self, num_reqs: int) -> LoadSamples:
        return self._loads.setdefault(load_of(num_reqs), LoadSamples())

    # ---- what steps take ----

    def seconds(self, num_reqs: int, num_drafts: int) -> float | None:
        found = self._of(num_reqs).seconds(num_drafts)
        if found is None:
            found = self._guess(load_of(num_reqs), num_drafts)
        return found if num_drafts or num_reqs == 1 else UNTIMED * found

    def _guess(self, load: int, num_drafts: int) -> float:
        """What was not measured: drafts gain no more than with fewer requests. Where nothing is
        known of these, drafts are taken to cost nothing, so that they are tried."""
        fewer = [each for each in self.sizes if each < load]
        found = self._loads[fewer[-1]].seconds(num_drafts) if fewer else None
        return self._any_step if found is None else found

    def bare_seconds(self, num_reqs: int, num_drafts: int) -> float | None:
        return self._of(num_reqs).seconds(num_drafts)

    @property
    def sizes(self) -> list[int]:
        loads = list(self._loads.items())  # another thread may ask
        return sorted(load for load, samples in loads if samples.seconds(0) is not None)

    @property
    def seconds_per_token(self) -> float:
        return self._seconds_per_token(with_drafter=True)

    def _seconds_per_token(self, with_drafter: bool) -> float:
        prompts = list(self._prompts)
        if not prompts:
            return PROMPT_SHARE * self._any_step
        seconds = sum(each.seconds - each.drafting * (not with_drafter) for each in prompts)
        return seconds / sum(each.num_tokens for each in prompts)

    # ---- steps ----

    def plan(self, num_reqs: int, num_drafts: int) -> tuple[int, int]:
        made, self._chosen = self._made, num_drafts
        other = self._next_try(num_reqs) if num_reqs else None
        if other == 0:
            verified, self._made = 0, num_drafts
        else:
            self._made = num_drafts if other is None else other
            verified = min(made, self._made)
        return verified, self._made

    def _next_try(self, num_reqs: int) -> int | None:
        """The number of drafts to try in the next step, if any."""
        samples, load = self._of(num_reqs), load_of(num_reqs)
        samples.choose(self._chosen)
        samples.num_without = 0 if self._chosen else samples.num_without + 1
        if samples.num_without >= RETRY:
            self._loads[load] = LoadSamples()  # it may be due to other programs, long gone
        if self._chosen == 0 or not self._counted:
            return None
        others = [count for count in self.counts if count != self._chosen]
        missing = [count for count in others if not samples.has_measured(count)]
        if all(samples.is_sure(count) for count in others):
            gap = LATE_GAP
        elif all(samples.knows(count) for count in others):
            gap = KNOWN_GAP
        else:
            gap = EARLY_GAP if num_reqs == 1 else SEVERAL_GAP
        if samples.since_try < gap:
            return None
        samples.attempts += 1
        if samples.attempts > ATTEMPTS:
            samples.since_try = samples.attempts = 0
            return None
        return missing[0] if missing else min(others, key=samples.last_try)

    def note(self, plan: StepPlan, time: StepTime) -> None:
        rows = plan.rows
        if not rows[0].decodes:  # decodes come first
            num_tokens = sum(row.num_tokens for row in rows)
            self._prompts.append(PromptTime(time.inside, time.drafting, num_tokens))
            self._counted = False
            return
        seconds = self._decode_seconds(plan, time)
        self._counted = seconds is not None
        if seconds is None:
            return
        if self._warm:
            self._warm -= 1
            return
        verified, made = rows[0].num_tokens - 1, plan.num_drafts
        if verified not in (0, made):
            return  # the step before made fewer than this one
        self._any_step = seconds
        num_decodes = sum(row.decodes for row in rows)
        samples = self._of(num_decodes)
        if time.busy:
            samples.num_disturbed = NEWEST * (len(self.counts) - 1)
        if verified == self._chosen:
            samples.choose(verified)  # this load may be another than the one that was planned for
            samples.note_chosen(seconds)
        else:
            samples.note_tried(verified, seconds)
        self._keep_new(samples, load_of(num_decodes))

    def _decode_seconds(self, plan: StepPlan, time: StepTime) -> float | None:
        """What the decodes of a step took; None if it cannot be told from what prompts took."""
        seconds, with_drafter = time.inside, True
        if plan.rows[0].num_tokens == 1 and plan.num_drafts:  # a try of none: it made some
            seconds, with_drafter = seconds - time.drafting, False
        num_tokens = sum(row.num_tokens for row in plan.rows if not row.decodes)
        prompts = num_tokens * self._seconds_per_token(with_drafter) if num_tokens else 0.0
        return seconds - prompts if prompts <= MOST_PROMPTS * seconds else None

    def _keep_new(self, samples: LoadSamples, load: int) -> None:
        """Each time that one more number of drafts was measured, or often enough, and once other
        programs are gone."""
        costs = samples.costs(load, self.counts)
        found = not costs.busy, len(costs.ms), costs.tries >= SURE
        if len(costs.ms) > 1 and found > samples.kept:
            samples.kept = found
            self._keep(costs)

    # Single steps tell enough: `plan` tries other numbers.

    def tries(self, num_reqs: int) -> bool:
        return False

    def try_fewer(self, num_reqs: int, num_drafts: int, num_steps: int) -> int:
        return num_drafts

    def goes_on(self, num_reqs: int, num_drafts: int, num_steps: int, any_drafts: bool) -> bool:
        return False
