"""The core's process as its front end has it: start it, frames over its socket, what it prints."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from stoop.engine.wire import Decoder

DRAIN_SECONDS = 1.0  # to read what a process printed before it ended
MAX_LINE_BYTES = 1 << 16  # of printed lines; longer ones are cut into several


def spawn(fd: int, output: int = 2) -> subprocess.Popen[bytes]:
    """A process with this end of the socket pair, and the same stoop package as here.

    output: where both of its standard streams go; standard output belongs to the front end
    """
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        # -P: a folder called stoop where the user happens to be is not the package.
        [sys.executable, "-P", "-m", "stoop.engine.core_process", str(fd)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[fd],
        start_new_session=True,  # out of reach of the terminal's Ctrl-C
    )


def how_ended(status: int) -> str:
    if status < 0:
        return f"by signal {-status} ({signal.Signals(-status).name})"
    return f"with status {status}"


class Connection(asyncio.Protocol):
    """Frames over a socket."""

    def __init__(
        self, take: Callable[[Sequence[Any]], None], on_closed: Callable[[], None]
    ) -> None:
        self._take = take
        self._on_closed = on_closed
        self._decoder = Decoder()
        self._transport: asyncio.Transport | None = None
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._take(self._decoder.feed(data))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport, self.closed = None, True
        self._on_closed()

    def write(self, frame: bytes) -> None:
        if self._transport is not None:
            self._transport.write(frame)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class PrintedLines(asyncio.Protocol):
    """Passes on what a process prints, line by line, until it ends."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._held = b""
        self._ended = asyncio.Event()
        self._transport: asyncio.BaseTransport | None = None

    async def open_pipe(self) -> int:
        """A new pipe that is read here; returns the end to write to, which the caller closes."""
        read, write = os.pipe()
        try:
            loop = asyncio.get_running_loop()
            await loop.connect_read_pipe(lambda: self, os.fdopen(read, "rb", 0))
        except BaseException:
            os.close(write)
            raise
        return write

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *lines, self._held = (self._held + data).split(b"\n")
        if len(self._held) > MAX_LINE_BYTES:
            lines, self._held = [*lines, self._held], b""
        for line in lines:
            self._tell(line)

    def connection_lost(self, error: Exception | None) -> None:
        self._tell(self._held)
        self._held = b""
        self._ended.set()

    def _tell(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self._take(text)

    async def close(self) -> None:
        """Read the rest of what a process that has ended printed."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), DRAIN_SECONDS)
        if self._transport is not None:
            self._transport.close()
