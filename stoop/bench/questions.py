"""Questions from files, as prompts; and for those with a reference answer, the number to find.

Files have one JSON object per line. GSM8K has `{"question": ..., "answer": "... #### 42"}`,
FastChat's layout `{"turns": [...], "reference": [...]}`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

from stoop.config.errors import ConfigError
from stoop.config.schema import Config
from stoop.text.prompts import (
    Conversation,
    Lines,
    parse_conversation,
    read_prompts,
    read_records,
)
from stoop.text.tokenizer import Tokenizer

Item = TypeVar("Item")
Prompts = Mapping[str, list[list[int]]]  # by file name, the token ids of each question

FLAG = "--questions"
ANSWERED = Lines(
    "a question with its answer, as JSON,",
    '{"question": ..., "answer": "... #### 42"} or {"turns": [...], "reference": [...]}',
)
NO_TEMPLATE = "the model has no chat template: add --raw to use questions as they are"

# Commas group thousands only: "1,2,3" is three numbers.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
# A hyphen after a letter, a digit or a bracket is no sign ("10-3"), nor one before a space.
_SIGN = r"(?:[$€£][-\u2212]|(?:(?<![\w)\].])[-\u2212])?(?:[$€£] ?)?)"
_SIGNED = rf"{_SIGN}(?:{_DIGITS})"
_NUMBER = re.compile(_SIGNED)
_MARKED = re.compile(rf"####\s*({_SIGNED})")
_ANNOTATION = re.compile(r"<<[^<>]*>>")  # GSM8K's notes for a calculator


@dataclass(frozen=True)
class Question:
    """A question and its reference."""

    conversation: Conversation
    solution: str  # worked out, without notes for a calculator
    answer: Decimal  # the number that it ends with


@dataclass(frozen=True)
class Task:
    """A question as token ids."""

    prompt: tuple[int, ...]
    solution: tuple[int, ...]
    answer: Decimal
    stop: tuple[str, ...] = ()  # ends an answer besides the end-of-text token


# ---- numbers ----


def find_number(text: str) -> Decimal | None:
    """Return the number after the last `####`, else the last number of a text, else None."""
    found = _MARKED.findall(text) or _NUMBER.findall(text)
    if not found:
        return None
    # Decimal compares exactly at any length: 42.0 equals 42.
    return Decimal(re.sub(r"[^0-9.-]", "", found[-1].replace("\u2212", "-")))


# ---- files ----


def read_questions(paths: Iterable[Path], limit: int | None) -> dict[str, list[Conversation]]:
    """Read at most `limit` questions per file, evenly spaced, since files sort by category."""
    found = {}
    for path in paths:
        every = read_prompts(path, FLAG)
        count = min(limit or len(every), len(every))
        found[str(path)] = spread(every, count)
    return found


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """`count` of the items, evenly spaced."""
    return [items[place * len(items) // count] for place in range(count)]


def read_answered(path: Path, flag: str = FLAG) -> list[Question]:
    """Read questions with reference answers."""
    if path.suffix not in (".jsonl", ".json"):
        raise ConfigError(
            f"{flag} {path} is not a .jsonl file: name one with {ANSWERED.each} on each line"
        )
    return [_question(record, where) for where, record in read_records(path, flag, ANSWERED)]


def read_exam(
    path: Path, limit: int | None = None, num_shots: int = 0, shots_path: Path | None = None
) -> tuple[list[Question], list[Question]]:
    """Read the first `limit` questions, and worked examples from the head of the file.

    shots_path: take the examples from this file instead
    """
    every = read_answered(path)
    if shots_path is None:
        shots, rest = every[:num_shots], every[num_shots:]
    elif num_shots == 0:
        raise ConfigError(f"--shots-file {shots_path} needs --shots N: say how many examples")
    else:
        shots, rest = read_answered(shots_path, "--shots-file")[:num_shots], every
    if len(shots) < num_shots or not rest:
        raise ConfigError(
            f"--shots {num_shots}: {shots_path or path} has too few questions, use a smaller number"
        )
    return rest[:limit], shots


def _question(record: Any, where: str) -> Question:
    conversation = parse_conversation(record, where, ANSWERED)
    given = record.get("answer", record.get("reference"))
    if isinstance(given, list) and given:
        given = given[0]  # one for each turn, and the first turn is the question
    if isinstance(given, int | float) and not isinstance(given, bool):
        given = str(given)
    answer = find_number(given) if isinstance(given, str) else None
    if answer is None:
        raise ConfigError(f"{where} has no answer with a number: write it as {ANSWERED.layouts}")
    return Question(conversation, _ANNOTATION.sub("", given).strip(), answer)


# ---- prompts ----


def encode_questions(
    conversations: Mapping[str, list[Conversation]], tokenizer: Tokenizer, raw: bool
) -> Prompts:
    """Encode questions with the chat template. raw: without it"""
    if not raw and not tokenizer.has_chat_template:
        raise ConfigError(NO_TEMPLATE)

    def encode(conversation: Conversation) -> list[int]:
        if not raw:
            return tokenizer.encode_chat(conversation)
        return tokenizer.encode(_text(conversation))

    return {name: [encode(each) for each in asked] for name, asked in conversations.items()}


def encode_tasks(
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    shots: Sequence[Question] = (),
    raw: bool = False,
) -> list[Task]:
    """Encode questions and reference solutions. shots: worked examples before each question

    raw: "Question: ... Answer:" instead of the chat template
    """
    if not raw and not tokenizer.has_chat_template:
        raise ConfigError(NO_TEMPLATE)

    def task(question: Question) -> Task:
        if raw:
            prompt, before = tokenizer.encode(_raw_prompt(shots, question)), " "
        else:
            prompt, before = tokenizer.encode_chat(_chat_prompt(shots, question)), ""
        solution = tokenizer.encode(before + question.solution, add_special_tokens=False)
        stop = (_NEXT,) if raw else ()
        return Task(tuple(prompt), tuple(solution), question.answer, stop)

    return [task(question) for question in questions]


_NEXT = "\n\nQuestion:"  # a model without a chat template goes on with the next question


def _raw_prompt(shots: Sequence[Question], question: Question) -> str:
    parts = [f"Question: {_text(each.conversation)}\nAnswer: {each.solution}" for each in shots]
    return "\n\n".join([*parts, f"Question: {_text(question.conversation)}\nAnswer:"])


def _chat_prompt(shots: Sequence[Question], question: Question) -> Conversation:
    worked = [
        message
        for each in shots
        for message in (*each.conversation, {"role": "assistant", "content": each.solution})
    ]
    return [*worked, *question.conversation]


def _text(conversation: Conversation) -> str:
    return "\n\n".join(turn["content"] for turn in conversation)


def check_room(config: Config, name: str, longest: int, what: str = "a question") -> None:
    """Refuse questions that leave no room for an answer. longest: of `what`, in tokens"""
    limit = config.schedule.max_model_len
    if longest >= limit:
        raise ConfigError(
            f"{FLAG} {name} has {what} of {longest} tokens, and max_model_len={limit} "
            "leaves no room for its answer: remove it or raise max_model_len"
        )
