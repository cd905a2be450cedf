"""Turns the model name that a user gives into a local folder in Hugging Face layout."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from stoop.checkpoint.cache import Recipe, models_dir, obtain
from stoop.checkpoint.embedded import (
    EMBEDDED,
    GGUF_NAME,
    PACKED_SUFFIX,
    EmbeddedModel,
    embedded_recipe,
    gguf_recipe,
)
from stoop.checkpoint.gguf import can_pack as can_pack_gguf
from stoop.checkpoint.gguf import convert_gguf, converted_bytes
from stoop.checkpoint.hub import fetch_from_hub
from stoop.config.errors import CheckpointError, ConfigError, FetchError
from stoop.core.report import Report, quiet, show_bytes, show_path

__all__ = ["EMBEDDED", "EmbeddedModel", "Report", "pull", "resolve_model"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def can_pack(name: str | os.PathLike[str]) -> bool:
    """Whether a model is a GGUF file whose weights can stay quantised."""
    if isinstance(name, str) and name in EMBEDDED:
        return True
    path = Path(os.path.expanduser(os.fspath(name)))
    return path.suffix.lower() == ".gguf" and path.is_file() and can_pack_gguf(path)


def resolve_model(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    report: Report | None = None,
    packed: bool = False,
) -> Path:
    """The folder of a model: an embedded name, a folder, a .gguf file or a hub id.

    packed: weights of a GGUF file stay quantised; only if `can_pack`

    An embedded name wins over a folder of that name in the working directory (write
    `./name` for the folder), and an existing path wins over a hub id.
    """
    text = os.fspath(name)
    path = Path(os.path.expanduser(text))
    is_name = isinstance(name, str)
    if not text:
        raise _unknown_name(text)
    if revision is not None and (text in EMBEDDED or path.exists()):
        raise ConfigError(f"revision={revision!r}: only models from the hub have revisions")
    if is_name and text in EMBEDDED:
        return obtain(embedded_recipe(text, report or quiet, packed), report or quiet)
    if path.is_dir():
        return _check_folder(path)
    if path.is_file():
        return _convert_once(path, report or quiet, packed)
    if not is_name or _looks_like_path(text):
        raise CheckpointError(f"{text} does not exist: check the path of the model or head")
    if HUB_ID.fullmatch(text):
        return fetch_from_hub(text, revision, report)
    raise _unknown_name(text)


def pull(name: str, report: Report | None = None, packed: bool = False) -> Path:
    """Fetch an embedded model or one from the hub, so that later starts need no network.

    packed: for starts that keep an embedded model's weights quantised
    """
    if name in EMBEDDED:
        return resolve_model(name, report=report, packed=packed)
    if HUB_ID.fullmatch(name) and not _looks_like_path(name):
        return fetch_from_hub(name, None, report, check_size=True)
    raise _unknown_name(name)


def embedded_gguf(name: str, report: Report | None = None) -> Path:
    """The GGUF file of an embedded model, which is downloaded for it and kept."""
    return obtain(gguf_recipe(name, report or quiet), report or quiet) / GGUF_NAME


def _unknown_name(name: str) -> FetchError:
    only = " (stoop check alone has tiny models)" if name.startswith("tiny") else ""
    return FetchError(
        f"no model is called {name!r}{only}: give one of {', '.join(EMBEDDED)}, a folder, "
        "a .gguf file, or a hub id such as org/name"
    )


def _looks_like_path(text: str) -> bool:
    return (
        text.startswith((".", "~", os.sep))
        or text.endswith((".gguf", os.sep))
        or text.count("/") > 1
    )


def _check_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    gguf_files = sorted(folder.glob("*.gguf"))
    if gguf_files:
        raise CheckpointError(f"{folder} has no config.json: give the file {gguf_files[0]} itself")
    raise CheckpointError(
        f"{folder} has no config.json: give a folder in Hugging Face layout, or a .gguf file"
    )


def _convert_once(file: Path, report: Report, packed: bool) -> Path:
    if file.suffix.lower() != ".gguf":
        raise CheckpointError(f"{file} is not a .gguf file: give a folder, or a .gguf file")
    return obtain(_gguf_recipe(file.resolve(), report, packed), report)


def converted_name(file: Path, packed: bool = False) -> str:
    """The name in the cache of the conversion of a GGUF file. file: its resolved path

    It depends on the path alone, so that a changed file replaces its old conversion.
    """
    path_digest = hashlib.sha256(os.fsencode(file)).hexdigest()[:12]
    readable = re.sub(r"[^\w.-]+", "-", file.stem)[:60]
    return f"gguf-{readable}-{path_digest}" + (PACKED_SUFFIX if packed else "")


def _gguf_recipe(file: Path, report: Report, packed: bool) -> Recipe:
    state = file.stat()

    def notice() -> str:
        size, place = show_bytes(converted_bytes(file, packed)), show_path(models_dir())
        return f"converting {file.name} ({show_bytes(state.st_size)}) to {size} in {place}"

    def build(scratch: Path, model: Path) -> None:
        convert_gguf(file, model, report, notice(), packed)

    return Recipe(
        name=converted_name(file, packed),
        source=f"{file} {state.st_size} {state.st_mtime_ns}",
        bytes_needed=lambda: converted_bytes(file, packed),
        build=build,
        notice=notice,
    )
