"""Encoding of prompts, and openings of prompts that the target invents."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from stoop.config.errors import ConfigError
from stoop.text.prompts import Conversation
from stoop.text.tokenizer import Tokenizer


class Prompt(NamedTuple):
    """An encoded prompt."""

    key: int  # hash of its tokens, which identifies it across runs
    token_ids: list[int]


def encode_prompts(
    tokenizer: Tokenizer, conversations: Iterable[Conversation], max_tokens: int
) -> Iterator[Prompt]:
    """Encode prompts, with the chat template if there is one; skip duplicates and long prompts."""
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
    """Encode a chat whose user turn starts with `opening` and is not finished."""
    if not tokenizer.has_chat_template:
        raise ConfigError("--invent needs a chat template, and the target has none: give --prompts")
    turn = [{"role": "user", "content": opening}]
    return tokenizer.encode_chat(turn, continue_final_message=True)


# Half of the invented prompts start without an opening; the rest use one of these, so that code,
# mathematics and other topics occur.
OPENINGS = (
    "Write a Python function that",
    "Write a program that",
    "Fix the bug in this code:",
    "Complete this code:\n\ndef",
    "Finish this Python function:\n\ndef",
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
