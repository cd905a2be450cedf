"""Progress bars on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)


class StageProgress:
    """Shows `report(stage, done, total)` calls as one bar or one line per stage."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._started = time.perf_counter()

    def __enter__(self) -> "StageProgress":
        self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.progress.stop()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        task = self._tasks.get(stage)
        if task is None:
            if not self.console.is_terminal:
                print(f"{stage} ...", file=sys.stderr, flush=True)
            task = self._tasks[stage] = self.progress.add_task(stage, total=total)
        self.progress.update(task, completed=done, total=total)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started
