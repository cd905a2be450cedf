"""How many of a CPU's cores other programs use, and how many threads that leaves for our kernels.

A step of packed weights is a few milliseconds with over a hundred barriers. If a thread has to wait
for a core, all others wait for it at the next barrier: on two cores, beside programs that never
rest, one thread is faster than two. So a busy machine gets as many threads as it has cores to
spare. A product's rows do not depend on the number of threads, and neither does the text.

A number of threads has threads and memory of its own, so there are few numbers to choose from: all,
half of them, a quarter and so on.
"""

import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

# Of a core's line in /proc/stat: user, system, irq, softirq, steal
BUSY_FIELDS = (0, 2, 5, 6, 7)
NICE_FIELD = 1  # of programs that give way to others
SPARE = 0.25  # of a core may be in use when threads are added


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def quota_cores(file: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    """Return how many cores' worth of time this container gets; None if it has no limit."""
    try:
        quota, period = file.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def seconds_used(*, nice: bool = True, stat: Path = Path("/proc/stat")) -> float | None:
    """Return how long this process's cores have been busy so far, in sum; None if unknown.

    nice: count programs of low priority, too
    """
    fields = (NICE_FIELD, *BUSY_FIELDS) if nice else BUSY_FIELDS
    ticks = found = 0
    try:
        names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        for line in stat.read_text().splitlines():
            name, *values = line.split()
            if name in names:
                ticks += sum(int(values[place]) for place in fields)
                found += 1
        return ticks / os.sysconf("SC_CLK_TCK") if found else None
    except (OSError, AttributeError, ValueError, IndexError):
        return None


def seconds_denied() -> float | None:
    """Return how long programs used our cores that do not give way to this one."""
    return seconds_used(nice=os.getpriority(os.PRIO_PROCESS, 0) > 0)


class ThreadLimit:
    """Lowers the number of threads while other programs need the cores."""

    def __init__(
        self,
        set_limit: Callable[[int], None],
        cores: int,
        most: int,
        used: Callable[[], float | None] = seconds_denied,
        own: Callable[[], float] = time.process_time,
    ) -> None:
        """set_limit: called with every new number; most: threads on an idle machine; used: seconds
        of all programs; own: seconds of this process"""
        self._set_limit = set_limit
        self._cores = cores
        self._sizes = [most >> shift for shift in range(most.bit_length())]
        self._used = used
        self._own = own
        self.threads = most
        set_limit(most)
        self.begin()

    @property
    def lowered(self) -> bool:
        return self.threads < self._sizes[0]

    def begin(self) -> None:
        """Start a new window."""
        self._used_before, self._own_before = self._used(), self._own()

    def decide(self, seconds: float, waits: bool, *, loading: bool = False) -> None:
        """End a window.

        waits: the stepping thread waited for a core in it; loading: it was the only thread, and
        hardly waits if others leave it one core
        """
        used = self._used()
        if used is None or self._used_before is None:
            return
        others = max((used - self._used_before) - (self._own() - self._own_before), 0.0) / seconds
        free = self._cores - others
        room = next((size for size in self._sizes if size <= free + 0.5), 1)
        crowded = waits or (loading and 2 * free <= self._cores + 0.5)
        lower = crowded and room < self.threads
        if lower or (room > self.threads and free >= room - SPARE):
            self.threads = room
            self._set_limit(room)
            most = self._sizes[0]
            log.info("CPU kernels use %d of %d threads (others use %.1f cores)", room, most, others)


def most_threads(torch_threads: int) -> int:
    """Threads for our kernels on an otherwise idle machine."""
    quota = quota_cores()
    return torch_threads if quota is None else max(1, min(torch_threads, math.ceil(quota)))
