"""Answers on disk: shards of compact arrays, from which a stopped run can continue.

The shards record which answers are done, including dropped loops; the manifest is only a summary. A
shard is written to a temporary file and then renamed, so it is never incomplete. Each worker has
its own folder: the first uses the root, others use part-1, part-2 ... inside it.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stoop.config.errors import ConfigError
from stoop.train.files import write_json, written_aside

INVENTED = "invented.jsonl"  # prompts that the target invented, in a worker's folder


@dataclass(frozen=True)
class Corpus:
    """The documents, each a prompt followed by its answer, concatenated."""

    tokens: np.ndarray  # [tokens] int32
    starts: np.ndarray  # [documents + 1] int64
    prompt_lens: np.ndarray  # [documents] int32
    greedy: np.ndarray  # [documents] bool
    keys: np.ndarray  # [documents] uint64, of their prompts

    def __len__(self) -> int:
        return len(self.prompt_lens)

    @property
    def lengths(self) -> np.ndarray:
        """The documents' lengths in tokens, [documents] int64."""
        return np.diff(self.starts)

    def document(self, index: int) -> np.ndarray:
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def count_answers(self, vocab_size: int) -> np.ndarray:
        """Count each token's occurrences in answers, [vocab_size]."""
        place = np.arange(len(self.tokens)) - np.repeat(self.starts[:-1], self.lengths)
        in_answer = place >= np.repeat(self.prompt_lens, self.lengths)
        return np.bincount(self.tokens[in_answer], minlength=vocab_size)


@dataclass
class _Rows:
    """The rows of a shard that is not yet written."""

    documents: list[np.ndarray] = field(default_factory=list)
    prompt_lens: list[int] = field(default_factory=list)
    greedy: list[bool] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    done: list[tuple[int, int]] = field(default_factory=list)  # prompt, answer; including loops


class ShardStore:
    """A worker's folder of shards; one process writes to it at a time."""

    def __init__(self, root: Path, origin: dict[str, Any], worker: int = 0) -> None:
        """Open a worker's folder. origin: what all its answers share, for the manifest"""
        self.folder = folder = worker_folder(root, worker)
        folder.mkdir(parents=True, exist_ok=True)
        known = read_manifest(folder)
        self.counts: dict[str, Any] = {**COUNTS, "seconds": known.get("seconds", 0.0), **origin}
        self.done: set[tuple[int, int]] = set()
        self._rows = _Rows()
        for path in shard_files(folder):
            self._count(read_shard(path))
        for place in all_folders(root):  # answers of other workers count as done, too
            for path in shard_files(place):
                done = read_shard(path)["done"]
                self.done.update((int(key), int(index)) for key, index in done)

    def _count(self, shard: dict[str, np.ndarray]) -> None:
        num_answers, num_prompt = len(shard["keys"]), int(shard["prompt_lens"].sum())
        self.counts["answers"] += num_answers
        self.counts["greedy"] += int(shard["greedy"].sum())
        self.counts["prompt_tokens"] += num_prompt
        self.counts["answer_tokens"] += len(shard["tokens"]) - num_prompt
        self.counts["loops_dropped"] += len(shard["done"]) - num_answers

    def add(
        self, prompt: list[int], answer: list[int], place: tuple[int, int], greedy: bool
    ) -> None:
        """Add an answer. place: the prompt's key and the answer's index"""
        rows = self._rows
        rows.documents.append(np.asarray(prompt + answer, dtype=np.int32))
        rows.prompt_lens.append(len(prompt))
        rows.greedy.append(greedy)
        rows.keys.append(place[0])
        rows.done.append(place)
        self.counts["answers"] += 1
        self.counts["greedy"] += greedy
        self.counts["prompt_tokens"] += len(prompt)
        self.counts["answer_tokens"] += len(answer)

    def drop_loop(self, place: tuple[int, int]) -> None:
        self._rows.done.append(place)
        self.counts["loops_dropped"] += 1

    def flush(self, seconds: float) -> None:
        """Write the answers since the last flush as a shard. seconds: time since then"""
        rows = self._rows
        self.counts["seconds"] += seconds
        if rows.done:
            tokens = np.concatenate([np.empty(0, np.int32), *rows.documents])
            arrays = {
                "tokens": tokens,
                "lengths": np.array([len(each) for each in rows.documents], dtype=np.int32),
                "prompt_lens": np.array(rows.prompt_lens, dtype=np.int32),
                "greedy": np.array(rows.greedy, dtype=bool),
                "keys": np.array(rows.keys, dtype=np.uint64),
                "done": np.array(rows.done, dtype=np.uint64).reshape(-1, 2),
            }
            number = len(shard_files(self.folder))
            path = self.folder / f"shard-{number:05d}.npz"
            with written_aside(path) as aside, aside.open("wb") as file:
                np.savez(file, **arrays)
        self._rows = _Rows()
        write_json(self.folder / "manifest.json", self.counts)


COUNTS = {
    "answers": 0,
    "greedy": 0,
    "prompt_tokens": 0,
    "answer_tokens": 0,
    "loops_dropped": 0,
    "seconds": 0.0,
}


def worker_folder(root: Path, worker: int) -> Path:
    return root / f"part-{worker}" if worker else root


def all_folders(root: Path) -> list[Path]:
    return [root, *sorted(root.glob("part-*"))]


def shard_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.npz"))


def read_shard(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as shard:
        return dict(shard)


def origin_of(target: str, seed: int) -> dict[str, Any]:
    """Return what all answers of a folder share."""
    return {"target": target, "seed": seed}


def load_corpus(root: Path) -> Corpus:
    """Load the answers of all workers, without duplicates."""
    shards = [read_shard(path) for folder in all_folders(root) for path in shard_files(folder)]
    if not sum(len(shard["lengths"]) for shard in shards):
        raise ConfigError(f"{root} has no answers to train on: run --stage data first")

    def joined(name: str) -> np.ndarray:
        return np.concatenate([shard[name] for shard in shards])

    tokens, lengths = joined("tokens"), joined("lengths")
    documents = np.split(tokens, np.cumsum(lengths, dtype=np.int64)[:-1])
    first = {document.tobytes(): place for place, document in reversed([*enumerate(documents)])}
    kept = sorted(first.values())
    starts = np.concatenate(([0], np.cumsum(lengths[kept], dtype=np.int64)))
    return Corpus(
        np.concatenate([documents[place] for place in kept]),
        starts,
        *(joined(name)[kept] for name in ("prompt_lens", "greedy", "keys")),
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    return json.loads(path.read_text()) if path.exists() else {}


def read_counts(root: Path) -> dict[str, Any]:
    """Sum the counts of all manifests; zeros if there is none."""
    manifests = [read_manifest(folder) for folder in all_folders(root)]
    return {name: sum(each.get(name, zero) for each in manifests) for name, zero in COUNTS.items()}
