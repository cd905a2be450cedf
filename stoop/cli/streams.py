"""Standard streams that may be closed, full, or in an encoding that lacks characters."""

import codecs
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from stoop.config.errors import RequestError, StoopError


class OutputError(StoopError):
    """Standard output cannot be written."""


class ReaderGone(Exception):
    """The program reading standard output has ended, as `head` does; this is not an error."""


class CheckedOutput:
    """Standard output, with errors that name it."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        with _naming_output():
            return int(self.stream.write(text))

    def flush(self) -> None:
        with _naming_output():
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class LenientOutput(CheckedOutput):
    """Standard error; a status line that cannot be written must not lose the answer."""

    def write(self, text: str) -> int:
        try:
            return int(self.stream.write(text))
        except OSError:
            _discard(self.stream)
            return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError:
            _discard(self.stream)


@contextmanager
def standard_streams() -> Iterator[None]:
    """Make the standard streams safe to use while a command runs."""
    before = sys.stdin, sys.stdout, sys.stderr
    checked = _ClosedOutput if sys.stdout is None else CheckedOutput
    # In this order, since each opens the lowest free file descriptor, which is its own.
    stdin = sys.stdin or _null("r")
    stdout = sys.stdout or _null("w")
    # If standard error were None, Python would print to standard output instead.
    stderr = sys.stderr or _null("w")
    _escape_what_cannot_be_shown(stdout, stderr)
    _keep_what_cannot_be_decoded(stdin)
    sys.stdin = stdin
    sys.stdout = cast(TextIO, checked(stdout))
    sys.stderr = cast(TextIO, LenientOutput(stderr))
    try:
        yield
    finally:
        sys.stderr.flush()
        sys.stdin, sys.stdout, sys.stderr = before


def settle_output() -> None:
    """Flush standard output or discard its buffer, so that the interpreter's exit cannot fail."""
    try:
        sys.stdout.flush()
    except (OutputError, ReaderGone):
        _discard(cast(Any, sys.stdout).stream)


class _ClosedOutput(CheckedOutput):
    def write(self, text: str) -> int:
        raise OutputError(
            "standard output is closed, so there is nowhere to print: redirect it to a file or to "
            "/dev/null"
        )


def _null(mode: str) -> Any:
    return open(os.devnull, mode)


@contextmanager
def _naming_output() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise ReaderGone from None
    except OSError as error:
        raise OutputError(f"cannot write to standard output: {error.strerror}") from None


def _escape_what_cannot_be_shown(*streams: Any) -> None:
    for stream in streams:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _keep_what_cannot_be_decoded(stdin: Any) -> None:
    """Let undecodable input reach `as_text`, which refuses it with a message.

    An ASCII terminal may still send UTF-8.
    """
    if hasattr(stdin, "reconfigure"):
        ascii_only = _canonical(stdin.encoding) == "ascii"
        stdin.reconfigure(
            encoding="utf-8" if ascii_only else stdin.encoding, errors="surrogateescape"
        )


def _discard(stream: Any) -> None:
    """Redirect the stream to the null device, including what its buffer holds."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()
    except (OSError, ValueError):  # the stream has no file descriptor
        return


# ---- text ----


def as_text(text: str, source: str) -> str:
    """Decode text that came as bytes, or refuse it if it is not UTF-8. source: its origin

    Python keeps bytes that it cannot decode as lone surrogates. In an ASCII locale these are all
    bytes beyond ASCII, even if an argument is valid UTF-8.
    """
    if not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:
        raise RequestError(f"{source} is not valid UTF-8: convert it to UTF-8 first") from None


def json_line(record: Any) -> str:
    """Format JSON, with non-ASCII characters escaped unless standard output can encode all."""
    shows_all = _canonical(sys.stdout.encoding).startswith("utf")
    return json.dumps(record, ensure_ascii=not shows_all)


def _canonical(encoding: str | None) -> str:
    """Return an encoding's canonical name, such as utf-8 or ascii."""
    try:
        return codecs.lookup(encoding or "ascii").name
    except LookupError:
        return "ascii"
