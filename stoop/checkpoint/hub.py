"""Model folders from the Hugging Face hub, kept in the hub library's own cache."""

from __future__ import annotations

import errno
import io
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from stoop.config.errors import FetchError
from stoop.core.report import Report, show_bytes

WANTED_FILES = [
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "spiece.model", "chat_template*",
    "*.safetensors", "*.safetensors.index.json",
]  # fmt: skip
# Subfolders hold other formats; consolidated files hold a second copy of the weights.
UNWANTED_FILES = ["*/*", "consolidated*"]


@dataclass(frozen=True)
class HubPlan:
    """What a download would fetch."""

    files: tuple[str, ...]
    missing_bytes: int  # of those files that are not in the hub library's cache


def fetch_from_hub(
    name: str, revision: str | None, report: Report | None, check_size: bool = False
) -> Path:
    """The local snapshot of a hub id; files that are cached are not fetched again.

    check_size: ask the hub for sizes even if the model seems to be cached
    """
    import huggingface_hub

    options: dict[str, Any] = {}
    stage = "downloading"
    if check_size or not _is_here(name, revision):
        plan = plan_download(name, revision)
        if plan is not None:
            _check_files(name, plan.files)
            _check_space(name, plan.missing_bytes)
            stage = f"downloading {name} ({show_bytes(plan.missing_bytes)})"
            if report is not None and plan.missing_bytes:
                report(stage, 0, plan.missing_bytes)
    if report is not None:
        options["tqdm_class"] = _reporting_bar(report, stage)
    try:
        with _nothing_left_of_a_failure(name):
            snapshot = huggingface_hub.snapshot_download(
                name,
                revision=revision,
                allow_patterns=WANTED_FILES,
                ignore_patterns=UNWANTED_FILES,
                **options,
            )
    except Exception as error:  # includes errors of the HTTP library that the hub library uses
        raise _hub_problem(name, revision, error) from error
    _check_files(name, [file.name for file in Path(snapshot).iterdir()])
    return Path(snapshot)


def plan_download(name: str, revision: str | None) -> HubPlan | None:
    """Which files a download needs; None if the hub does not answer."""
    import huggingface_hub

    try:
        info = huggingface_hub.HfApi().model_info(name, revision=revision, files_metadata=True)
        sizes = {
            file.rfilename: int(file.size or 0)
            for file in info.siblings or []
            if _is_wanted(file.rfilename)
        }
        missing = sum(
            size
            for file, size in sizes.items()
            if not isinstance(
                huggingface_hub.try_to_load_from_cache(
                    name, file, cache_dir=hub_cache_dir(), revision=info.sha
                ),
                str,
            )
        )
    except Exception:  # the download itself reports the error, or works without the hub
        return None
    return HubPlan(tuple(sizes), missing)


def hub_cache_dir() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repo_folder(name: str) -> Path:
    """The folder of a model in the hub library's cache."""
    return hub_cache_dir() / f"models--{name.replace('/', '--')}"


def remove_repo(folder: Path) -> None:
    """Remove a model from the hub library's cache, with its locks."""
    if folder.exists():
        shutil.rmtree(folder)
    shutil.rmtree(folder.parent / ".locks" / folder.name, ignore_errors=True)


def _is_here(name: str, revision: str | None) -> bool:
    import huggingface_hub

    try:
        found = huggingface_hub.try_to_load_from_cache(
            name, "config.json", cache_dir=hub_cache_dir(), revision=revision
        )
    except huggingface_hub.errors.HFValidationError:
        return False
    return isinstance(found, str)


def _is_wanted(file: str) -> bool:
    return any(fnmatch(file, pattern) for pattern in WANTED_FILES) and not any(
        fnmatch(file, pattern) for pattern in UNWANTED_FILES
    )


def _check_files(name: str, files: Sequence[str]) -> None:
    if "config.json" not in files:
        raise FetchError(f"{name} on the hub has no config.json: choose a model in that layout")
    if not any(file.endswith(".safetensors") for file in files):
        raise FetchError(
            f"{name} on the hub has no .safetensors weights: choose a model that has them"
        )


def _check_space(name: str, num_bytes: int) -> None:
    """Refuse a download that the disk cannot hold, before it starts."""
    folder = repo_folder(name)
    while not folder.exists():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < num_bytes:
        raise FetchError(
            f"{name} needs {show_bytes(num_bytes)}, but {folder} has {show_bytes(free_bytes)} "
            "free: free some space or set HF_HOME to a folder on another disk"
        )


@contextmanager
def _nothing_left_of_a_failure(name: str) -> Iterator[None]:
    """Remove what a first download leaves if it fails before it has any weights.

    Complete weight files stay, and the next attempt continues from there.
    """
    folder = repo_folder(name)
    is_new = not folder.exists()
    try:
        yield
    except BaseException:
        # Incomplete files belong to another process, which is still downloading.
        others = any(folder.glob("blobs/*.incomplete"))
        weights = any(folder.glob("snapshots/*/*.safetensors"))
        if is_new and folder.exists() and not others and not weights:
            with suppress(OSError):  # the user needs to see the failure itself
                remove_repo(folder)
        raise


def _hub_problem(name: str, revision: str | None, error: Exception) -> FetchError:
    from huggingface_hub import errors

    # The error for a gated repository is a subclass of "not found", so the order matters.
    if isinstance(error, errors.GatedRepoError):
        return FetchError(
            f"{name} is gated: ask for access on its hub page, then log in with 'hf auth login'"
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return FetchError(
            f"{name} is not on the hub, or is private: check its name, or log in with "
            "'hf auth login'"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return FetchError(f"{name} has no revision {revision!r} on the hub: check the revision")
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return FetchError(
            f"{name} is neither a folder nor in the hub cache, and the hub cannot be reached: "
            "check the path, or the network"
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return FetchError(
            f"the disk is full while fetching {name}: free some space or set HF_HOME to a "
            "folder on another disk"
        )
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return FetchError(
        f"{name} could not be fetched from the hub ({lines[0].rstrip('.')}): check the network "
        "and try again"
    )


def _reporting_bar(report: Report, stage: str) -> type[Any]:
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class ReportingBar(tqdm):
        """Draws nothing; reports the bytes."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # A disabled bar does not count.
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            drawn: bool | None = super().update(n)
            if self.unit == "B":
                report(stage, int(self.n), int(self.total) if self.total else None)
            return drawn

    return ReportingBar
