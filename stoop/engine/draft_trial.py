"""Measures whether drafts pay while requests are served.

Steps that serve a single request are timed. Now and then one of them verifies no drafts, which
shows what plain decoding would cost. If drafts do not pay, the engine decodes without them from
then on: until it is idle, or for good if they could not pay with usual acceptance either. The text
is the same either way.
"""

import logging
import statistics
from collections import deque
from collections.abc import Callable, Sequence

from stoop.engine.draft_costs import DraftCosts

log = logging.getLogger(__name__)

WARM_STEPS = 3  # the first steps of a process take longer and are not counted
PLAIN_SAMPLES = 5  # needed before anything is decided
DRAFTED_SAMPLES = 16
# Drafted steps between plain ones: at first, at first if earlier runs measured, and later.
EARLY_GAP, KNOWN_GAP, LATE_GAP = 6, 25, 60
PRIOR_STEPS = 16  # weight of the usual acceptance, in steps
WORTH_IT = 0.97  # drafts are switched off below this share of plain speed
KEPT = 8  # samples of each kind that count, the newest


class DraftTrial:
    """Times steps with and without drafts, and decides."""

    def __init__(
        self,
        num_drafts: int,
        usual_tokens: Sequence[float],
        keep: Callable[[DraftCosts], None],
    ) -> None:
        """usual_tokens: tokens per step with 1, 2 ... drafts; keep: called with the costs found"""
        self.num_drafts = num_drafts
        self.usual_tokens = usual_tokens[min(num_drafts, len(usual_tokens)) - 1]
        self.pays = True
        self.early_gap = EARLY_GAP
        self.hopeless = False  # drafts are off for good
        self._keep = keep
        self._plain: deque[float] = deque(maxlen=KEPT)  # seconds
        self._drafted: deque[float] = deque(maxlen=4 * KEPT)
        self._busy = False
        self._num_steps = 0
        self._since_plain = 0
        self._restart_acceptance()

    def _restart_acceptance(self) -> None:
        self._num_drafted = PRIOR_STEPS
        self._num_tokens = PRIOR_STEPS * self.usual_tokens

    def wants_plain(self) -> bool:
        """Whether the next step should verify no drafts."""
        if not self.pays:
            return True
        gap = self.early_gap if len(self._plain) < PLAIN_SAMPLES else LATE_GAP
        return self._since_plain >= gap

    def note_plain(self, seconds: float, busy: bool = False) -> None:
        """Record the time of a step that verified no drafts, without that of making new ones.

        busy: whether other programs use the cores
        """
        if not self.pays:
            return
        self._busy |= busy
        self._plain.append(seconds)
        self._since_plain = 0
        if len(self._plain) == PLAIN_SAMPLES and len(self._drafted) >= DRAFTED_SAMPLES:
            self._keep(self.costs())

    def note_drafted(self, seconds: float, num_tokens: int) -> None:
        """Record the time of a step that verified drafts, and the tokens that it produced."""
        self._num_steps += 1
        if self._num_steps <= WARM_STEPS:
            return
        self._since_plain += 1
        self._num_drafted += 1
        self._num_tokens += num_tokens
        self._drafted.append(seconds)
        if len(self._plain) >= PLAIN_SAMPLES and len(self._drafted) >= DRAFTED_SAMPLES:
            self._decide()

    def note_idle(self) -> None:
        """No requests are left, and drafts may be accepted more often in the next ones."""
        self._restart_acceptance()
        self.pays = not self.hopeless

    def costs(self) -> DraftCosts:
        """The medians of the newest samples."""
        plain, drafted = (1e3 * statistics.median(each) for each in (self._plain, self._drafted))
        return DraftCosts(self.num_drafts, plain, drafted, self._busy)

    def _decide(self) -> None:
        costs, tokens = self.costs(), self._num_tokens / self._num_drafted
        if tokens * costs.plain_ms >= WORTH_IT * costs.drafted_ms:
            return
        self.pays = False
        self.hopeless = self.usual_tokens * costs.plain_ms < WORTH_IT * costs.drafted_ms
        log.warning(
            "speculative decoding is off %s: a step takes %.0f ms with K = %d and %.0f ms without, "
            "and yields %.1f tokens (to keep it on, name a drafter in speculative_config)",
            "from now on" if self.hopeless else "until these requests are done",
            costs.drafted_ms,
            self.num_drafts,
            costs.plain_ms,
            tokens,
        )
