"""Runs the server: socket, start, signals, draining."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

import uvicorn

from stoop.config.errors import ConfigError
from stoop.server.app import make_app, make_service
from stoop.server.service import Service
from stoop.server.settings import ServerSettings

if TYPE_CHECKING:
    from stoop.async_llm import AsyncLLM

log = logging.getLogger(__name__)
BACKLOG = 2048
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def open_socket(settings: ServerSettings) -> socket.socket:
    """Bind before the model loads, so that a port in use is reported at once."""
    if settings.uds is not None:
        return _open_unix(settings.uds)
    host, port = settings.host, settings.port
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is in use: choose another with --port, or 0 for any free "
                "one"
            ) from None
        reason = error.strerror or str(error)
        raise ConfigError(f"--host {host} --port {port}: {reason}") from None


def _open_unix(path: str) -> socket.socket:
    """A socket file that no process listens on is replaced."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise ConfigError(f"--uds {path} is a file: name another path")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                if other.connect_ex(path) == 0:
                    raise ConfigError(f"--uds {path} is in use: name another path")
            os.unlink(path)
        made.bind(path)
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise ConfigError(f"--uds {path}: {error.strerror or error}") from None
    except ConfigError:
        made.close()
        raise
    return made


def address(settings: ServerSettings, bound: socket.socket) -> str:
    """Where clients reach the server."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's, with signals left to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Signals:
    """Counts SIGINT and SIGTERM. Before the server is up, the first one ends the start."""

    def __init__(self) -> None:
        self.count = 0
        self.last = signal.SIGTERM
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self.starting: asyncio.Future[AsyncLLM] | None = None
        loop = asyncio.get_running_loop()
        for each in SIGNALS:
            loop.add_signal_handler(each, self._came, each)

    def _came(self, number: signal.Signals) -> None:
        self.count += 1
        self.last = number
        (self.first if self.count == 1 else self.second).set()
        if self.starting is not None:
            self.starting.cancel()


async def serve(
    start: Callable[[], Awaitable["AsyncLLM"]],
    settings: ServerSettings,
    bound: socket.socket,
    announce: Callable[[Service, str], None],
) -> int:
    """Serve until a signal; returns the exit code: 0 after a clean drain.

    start: makes the engine. announce: called once requests are taken, with the address
    """
    signals = Signals()
    signals.starting = asyncio.ensure_future(start())
    try:
        llm = await signals.starting
    except asyncio.CancelledError:
        return 128 + signals.last
    signals.starting = None
    service = make_service(llm, settings)
    config = uvicorn.Config(
        make_app(service),
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_keep_alive=65,
        timeout_graceful_shutdown=5,
    )
    server = Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[bound]))
    try:
        while not (server.started or serving.done()):
            await asyncio.sleep(0.01)
        announce(service, address(settings, bound))
        await _any_of(signals.first.wait(), serving)
        clean = await _drain(service, signals)
        if not clean:
            await llm.shutdown()  # open requests end with an error
        server.should_exit = True
        await serving
    finally:
        await llm.shutdown()
        service.prompts.close()
        service.tracer.shutdown()
        if settings.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(settings.uds)
    return 0 if clean else 1


async def _drain(service: Service, signals: Signals) -> bool:
    """Refuse new requests and wait for the open ones; whether all of them ended."""
    service.draining = True
    count, limit = service.num_requests, service.settings.drain_timeout
    if count:
        log.warning("shutting down: waiting up to %g s for %d open requests", limit, count)
        await _any_of(service.idle.wait(), signals.second.wait(), timeout=limit)
    if service.num_requests:
        log.warning("%d open requests are ended", service.num_requests)
    return not service.num_requests


async def _any_of(*waits: Awaitable[object], timeout: float | None = None) -> None:
    tasks = [asyncio.ensure_future(each) for each in waits]
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task, wait in zip(tasks, waits, strict=True):
        if task is not wait:
            task.cancel()
