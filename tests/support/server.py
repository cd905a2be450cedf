"""Real `stoop serve` processes for tests."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from support.byte_tokenizer import write_tokenizer
from support.checkpoints import write_llama

START_SECONDS = 120.0
SMALL_ENGINE = ("--device", "cpu", "--dtype", "float64", "--kv-cache-memory", "16MiB")


def write_served_model(
    folder: Path, chat_template: str | None = None, max_position: int = 512
) -> Path:
    """A tiny Llama with a tokenizer of bytes and a chat template; its end of text is </s>."""
    write_llama(
        folder, seed=0, vocab_size=258, eos_token_id=257, max_position_embeddings=max_position
    )
    write_tokenizer(folder)
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder


class ServerProcess:
    """A server on a free port of the loopback, ready when the constructor returns.

    url: without /v1. log: what it has written to standard error so far
    """

    def __init__(
        self, model: str | Path, *flags: str, engine: Sequence[str] = SMALL_ENGINE
    ) -> None:
        self.name = Path(model).name
        self._file = tempfile.NamedTemporaryFile(  # noqa: SIM115 - closed by `kill`
            "w+", prefix="stoop-serve-", suffix=".log"
        )
        command = [sys.executable, "-m", "stoop", "serve", str(model), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *engine, *flags],
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=self._file,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )
        try:
            self.url = self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    @property
    def log(self) -> str:
        return Path(self._file.name).read_text()

    @property
    def api(self) -> str:
        """The base URL for OpenAI's client."""
        return f"{self.url}/v1"

    def _wait_until_ready(self) -> str:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            found = re.search(r'(?:^|")serving .* at (http://\S+)/v1', self.log, re.MULTILINE)
            if found:
                return found[1]
            if self.process.poll() is not None:
                raise AssertionError(f"the server left with {self.process.returncode}:\n{self.log}")
            time.sleep(0.05)
        raise AssertionError(f"the server was not ready in {START_SECONDS} s:\n{self.log}")

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = 60.0) -> int:
        """The exit code."""
        return self.process.wait(seconds)

    def wait_for_log(self, text: str, seconds: float = 30.0) -> str:
        """The log, once it has this text."""
        deadline = time.monotonic() + seconds
        while text not in self.log:
            assert time.monotonic() < deadline, f"no {text!r} in the log:\n{self.log}"
            time.sleep(0.02)
        return self.log

    def stop(self) -> int:
        """SIGTERM, then the exit code."""
        if self.process.poll() is None:
            self.signal()
        return self.wait()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._file.close()

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self.process.poll() is None:
                self.signal()
                self.process.wait(30)
        finally:
            self.kill()
