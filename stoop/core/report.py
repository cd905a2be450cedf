<<<<<<< HEAD:stoop/core/report.py
"""Progress reports of long work, and how messages show sizes and paths."""
=======
"""Progress reports of downloads, conversions and loading."""
>>>>>>> wt-words2:stoop/checkpoint/report.py

from pathlib import Path
from typing import Protocol


class Report(Protocol):
<<<<<<< HEAD:stoop/core/report.py
    """Called with a stage such as "downloading", the work done and its total, None if unknown."""
=======
    """Called with a stage such as "downloading", the bytes done, and the total if it is known."""
>>>>>>> wt-words2:stoop/checkpoint/report.py

    def __call__(self, stage: str, done: int, total: int | None, /) -> None: ...


def show_bytes(num_bytes: int) -> str:
<<<<<<< HEAD:stoop/core/report.py
    """Format a size for messages, rounded up: 639 MB, 1.3 GB."""
=======
    """A readable size, rounded up: 639 MB, 1.3 GB."""
>>>>>>> wt-words2:stoop/checkpoint/report.py
    if num_bytes >= 1_000_000_000:
        return f"{-(-num_bytes // 100_000_000) / 10:.1f} GB"
    return f"{-(-num_bytes // 1_000_000)} MB"


def show_path(path: Path) -> str:
<<<<<<< HEAD:stoop/core/report.py
    """Format a path for messages, with ~ for the home directory."""
=======
    """A readable path, with ~ for the home folder."""
>>>>>>> wt-words2:stoop/checkpoint/report.py
    home = Path.home()
    return str(Path("~") / path.relative_to(home)) if path.is_relative_to(home) else str(path)


def quiet(stage: str, done: int, total: int | None) -> None:
    """Report nothing."""
