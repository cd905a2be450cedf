"""The loop of a core in a process of its own: commands in, messages out. It knows no socket."""

import logging
import time
from collections.abc import Callable, Sequence

from stoop.core.messages import Delta, EngineRequest
from stoop.engine.core import EngineCore
from stoop.engine.wire import (
    Abort,
    Add,
    Command,
    Deltas,
    Heartbeat,
    Lost,
    Message,
    Reply,
    ResetPrefixCache,
    Stop,
)

log = logging.getLogger(__name__)

BUSY_SECONDS = 0.25  # between heartbeats while there is work
IDLE_SECONDS = 1.0
MAX_FAILURES = 3  # steps in a row that fail before the core is given up


class CoreBroken(Exception):
    """The core cannot go on: its process must end, and another one start."""


class CoreLoop:
    """Feeds an `EngineCore` with commands, and steps it while it has work.

    send: takes each message, in order
    is_fatal: whether no later step can succeed after this error
    """

    def __init__(
        self,
        core: EngineCore,
        send: Callable[[Message], None],
        is_fatal: Callable[[Exception], bool] = lambda error: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = core
        self.stopped = False
        self._send = send
        self._is_fatal = is_fatal
        self._clock = clock
        self._num_failures = 0
        self._next_beat = 0.0
        self._was_busy = False

    @property
    def has_work(self) -> bool:
        return self.core.has_work

    @property
    def patience(self) -> float:
        """Seconds to wait for commands when there is nothing to do."""
        return 0.0 if self.has_work else max(self._next_beat - self._clock(), 0.0)

    # ---- commands ----

    def take(self, command: Command) -> None:
        """Carry out one command. Ids of unknown or finished requests are ignored."""
        match command:
            case Add(requests):
                self._add(requests)
            case Abort(request_ids):
                self._guard(lambda: self.core.abort(request_ids))
            case ResetPrefixCache(number):
                self._send(Reply(number, self.core.reset_prefix_cache()))
            case Stop():
                self.stopped = True

    def _add(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            try:
                self.core.add([request])
            except Exception as error:
                self._send(Lost([request.request_id], _one_line(error)))

    # ---- steps ----

    def turn(self) -> None:
        """One step, if there is work, and a heartbeat if it is time or the last request ended."""
        if self.core.has_work:
            self._was_busy = True
            deltas = self._guard(self._step)
            if deltas:
                self._send(Deltas(deltas))
        now, busy = self._clock(), self.core.has_work
        if now >= self._next_beat or busy < self._was_busy:
            self._next_beat = now + (BUSY_SECONDS if busy else IDLE_SECONDS)
            self._send(Heartbeat(self.core.metrics()))
        self._was_busy = busy

    def _step(self) -> list[Delta]:
        deltas = self.core.step()
        self.core.acknowledge()
        self._num_failures = 0
        return deltas

    def _guard(self, change: Callable[[], list[Delta]]) -> list[Delta]:
        """An exception loses the requests of the step at hand; the others go on."""
        try:
            return change()
        except Exception as error:
            log.exception("a step failed")
            self._num_failures += 1
            if self._is_fatal(error) or self._num_failures >= MAX_FAILURES:
                raise CoreBroken(_one_line(error)) from error
            self._mend(error)
            return []

    def _mend(self, error: Exception) -> None:
        core = self.core
        lost = set(core.at_hand)
        # Without a step at hand, nothing tells which request is to blame.
        if not lost and self._num_failures > 1:
            lost = set(core.open_requests)
        core.restart([each for each in core.open_requests if each not in lost])
        if lost:
            sentence = f"a step of the engine failed ({_one_line(error)}): retry"
            self._send(Lost(sorted(lost), sentence))


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
