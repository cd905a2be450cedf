"""Reads prompt files in the common layouts, as conversations to answer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoop.config.errors import ConfigError

Conversation = list[dict[str, str]]


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
    return [_user(line) for _, line in _read_lines(path, flag)]


def read_records(path: Path, flag: str, lines: Lines = PROMPTS) -> list[tuple[str, Any]]:
    """Read a file with one JSON value per line, each with its place in the file for messages."""
    found = []
    for number, line in _read_lines(path, flag, lines):
        where = f"{path}:{number}"
        try:
            found.append((where, json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{where} is not JSON ({error}): write one object on each line, {lines.layouts}"
            ) from None
    return found


def parse_conversation(record: Any, where: str, lines: Lines = PROMPTS) -> Conversation:
    """Find the prompt in a record of any of the layouts."""
    try:
        return _conversation(record)
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ConfigError(
            f"{where} has no prompt that stoop can read: write one object on each line, "
            f"{lines.layouts}"
        ) from None


def _read_lines(path: Path, flag: str, lines: Lines = PROMPTS) -> list[tuple[int, str]]:
    """Return the lines that are not blank, with their numbers."""
    try:
        # Not splitlines(): a prompt may hold characters that it takes for the end of a line.
        texts = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise ConfigError(
            f"{flag} {path} does not exist: name a file with {lines.each} on each line"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error}") from None
    found = [(number, line) for number, line in enumerate(texts, start=1) if line.strip()]
    if not found:
        raise ConfigError(f"{flag} {path} is empty: write {lines.each} on each line")
    return found


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
