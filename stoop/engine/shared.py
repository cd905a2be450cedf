"""One engine for many threads.

The requests of all callers share the engine's steps, and each caller gets its own outputs. There is
no background thread: one of the waiting callers steps the engine for all, and the others sleep
until one of their outputs arrives or the engine is free.
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from stoop.config.errors import RequestError
from stoop.core.outputs import RequestOutput
from stoop.engine.engine import Engine
from stoop.engine.interrupts import HeldInterrupts
from stoop.engine.outputs import RequestGroup

FORKED = (
    "this LLM was made in another process, whose threads a fork does not copy: make it in the "
    "process that uses it (multiprocessing: start method 'spawn')"
)
LOST = "the request was lost in a step that failed: ask again"
POLL_SECONDS = 0.1  # how often a sleeping caller checks for Ctrl-C


class Mailbox:
    """The outputs of one call's requests. Dropping it cancels the requests that are open."""

    def __init__(self, request_ids: Sequence[str], lock: threading.RLock) -> None:
        self.open = set(request_ids)
        self.woken = threading.Condition(lock)  # an output is here, or the engine is free
        self.outputs: deque[RequestOutput] = deque()
        self.error: BaseException | None = None

    @property
    def ready(self) -> bool:
        return bool(self.outputs) or self.error is not None

    @property
    def pending(self) -> bool:
        """Whether anything is left to collect."""
        return bool(self.open) or self.ready

    def put(self, output: RequestOutput) -> None:
        self.outputs.append(output)
        if output.finished:
            self.open.discard(output.request_id)

    def fail(self, request_id: str, error: BaseException) -> None:
        if request_id in self.open:
            self.open.discard(request_id)
            self.error = error


class _Address(weakref.ref[Mailbox]):
    """A mailbox to deliver to, as long as it exists."""

    __slots__ = ("request_ids",)

    request_ids: list[str]


class _Claim:
    """The right to use the engine. Only the frame that claims it holds a reference, so a claim
    ends with its frame, whatever happens there."""

    __slots__ = ("__weakref__", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()


class SharedEngine:
    """Lets any number of threads submit requests and collect outputs."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._process = os.getpid()
        # Reentrant: the garbage collector may cancel requests while this thread holds it.
        self._lock = threading.RLock()
        self._sleepers: dict[Mailbox, None] = {}  # of calls that wait for an output or the engine
        self._claim: weakref.ref[_Claim] | None = None
        self._jobs: deque[Callable[[], None]] = deque()  # to do between steps
        self._boxes: dict[str, _Address] = {}  # of open requests
        # Boxes that their calls dropped. Appending to a deque runs no Python code: a Ctrl-C in the
        # Python code of a finalizer would be lost.
        self._dropped: deque[_Address] = deque()

    # ---- for any thread ----

    def submit(self, groups: Sequence[RequestGroup]) -> Mailbox:
        """Queue prepared requests."""
        if os.getpid() != self._process:
            raise RequestError(FORKED)
        request_ids = [group.request_id for group in groups]
        box = Mailbox(request_ids, self._lock)
        here = _Address(box, self._dropped.append)
        here.request_ids = request_ids
        self._post(lambda: self._add(groups, here))
        return box

    def cancel(self, box: Mailbox) -> None:
        """Stop a call's open requests. It may be called twice, and in the middle of a step, as
        happens when the garbage collector closes a stream."""
        request_ids = list(box.open)
        if request_ids:
            self._post(lambda: self._abort(request_ids))
            box.open.clear()

    def collect(self, box: Mailbox, interrupts: HeldInterrupts) -> RequestOutput:
        """Wait for the next output of a pending box."""
        claim = _Claim()
        try:
            while not box.ready:
                interrupts.check()
                if self._has(claim) or self._acquire(claim, box):
                    self._step(box)
        finally:
            self._release(claim)
        if box.outputs:
            return box.outputs.popleft()
        assert box.error is not None
        raise box.error

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; does nothing and returns False while there are requests."""
        claim = _Claim()
        try:
            return self._acquire(claim) and self.engine.reset_prefix_cache()
        finally:
            self._release(claim)

    # ---- who may use the engine ----

    def _has(self, claim: _Claim) -> bool:
        return self._claim is not None and self._claim() is claim

    def _acquire(self, claim: _Claim, box: Mailbox | None = None) -> bool:
        """Claim the engine if it is free. With `box`, else wait a moment for it or an output."""
        with self._lock:
            holder = self._claim() if self._claim is not None else None
            if holder is None:
                self._claim = weakref.ref(claim)
                return True
            if box is not None:
                if holder.thread == claim.thread:
                    raise RuntimeError("a step of the engine called the engine")
                if not box.ready:
                    self._sleep(box)
            return False

    def _sleep(self, box: Mailbox) -> None:
        self._sleepers[box] = None
        try:
            box.woken.wait(POLL_SECONDS)
        finally:
            self._sleepers.pop(box, None)

    def _release(self, claim: _Claim) -> None:
        """Run the jobs that others posted meanwhile, then let one of them have the engine."""
        while self._has(claim):
            self._run_jobs()
            with self._lock:
                if not self._jobs:
                    self._claim = None
        # Also if this call never had it: it may have been woken to take it, but found an output.
        with self._lock:
            if self._claim is None and self._sleepers:
                next(iter(self._sleepers)).woken.notify()

    def _post(self, job: Callable[[], None]) -> None:
        """Run a job between two steps: now if the engine is free, else its holder runs it."""
        self._jobs.append(job)
        claim = _Claim()
        try:
            self._acquire(claim)
        finally:
            self._release(claim)

    def _run_jobs(self) -> None:
        while self._jobs:
            self._jobs[0]()  # run again next time if an exception interrupts it
            self._jobs.popleft()
        while self._dropped:
            request_ids = self._dropped[0].request_ids
            self._abort([each for each in request_ids if each in self._boxes])
            self._dropped.popleft()

    # ---- for the thread that has the engine ----

    def _add(self, groups: Sequence[RequestGroup], here: _Address) -> None:
        box = here()
        if box is None or not box.open:
            return
        try:
            self._boxes.update(dict.fromkeys(here.request_ids, here))
            self.engine.add_groups(groups)
        except BaseException as error:
            for request_id in here.request_ids:
                box.fail(request_id, error)
            self._abort(here.request_ids)

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.engine.abort_request(request_id)
            self._boxes.pop(request_id, None)

    def _step(self, own: Mailbox) -> None:
        """One step for all callers. An error goes to the calls whose requests it ended."""
        self._run_jobs()
        try:
            for output in self.engine.step():
                self._deliver(output, own)
            lost = self.engine.take_lost()
        except BaseException as error:
            lost = self.engine.take_lost()
            # Requests may have ended without their outputs having been delivered.
            closed = [each for each in self._boxes if not self.engine.is_open(each)]
            lost |= {each: error for each in closed if each not in lost}
            self._give_up(lost, own)
            if not lost or not isinstance(error, Exception):
                raise
        else:
            if lost:
                self._give_up(lost, own)
        if not own.ready and not self.engine.has_work and not self._jobs:
            own.error = RequestError(LOST)

    def _deliver(self, output: RequestOutput, own: Mailbox) -> None:
        here = self._boxes.get(output.request_id)
        box = here() if here is not None else None
        if box is not None:
            box.put(output)
            if box is not own:
                self._wake(box)
        if output.finished:
            self._boxes.pop(output.request_id, None)

    def _give_up(self, lost: dict[str, BaseException | None], own: Mailbox) -> None:
        """Tell the calls of lost requests. The caller's own gets the error itself."""
        for request_id, error in lost.items():
            here = self._boxes.pop(request_id, None)
            box = here() if here is not None else None
            if box is not None:
                told = RequestError(LOST)
                told.__cause__ = error
                box.fail(request_id, error if box is own and error is not None else told)
                self._wake(box)

    def _wake(self, box: Mailbox) -> None:
        with self._lock:
            box.woken.notify()
