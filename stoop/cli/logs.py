"""Logging to standard error: text that does not interrupt a streamed answer, or JSON."""

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TextIO, cast


class HoldingHandler(logging.StreamHandler):
    """A log handler that holds records back while an answer is streamed."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[logging.LogRecord] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.held is None:
            super().emit(record)
        else:
            self.held.append(record)


def set_up_logging(level: str) -> None:
    form = "%(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=level, format=form, handlers=[HoldingHandler()])


@contextmanager
def logs_held() -> Iterator[None]:
    """Hold log records back until the end of the block, which streams an answer."""
    handlers = [each for each in logging.getLogger().handlers if isinstance(each, HoldingHandler)]
    for handler in handlers:
        handler.held = []
    try:
        yield
    finally:
        for handler in handlers:
            held, handler.held = handler.held or [], None
            for record in held:
                handler.emit(record)


# ---- JSON ----


class JsonFormatter(logging.Formatter):
    """One object per record, on one line."""

    def format(self, record: logging.LogRecord) -> str:
        more = {}
        if record.exc_info:
            more["exception"] = self.formatException(record.exc_info)
        message = record.getMessage()
        return _line(record.created, record.levelname, record.name, message, **more)


class JsonLines:
    """Standard error on which every line that is printed becomes an object."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._held = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._held = (self._held + text).split("\n")
        for line in lines:
            self.tell("stoop", line)
        return len(text)

    def tell(self, logger: str, line: str) -> None:
        """Write one line in the name of this logger."""
        kind = line.partition(":")[0]
        level = {"error": "ERROR", "warning": "WARNING"}.get(kind, "INFO")
        if line.strip():
            self.stream.write(_line(time.time(), level, logger, line.rstrip()) + "\n")

    def flush(self) -> None:
        self.stream.flush()

    def isatty(self) -> bool:
        """No progress bars."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _line(seconds: float, level: str, logger: str, message: str, **more: str) -> str:
    found = {"time": round(seconds, 3), "level": level, "logger": logger, "message": message}
    return json.dumps({**found, **more})


def set_up_json_logging() -> Callable[[str, str], None]:
    """Make JSON of all that this process logs or prints to standard error.

    Returns what takes lines of other processes: `tell(logger, line)`.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, HoldingHandler):
            handler.setFormatter(JsonFormatter())
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    lines = JsonLines(sys.stderr)
    sys.stderr = cast(TextIO, lines)
    return lines.tell


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    logging.getLogger("stoop").critical("stoop failed", exc_info=(kind, error, trace))
