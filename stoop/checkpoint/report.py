"""How long work on a model tells its progress."""

from typing import Protocol


class Report(Protocol):
    """Called with a stage such as "downloading", and bytes done of a total if it is known."""

    def __call__(self, stage: str, done: int, total: int | None, /) -> None: ...


def quiet(stage: str, done: int, total: int | None) -> None:
    """Tell nobody."""
