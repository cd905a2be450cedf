"""Lists what is cached on this machine: models that stoop made, and the hub library's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stoop.checkpoint import cache, hub
from stoop.checkpoint.embedded import EMBEDDED, PACKED_SUFFIX
from stoop.checkpoint.fetch import converted_name
from stoop.checkpoint.hub import hub_cache_dir
from stoop.checkpoint.weights import INDEX_FILE
from stoop.config.errors import ConfigError, FetchError


@dataclass(frozen=True)
class CachedModel:
    name: str  # the name to remove it by
    place: Literal["stoop", "hub"]
    num_bytes: int
    folder: Path
    note: str = ""


def list_models() -> list[CachedModel]:
    """Everything that is cached, including unfinished downloads and conversions, by name."""
    found = [*_made_by_stoop(), *_from_the_hub()]
    return sorted(found, key=lambda model: (model.place != "stoop", model.name, model.note))


def find_models(name: str) -> list[CachedModel]:
    """What is cached under a name, or as conversions of the .gguf file at that path.

    An embedded model and a .gguf file have two conversions: dense, and packed.
    """
    path = Path(os.path.expanduser(name)).resolve()
    names = {name}
    if name.lower().endswith(".gguf"):
        names |= {converted_name(path, packed) for packed in (False, True)}
    elif name in EMBEDDED:
        names.add(name + PACKED_SUFFIX)
    found = [model for model in list_models() if model.name in names]
    if not found:
        raise ConfigError(f"no model called {name!r} is cached: run 'stoop models' for a list")
    return found


def remove_models(models: list[CachedModel]) -> None:
    for name, place in dict.fromkeys((model.name, model.place) for model in models):
        if place == "stoop":
            cache.remove(name)
        else:
            _remove_from_hub(name)


def _made_by_stoop() -> Iterator[CachedModel]:
    root = cache.models_dir()
    if not root.is_dir():
        return
    for folder in root.iterdir():
        if folder.name.startswith(".") or not folder.is_dir():
            continue
        yield CachedModel(folder.name, "stoop", _size(folder), folder, _origin(folder))
    for name, folder in cache.leftovers():
        note = "unfinished"
        # In a read-only cache there are no locks to test.
        with suppress(OSError), cache.lock_if_free(name) as is_free:
            note = note if is_free else "being made by another process"
        yield CachedModel(name, "stoop", _size(folder), folder, note)


def _origin(folder: Path) -> str:
    """Where a complete folder comes from, if its name does not say."""
    manifest = cache.read_manifest(folder)
    if manifest is None:
        return "damaged, or of another version: will be made again when used"
    # A conversion records the path, size and time of its file; a digest has no spaces.
    path, *state = str(manifest["source"]).rsplit(" ", 2)
    return f"from {path}" if state else ""


def _from_the_hub() -> Iterator[CachedModel]:
    """Every model folder in the hub library's cache, even those that its own scan calls corrupt."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        scanned = {repo.repo_path: repo for repo in scan_cache_dir(hub_cache_dir()).repos}
    except (CacheNotFound, ValueError):
        return
    for folder in hub_cache_dir().glob("models--*"):
        if not folder.is_dir():
            continue
        name = folder.name.removeprefix("models--").replace("--", "/")
        partial_bytes = sum(path.stat().st_size for path in folder.glob("blobs/*.incomplete"))
        repo = scanned.get(folder)
        whole_bytes = repo.size_on_disk if repo is not None else _size(folder) - partial_bytes
        is_whole = repo is not None and not partial_bytes and _is_whole(folder)
        note = "" if is_whole else "unfinished"
        yield CachedModel(name, "hub", whole_bytes + partial_bytes, folder, note)


def _is_whole(folder: Path) -> bool:
    """Whether some snapshot has all files that its index names."""
    for snapshot in folder.glob("snapshots/*"):
        try:
            index = json.loads((snapshot / INDEX_FILE).read_text(encoding="utf-8"))
            names = set(index["weight_map"].values())
        except FileNotFoundError:
            names = set()
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue
        if any(snapshot.iterdir()) and all((snapshot / str(name)).exists() for name in names):
            return True
    return False


def _remove_from_hub(name: str) -> None:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    folder = hub.repo_folder(name)
    try:
        # The library knows which files several revisions share.
        scan = scan_cache_dir(hub_cache_dir())
        repos = [repo for repo in scan.repos if repo.repo_path == folder]
        revisions = [revision.commit_hash for repo in repos for revision in repo.revisions]
        if revisions:
            scan.delete_revisions(*revisions).execute()
        hub.remove_repo(folder)  # also what no snapshot names, such as unfinished files and locks
    except (OSError, CacheNotFound) as error:
        raise FetchError(
            f"{name} cannot be removed from {folder.parent} ({error}): check the rights to that "
            "folder"
        ) from error


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # another process has just moved it
                continue
    return total
