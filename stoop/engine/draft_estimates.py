"""What decode steps yield, by number of drafts: how many of these are accepted."""

from collections.abc import Sequence

USUAL = 0.7  # share of drafts that are accepted, where nothing is known
PRIOR = 6  # weight of what is usual, in drafts
WINDOW = 512  # drafts of a position that count, the newest
SURE = 0.98  # no rate is above
LATER_SCALE = 1.25  # at most, of drafts after the first one


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

    def forget(self, share: float, beyond: int = 0) -> None:
        """Take acceptance to be more as usual, of drafts after the first `beyond`."""
        for place in range(beyond, len(self._tried)):
            self._scale(place, 1 - share)

    def _scale(self, place: int, factor: float) -> None:
        self._tried[place] *= factor
        self._passed[place] *= factor

    @property
    def rates(self) -> list[float]:
        found = zip(self.usual, self._tried, self._passed, strict=True)
        return [(PRIOR * usual + passed) / (PRIOR + tried) for usual, tried, passed in found]


def expected_tokens(rates: Sequence[float], num_drafts: int, scale: float = 1.0) -> float:
    """Tokens of a step that verifies so many drafts.

    scale: of the first rate, for the batch at hand. Later drafts follow accepted ones, so that they
    are little better where first drafts are right more often.
    """
    tokens = reached = 1.0
    for rate in rates[:num_drafts]:
        reached *= min(rate * scale, SURE)
        tokens += reached
        scale = min(scale, LATER_SCALE)
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
