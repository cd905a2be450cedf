"""The threads that compile grammars, and the time that each grammar may take."""

import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

# Threads that may be left to grammars which take too long; others take their places.
MAX_STUCK = 4
BUSY = (
    "no thread is free to compile the grammar of structured_outputs, since other grammars take too "
    "long: try again in a minute"
)


class Job(Protocol):
    """A grammar to compile. Whichever comes first counts: its result, or an error from outside."""

    def run(self) -> None: ...

    def fail(self, error: str) -> bool:
        """End it with an error; returns False if it is done already."""
        ...

    def fail_late(self, seconds: float) -> bool:
        """The same, since it took so long."""
        ...


class Crew:
    """Runs jobs in threads. One that no one holds any more is left out.

    The library cannot be interrupted. A job that takes longer than `max_seconds` fails, and its
    thread is stuck until the library returns; another thread takes its place. If too many are
    stuck, jobs fail at once.
    """

    def __init__(self, num_threads: int, max_seconds: float) -> None:
        self._wanted = num_threads  # that are not stuck
        self._max_seconds = max_seconds
        self._num_threads = 0
        self._num_stuck = 0
        self._jobs: SimpleQueue[weakref.ref[Job] | None] = SimpleQueue()
        self._lock = threading.Lock()
        for _ in range(num_threads):
            self._add_thread()

    def submit(self, job: Job) -> None:
        with self._lock:
            if self._num_threads > self._num_stuck:
                self._jobs.put(weakref.ref(job))
                return
        job.fail(BUSY)

    def close(self) -> None:
        """Threads end when they have done what they do."""
        self._jobs.put(None)

    def _add_thread(self) -> None:
        self._num_threads += 1
        threading.Thread(target=self._work, name="stoop-grammars", daemon=True).start()

    def _work(self) -> None:
        """Keeps no reference to what it did last."""
        while (found := self._jobs.get()) is not None:
            job = found()
            if job is not None and not self._run(job):
                return
            del job
        self._jobs.put(None)  # for the next thread

    def _run(self, job: Job) -> bool:
        """Returns whether the thread is still needed."""
        late = threading.Event()
        timer = threading.Timer(self._max_seconds, self._give_up, (job, late.set))
        timer.daemon = True
        timer.start()
        job.run()
        timer.cancel()
        with self._lock:
            if not late.is_set():
                return True
            self._num_stuck -= 1
            needed = self._num_threads - self._num_stuck <= self._wanted
            self._num_threads -= not needed
            return needed

    def _give_up(self, job: Job, note: Callable[[], None]) -> None:
        with self._lock:
            if not job.fail_late(self._max_seconds):
                return
            note()
            self._num_stuck += 1
            if self._num_stuck <= MAX_STUCK:
                self._add_thread()
            if self._num_threads > self._num_stuck:
                return
        while True:  # no thread is left for these
            try:
                waiting = self._jobs.get_nowait()
            except Empty:
                return
            if waiting is None:
                self._jobs.put(None)
                return
            if (other := waiting()) is not None:
                other.fail(BUSY)
