"""Counts how often each token occurs in a file of texts, which may be larger than memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stoop.config.errors import CheckpointError, ConfigError
from stoop.core.report import Report
from stoop.text.prompts import Lines, open_text, report_place, stream_records
from stoop.text.tokenizer import Tokenizer

RECORDS = Lines(
    "a text, or a record with one, as JSON,",
    '{"prompt": ..., "answer": ...}, {"messages": [...]}, {"turns": [...]}, {"text": ...} or as '
    "stoop generate --json prints it",
)
FIELDS = (
    *("messages", "turns", "prompt", "text", "question", "instruction", "input"),
    *("answer", "reference", "response", "completion", "output", "outputs"),
)
TEXT_SIZE = 1 << 13  # characters of a text file that are counted as one text
HELD_OUT = 10  # one text of so many


@dataclass(frozen=True)
class TokenCounts:
    """How often each token occurs, [vocab_size] int64."""

    everywhere: np.ndarray
    held_out: np.ndarray  # in every tenth text
    num_texts: int

    @property
    def num_tokens(self) -> int:
        return int(self.everywhere.sum())

    @property
    def num_kinds(self) -> int:
        """Tokens that occur."""
        return int((self.everywhere > 0).sum())

    def ranking(self) -> np.ndarray:
        """All token ids, the most frequent first; of equally frequent ones the lowest first."""
        return _rank(self.everywhere)

    def coverage(self, size: int) -> float:
        """Share of the text that the `size` most frequent tokens make."""
        return _share(self.everywhere, self.ranking()[:size])

    def lowest_coverage(self, size: int) -> float:
        """Share of the text that the tokens with the `size` lowest ids make."""
        return _share(self.everywhere, np.arange(size))

    def held_out_coverage(self, size: int) -> float | None:
        """Share of the held-out texts that the most frequent tokens of the others make."""
        if self.num_texts < HELD_OUT:
            return None
        return _share(self.held_out, _rank(self.everywhere - self.held_out)[:size])


def _rank(counts: np.ndarray) -> np.ndarray:
    return np.argsort(-counts, kind="stable")


def _share(counts: np.ndarray, token_ids: np.ndarray) -> float:
    return float(counts[token_ids].sum() / max(counts.sum(), 1))


def count_tokens(
    path: Path, flag: str, tokenizer: Tokenizer, vocab_size: int, report: Report | None = None
) -> TokenCounts:
    """Count a .jsonl file, record by record, or a text file.

    vocab_size: of the model, which may be larger than the tokenizer's
    """
    everywhere, held_out = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    number = -1
    for number, parts in enumerate(read_texts(path, flag, report)):
        ids = [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False)]
        found = np.bincount(np.asarray(ids, np.int64), minlength=vocab_size)
        if len(found) > vocab_size:
            raise CheckpointError(
                f"the tokenizer has token {len(found) - 1}, but the model's vocabulary has "
                f"{vocab_size:,} tokens: use the model's own tokenizer"
            )
        everywhere += found
        if number % HELD_OUT == HELD_OUT - 1:
            held_out += found
    return TokenCounts(everywhere, held_out, number + 1)


def read_texts(path: Path, flag: str, report: Report | None = None) -> Iterator[list[str]]:
    """The texts of a file: the parts of each JSON record, or pieces of a text file."""
    if path.suffix not in (".jsonl", ".json"):
        yield from ([piece] for piece in _read_pieces(path, flag, report))
        return
    for where, record in stream_records(path, flag, RECORDS, report):
        found = list(_record_texts(record))
        # The last line of `stoop generate --json` has no text.
        if not found and not (isinstance(record, dict) and "metrics" in record):
            raise ConfigError(
                f"{where} has no text that stoop can read: write one object on each line, "
                f"{RECORDS.layouts}"
            )
        if found:
            yield found


def _read_pieces(path: Path, flag: str, report: Report | None) -> Iterator[str]:
    """Pieces that end with a line, unless lines are too long."""
    empty = True
    with open_text(path, flag, RECORDS) as file:
        while piece := file.read(TEXT_SIZE) + file.readline(TEXT_SIZE):
            empty = empty and not piece.strip()
            yield piece
            if report:
                report_place(file, path, report)
    if empty:
        raise ConfigError(f"{flag} {path} is empty: write {RECORDS.each} on each line")


def _record_texts(record: Any) -> Iterator[str]:
    if isinstance(record, str):
        yield record
    elif isinstance(record, dict):
        for name in FIELDS:
            yield from _field_texts(record.get(name))


def _field_texts(value: Any) -> Iterator[str]:
    """A text, or those of a list; of a message its content, of an answer its text."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _field_texts(each)
    elif isinstance(value, dict):
        for name in ("content", "text"):
            yield from _field_texts(value.get(name))
