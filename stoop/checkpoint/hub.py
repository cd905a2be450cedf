"""Model folders from the Hugging Face hub, kept in the hub library's own cache."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from typing import Any

from stoop.checkpoint.report import Report
from stoop.config.errors import FetchError

WANTED_FILES = [
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "spiece.model", "chat_template*",
    "*.safetensors", "*.safetensors.index.json",
]  # fmt: skip
# Subfolders hold other formats; consolidated files hold the same weights once more.
UNWANTED_FILES = ["*/*", "consolidated*"]


def fetch_from_hub(name: str, revision: str | None, report: Report | None) -> Path:
    """The local snapshot of a hub id; files already there are not fetched again."""
    import huggingface_hub

    options: dict[str, Any] = {} if report is None else {"tqdm_class": _reporting_bar(report)}
    try:
        snapshot = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=WANTED_FILES,
            ignore_patterns=UNWANTED_FILES,
            **options,
        )
    except Exception as error:  # also what the HTTP library below the hub library raises
        raise _hub_problem(name, revision, error) from error
    return _check_snapshot(name, Path(snapshot))


def _check_snapshot(name: str, folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise FetchError(f"{name} on the hub has no config.json: choose a model in that layout")
    if not any(folder.glob("*.safetensors")):
        raise FetchError(
            f"{name} on the hub has no .safetensors weights: choose a model that has them"
        )
    return folder


def _hub_problem(name: str, revision: str | None, error: Exception) -> FetchError:
    from huggingface_hub import errors

    # A gated repository is also a "not found", so the order matters.
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
            f"{name} is no folder here, it is not in the hub cache, and the hub cannot be reached: "
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


def _reporting_bar(report: Report) -> type[Any]:
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class ReportingBar(tqdm):
        """Draws nothing; hands the bytes on."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # A disabled bar would not count.
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            drawn: bool | None = super().update(n)
            if self.unit == "B":
                report("downloading", int(self.n), int(self.total) if self.total else None)
            return drawn

    return ReportingBar
