"""Reads a folder's tensors one at a time, from safetensors files or one pickled file."""

from __future__ import annotations

import json
import math
import os
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from stoop.config.errors import CheckpointError
from stoop.core.quantized import BLOCKS, QuantizedRows

if TYPE_CHECKING:
    import torch

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PICKLED_FILE = "pytorch_model.bin"
# Mistral's folders hold a second copy of all weights under other tensor names.
DUPLICATE_FILES = "consolidated*"
# Metadata of a safetensors file: JSON with GGUF's type of each matrix that is stored as rows of
# GGUF blocks, in bytes.
QUANTIZED = "stoop.quantized"


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's file, shape and size."""

    file: Path
    shape: tuple[int, ...]
    num_bytes: int
    kind: str | None = None  # GGUF's name of its quantisation
    stored_name: str | None = None  # in the file, if it is read under another name


class WeightReader:
    """All tensors of a model folder by name; use as a context manager, or close it.

    With `allow_pickle`, a folder without safetensors may have a pytorch_model.bin instead.
    aliases: how names of tensors may begin instead, each with how they are read
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        allow_pickle: bool = False,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = Path(folder)
        self._pickled: dict[str, torch.Tensor] = {}
        pickled = self._folder / PICKLED_FILE
        if allow_pickle and pickled.is_file() and not any(self._folder.glob("*.safetensors")):
            self._pickled = _read_pickled(pickled)
            self._entries = {
                name: TensorEntry(pickled, tuple(tensor.shape), tensor.nbytes)
                for name, tensor in self._pickled.items()
            }
        else:
            self._entries = _list_tensors(self._folder)
        if aliases:
            self._entries = _renamed(self._entries, aliases, self._folder)

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def total_bytes(self) -> int:
        """Size of all tensors together."""
        return sum(entry.num_bytes for entry in self._entries.values())

    def names(self) -> set[str]:
        return set(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, memory-mapped: bytes are read when they are used.

        A quantised one is dequantised to float32.
        """
        rows = self.quantized(name)
        return self._stored(name) if rows is None else dequantize(rows)

    def quantized(self, name: str) -> QuantizedRows | None:
        """A quantised matrix as it is stored; None if it is not quantised."""
        kind = self._entry(name).kind
        return None if kind is None else QuantizedRows(kind, self._stored(name))

    def rows(self, name: str, places: Sequence[int]) -> torch.Tensor:
        """Some rows of a matrix; no others are read."""
        found = self._stored(name)[list(places)]
        kind = self._entry(name).kind
        return found if kind is None else dequantize(QuantizedRows(kind, found))

    def _stored(self, name: str) -> torch.Tensor:
        from safetensors import SafetensorError

        entry = self._entry(name)
        name = entry.stored_name or name
        if name in self._pickled:
            return self._pickled[name]
        # A handle opened per tensor makes a mapping per tensor, which is freed with the tensor.
        # A lasting handle maps the whole file, and its resident pages would pile up.
        try:
            with _open(entry.file) as handle:
                tensor: torch.Tensor = handle.get_tensor(name)
                return tensor
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{entry.file} can no longer be read ({error}): fetch the model again"
            ) from error

    def close(self) -> None:
        """Close the files; tensors that were returned stay valid."""
        self._entries, self._pickled = {}, {}

    def _entry(self, name: str) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(
                f"{self._folder} holds no tensor {name!r}: "
                "check that its config.json belongs to these weights"
            )
        return entry


def dequantize(rows: QuantizedRows) -> torch.Tensor:
    """[rows, row length] float32"""
    import gguf
    import torch

    kind = gguf.GGMLQuantizationType[rows.kind]
    return torch.from_numpy(gguf.quants.dequantize(rows.data.numpy(), kind))


def _renamed(
    entries: Mapping[str, TensorEntry], aliases: Mapping[str, str], folder: Path
) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        prefix = next((prefix for prefix in aliases if name.startswith(prefix)), None)
        own = name if prefix is None else aliases[prefix] + name.removeprefix(prefix)
        if own in found:
            raise CheckpointError(
                f"{folder} has one tensor under two names, {found[own].stored_name!r} and "
                f"{name!r}: fetch the model again"
            )
        found[own] = replace(entry, stored_name=name)
    return found


def _list_tensors(folder: Path) -> dict[str, TensorEntry]:
    if (folder / INDEX_FILE).is_file():
        return _list_indexed(folder)
    if (folder / SINGLE_FILE).is_file():
        return _list_file(folder / SINGLE_FILE)
    entries: dict[str, TensorEntry] = {}
    for file in _find_files(folder):
        found = _list_file(file)
        twice = sorted(entries.keys() & found.keys())
        if twice:
            raise CheckpointError(
                f"tensor {twice[0]!r} is both in {entries[twice[0]].file.name} and in {file.name} "
                f"in {folder}: remove one of the two files"
            )
        entries.update(found)
    return entries


def _list_indexed(folder: Path) -> dict[str, TensorEntry]:
    weight_map = _read_weight_map(folder / INDEX_FILE)
    entries: dict[str, TensorEntry] = {}
    for file_name in sorted(set(weight_map.values())):
        # The file itself may be a link to another folder, as in the hub's cache.
        if file_name != Path(file_name).name or "\\" in file_name:
            raise CheckpointError(
                f"{folder / INDEX_FILE} names {file_name[:80]!r}, which is not a file name in its "
                "own folder: fetch the model again"
            )
        if not _is_file(folder / file_name):
            raise CheckpointError(
                f"{folder / file_name} is missing though {INDEX_FILE} names it: "
                "fetch the model again"
            )
        found = _list_file(folder / file_name)
        for name in (name for name, place in weight_map.items() if place == file_name):
            if name not in found:
                raise CheckpointError(
                    f"{folder / file_name} lacks the tensor {name!r} that {INDEX_FILE} "
                    "places there: fetch the model again"
                )
            entries[name] = found[name]
    return entries


def _read_weight_map(file: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise TypeError("it maps no tensors")
        if not all(isinstance(name, str) for name in weight_map.values()):
            raise TypeError("its files are not all names")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is not a valid index ({_first_line(error)}): fetch the model again"
        ) from error
    return weight_map


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except ValueError:  # a null byte or a lone surrogate in its name
        return False


def _find_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: give the folder of a model")
    files = sorted(folder.glob("*.safetensors"))
    files = [file for file in files if not file.match(DUPLICATE_FILES)] or files
    if files:
        return files
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise CheckpointError(
            f"{folder} holds its weights only as pickled PyTorch files (pytorch_model.bin): "
            "convert them to safetensors"
        )
    raise CheckpointError(
        f"{folder} holds no .safetensors files: fetch the model's weights into it"
    )


def _read_pickled(file: Path) -> dict[str, torch.Tensor]:
    import torch

    try:
        # Only files in the zip format of torch 1.6 and later can be mapped.
        mapped = zipfile.is_zipfile(file)
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{file} is damaged, or holds more than tensors, which could run code when it is read: "
            "convert it to safetensors"
        ) from None
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{file} is truncated or damaged ({_first_line(error)}): fetch the model again"
        ) from error
    if not isinstance(tensors, dict):
        raise CheckpointError(f"{file} holds no tensors by name: convert it to safetensors")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"{file} has {type(tensor).__name__} {name!r} among its tensors: "
                "convert it to safetensors"
            )
    return tensors


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]


def _list_file(file: Path) -> dict[str, TensorEntry]:
    from safetensors import SafetensorError

    try:
        with _open(file) as handle:
            kinds = json.loads((handle.metadata() or {}).get(QUANTIZED, "{}"))
            return {
                name: _describe(file, handle.get_slice(name), kinds.get(name))
                for name in handle.keys()  # noqa: SIM118 - the handle is no mapping
            }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is truncated or damaged ({error}): fetch the model again"
        ) from error


def _describe(file: Path, tensor: Any, kind: str | None) -> TensorEntry:
    shape = tuple(tensor.get_shape())
    num_bytes = math.prod(shape) * _type_bytes(tensor.get_dtype())
    if kind is None:
        return TensorEntry(file, shape, num_bytes)
    values, block_bytes = BLOCKS[kind]
    return TensorEntry(file, (shape[0], shape[1] // block_bytes * values), num_bytes, kind)


def _type_bytes(type_name: str) -> int:
    """Bytes per element, parsed from names such as F32, BF16, F8_E4M3 and BOOL."""
    digits = type_name.split("_")[0].lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    return int(digits) // 8 if digits else 1


def _open(file: Path) -> Any:
    from safetensors import safe_open

    return safe_open(file, framework="pt", device="cpu")
