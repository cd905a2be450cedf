"""The cache of folders that stoop makes: complete or absent, made by one process at a time."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoop.config.environ import cache_dir
from stoop.config.errors import FetchError
from stoop.core.report import Report, quiet, show_bytes

logger = logging.getLogger(__name__)

MANIFEST = "stoop.json"
# Increase it when the converter's output changes, so that cached folders are made again.
FORMAT_VERSION = 1
# A folder that is being made, or whose process was killed: the cached folder's name and the random
# letters of `tempfile`.
_WORKSHOP = re.compile(r"\.making-(.+)-[a-z0-9_]{8}")


@dataclass(frozen=True)
class Recipe:
    """How to make one cached folder."""

    name: str  # the folder's name in the cache
    source: str  # what the folder is made from; if it changes, the folder is stale
    bytes_needed: Callable[[], int]  # peak disk space while it is made
    build: Callable[[Path, Path], None]  # takes a scratch folder and the folder to fill
    notice: Callable[[], str]  # what will be downloaded and written, with sizes


def models_dir() -> Path:
    return cache_dir() / "models"


def obtain(recipe: Recipe, report: Report) -> Path:
    """The folder of a recipe: the cached one if it is complete, else a new one."""
    folder = models_dir() / recipe.name
    if is_whole(folder, recipe.source):
        return folder
    with _disk_problems(recipe):
        models_dir().mkdir(parents=True, exist_ok=True)
        with _locked(recipe.name, report):
            # Another process may have made it while we waited.
            if not is_whole(folder, recipe.source):
                if report is quiet:
                    logger.warning("%s", recipe.notice())
                _make(recipe, folder)
    return folder


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The folder's manifest; None if it has none, or one that does not match its files."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        whole = is_whole(folder, manifest["source"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest if whole else None


def leftovers() -> list[tuple[str, Path]]:
    """Unfinished folders, each with the name of the cached folder that it was meant for."""
    if not models_dir().is_dir():
        return []
    matches = ((_WORKSHOP.fullmatch(path.name), path) for path in models_dir().iterdir())
    return sorted((match[1], path) for match, path in matches if match)


@contextmanager
def lock_if_free(name: str) -> Iterator[bool]:
    """Hold the lock on a cached folder's name; yields False if another process holds it."""
    from filelock import FileLock, Timeout

    lock = FileLock(_lock_path(name))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def remove(name: str) -> None:
    """Remove a cached folder and what unfinished attempts left."""
    try:
        with lock_if_free(name) as is_free:
            if not is_free:
                raise FetchError(
                    f"{name} is being downloaded or converted by another process: wait for it, or "
                    "stop it first"
                )
            folder = models_dir() / name
            if folder.is_dir():
                # Atomic: other processes see it complete or not at all.
                workshop = Path(tempfile.mkdtemp(prefix=f".making-{name}-", dir=models_dir()))
                folder.rename(workshop / "model")
            for other, leftover in leftovers():
                if other == name:
                    shutil.rmtree(leftover)
    except OSError as error:
        raise FetchError(
            f"{name} cannot be removed from {models_dir()} ({error.strerror}): check the rights to "
            "that folder"
        ) from error


def is_whole(folder: Path, source: str) -> bool:
    """Whether the folder matches its manifest and was made from this source by this version."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    # Extra files do no harm.
    return manifest == _manifest(source, sizes)


def _make(recipe: Recipe, folder: Path) -> None:
    _clear_leftovers(recipe.name)
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


def _clear_leftovers(own_name: str) -> None:
    """Remove what killed processes left; a live process holds the lock on its name."""
    for name, leftover in leftovers():
        if name == own_name:
            shutil.rmtree(leftover, ignore_errors=True)
            continue
        # A leftover that we cannot remove does no harm.
        with suppress(OSError), lock_if_free(name) as is_free:
            if is_free:
                shutil.rmtree(leftover)


def _lock_path(name: str) -> Path:
    return models_dir() / f".{name}.lock"


def _manifest(source: str, sizes: dict[str, int]) -> dict[str, Any]:
    return {"format": FORMAT_VERSION, "source": source, "files": sizes}


def _file_sizes(folder: Path) -> dict[str, int]:
    return {
        entry.name: entry.stat().st_size
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name)
    }


@contextmanager
def _locked(name: str, report: Report) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(_lock_path(name))
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
    """Turn disk errors into sentences that say what to do."""
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
