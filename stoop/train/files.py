"""File writes that an interrupt or a crash cannot leave half done."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block succeeds, else is removed."""
    aside = path.with_name(f"{path.name}.unfinished")
    try:
        yield aside
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any) -> None:
    with written_aside(path) as aside:
        aside.write_text(json.dumps(content, indent=2) + "\n")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read a file with a JSON object per line, ignoring an incomplete last line."""
    if not path.exists():
        return []
    *lines, _torn = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def write_records(path: Path, records: list[dict[str, Any]]) -> None:
    with written_aside(path) as aside:
        lines = "".join(json.dumps(record) + "\n" for record in records)
        aside.write_text(lines, encoding="utf-8")
