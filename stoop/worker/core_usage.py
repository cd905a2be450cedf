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
from typing import NamedTuple

log = logging.getLogger(__name__)

STAT = Path("/proc/stat")
# Of a core's line there: user, system, irq, softirq, steal
BUSY_FIELDS = (0, 2, 5, 6, 7)
NICE_FIELD = 1  # of programs of low priority
SPARE = 0.25  # of a core may be in use when threads are added
BUSY_SHARE = 0.05  # waiting for a core for a larger share: other programs need the cores
HELD_SHARE = 0.25  # for a larger one: they do not give way
FIRST_DOUBT, LONGEST_DOUBT = 4.0, 256.0  # seconds for which that is believed


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


class CoreSeconds(NamedTuple):
    """How long our cores have been busy so far, in sum."""

    first: float  # with programs that have our priority or a higher one, this one among them
    after: float  # with those of lower priority, which usually give way


def core_seconds(stat: Path = STAT) -> CoreSeconds | None:
    """None if unknown."""
    ticks = found = low = 0
    try:
        names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        for line in stat.read_text().splitlines():
            name, *values = line.split()
            if name in names:
                ticks += sum(int(values[place]) for place in BUSY_FIELDS)
                low += int(values[NICE_FIELD])
                found += 1
        second = os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return None
    if not found:
        return None
    if os.getpriority(os.PRIO_PROCESS, 0) > 0:  # we give way, too
        return CoreSeconds((ticks + low) / second, 0.0)
    return CoreSeconds(ticks / second, low / second)


def seconds_used(stat: Path = STAT) -> float | None:
    """With all programs; None if unknown."""
    used = core_seconds(stat)
    return None if used is None else sum(used)


class ThreadLimit:
    """Lowers the number of threads while other programs need the cores.

    Programs of low priority (`nice`) give way, so they do not count. But Linux shares cores between
    sessions and containers before it looks at priorities, and those of another session hold theirs.
    If nothing else explains why the stepping thread waits, they count for some seconds: longer each
    time, since to find it out again costs a slow window.
    """

    def __init__(
        self,
        set_limit: Callable[[int], None],
        cores: int,
        most: int,
        used: Callable[[], CoreSeconds | None] = core_seconds,
        own: Callable[[], float] = time.process_time,
    ) -> None:
        """set_limit: called with every new number; most: threads on an idle machine; used: by all
        programs; own: seconds of this process"""
        self._set_limit = set_limit
        self._cores = cores
        self._sizes = [most >> shift for shift in range(most.bit_length())]
        self._used = used
        self._own = own
        self._doubt, self._next_doubt = 0.0, FIRST_DOUBT  # seconds
        self.threads = most
        set_limit(most)
        self.begin()

    @property
    def lowered(self) -> bool:
        return self.threads < self._sizes[0]

    def begin(self) -> None:
        """Start a new window."""
        self._used_before, self._own_before = self._used(), self._own()
        self._at_pause: tuple[CoreSeconds | None, float] | None = None

    def pause(self) -> None:
        """What cores do until `resume` is not counted."""
        self._at_pause = self._used(), self._own()

    def resume(self) -> None:
        if self._at_pause is None:
            return
        (used, own), self._at_pause = self._at_pause, None
        now, before = self._used(), self._used_before
        if used is not None and now is not None and before is not None:
            passed = now.first - used.first, now.after - used.after
            self._used_before = CoreSeconds(before.first + passed[0], before.after + passed[1])
        self._own_before += self._own() - own

    def decide(self, seconds: float, waited: float, *, loading: bool = False) -> None:
        """End a window.

        waited: share of it in which the stepping thread waited for a core; loading: it was the only
        thread, and hardly waits if others leave it one core
        """
        used, before = self._used(), self._used_before
        if used is None or before is None:
            return
        others = max((used.first - before.first) - (self._own() - self._own_before), 0.0) / seconds
        after = (used.after - before.after) / seconds
        explained = self._cores - others < self.threads - SPARE
        if self._holds_cores(after, waited, seconds, explained):
            others += after
        free, room = self._cores - others, self._room(others)
        crowded = waited > BUSY_SHARE or (loading and 2 * free <= self._cores + 0.5)
        lower = crowded and room < self.threads
        if lower or (room > self.threads and free >= room - SPARE):
            self.threads = room
            self._set_limit(room)
            most = self._sizes[0]
            log.info("CPU kernels use %d of %d threads (others use %.1f cores)", room, most, others)

    def _room(self, others: float) -> int:
        """Threads to use beside programs that use so many cores."""
        return next((size for size in self._sizes if size <= self._cores - others + 0.5), 1)

    def _holds_cores(self, after: float, waited: float, seconds: float, explained: bool) -> bool:
        """Whether programs of lower priority, which use so many cores, do not give way.

        explained: other programs make the stepping thread wait
        """
        if after < SPARE:
            self._doubt, self._next_doubt = 0.0, FIRST_DOUBT
        elif waited <= HELD_SHARE or explained:
            self._doubt -= seconds
        elif self._doubt <= 0:
            self._doubt = self._next_doubt
            self._next_doubt = min(2 * self._next_doubt, LONGEST_DOUBT)
        return self._doubt > 0


def most_threads(torch_threads: int) -> int:
    """Threads for our kernels on an otherwise idle machine."""
    quota = quota_cores()
    return torch_threads if quota is None else max(1, min(torch_threads, math.ceil(quota)))
