"""Progress reports of long work, and how messages show sizes and paths."""

from pathlib import Path
from typing import Protocol


class Report(Protocol):
    """Called with a stage such as "downloading", the work done and its total, None if unknown."""

    def __call__(self, stage: str, done: int, total: int | None, /) -> None: ...


def show_bytes(num_bytes: int) -> str:
    """Format a size for messages, rounded up: 639 MB, 1.3 GB."""
    if num_bytes >= 1_000_000_000:
        return f"{-(-num_bytes // 100_000_000) / 10:.1f} GB"
    return f"{-(-num_bytes // 1_000_000)} MB"


def show_path(path: Path) -> str:
    """Format a path for messages, with ~ for the home directory."""
    home = Path.home()
    return str(Path("~") / path.relative_to(home)) if path.is_relative_to(home) else str(path)


def quiet(stage: str, done: int, total: int | None) -> None:
    """Report nothing."""
