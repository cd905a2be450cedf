"""CPU threads that spin while the cores are free and sleep while other programs need them.

A step on a CPU has over a hundred parallel regions, and OpenMP's threads wait for each other at the
end of each. On idle cores, spinning (libgomp's default for some milliseconds) is fastest: a step of
SmolLM2 takes a quarter less time than with sleeping threads. But if another program occupies a
core, the spinning threads keep the one they wait for from running, and a step takes ten times as
long.

So threads sleep at first. They start to spin once the stepping thread has hardly waited for a core
for a while, and sleep again when it does. libgomp has no call for this, but it stops spinning while
it manages more threads than there are cores. Creating a second team of idle threads has that
effect; ending the team undoes it.

Our own CPU kernels have a team of their own (ops/native), which follows the same decision. They
also use fewer threads while other programs need the cores (`core_usage.py`).

`OMP_WAIT_POLICY` or `GOMP_SPINCOUNT` in the environment take precedence over both, `num_threads` or
`OMP_NUM_THREADS` over the number of threads.
"""

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stoop.ops.native.library import limit_threads, spin_between_calls
from stoop.worker.core_usage import BUSY_SHARE, ThreadLimit, most_threads, num_cores

log = logging.getLogger(__name__)

WINDOW_SECONDS = 0.3  # minimum window over which waiting is measured, without pauses
FIRST_WINDOW = 0.1  # after loading, since many an answer takes no longer
MIN_STEPS = 4  # minimum steps per window, unless it lasts LONG_WINDOW_SECONDS
LONG_WINDOW_SECONDS = 1.0
IDLE_SHARE = 0.01  # waiting for a smaller share: the cores are idle
FIRST_PAUSE = 2.0  # seconds of sleeping before the next try to spin; doubles at every failure
LONGEST_PAUSE = 60.0


class IdleTeam:
    """A team of OpenMP threads, one more than there are cores, that sleeps until `end`."""

    def __init__(self, libgomp: Any) -> None:
        self._libgomp = libgomp
        self._end = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stoop-idle-team", daemon=True)
        self._thread.start()
        self._ready.wait()

    def _run(self) -> None:
        # Any cheap function works. The team lives as long as this thread.
        nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)
        self._libgomp.GOMP_parallel(nothing, None, num_cores() + 1, 0)
        self._ready.set()
        self._end.wait()

    def end(self) -> None:
        self._end.set()
        self._thread.join()


class SleepingThreads:
    """While it exists, threads sleep instead of spinning: OpenMP's, and those of our kernels."""

    def __init__(self, libgomp: Any | None) -> None:
        spin_between_calls(False)
        self._team = None if libgomp is None else IdleTeam(libgomp)

    def end(self) -> None:
        spin_between_calls(True)
        if self._team is not None:
            self._team.end()


def find_libgomp() -> Any | None:
    """Return the OpenMP library that torch has loaded, if it is libgomp."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}
    for path in sorted(paths):
        try:
            library = ctypes.CDLL(path)
            library.GOMP_parallel.restype = None
            library.GOMP_parallel.argtypes = [
                ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
            ]  # fmt: skip
        except (OSError, AttributeError):
            continue
        return library
    return None


def seconds_waited() -> float | None:
    """Return how long this thread has waited for a core so far; None if unknown."""
    try:
        fields = Path("/proc/thread-self/schedstat").read_text().split()
        return int(fields[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


class SpinControl:
    """Decides between spinning and sleeping from how long the stepping thread waits for a core."""

    def __init__(
        self,
        make_team: Callable[[], Any],
        waited: Callable[[], float | None] = seconds_waited,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._make_team = make_team
        self._waited = waited
        self._clock = clock
        self.limit: ThreadLimit | None = None  # of our kernels' threads
        self._team: Any = make_team()
        self._pause = FIRST_PAUSE
        self._spin_after = 0.0  # earliest time to spin
        self._told = False
        self._waits = False  # the stepping thread had to wait for a core in the last window
        self._begin()

    @property
    def spins(self) -> bool:
        return self._team is None

    @property
    def busy(self) -> bool:
        """Other programs need the cores."""
        return self._waits or (self.limit is not None and self.limit.lowered)

    def limit_threads(self, wanted: bool) -> None:
        """Whether our kernels use fewer threads on a busy machine; the last engine decides."""
        if not wanted:
            self.limit = None
            limit_threads(None)
        else:
            most = most_threads(torch.get_num_threads())
            self.limit = ThreadLimit(limit_threads, num_cores(), most)
        self._begin()

    def note_loaded(self) -> None:
        """Choose the first number of threads by what others used while a model was loaded."""
        limit, passed = self.limit, self._clock() - self._started
        if limit is not None and passed >= WINDOW_SECONDS:
            limit.decide(passed, self._waited_share(passed), loading=True)
        self._begin(FIRST_WINDOW)
        self.note_idle()

    def _begin(self, seconds: float = WINDOW_SECONDS) -> None:
        """Start a new window for the calling thread."""
        self._thread, self._mixed, self._window = threading.get_ident(), False, seconds
        self._started, self._num_steps = self._clock(), 0
        self._waited_before = self._waited() or 0.0
        self._paused: tuple[float, float] | None = None
        if self.limit is not None:
            self.limit.begin()

    def note_start(self) -> None:
        """A step begins."""
        self._mixed |= self._thread != threading.get_ident()
        if self._paused is None:
            return
        since, waited = self._paused
        self._paused = None
        self._started += self._clock() - since
        self._waited_before += (self._waited() or 0.0) - waited
        if self.limit is not None:
            self.limit.resume()

    def note_step(self) -> None:
        """Count a step. The stepping thread calls this after every step."""
        if self._paused is not None:
            return  # nothing was computed: requests wait for their grammars
        self._num_steps += 1
        now = self._clock()
        passed = now - self._started
        if passed < self._window or (self._num_steps < MIN_STEPS and passed < LONG_WINDOW_SECONDS):
            return
        same = not self._mixed and self._thread == threading.get_ident()
        waited = self._waited_share(passed) if same else 0.0
        if same:
            self._decide(waited, now)
        if self.limit is not None:  # of all threads
            self.limit.decide(passed, waited)
        self._begin()

    def note_idle(self) -> None:
        """There is nothing to compute until the next step. What happens meanwhile does not count:
        the window goes on after it."""
        if self._paused is not None:
            return
        self._mixed |= self._thread != threading.get_ident()
        self._paused = self._clock(), self._waited() or 0.0
        if self.limit is not None:
            self.limit.pause()

    def _waited_share(self, passed: float) -> float:
        """Of a window's time, which the calling thread began."""
        return ((self._waited() or 0.0) - self._waited_before) / passed

    def _decide(self, share: float, now: float) -> None:
        self._waits = share > BUSY_SHARE
        if self._waits:
            self._tell()
            if self.spins:
                self._team = self._make_team()
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._spin_after = now + self._pause
        elif not self.spins and share < IDLE_SHARE and now >= self._spin_after:
            self._team.end()
            self._team = None
        elif self.spins and now >= self._spin_after + LONGEST_PAUSE:
            self._pause = FIRST_PAUSE  # the cores have been idle for a while

    def _tell(self) -> None:
        if not self._told:
            fewer = (
                ", and kernels of quantised weights may use fewer threads (--num-threads overrides "
                "that)"
            )
            log.warning(
                "stoop waits for CPU cores that other programs, or other threads of this one, are "
                "using, so its threads sleep while they wait (OMP_WAIT_POLICY or GOMP_SPINCOUNT "
                "override this)%s",
                fewer if self.limit is not None else "",
            )
            self._told = True


_control: SpinControl | None = None  # one per process, like libgomp's thread count
_lock = threading.Lock()


def share_cores(fixed_threads: bool = False) -> SpinControl | None:
    """Return the process's control, created at the first call; None if it has no effect here.

    fixed_threads: the user chose their number
    """
    global _control
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        spin_between_calls(_asks_to_spin())
        limit_threads(None)
        return None
    with _lock:
        if _control is None and seconds_waited() is not None:
            libgomp = find_libgomp()
            _control = SpinControl(lambda: SleepingThreads(libgomp))
        if _control is not None:
            _control.limit_threads(not (fixed_threads or "OMP_NUM_THREADS" in os.environ))
        return _control


def _asks_to_spin() -> bool:
    """What the environment asks of OpenMP's threads."""
    policy = os.environ.get("OMP_WAIT_POLICY", "").lower()
    return policy == "active" or (policy != "passive" and os.environ.get("GOMP_SPINCOUNT") != "0")
