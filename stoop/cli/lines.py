"""Reading typed lines, with editing and history where Python has readline."""

import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from stoop.cli.streams import as_text
from stoop.config.environ import cache_dir
from stoop.config.errors import RequestError

log = logging.getLogger(__name__)

PROMPT = "> "
HISTORY = "chat-history.jsonl"
MAX_HISTORY = 1000  # lines kept from one conversation to the next
MAX_LINE = 10_000  # characters; longer lines are not kept


class LineReader:
    """Reads standard input line by line. A terminal gets a prompt; a pipe gets none."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        # readline needs standard output to be a terminal as well.
        self._editor = _load_readline() if self.interactive and sys.stdout.isatty() else None
        self._history = History(cache_dir() / HISTORY) if self._editor else None
        if self._editor and self._history:
            self._editor.set_auto_history(False)
            for line in self._history.lines:
                self._editor.add_history(line)

    def read(self) -> str | None:
        """Return the next line, or None at end of input. Ctrl-C clears the line being typed."""
        while True:
            try:
                line = as_text(self._read(), "the line")
            except EOFError:
                if self.interactive:
                    print(file=sys.stderr)  # the shell's prompt starts on a new line
                return None
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                print(file=sys.stderr)
                continue
            except RequestError as error:
                if not self.interactive:
                    raise
                print(f"error: {error}", file=sys.stderr)
                continue
            self._remember(line)
            return line

    def _read(self) -> str:
        if self._editor:
            return input(PROMPT)
        if self.interactive:
            print(PROMPT, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def _remember(self, line: str) -> None:
        if self._editor and self._history and self._history.add(line):
            self._editor.add_history(line)


class History:
    """Lines typed in this and earlier conversations, in a file that only its owner can read.

    Each line is written as soon as it is typed, since a terminal may be closed at any time. If the
    cache folder is not writable, there is no history, and nothing else changes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = self._read()
        if len(self.lines) > MAX_HISTORY:
            self.lines = self.lines[-MAX_HISTORY:]
            self._shorten()

    def add(self, line: str) -> bool:
        """Add a line unless it is blank, too long or a repeat; return whether it was added."""
        if not line.strip() or [line] == self.lines[-1:] or len(line) > MAX_LINE:
            return False
        self.lines.append(line)
        with _forgiving():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            number = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(number, "w", encoding="ascii") as file:
                file.write(json.dumps(line) + "\n")
        return True

    def _read(self) -> list[str]:
        """Read JSON strings, since pasted text may contain line breaks; skip anything else."""
        found = []
        with _forgiving():
            for each in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(json.JSONDecodeError):
                    found.append(json.loads(each))
        return [line for line in found if isinstance(line, str)]

    def _shorten(self) -> None:
        """Replace the file atomically."""
        with _forgiving():
            number, name = tempfile.mkstemp(prefix=HISTORY, dir=self.path.parent)  # mode 0600
            with os.fdopen(number, "w", encoding="ascii") as file:
                file.writelines(json.dumps(line) + "\n" for line in self.lines)
            os.replace(name, self.path)


@contextmanager
def _forgiving() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        return
    except OSError as error:
        log.info("the chat history cannot be saved: %s", error)


def _load_readline() -> ModuleType | None:
    """Import readline, which makes `input` use it; not every Python has it."""
    try:
        import readline
    except ImportError:
        return None
    return readline
