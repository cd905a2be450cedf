"""Progress, speed and remaining time of a stage."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from stoop.train.settings import Deadline, Say

SHOW_SECONDS = 0.2  # minimum time between updates of a stage
FIRST_STEPS = 8  # engine steps before the first estimate; they process prompts


@dataclass(frozen=True)
class Progress:
    """The state of a stage at one moment."""

    stage: str
    done: int
    total: int | None
    unit: str = ""  # what is counted; empty for bytes
    tokens_per_s: float | None = None
    seconds_left: float | None = None  # an estimate

    @property
    def figures(self) -> str:
        """Format the progress, such as `120 of 400 answers, 1,250 tokens/s, about 40 s left`."""
        parts = []
        if self.unit and self.total is not None:
            parts.append(f"{self.done:,} of {self.total:,} {self.unit}")
        elif self.total:
            parts.append(f"{self.done / self.total:.0%}")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        if self.seconds_left is not None:
            parts.append(f"about {duration(self.seconds_left)} left")
        return ", ".join(parts)


Show = Callable[[Progress | None], None]  # None: no stage is running


def show_nothing(progress: Progress | None) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class Teller:
    """Where a stage reports to: lines that stay, and progress that the next call replaces."""

    say: Say
    show: Show = show_nothing


def duration(seconds: float) -> str:
    """Format a duration, such as `45 s`, `12 min` or `3 h 20 min`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


class AnswerPace:
    """Progress of engine requests until `total` good answers are found.

    The estimate counts tokens, including those of unfinished answers, since a whole batch may
    finish at once. It starts from the maximum answer length and also assumes it for the last
    answer: when few requests are left, a step takes as long as before but yields few tokens.
    """

    def __init__(
        self,
        progress: Progress,
        longest: int,
        deadline: Deadline,
        show: Show,
        num_generated: Callable[[], int],
    ) -> None:
        self.start, self.longest, self.deadline, self.show = progress, longest, deadline, show
        self.num_generated = num_generated  # tokens since the engine's start
        self.generated_before = num_generated()
        self.num_asked = self.num_finished = self.num_good = self.num_tokens = 0
        self.num_steps = self.newest_ask = 0
        self.started = time.monotonic()
        self._shown = float("-inf")

    @property
    def num_in_flight(self) -> int:
        return self.num_asked - self.num_finished

    def ask(self) -> None:
        self.num_asked += 1
        self.newest_ask = self.num_steps

    def add(self, num_tokens: int, good: bool = True) -> None:
        """Count a finished answer."""
        self.num_finished += 1
        self.num_good += good
        self.num_tokens += num_tokens

    def step(self) -> None:
        """Count an engine step, and show progress unless the last update is recent."""
        self.num_steps += 1
        now = time.monotonic()
        if now - self._shown >= SHOW_SECONDS:
            self._shown = now
            self.show(self.progress(now - self.started))

    def progress(self, seconds: float) -> Progress:
        """Return the progress after `seconds`."""
        generated = self.num_generated() - self.generated_before
        if not generated:
            return self.start
        assert self.start.total is not None
        rate = generated / max(seconds, 1e-9)
        # One extra good answer of maximum length avoids a division by zero.
        mean = (self.num_tokens + self.longest) / (self.num_finished + 1)
        share = (self.num_good + 1) / (self.num_finished + 1)
        lacking = max(0, self.start.total - self.num_good) / share
        tokens_left = (self.num_finished + lacking) * mean - generated
        age = self.num_steps - self.newest_ask if lacking <= self.num_in_flight else 0
        steps_left = self.longest - age
        left = max(0.0, tokens_left / rate, steps_left * seconds / self.num_steps)
        return replace(
            self.start,
            done=min(self.num_good, self.start.total),
            tokens_per_s=rate,
            seconds_left=min(left, self.deadline.left) if self.num_steps >= FIRST_STEPS else None,
        )


class _Mark(NamedTuple):
    """A point in training to measure from."""

    time: float
    step: int
    num_tokens: int


class StepPace:
    """Progress of training steps; the slow first step counts only until the second is done."""

    def __init__(self, first_step: int, num_steps: int, deadline: Deadline, show: Show) -> None:
        self.num_steps, self.deadline, self.show = num_steps, deadline, show
        self.newest = _Mark(time.monotonic(), first_step, 0)
        self.marks = [self.newest]  # the start, and the end of the first step
        self._shown = float("-inf")

    def add(self, num_tokens: int) -> None:
        """Count a finished step."""
        before = self.newest
        self.newest = _Mark(time.monotonic(), before.step + 1, before.num_tokens + num_tokens)
        if self.newest.time - self._shown >= SHOW_SECONDS:
            self._shown = self.newest.time
            self.show(self.progress())
        if len(self.marks) == 1:
            self.marks.append(self.newest)

    def progress(self) -> Progress:
        since, newest = self.marks[-1], self.newest
        seconds = max(newest.time - since.time, 1e-9)
        left = (self.num_steps - newest.step) * seconds / (newest.step - since.step)
        return Progress(
            "training",
            newest.step,
            self.num_steps,
            "steps",
            (newest.num_tokens - since.num_tokens) / seconds,
            min(left, self.deadline.left),
        )


class Combined:
    """Combines the progress of several workers, showing the earliest stage still running."""

    def __init__(self, show: Show) -> None:
        self.show = show
        self.current: dict[int, str] = {}  # each active worker's stage
        self.stages: dict[str, dict[int, Progress]] = {}  # in starting order

    def __call__(self, worker: int, progress: Progress | None) -> None:
        self.current.pop(worker, None)
        if progress is not None:
            self.current[worker] = progress.stage
            self.stages.setdefault(progress.stage, {})[worker] = progress
        for stage, found in self.stages.items():
            working = [found[each] for each, now in self.current.items() if now == stage]
            if working:
                self.show(_sum([*found.values()], working))
                return
        self.show(None)


def _sum(found: list[Progress], working: list[Progress]) -> Progress:
    """Sum progress. found: of all workers that began the stage; working: of those still in it"""
    totals = [each.total for each in found if each.total is not None]
    rates = [each.tokens_per_s for each in working if each.tokens_per_s is not None]
    left = [each.seconds_left for each in working if each.seconds_left is not None]
    return replace(
        found[0],
        done=sum(each.done for each in found),
        total=sum(totals) if totals else None,
        tokens_per_s=sum(rates) if rates else None,
        seconds_left=max(left, default=None),
    )
