"""Model folders that we make ourselves: whole or absent, made once, by one process at a time."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoop.checkpoint.report import Report
from stoop.config.environ import cache_dir
from stoop.config.errors import FetchError

MANIFEST = "stoop.json"
# Raise it when the converter writes something else than before: cached folders are made again.
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Recipe:
    """How to make one cached folder."""

    name: str  # the folder's name in the cache
    source: str  # what the folder is made of; another source makes it stale
    bytes_needed: Callable[[], int]  # free disk space at the worst moment
    build: Callable[[Path, Path], None]  # takes a scratch folder and the folder to fill


def models_dir() -> Path:
    return cache_dir() / "models"


def obtain(recipe: Recipe, report: Report) -> Path:
    """The folder of a recipe: the cached one if it is whole, else newly made."""
    folder = models_dir() / recipe.name
    if is_whole(folder, recipe.source):
        return folder
    with _disk_problems(recipe):
        models_dir().mkdir(parents=True, exist_ok=True)
        with _locked(models_dir() / f".{recipe.name}.lock", report):
            # Another process may have made it while we waited.
            if not is_whole(folder, recipe.source):
                _make(recipe, folder)
    return folder


def is_whole(folder: Path, source: str) -> bool:
    """Whether the folder is what its manifest says, made of this source by this version."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    # Files that someone laid beside ours do no harm.
    return manifest == _manifest(source, sizes)


def _make(recipe: Recipe, folder: Path) -> None:
    for leftover in models_dir().glob(f".making-{recipe.name}-*"):
        # We hold the lock, so whoever made it is gone.
        shutil.rmtree(leftover, ignore_errors=True)
    if folder.exists():
        shutil.rmtree(folder)
    _check_free_space(recipe)
    workshop = Path(tempfile.mkdtemp(prefix=f".making-{recipe.name}-", dir=models_dir()))
    try:
        scratch, model = workshop / "scratch", workshop / "model"
        scratch.mkdir()
        model.mkdir()
        recipe.build(scratch, model)
        manifest = _manifest(recipe.source, _file_sizes(model))
        (model / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        model.rename(folder)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def _manifest(source: str, sizes: dict[str, int]) -> dict[str, Any]:
    return {"format": FORMAT_VERSION, "source": source, "files": sizes}


def _file_sizes(folder: Path) -> dict[str, int]:
    return {
        entry.name: entry.stat().st_size
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name)
    }


@contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("waiting for another process", 0, None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _check_free_space(recipe: Recipe) -> None:
    free_bytes = shutil.disk_usage(models_dir()).free
    if free_bytes < recipe.bytes_needed():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def _disk_problems(recipe: Recipe) -> Iterator[None]:
    """Turn what the disk says into what the user can do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FetchError(
                f"the disk is full: {recipe.name} needs {show_bytes(recipe.bytes_needed())} in "
                f"{models_dir()}, so free some space or set STOOP_CACHE to a folder on "
                "another disk"
            ) from error
        raise FetchError(
            f"the cache folder {models_dir()} cannot be used ({error}): "
            "set STOOP_CACHE to a folder that you can write to"
        ) from error


def show_bytes(num_bytes: int) -> str:
    """A size for people, rounded up: 639 MB."""
    return f"{-(-num_bytes // 1_000_000)} MB"
