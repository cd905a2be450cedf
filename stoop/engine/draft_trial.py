"""Measures whether drafts pay while requests are served, by how many of them decode at once.

Steps that only decode are timed. Now and then one of them verifies no drafts, which shows what
plain decoding would cost. Where drafts do not pay, the engine decodes without them: with so many
requests or more, until it is idle, or for good if they could not pay with usual acceptance either.
The more requests, the less drafts gain. The text is the same either way.
"""

import logging
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from stoop.engine.draft_costs import DraftCosts

log = logging.getLogger(__name__)

WARM_STEPS = 3  # the first steps of a process take longer and are not counted
PLAIN_SAMPLES = 5  # needed before anything is decided
DRAFTED_SAMPLES = 16
# Drafted steps between plain ones: at first, with several requests, where drafts pay less often,
# if earlier runs measured, and later.
EARLY_GAP, SEVERAL_GAP, KNOWN_GAP, LATE_GAP = 6, 3, 25, 60
PRIOR_STEPS = 16  # weight of the usual acceptance, in steps of a request
WORTH_IT = 0.97  # drafts are switched off below this share of plain speed
KEPT = 8  # samples of each kind that count, the newest
NEVER = 1 << 30  # a load that no engine has


def load_of(num_reqs: int) -> int:
    """Requests are counted in powers of two, rounded up."""
    return 1 << max(num_reqs - 1, 0).bit_length()


class Samples:
    """The newest steps with and without drafts, of one load."""

    def __init__(self) -> None:
        self.plain: deque[float] = deque(maxlen=KEPT)  # seconds
        self.drafted: deque[float] = deque(maxlen=4 * KEPT)
        self.busy = False
        self.since_plain = 0
        self.kept = False  # for later runs

    @property
    def enough(self) -> bool:
        return len(self.plain) >= PLAIN_SAMPLES and len(self.drafted) >= DRAFTED_SAMPLES

    def costs(self, num_drafts: int, load: int) -> DraftCosts:
        plain, drafted = (1e3 * statistics.median(each) for each in (self.plain, self.drafted))
        return DraftCosts(num_drafts, plain, drafted, self.busy, load)


class DraftTrial:
    """Times steps with and without drafts, and decides."""

    def __init__(
        self,
        num_drafts: int,
        usual_tokens: Sequence[float],
        keep: Callable[[DraftCosts], None],
        known: Iterable[DraftCosts] = (),
    ) -> None:
        """usual_tokens: tokens per step with 1, 2 ... drafts; keep: called with the costs found;
        known: what earlier runs found"""
        self.num_drafts = num_drafts
        self.usual_tokens = usual_tokens[min(num_drafts, len(usual_tokens)) - 1]
        self._keep = keep
        self._samples: dict[int, Samples] = {}  # by load
        self._num_steps = 0
        known = list(known)
        self._known_loads = {each.load for each in known}
        # What steps cost, until this run has measured it
        self._known = {each.load: each for each in known if each.num_drafts == num_drafts}
        # The lowest load with which drafts do not pay: for now, and with usual acceptance
        hopeless = (load for load, each in self._known.items() if not self._pays_usually(each))
        self._off_from = self._hopeless_from = min(hopeless, default=NEVER)
        self._restart_acceptance()

    def _restart_acceptance(self) -> None:
        self._num_drafted = PRIOR_STEPS
        self._num_tokens = PRIOR_STEPS * self.usual_tokens

    def pays(self, num_reqs: int = 1) -> bool:
        """Whether to make drafts while so many requests run."""
        return load_of(num_reqs) < self._off_from

    @property
    def hopeless(self) -> bool:
        """Drafts are off for good."""
        return self._hopeless_from == 1

    def wants_plain(self, num_reqs: int = 1) -> bool:
        """Whether the next step should verify no drafts."""
        if not self.pays(num_reqs):
            return True
        samples = self._of(num_reqs)
        return samples.since_plain >= self._gap(samples, load_of(num_reqs))

    def _gap(self, samples: Samples, load: int) -> int:
        if len(samples.plain) >= PLAIN_SAMPLES:
            return LATE_GAP
        if load in self._known_loads:
            return KNOWN_GAP
        return EARLY_GAP if load == 1 else SEVERAL_GAP

    def _of(self, num_reqs: int) -> Samples:
        return self._samples.setdefault(load_of(num_reqs), Samples())

    def note_plain(self, seconds: float, busy: bool = False, num_reqs: int = 1) -> None:
        """Record the time of a step that verified no drafts, without that of making new ones.

        busy: whether other programs use the cores
        """
        if not self.pays(num_reqs):
            return
        samples = self._of(num_reqs)
        samples.busy |= busy
        samples.plain.append(seconds)
        samples.since_plain = 0
        self._keep_once(samples, load_of(num_reqs))

    def note_drafted(self, seconds: float, num_tokens: int, num_reqs: int = 1) -> None:
        """Record the time of a step that verified drafts, and the tokens that it produced."""
        self._num_steps += 1
        if self._num_steps <= WARM_STEPS:
            return
        samples = self._of(num_reqs)
        samples.since_plain += 1
        samples.drafted.append(seconds)
        self._num_drafted += num_reqs
        self._num_tokens += num_tokens
        load = load_of(num_reqs)
        self._keep_once(samples, load)
        costs = samples.costs(self.num_drafts, load) if samples.enough else self._known.get(load)
        if costs is not None:
            self._decide(costs)

    def _keep_once(self, samples: Samples, load: int) -> None:
        if samples.enough and not samples.kept:
            samples.kept = True
            self._keep(samples.costs(self.num_drafts, load))

    def note_idle(self) -> None:
        """No requests are left, and drafts may be accepted more often in the next ones."""
        self._restart_acceptance()
        self._off_from = self._hopeless_from

    def _pays_usually(self, costs: DraftCosts) -> bool:
        return self.usual_tokens * costs.plain_ms >= WORTH_IT * costs.drafted_ms

    def _decide(self, costs: DraftCosts) -> None:
        tokens = self._num_tokens / self._num_drafted
        if tokens * costs.plain_ms >= WORTH_IT * costs.drafted_ms or costs.load >= self._off_from:
            return
        self._off_from = costs.load
        if not self._pays_usually(costs):
            self._hopeless_from = costs.load
        if costs.load > 1:
            when = f"while {costs.load // 2 + 1} or more requests run"
        else:
            when = "from now on" if self.hopeless else "until these requests are done"
        log.warning(
            "speculative decoding is off %s: a step takes %.1f ms with K = %d and %.1f ms without, "
            "and yields %.1f tokens (to keep it on, name a drafter in speculative_config)",
            when,
            costs.drafted_ms,
            self.num_drafts,
            costs.plain_ms,
            tokens,
        )
