"""Reads prompt files in the common layouts, as conversations to answer."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from stoop.config.errors import ConfigError
from stoop.core.report import Report

Conversation = list[dict[str, str]]

LINES_PER_REPORT = 64


@dataclass(frozen=True)
class Lines:
    """What the lines of a file should be, for messages."""

    each: str
    layouts: str  # as JSON


PROMPTS = Lines(
    "a prompt, as JSON or text,",
    '{"prompt": ...}, {"text": ...}, {"question": ...}, {"instruction": ...}, {"turns": [...]} or '
    '{"messages": [...]}',
)


def read_prompts(path: Path, flag: str = "--prompts") -> list[Conversation]:
    """Read a file with one JSON object per line (.jsonl, .json) or one text per line."""
    if path.suffix in (".jsonl", ".json"):
        return [parse_conversation(record, where) for where, record in read_records(path, flag)]
    return [_user(line) for _, line in stream_lines(path, flag)]


def read_records(path: Path, flag: str, lines: Lines = PROMPTS) -> list[tuple[str, Any]]:
    """Read a file with one JSON value per line, each with its place in the file for messages."""
    return list(stream_records(path, flag, lines))


def stream_records(
    path: Path, flag: str, lines: Lines = PROMPTS, report: Report | None = None
) -> Iterator[tuple[str, Any]]:
    """`read_records` for files of any size."""
    for number, line in stream_lines(path, flag, lines, report):
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{where} is not JSON ({error}): write one object on each line, {lines.layouts}"
            ) from None
        yield where, record


def parse_conversation(record: Any, where: str, lines: Lines = PROMPTS) -> Conversation:
    """Find the prompt in a record of any of the layouts."""
    try:
        return _conversation(record)
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ConfigError(
            f"{where} has no prompt that stoop can read: write one object on each line, "
            f"{lines.layouts}"
        ) from None


def stream_lines(
    path: Path, flag: str, lines: Lines = PROMPTS, report: Report | None = None
) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers."""
    empty = True
    with open_text(path, flag, lines) as file:
        # Not splitlines(): a prompt may hold characters that it takes for the end of a line.
        for number, line in enumerate(file, start=1):
            if line.strip():
                empty = False
                yield number, line.removesuffix("\n")
            if report and number % LINES_PER_REPORT == 0:
                report_place(file, path, report)
    if empty:
        raise ConfigError(f"{flag} {path} is empty: write {lines.each} on each line")


@contextmanager
def open_text(path: Path, flag: str, lines: Lines) -> Iterator[TextIO]:
    """Open a text file; what goes wrong while it is read is refused with a sentence."""
    try:
        with path.open(encoding="utf-8") as file:
            yield file
    except FileNotFoundError:
        raise ConfigError(
            f"{flag} {path} does not exist: name a file with {lines.each} on each line"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error}") from None


def report_place(file: TextIO, path: Path, report: Report) -> None:
    """Report how much of a file has been read, to the size of its buffer."""
    report(f"reading {path.name}", file.buffer.tell(), os.fstat(file.fileno()).st_size)


def _conversation(record: Mapping[str, Any]) -> Conversation:
    """The part of a conversation before its last answer, or the first of several turns."""
    if "messages" in record:
        messages = [{"role": m["role"], "content": m["content"]} for m in record["messages"]]
        while messages[-1]["role"] == "assistant":
            messages.pop()
        return messages
    if "turns" in record:
        return _user(record["turns"][0])
    if "instruction" in record:
        return _user("\n\n".join(filter(None, (record["instruction"], record.get("input")))))
    for name in ("prompt", "text"):
        if name in record:
            return _user(record[name])
    return _user(record["question"])


def _user(text: str) -> Conversation:
    if not isinstance(text, str):
        raise TypeError(text)
    return [{"role": "user", "content": text}]
