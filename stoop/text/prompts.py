"""Reads prompt files in the common layouts, as conversations to answer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoop.config.errors import ConfigError

Conversation = list[dict[str, str]]
LAYOUTS = (
    '{"prompt": ...}, {"text": ...}, {"instruction": ...}, {"turns": [...]}, {"messages": [...]}'
)


def read_prompts(path: Path, flag: str = "--prompts") -> list[Conversation]:
    """Read a file with one JSON object per line (.jsonl, .json) or one text per line."""
    try:
        # Not splitlines(): a prompt may hold characters that it takes for the end of a line.
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise ConfigError(
            f"{flag} {path} does not exist: name a file of yours, with JSON or text a line"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            as_json = path.suffix in (".jsonl", ".json")
            found.append(_parse(line, f"{path}:{number}") if as_json else _user(line))
    if not found:
        raise ConfigError(f"{flag} {path} is empty: write a prompt a line")
    return found


def _parse(line: str, where: str) -> Conversation:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON ({error}): write one object a line") from None
    try:
        return _conversation(record)
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ConfigError(f"{where} has no prompt that stoop can read: use {LAYOUTS}") from None


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
    return _user(record["prompt"] if "prompt" in record else record["text"])


def _user(text: str) -> Conversation:
    if not isinstance(text, str):
        raise TypeError(text)
    return [{"role": "user", "content": text}]
