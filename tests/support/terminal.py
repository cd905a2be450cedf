"""Runs a program on its own terminal."""

import fcntl
import os
import pty
import struct
import subprocess
import termios
import time
from collections.abc import Callable


class Terminal:
    def __init__(self, args: list[str], columns: int = 200, **environment: str) -> None:
        self.parent, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        self.process = subprocess.Popen(
            args,
            stdin=child,
            stdout=child,
            stderr=child,
            env=env | {"TERM": "dumb"} | environment,
            start_new_session=True,
        )
        os.close(child)
        os.set_blocking(self.parent, False)
        self.seen = ""

    def wait_for(self, text: str) -> None:
        """Read until the text appears, and drop everything up to it."""
        self._read_until(lambda: text in self.seen)
        assert text in self.seen, self.seen
        self.seen = self.seen.split(text, 1)[1]

    def wait_for_any(self) -> None:
        self._read_until(lambda: bool(self.seen))

    def read_all(self) -> str:
        """Read to the end of the program."""
        self._read_until(lambda: False)
        return self.seen

    def _read_until(self, done: Callable[[], bool], timeout: float = 120) -> None:
        deadline = time.monotonic() + timeout
        while not done():
            assert time.monotonic() < deadline, f"nothing more after {self.seen!r}"
            try:
                self.seen += os.read(self.parent, 65536).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                return

    def type(self, text: str | bytes) -> None:
        os.write(self.parent, text.encode() if isinstance(text, str) else text)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.parent)
