"""Prompts of every common layout into conversations that await an answer, and into token ids."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stoop.config.errors import ConfigError
from stoop.text.tokenizer import Tokenizer

Conversation = list[dict[str, str]]
LAYOUTS = (
    '{"prompt": ...}, {"text": ...}, {"instruction": ...}, {"turns": [...]}, {"messages": [...]}'
)


class Prompt(NamedTuple):
    key: int  # of its tokens: what tells it from others, in any order and in any run
    token_ids: list[int]


def read_prompts(path: Path) -> list[Conversation]:
    """JSON a line (.jsonl, .json) or text a line (anything else)."""
    try:
        # A prompt may hold what only splitlines() takes for the end of a line.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            as_json = path.suffix in (".jsonl", ".json")
            found.append(_parse(line, f"{path}:{number}") if as_json else _user(line))
    if not found:
        raise ConfigError(f"--prompts {path} is empty: write a prompt a line")
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
    """Of a conversation the part before its last answer; of several turns the first."""
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


def encode_prompts(
    tokenizer: Tokenizer, conversations: Iterable[Conversation], max_tokens: int
) -> Iterator[Prompt]:
    """Through the chat template where there is one; each prompt once, too long ones never."""
    seen = set()
    for conversation in conversations:
        if tokenizer.has_chat_template:
            ids = tokenizer.encode_chat(conversation)
        else:
            ids = tokenizer.encode("\n\n".join(turn["content"] for turn in conversation))
        key = key_of(ids)
        if 0 < len(ids) <= max_tokens and key not in seen:
            seen.add(key)
            yield Prompt(key, ids)


def key_of(token_ids: list[int]) -> int:
    raw = np.asarray(token_ids, dtype=np.int32).tobytes()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def user_turn_start(tokenizer: Tokenizer, opening: str) -> list[int]:
    """A chat as it stands when the user has written `opening` and goes on writing."""
    if not tokenizer.has_chat_template:
        raise ConfigError("--invent needs a chat template, and the target has none: give --prompts")
    turn = [{"role": "user", "content": opening}]
    return tokenizer.encode_chat(turn, continue_final_message=True)


# Every other invented prompt starts bare; the rest start with one of these, so that there is code,
# mathematics and more among them.
OPENINGS = (
    "Write a Python function that",
    "Write a program that",
    "Fix the bug in this code:",
    "Write a JavaScript function to",
    "How do I use a",
    "Write a SQL query that",
    "Explain",
    "What is the difference between",
    "How many",
    "Solve",
    "If a train",
    "Write a short story about",
    "Write an email to",
    "Write a poem about",
    "Summarize the following text:",
    "Translate",
    "Give me a list of",
    "Why do",
    "Who was",
    "I need help with",
    "Rewrite this sentence",
    "Plan a",
    "Pretend you are",
    "What are the main",
)
