"""The process of an engine core: `python -m stoop.engine.core_process FD`.

FD is one end of a socket pair; the front end has the other (`stoop.engine.core_client`). The
process ends when that end is closed, so it never outlives the front end.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import traceback
from typing import Any, NoReturn

from stoop.config.errors import StoopError
from stoop.engine.wire import Decoder, Failed, Found, LogLine, Message, Progress, Ready, encode

log = logging.getLogger(__name__)

RECEIVE_BYTES = 1 << 18
SEND_BUFFER_BYTES = 1 << 22  # of messages that the front end has not read; then the core waits
PARENT_SECONDS = 1.0  # between looks at whether the parent lives


class Channel:
    """The core's end of the socket. Any thread may send; one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._decoder = Decoder()
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, message: Message) -> None:
        frame = encode(message)
        with self._lock:
            self._socket.sendall(frame)

    def receive(self, seconds: float) -> list[Any]:
        """The commands that are here, after waiting for the first for at most so long.

        Raises EOFError if the front end is gone.
        """
        if not self._poll.poll(seconds * 1000):
            return []
        data = self._socket.recv(RECEIVE_BYTES)
        if not data:
            raise EOFError
        return self._decoder.feed(data)

    def first(self) -> Any:
        """The first command, and no other follows it yet."""
        while True:
            commands = self.receive(seconds=1.0)
            if commands:
                (command,) = commands
                return command


class LogSender(logging.Handler):
    """Sends log records to the front end, which logs them as its own."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._channel.send(LogLine(record.name, record.levelno, self.format(record)))
        except OSError:
            sys.stderr.write(self.format(record) + "\n")


def watch_parent(sock: socket.socket) -> None:
    """End this process as soon as the front end is gone, also during a long start or step."""
    parent = os.getppid()
    poll = select.poll()
    poll.register(sock, 0)  # a closed end is reported in any case

    def watch(_: socket.socket) -> None:
        while not poll.poll(PARENT_SECONDS * 1000) and os.getppid() == parent:
            pass
        os._exit(1)

    # The thread holds the socket, which would otherwise close with its last other reference.
    threading.Thread(target=watch, args=(sock,), name="stoop-parent-watch", daemon=True).start()


def run(channel: Channel) -> None:
    """Build the core, then serve the front end until it says stop."""
    start = channel.first()
    logging.basicConfig(level=start.log_level, handlers=[LogSender(channel)])

    def report(stage: str, done: int, total: int | None) -> None:
        channel.send(Progress(stage, done, total))

    from stoop.engine.build import CoreBuilder
    from stoop.engine.core_loop import CoreLoop
    from stoop.worker.device import exempt_from_collection

    builder = CoreBuilder(start.options, report)
    folder = builder.tokenizer_folder
    channel.send(Found(None if folder is None else str(folder)))
    built = builder.build()
    core = built.core
    if start.options.capture_structured:  # grammars are expected
        built.executor.warm_up_grammars()
    if built.config.device.device != "cpu":
        exempt_from_collection(core)
    channel.send(Ready(built.config, core.limits, core.metrics()))
    loop = CoreLoop(core, channel.send, is_fatal)
    while not loop.stopped:
        for command in channel.receive(loop.patience):
            loop.take(command)
        loop.turn()


def is_fatal(error: Exception) -> bool:
    """Whether the error leaves the device unusable for this process."""
    return "CUDA error" in str(error)


def main() -> NoReturn:
    """Leaves by `os._exit`: nothing here needs the interpreter's slow end."""
    # A terminal and a service manager signal the whole group. The front end decides what happens,
    # and may drain first; when it leaves, its end of the socket closes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.set_inheritable(int(sys.argv[1]), False)
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    watch_parent(sock)
    channel = Channel(sock)
    code = 1
    try:
        run(channel)
        code = 0
    except (EOFError, ConnectionError):
        pass  # the front end is gone
    except BaseException as error:
        if not isinstance(error, StoopError):
            traceback.print_exc()
        _tell(channel, error)
    sys.stderr.flush()
    os._exit(code)


def _tell(channel: Channel, error: BaseException) -> None:
    text = " ".join(str(error).split()) or type(error).__name__
    with contextlib.suppress(OSError):
        channel.send(Failed(type(error).__name__, text))


if __name__ == "__main__":
    main()
