"""Options for training a draft head. Each group is one panel of `--help`."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from stoop.config.errors import ConfigError

Say = Callable[[str], None]  # one line of progress


def as_flag(name: str, value: Any) -> str:
    """Format a setting as a flag, such as `--max-answer 24`."""
    flag = name.replace("_", "-")
    if value is None:
        return f"no --{flag}"
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value}"


def advise(name: str, value: Any) -> str:
    """Tell the user how to give a setting this value."""
    if value is None:
        return f"leave --{name.replace('_', '-')} out"
    return f"give {as_flag(name, value)}"


def _setting(default: Any, text: str, least: float | None = None, most: float | None = None) -> Any:
    return field(default=default, metadata={"help": text, "least": least, "most": most})


@dataclass(frozen=True)
class _Settings:
    """Checks values against the range of each field."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value, least, most = (
                getattr(self, each.name),
                each.metadata["least"],
                each.metadata["most"],
            )
            flag = "--" + each.name.replace("_", "-")
            if value is None or least is None:
                continue
            if value < least:
                raise ConfigError(f"{flag} {value}: use at least {least:g}")
            if most is not None and value > most:
                raise ConfigError(f"{flag} {value}: use at most {most:g}")


@dataclass(frozen=True)
class DataSettings(_Settings):
    """Options of the data stage."""

    invent: int = _setting(0, "number of prompts the target writes itself, besides --prompts", 0)
    answers: int = _setting(1, "answers per prompt; at most one is greedy", 1)
    greedy_share: float = _setting(0.5, "fraction of greedy answers; the rest are sampled", 0, 1)
    temperature: float = _setting(0.7, "sampling temperature of the other answers", 0.01, 100)
    max_answer: int = _setting(512, "maximum length of an answer, in tokens", 4)
    max_len: int = _setting(
        2048, "maximum length of prompt plus answer, in tokens, for data and training", 8
    )
    max_num_seqs: int | None = _setting(
        None, "answers generated at a time; default: 16 on a CPU, 512 on a GPU", 1
    )
    workers: int = _setting(
        1,
        "number of engine processes that generate answers in parallel; helps with small targets, "
        "whose steps are bound by the host",
        1,
        64,
    )
    kv_cache_memory: str | None = _setting(
        None, "KV cache size of each worker, such as 16GiB; default: a share of free memory"
    )


@dataclass(frozen=True)
class HeadSettings(_Settings):
    """Options of the head's architecture."""

    draft_vocab: int | None = _setting(
        None,
        "size of the head's vocabulary, in tokens; default: 8192, 16384 or 32768, whichever "
        "first covers 98% of the answers' tokens",
        1,
    )
    taps: str | None = _setting(
        None,
        "target layers whose inputs the head reads, such as 2,15,27; default: 2, n/2, n-3 for n "
        "layers",
    )
    fc_norm: bool = _setting(True, "normalize the hidden states of each tap (EAGLE-3.1)")
    norm_output: bool = _setting(
        True, "use the normalized output as the feature of the next draft (EAGLE-3.1)"
    )


@dataclass(frozen=True)
class TrainSettings(_Settings):
    """Options of the training stage."""

    ttt_steps: int = _setting(
        7, "passes of the training-time test: draft tokens per chain in training", 1, 16
    )
    decay: float = _setting(0.8, "loss weight of each pass relative to the previous one", 0.01, 1)
    lr: float = _setting(1e-3, "peak learning rate", 0)
    warmup: float = _setting(0.03, "fraction of steps for warmup; cosine decay follows", 0, 1)
    clip: float = _setting(0.5, "maximum gradient norm", 0)
    weight_decay: float = _setting(0.0, "weight decay of AdamW", 0)
    batch_tokens: int = _setting(32768, "tokens per training step", 8)
    epochs: int = _setting(4, "passes over the data", 1)
    steps: int | None = _setting(None, "number of training steps; overrides --epochs", 1)
    include_prompts: bool = _setting(False, "also train on the tokens of prompts")
    val_share: float = _setting(0.02, "fraction of prompts held out for evaluation", 0, 0.5)
    val_tokens: int = _setting(65536, "maximum held-out tokens per evaluation", 8)
    eval_every: int = _setting(200, "steps between evaluations", 1)
    log_every: int = _setting(20, "steps between log lines", 1)
    save_every: float = _setting(120.0, "seconds between checkpoints", 0)


@dataclass(frozen=True)
class Settings:
    """Everything that determines the trained head, and the device."""

    data: DataSettings = DataSettings()
    head: HeadSettings = HeadSettings()
    train: TrainSettings = TrainSettings()
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"  # bfloat16 on a GPU, else the target's
    time_budget: float | None = None  # seconds per stage


class Deadline:
    """The time at which a stage must stop; without a budget, never."""

    def __init__(self, seconds: float | None) -> None:
        self.started = time.monotonic()
        self.seconds = seconds

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @property
    def over(self) -> bool:
        return self.seconds is not None and self.elapsed >= self.seconds

    @property
    def left(self) -> float:
        return float("inf") if self.seconds is None else max(0.0, self.seconds - self.elapsed)

    def share(self, part: float) -> "Deadline":
        """Return a deadline that starts now and has a part of the budget."""
        return Deadline(None if self.seconds is None else part * self.seconds)
