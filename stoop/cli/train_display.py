"""What `stoop train-draft` prints: lines and, on a terminal, a progress bar below them."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from stoop.train.progress import Progress

# Without a terminal, progress is printed after this many seconds without a line; the interval
# grows with the run.
QUIET_LEAST, QUIET_MOST, QUIET_SHARE = 10.0, 60.0, 0.1


class Display:
    """`say` prints lines that stay; `show` displays progress that the next call replaces."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.bars: Bars | None = None
        if self.console.is_terminal:
            self.bars = Bars(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[figures]}", markup=False),
                console=self.console,
                transient=True,
                redirect_stdout=False,
            )
        self.task: TaskID | None = None
        self.stage = ""  # of the task
        self.started = self.newest_line = time.monotonic()

    def __enter__(self) -> "Display":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.show(None)

    def say(self, line: str) -> None:
        self.newest_line = time.monotonic()
        if self.bars is not None:
            self.console.print(line, soft_wrap=True, markup=False, highlight=False, emoji=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def show(self, progress: Progress | None) -> None:
        if self.bars is not None:
            self._draw(self.bars, progress)
        elif progress is not None and progress.figures:
            now = time.monotonic()
            quiet = min(max(QUIET_LEAST, QUIET_SHARE * (now - self.started)), QUIET_MOST)
            if now - self.newest_line >= quiet:
                self.say(f"{progress.stage}: {progress.figures}")

    def _draw(self, bars: Bars, progress: Progress | None) -> None:
        if self.task is not None and (progress is None or progress.stage != self.stage):
            bars.remove_task(self.task)
            self.task = None
        if progress is None:
            bars.stop()
            return
        if self.task is None:
            self.stage = progress.stage
            self.task = bars.add_task(
                progress.stage,
                total=progress.total,
                completed=progress.done,
                figures=progress.figures,
            )
            bars.start()
        bars.update(
            self.task,
            completed=progress.done,
            total=progress.total,
            figures=progress.figures,
        )
