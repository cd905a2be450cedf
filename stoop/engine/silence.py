"""How long a process has been silent."""

import time
from collections.abc import Callable

MAX_LOOK_SECONDS = 1.0  # between two looks


class Silence:
    """Adds up the time without a sign of life, as far as the listener was there to hear one.

    `look` is called at least every `interval` seconds. If it comes much later, the listener itself
    was stopped or busy, and that time does not count: a sign may be waiting for it.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        """limit: seconds; 0 for none"""
        self.limit = limit
        self.seconds = 0.0
        self._clock = clock
        self._heard = True  # a sign since the last look
        self._last_look = clock()

    @property
    def interval(self) -> float:
        return min(MAX_LOOK_SECONDS, self.limit / 4)

    def end(self) -> None:
        """There was a sign of life."""
        self._heard = True

    def look(self, at_least: float = 0.0) -> bool:
        """Whether the silence has lasted too long. If so, counting starts over.

        at_least: seconds that are not too long, whatever the limit
        """
        now = self._clock()
        since, self._last_look = now - self._last_look, now
        if self._heard:
            self._heard, self.seconds = False, 0.0
            return False
        self.seconds += min(since, 2 * self.interval)
        if not self.limit or self.seconds < max(self.limit, at_least):
            return False
        self.seconds = 0.0
        return True
