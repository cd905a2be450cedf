"""How many of a CPU's cores other programs use, and how many threads that leaves for our kernels.

A step of packed weights is a few milliseconds with over a hundred barriers. If a thread has to wait
for a core, all others wait for it at the next barrier: on two cores, beside programs that never
rest, one thread is faster than two. So a busy machine gets as many threads as it has cores to
spare. A product's rows do not depend on the number of threads, and neither does the text.
"""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # of /proc/stat: user, nice, system, irq, softirq, steal
SPARE = 0.75  # of a core must be free before it gets a thread again


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def seconds_used() -> float | None:
    """Return how long this process's cores have been busy so far, in sum; None if unknown."""
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = found = 0
    try:
        for line in Path("/proc/stat").read_text().splitlines():
            name, *fields = line.split()
            if name in names:
                ticks += sum(int(fields[place]) for place in BUSY_FIELDS)
                found += 1
    except (OSError, ValueError, IndexError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK") if found else None


class ThreadLimit:
    """Lowers the number of threads while other programs need the cores."""

    def __init__(
        self,
        set_limit: Callable[[int | None], None],
        cores: int,
        used: Callable[[], float | None] = seconds_used,
        own: Callable[[], float] = time.process_time,
    ) -> None:
        """set_limit: called with every new number, None for all; own: seconds of this process"""
        self._set_limit = set_limit
        self._cores = cores
        self._used = used
        self._own = own
        self.threads = cores
        self.begin()

    @property
    def lowered(self) -> bool:
        return self.threads < self._cores

    def begin(self) -> None:
        """Start a new window."""
        self._used_before, self._own_before = self._used(), self._own()

    def decide(self, seconds: float, busy: bool) -> None:
        """End a window. busy: the stepping thread waited for a core in it"""
        used = self._used()
        if used is None or self._used_before is None:
            return
        others = (used - self._used_before) - (self._own() - self._own_before)
        free = self._cores - max(others, 0.0) / seconds
        room = min(max(math.floor(free + 0.5), 1), self._cores)
        lower = busy and room < self.threads
        if lower or (room > self.threads and free >= self.threads + SPARE):
            self.threads = room
            self._set_limit(room if self.lowered else None)
