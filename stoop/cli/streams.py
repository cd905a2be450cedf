"""Standard streams as they come: closed, full, or in an encoding that lacks characters."""

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
    """The program that read standard output has ended, as `head` does: not an error of ours."""


class CheckedOutput:
    """Standard output, with errors that say so."""

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
    """Standard error: a status line that cannot be shown must not cost the answer."""

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
    # In this order: each gets the lowest number that is free, which is its own.
    stdin = sys.stdin or _null("r")
    stdout = sys.stdout or _null("w")
    # Python would print to standard output what is meant for a standard error of None.
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
    """Write what standard output still holds, or drop it: the interpreter's exit must not fail."""
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
    """For `as_text` to refuse it with a sentence. An ASCII terminal may well send UTF-8."""
    if hasattr(stdin, "reconfigure"):
        ascii_only = _canonical(stdin.encoding) == "ascii"
        stdin.reconfigure(
            encoding="utf-8" if ascii_only else stdin.encoding, errors="surrogateescape"
        )


def _discard(stream: Any) -> None:
    """Send what is left in the stream's buffer, and all that follows, to the null device."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()
    except (OSError, ValueError):  # there is no file behind it
        return


# ---- text ----


def as_text(text: str, source: str) -> str:
    """Text that came as bytes; refused if it is not UTF-8. source: where it came from

    Python keeps bytes that it cannot decode as lone surrogates. In an ASCII locale it cannot decode
    any beyond ASCII, though those of an argument may well be UTF-8.
    """
    if not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:
        raise RequestError(f"{source} is not valid UTF-8: convert it to UTF-8 first") from None


def json_line(record: Any) -> str:
    """JSON that standard output can hold: characters beyond ASCII are escaped if it lacks some."""
    shows_all = _canonical(sys.stdout.encoding).startswith("utf")
    return json.dumps(record, ensure_ascii=not shows_all)


def _canonical(encoding: str | None) -> str:
    """One name for each encoding, such as utf-8 or ascii."""
    try:
        return codecs.lookup(encoding or "ascii").name
    except LookupError:
        return "ascii"
