"""What a user may say about training a draft head. Each group is one panel of `--help`."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from stoop.config.errors import ConfigError

Say = Callable[[str], None]  # one line of progress


def as_flag(name: str, value: Any) -> str:
    """How a user writes a setting, such as `--max-answer 24`."""
    flag = name.replace("_", "-")
    if value is None:
        return f"no --{flag}"
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value}"


def advise(name: str, value: Any) -> str:
    """To write a setting so that it has this value."""
    if value is None:
        return f"leave --{name.replace('_', '-')} out"
    return f"give {as_flag(name, value)}"


def _setting(default: Any, text: str, least: float | None = None, most: float | None = None) -> Any:
    return field(default=default, metadata={"help": text, "least": least, "most": most})


@dataclass(frozen=True)
class _Settings:
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
    invent: int = _setting(0, "prompts that the target invents itself, beside --prompts", 0)
    answers: int = _setting(1, "answers to each prompt; at most one of them greedy", 1)
    greedy_share: float = _setting(0.5, "share of greedy answers; the others are drawn", 0, 1)
    temperature: float = _setting(0.7, "of the answers that are drawn", 0.01, 100)
    max_answer: int = _setting(512, "longest answer, in tokens", 4)
    max_len: int = _setting(2048, "longest prompt and answer together, here and in training", 8)
    max_num_seqs: int | None = _setting(
        None, "answers under way at once; default: 16 on a CPU, 512 on a GPU", 1
    )
    workers: int = _setting(
        1,
        "engines that answer side by side, each in a process of its own: for small targets, whose "
        "steps take the host longer than the GPU",
        1,
        64,
    )
    kv_cache_memory: str | None = _setting(
        None, "bytes of each worker's KV cache, such as 16GiB; default: a share of what is free"
    )


@dataclass(frozen=True)
class HeadSettings(_Settings):
    draft_vocab: int | None = _setting(
        None,
        "tokens that the head may draft; default: 8192, or twice or four times as many, "
        "until they cover 98% of the answers",
        1,
    )
    taps: str | None = _setting(
        None, "layers whose entering streams the head reads, such as 2,15,27; default: 2, n/2, n-3"
    )
    fc_norm: bool = _setting(True, "a norm for each tap (EAGLE-3.1)")
    norm_output: bool = _setting(
        True, "the next draft gets the normalised output as its feature (EAGLE-3.1)"
    )


@dataclass(frozen=True)
class TrainSettings(_Settings):
    ttt_steps: int = _setting(7, "passes of the training-time test: drafts in a row", 1, 16)
    decay: float = _setting(0.8, "weight of each pass's loss beside the one before", 0.01, 1)
    lr: float = _setting(1e-3, "highest learning rate", 0)
    warmup: float = _setting(0.03, "share of the steps in which it rises; then it falls", 0, 1)
    clip: float = _setting(0.5, "longest gradient", 0)
    weight_decay: float = _setting(0.0, "of AdamW", 0)
    batch_tokens: int = _setting(32768, "tokens of a step, packed", 8)
    epochs: int = _setting(4, "times that every answer is seen", 1)
    steps: int | None = _setting(None, "steps in all, instead of --epochs", 1)
    include_prompts: bool = _setting(False, "learn to draft the tokens of prompts too")
    val_share: float = _setting(0.02, "share of the prompts held out", 0, 0.5)
    val_tokens: int = _setting(65536, "tokens of them that are looked at", 8)
    eval_every: int = _setting(200, "steps between looks at them", 1)
    log_every: int = _setting(20, "steps between lines of the log", 1)
    save_every: float = _setting(120.0, "seconds between checkpoints", 0)


@dataclass(frozen=True)
class Settings:
    """All that decides what comes out, and where it is computed."""

    data: DataSettings = DataSettings()
    head: HeadSettings = HeadSettings()
    train: TrainSettings = TrainSettings()
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"  # bfloat16 on a GPU, else the target's
    time_budget: float | None = None  # seconds of each stage


class Deadline:
    """When a stage has to stop; never, without a budget."""

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
        """A part of the budget, from now on."""
        return Deadline(None if self.seconds is None else part * self.seconds)
