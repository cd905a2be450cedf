"""The front end's side of a core in another process: start it, talk to it, start it again.

Everything here runs on one asyncio event loop.
"""

import asyncio
import logging
import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from stoop.config import errors
from stoop.config.errors import CoreDied, MemoryShortage, StoopError
from stoop.config.schema import EngineOptions
from stoop.core.messages import Delta
from stoop.core.report import Report
from stoop.engine.child import Connection, PrintedLines, how_ended, spawn
from stoop.engine.silence import Silence
from stoop.engine.wire import (
    Command,
    Deltas,
    Failed,
    Found,
    Heartbeat,
    LogLine,
    Lost,
    Progress,
    Ready,
    Reply,
    ResetPrefixCache,
    Start,
    Stop,
    encode,
)

log = logging.getLogger(__name__)

RESTART_WINDOW = 600.0  # seconds in which at most `max_restarts` restarts are tried
STOP_SECONDS = 5.0  # that a core gets to end by itself
KILL_SECONDS = 30.0  # that a killed one gets: a driver that hangs may keep it


class Listener(Protocol):
    """What a client tells its owner."""

    def on_found(self, tokenizer_folder: str | None) -> None: ...

    def on_restarted(self, ready: Ready) -> None: ...

    def on_deltas(self, deltas: Sequence[Delta]) -> None: ...

    def on_lost(self, request_ids: Sequence[str], sentence: str) -> None: ...

    def on_died(self, error: CoreDied) -> None:
        """Requests that the core had are lost. It is being restarted."""
        ...

    def on_dead(self, error: CoreDied) -> None:
        """It will not be restarted any more."""
        ...


class CoreClient:
    """A core's process, restarted when it dies or says nothing for too long.

    A new process that fails to start counts as a restart too.
    """

    def __init__(
        self,
        options: EngineOptions,
        listener: Listener,
        report: Report | None = None,
        *,
        max_restarts: int = 3,
        stall_timeout: float = 600.0,
        on_printed: Callable[[str], None] | None = None,
    ) -> None:
        """stall_timeout: seconds of silence after which the process is restarted; 0 for never.
        on_printed: takes the lines that it prints, which otherwise go to standard error
        """
        self.state = "starting"  # then ready, restarting, dead or stopped
        self.num_restarts = 0
        self.metrics: dict[str, Any] = {}
        self._options = options
        self._listener = listener
        self._report = report
        self._max_restarts = max_restarts
        self._restarts: list[float] = []  # when they were tried
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._on_printed = on_printed
        self._printed: PrintedLines | None = None
        self._silence = Silence(stall_timeout)
        self._next_look: asyncio.TimerHandle | None = None
        self._started: asyncio.Future[Ready] | None = None  # of the process that is starting
        self._recovery: asyncio.Task[None] | None = None
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._num_questions = 0
        self._last_beat = time.monotonic()
        self._first_start = 0.0  # seconds that it took

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def heartbeat_age(self) -> float:
        return time.monotonic() - self._last_beat

    # ---- commands ----

    def send(self, command: Command) -> None:
        """To a core that is ready; otherwise nothing happens."""
        if self.state == "ready" and self._connection is not None:
            self._connection.write(encode(command))

    async def reset_prefix_cache(self) -> bool:
        if self.state != "ready":
            return False
        self._num_questions += 1
        number, loop = self._num_questions, asyncio.get_running_loop()
        reply = self._replies[number] = loop.create_future()
        self.send(ResetPrefixCache(number))
        try:
            return bool(await reply)
        finally:
            self._replies.pop(number, None)

    # ---- a process comes and goes ----

    async def start(self) -> Ready:
        """Start the first process. Its errors are raised here; there is no second try."""
        begun = time.monotonic()
        try:
            ready = await self._launch()
        except BaseException:
            self.state = "dead"
            await self._reap()
            raise
        self._become_ready(ready)
        self._check_open()
        self._first_start = time.monotonic() - begun
        self._look_later()
        return ready

    def refuse(self, error: Exception) -> None:
        """Give up the start that is under way, for a reason that the front end found."""
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)

    async def _launch(self) -> Ready:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = await self._spawn(theirs.fileno())
            except BaseException:
                ours.close()
                raise
        self._silence.end()
        self._started = started = loop.create_future()
        process = self._process
        self._connection = connection = Connection(self._take, lambda: self._on_closed(process))
        await loop.create_unix_connection(lambda: connection, sock=ours)
        level = logging.getLogger("stoop").getEffectiveLevel()
        connection.write(encode(Start(self._options, level)))
        return await started

    async def _spawn(self, fd: int) -> subprocess.Popen[bytes]:
        if self._on_printed is None:
            return spawn(fd)
        self._printed = PrintedLines(self._on_printed)
        output = await self._printed.open_pipe()
        try:
            return spawn(fd, output)
        finally:
            os.close(output)

    def _become_ready(self, ready: Ready) -> None:
        self._last_beat = time.monotonic()
        self.metrics = ready.metrics
        self._report = None  # a restart is reported by the log
        self.state = "ready"

    def _check_open(self) -> None:
        """It may have died right after it said that it was ready."""
        assert self._connection is not None and self._process is not None
        if self._connection.closed:
            self._on_closed(self._process)

    def _on_closed(self, process: subprocess.Popen[bytes]) -> None:
        """The socket's other end is closed: the process has ended or is about to."""
        if process is not self._process or self.state in ("dead", "stopped"):
            return
        if self._started is not None and not self._started.done():
            self._started.set_exception(
                CoreDied("the engine's process ended while it started: see the log, and try again")
            )
            return
        if self.state != "ready":
            return
        log.error("the engine's process %d died", process.pid)
        self._lose(CoreDied("the engine's process died, and this request with it: retry"))
        self._recovery = asyncio.get_running_loop().create_task(self._recover())

    def _lose(self, error: CoreDied) -> None:
        """The process is of no more use, and neither are its requests."""
        self.state = "restarting"
        self.metrics |= dict.fromkeys(
            ("num_requests_running", "num_requests_waiting", "kv_cache_usage"), 0
        )
        self._fail_replies(error)
        try:
            self._listener.on_died(error)
        except Exception:  # the engine comes back in any case
            log.exception("the front end failed when it was told that the engine died")

    # ---- a process that hangs ----

    def _look_later(self) -> None:
        if self._silence.limit:
            loop = asyncio.get_running_loop()
            self._next_look = loop.call_later(self._silence.interval, self._look)

    def _look(self) -> None:
        """A core with nothing to do says so every second; one that loads, how far it is."""
        if self.state in ("dead", "stopped"):
            return
        self._look_later()
        # A start may be as silent as the first one was long.
        if self._silence.look(0.0 if self.state == "ready" else self._first_start):
            self._give_up_hung()

    def _give_up_hung(self) -> None:
        seconds = self._silence.limit
        if self._started is not None and not self._started.done():
            self._started.set_exception(CoreDied("it said nothing for too long"))
        elif self.state == "ready":
            log.error("the engine's process %s said nothing for %g s: it hangs", self.pid, seconds)
            self._lose(CoreDied("the engine's process hung, and this request with it: retry"))
            self._recovery = asyncio.get_running_loop().create_task(self._recover())

    # ---- recovery ----

    async def _recover(self) -> None:
        """Start the process again; whatever goes wrong here, the state says so."""
        try:
            await self._restart()
        except Exception:
            log.exception("the engine's process could not be restarted")
            self._give_up()

    async def _restart(self) -> None:
        while self.state == "restarting":
            await self._reap()
            now = time.monotonic()
            self._restarts = [each for each in self._restarts if now - each < RESTART_WINDOW]
            if len(self._restarts) >= self._max_restarts:
                self._give_up()
                return
            self._restarts.append(now)
            self.num_restarts += 1
            log.warning(
                "restarting the engine's process: try %d of %d within %.0f minutes",
                len(self._restarts),
                self._max_restarts,
                RESTART_WINDOW / 60,
            )
            try:
                ready = await self._launch()
            except Exception as error:
                log.error("the engine's process did not start: %s", error)
                continue
            log.warning("the engine's process %s is ready", self.pid)
            self._become_ready(ready)
            try:
                self._listener.on_restarted(ready)
            except Exception:
                log.exception("the front end failed on the restarted engine")
                self._lose(CoreDied("the engine failed when it was restarted: retry"))
                continue
            self._check_open()
            return

    def _give_up(self) -> None:
        self.state = "dead"
        log.critical(
            "the engine's process died again after %d restarts: it stays down",
            len(self._restarts),
        )
        error = CoreDied("the engine's process died too often: restart the engine")
        try:
            self._listener.on_dead(error)
        except Exception:
            log.exception("the front end failed when it was told that the engine stays down")

    async def _reap(self) -> None:
        """Make sure that the process is gone, and its memory on the device with it."""
        connection, process = self._connection, self._process
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            try:
                status = await asyncio.to_thread(process.wait, KILL_SECONDS)
            except subprocess.TimeoutExpired:
                log.error("the engine's process %d cannot be killed: leaving it", process.pid)
            else:
                level = logging.WARNING if self.state == "restarting" else logging.INFO
                log.log(level, "the engine's process %d ended %s", process.pid, how_ended(status))
        if self._printed is not None:
            await self._printed.close()

    async def stop(self) -> None:
        """Stop the process for good."""
        running, self.state = self.state == "ready", "stopped"
        if self._next_look is not None:
            self._next_look.cancel()
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.wait([self._recovery])
        self._fail_replies(CoreDied("the engine was stopped"))
        process = self._process
        if process is None:
            return
        if running and self._connection is not None:
            self._connection.write(encode(Stop()))
            try:
                await asyncio.to_thread(process.wait, STOP_SECONDS)
            except subprocess.TimeoutExpired:
                log.warning("the engine's process %d does not stop: killing it", process.pid)
        await self._reap()

    def close(self) -> None:
        """Let the process end without waiting for it, when no event loop runs any more."""
        self.state = "stopped"
        if self._process is not None:
            self._process.kill()

    def _fail_replies(self, error: CoreDied) -> None:
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(error)

    # ---- messages ----

    def _take(self, messages: Sequence[Any]) -> None:
        """All messages that are here. The deltas of several steps go on together."""
        self._silence.end()
        deltas: list[Delta] = []
        others = []
        for message in messages:
            if type(message) is Deltas:
                deltas += message.deltas
            else:
                others.append(message)
        if deltas:
            self._last_beat = time.monotonic()
            self._listener.on_deltas(deltas)
        for message in others:
            self._take_other(message)

    def _take_other(self, message: Any) -> None:
        match message:
            case Heartbeat(metrics):
                self._last_beat, self.metrics = time.monotonic(), metrics
            case Lost(request_ids, sentence):
                self._listener.on_lost(request_ids, sentence)
            case Reply(number, value):
                reply = self._replies.get(number)
                if reply is not None and not reply.done():
                    reply.set_result(value)
            case LogLine(name, level, text):
                logging.getLogger(name).log(level, "%s", text)
            case Progress(stage, done, total):
                if self._report is not None:
                    self._report(stage, done, total)
            case Found(folder):
                self._listener.on_found(folder)
            case Ready():
                self._settle(message)
            case Failed():
                self._settle(_as_error(message))

    def _settle(self, outcome: Ready | Exception) -> None:
        """The process that is starting has started, or says why it could not."""
        if self._started is None or self._started.done():
            if isinstance(outcome, Exception):
                log.error("the engine's process gives up: %s", outcome)
        elif isinstance(outcome, Exception):
            self._started.set_exception(outcome)
        else:
            self._started.set_result(outcome)


def _as_error(failed: Failed) -> Exception:
    """The error of a core that could not start."""
    if failed.kind == "MemoryShortage":
        problem, _, advice = failed.sentence.rpartition(": ")
        return MemoryShortage(problem, advice)
    if "OutOfMemory" in failed.kind or failed.kind == "MemoryError":
        return MemoryError(failed.sentence)
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, StoopError):
        return kind(failed.sentence)
    return CoreDied(f"the engine failed ({failed.kind}: {failed.sentence}): see its traceback")
