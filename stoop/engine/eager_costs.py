"""What decode steps take, by numbers of requests and drafts, where no graphs could be timed.

Steps are timed while requests are served. Those with the number of drafts in use show how fast the
machine is at the moment: other programs may slow it down, and contexts grow. Now and then a step
takes another number, which shows what that takes in comparison. A step can verify no drafts and
still make some, so that nothing is lost but that step's drafts. What was found is kept for the
next start (`draft_costs`).
"""

import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from stoop.core.step import StepPlan
from stoop.engine.draft_costs import DraftCosts, between, load_of
from stoop.engine.step_costs import StepTime

WARM_STEPS = 3  # the first steps of a process take longer and are not counted
ENOUGH = 3  # steps of a number of drafts that tell what it takes
NEWEST = 8  # steps that count
# Steps between those with another number: at first, with several requests, where drafts pay less
# often, if earlier runs have measured it, and later.
EARLY_GAP, SEVERAL_GAP, KNOWN_GAP, LATE_GAP = 6, 3, 25, 100
DOUBT = 1.03  # times what steps without drafts take: to make drafts again costs something
ATTEMPTS = 3  # steps in which another number is tried: the first may have too few drafts
RETRY = 4096  # steps without drafts after which the next requests measure again
PROMPT_SHARE = 0.25  # of what a decode step takes, by a token of a prompt, until that is measured


class LoadSamples:
    """Steps of one load. A step takes `pace` times what its number of drafts takes usually."""

    def __init__(self, known: DraftCosts | None) -> None:
        self._known = {k: ms / 1e3 for k, ms in known.ms.items()} if known else {}
        self._taken: dict[int, deque[float]] = {}  # seconds over the pace at that time
        self._paces: deque[float] = deque(maxlen=NEWEST)
        self._tried: Counter[int] = Counter()
        self._last = -1  # number of drafts in the step before
        self.since_other = 0  # steps with the same number
        self.num_kept = 0  # numbers of drafts whose costs were kept
        self.busy = False

    @property
    def pace(self) -> float:
        return statistics.median(self._paces) if self._paces else 1.0

    def note(self, num_drafts: int, seconds: float) -> None:
        """The first step with another number of drafts shows what that takes in comparison."""
        usual, same = self._usual(num_drafts), num_drafts == self._last
        self._last = num_drafts
        if same and usual is not None:
            self._paces.append(seconds / usual)
            self.since_other += 1
            return
        self._taken.setdefault(num_drafts, deque(maxlen=NEWEST)).append(seconds / self.pace)
        if not same:
            self.since_other = 0
            self._tried[num_drafts] += 1

    def _usual(self, num_drafts: int) -> float | None:
        if self.has_measured(num_drafts):
            return statistics.median(self._taken[num_drafts])
        return self._known.get(num_drafts)

    def has_measured(self, num_drafts: int) -> bool:
        return len(self._taken.get(num_drafts, ())) >= ENOUGH

    def knows(self, num_drafts: int) -> bool:
        return self._usual(num_drafts) is not None

    def seconds(self, num_drafts: int) -> float | None:
        """Of a step with so many drafts, measured or in between; None if too little is known."""
        found = {k: usual for k in {*self._taken, *self._known} if (usual := self._usual(k))}
        return self.pace * between(found, num_drafts) if len(found) > 1 else None

    def times_tried(self, num_drafts: int) -> int:
        return self._tried[num_drafts]

    def costs(self, load: int, counts: Iterable[int]) -> DraftCosts:
        ms = {k: 1e3 * self.pace * (self._usual(k) or 0.0) for k in counts if self.has_measured(k)}
        return DraftCosts(ms, self.busy, load)


class EagerCosts:
    """The `StepCosts` of engines that run one step at a time, on a CPU and without graphs."""

    bounded = False
    tries = False

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
        self._attempts = 0
        self._without = 0  # steps without drafts, since something was measured
        self._warm = WARM_STEPS
        self._per_token: deque[float] = deque(maxlen=NEWEST)

    def _of(self, num_reqs: int) -> LoadSamples:
        load = load_of(num_reqs)
        if load not in self._loads:
            self._loads[load] = LoadSamples(None)
        return self._loads[load]

    # ---- what steps take ----

    def seconds(self, num_reqs: int, num_drafts: int) -> float | None:
        """Until something is known, drafts are taken to cost nothing: so they are tried."""
        found = self._of(num_reqs).seconds(num_drafts)
        if found is None:
            return 1.0
        return found if num_drafts else DOUBT * found

    def bare_seconds(self, num_reqs: int, num_drafts: int) -> float | None:
        return self._of(num_reqs).seconds(num_drafts)

    def knows(self, num_reqs: int) -> bool:
        """Whether it was measured what so many requests take with drafts and without."""
        return self._of(num_reqs).seconds(0) is not None

    @property
    def sizes(self) -> list[int]:
        return sorted(load for load in self._loads if self.knows(load))

    @property
    def seconds_per_token(self) -> float:
        if self._per_token:
            return statistics.median(self._per_token)
        return PROMPT_SHARE * (self._of(1).seconds(0) or 0.0)

    # ---- steps ----

    def plan(self, num_reqs: int, num_drafts: int) -> tuple[int, int]:
        made, self._chosen = self._made, num_drafts
        self._without += num_drafts == 0
        other = self._due(num_reqs) if num_drafts else None
        if other == 0:
            verified, self._made = 0, num_drafts
        else:
            self._made = num_drafts if other is None else other
            verified = min(made, self._made)
        return verified, self._made

    def _due(self, num_reqs: int) -> int | None:
        """The number of drafts to try in the next step, if any."""
        samples = self._of(num_reqs)
        others = [count for count in self.counts if count != self._chosen]
        missing = [count for count in others if not samples.has_measured(count)]
        if not missing:
            gap = LATE_GAP
        elif all(samples.knows(count) for count in others):
            gap = KNOWN_GAP
        else:
            gap = EARLY_GAP if num_reqs == 1 else SEVERAL_GAP
        if samples.since_other < gap:
            self._attempts = 0
            return None
        self._attempts += 1
        if self._attempts > ATTEMPTS:  # there were prompts beside it
            samples.since_other = 0
            return None
        return missing[0] if missing else min(others, key=samples.times_tried)

    def note(self, plan: StepPlan, time: StepTime) -> None:
        rows = plan.rows
        if not any(row.decodes for row in rows):
            self._per_token.append(time.inside / sum(row.num_tokens for row in rows))
            return
        if not all(row.decodes for row in rows):
            return
        if self._warm:
            self._warm -= 1
            return
        verified, made = rows[0].num_tokens - 1, plan.num_drafts
        if verified == made:
            seconds = time.inside
        elif verified == 0:
            seconds = time.inside - time.drafting
        else:
            return  # the step before made fewer than this one
        samples = self._of(len(rows))
        samples.busy |= time.busy
        samples.note(verified, seconds)
        self._keep_new(samples, load_of(len(rows)))

    def _keep_new(self, samples: LoadSamples, load: int) -> None:
        """Each time that one more number of drafts was measured."""
        costs = samples.costs(load, self.counts)
        if len(costs.ms) > max(samples.num_kept, 1):
            samples.num_kept = len(costs.ms)
            self._keep(costs)

    def note_idle(self) -> None:
        """What was measured long ago may be due to other programs, and keeps drafts away."""
        if self._without >= RETRY:
            self._loads.clear()
            self._without = 0

    def forget_load(self) -> None:
        pass

    # No trials of some length: single steps tell enough.

    def try_fewer(self, num_reqs: int, num_drafts: int, num_steps: int) -> int:
        return num_drafts

    def goes_on(self, num_reqs: int, num_drafts: int, num_steps: int) -> bool:
        return False
