"""The container format of GGUF files: metadata, and where each tensor lies.

We read it ourselves because the `gguf` package's reader trusts the lengths in a file: on a damaged
one it loops or returns short arrays, where we must report the damage.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoop.config.errors import CheckpointError
from stoop.config.values import MAX_SHOWN

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4  # as in llama.cpp
# The fewest bytes of a field (key length, type, value) and of a tensor's header.
MIN_FIELD_BYTES = 8 + 4 + 1
MIN_TENSOR_BYTES = 8 + 4 + 4 + 8
STRING_TYPE = 8
ARRAY_TYPE = 9
# GGUF value type -> struct format, little-endian.
SCALAR_FORMATS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


class DamagedFile(Exception):
    """The bytes are inconsistent; `GGUFFile` adds the file's name."""


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor in the file, with the shape in PyTorch's order (GGUF writes it reversed)."""

    name: str
    shape: tuple[int, ...]
    type_code: int  # a gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


class GGUFFile:
    """A memory-mapped GGUF file; use as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._map = _map_file(path)
            cursor = _Cursor(self._map)
            self.metadata, self.tensors = _read_header(cursor)
        except DamagedFile as problem:
            raise CheckpointError(
                f"{path} is not a whole GGUF file ({problem}): download it again"
            ) from problem
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read ({error.strerror}): check the file"
            ) from error

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._map.close()
        except BufferError:
            # A propagating error may still hold an array over the mapping.
            return

    def rows(self, tensor: GGUFTensor) -> np.ndarray:
        """The tensor's bytes as stored in the file: [rows, bytes per row] uint8."""
        import numpy as np

        data = np.frombuffer(
            self._map, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset
        )
        num_rows = tensor.num_elements // tensor.shape[-1]
        return data.reshape(num_rows, -1)


class _Cursor:
    """Reads forward through a buffer and refuses to run past its end."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = buffer
        self.position = 0
        self.size = len(buffer)

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > self.size:
            raise DamagedFile("it ends within its header")
        data = self._buffer[self.position : end]
        self.position = end
        return data

    def scalar(self, form: str) -> Any:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", errors="replace")

    def count(self, form: str, min_bytes: int) -> int:
        """The number of entries that follow, each of at least `min_bytes` bytes."""
        count: int = self.scalar(form)
        if count * min_bytes > self.size - self.position:
            raise DamagedFile(f"it announces {count} entries, more than it has bytes for")
        return count

    def scalars(self, form: str, count: int) -> list[Any]:
        data = self.take(struct.calcsize("<" + form) * count)
        return list(struct.unpack(f"<{count}{form}", data))


def _map_file(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise DamagedFile("it does not begin with the letters GGUF")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], list[GGUFTensor]]:
    cursor.take(len(MAGIC))
    version = cursor.scalar("I")
    if version not in SUPPORTED_VERSIONS:
        raise DamagedFile(f"its version is {version}, we read {SUPPORTED_VERSIONS}")
    num_tensors = cursor.count("Q", MIN_TENSOR_BYTES)
    num_fields = cursor.count("Q", MIN_FIELD_BYTES)
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.string()
        metadata[key] = _read_value(cursor, cursor.scalar("I"))
    headers = [_read_tensor_header(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise DamagedFile("its alignment is not a positive number")
    data_start = -(-cursor.position // alignment) * alignment
    tensors = [_place(header, data_start, cursor.size) for header in headers]
    _check_apart(tensors)
    return metadata, tensors


def _read_value(cursor: _Cursor, value_type: int) -> Any:
    if value_type == STRING_TYPE:
        return cursor.string()
    if value_type == ARRAY_TYPE:
        item_type = cursor.scalar("I")
        if item_type == STRING_TYPE:
            return [cursor.string() for _ in range(cursor.count("Q", min_bytes=8))]
        form = _scalar_format(item_type)
        return cursor.scalars(form, cursor.count("Q", struct.calcsize("<" + form)))
    return cursor.scalar(_scalar_format(value_type))


def _scalar_format(value_type: int) -> str:
    if value_type not in SCALAR_FORMATS:
        raise DamagedFile(f"it has a field of unknown type {value_type}")
    return SCALAR_FORMATS[value_type]


def _read_tensor_header(cursor: _Cursor) -> tuple[str, list[int], int, int]:
    name = cursor.string()
    num_dimensions = cursor.scalar("I")
    if num_dimensions > MAX_DIMENSIONS:
        raise DamagedFile(f"tensor {name[:MAX_SHOWN]} has {num_dimensions} dimensions")
    dimensions = cursor.scalars("Q", num_dimensions)
    return name, dimensions, cursor.scalar("I"), cursor.scalar("Q")


def _place(header: tuple[str, list[int], int, int], data_start: int, size: int) -> GGUFTensor:
    name, dimensions, type_code, offset = header
    shape = tuple(reversed(dimensions))
    tensor = GGUFTensor(
        name, shape, type_code, data_start + offset, _num_bytes(name, shape, type_code)
    )
    if tensor.offset + tensor.num_bytes > size:
        raise DamagedFile(f"it ends before tensor {name[:MAX_SHOWN]}")
    return tensor


def _check_apart(tensors: Sequence[GGUFTensor]) -> None:
    """Refuse tensors that share bytes or a name: the output could be far larger than the file."""
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise DamagedFile("it has two tensors with the same name")
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise DamagedFile(f"tensor {tensor.name[:MAX_SHOWN]} overlaps another")
        end = tensor.offset + tensor.num_bytes


def _num_bytes(name: str, shape: Sequence[int], type_code: int) -> int:
    import gguf

    try:
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type_code)]
    except (ValueError, KeyError) as error:
        raise DamagedFile(f"tensor {name[:MAX_SHOWN]} has the unknown type {type_code}") from error
    if not shape or 0 in shape or shape[-1] % block_size:
        raise DamagedFile(f"tensor {name[:MAX_SHOWN]} has the impossible shape {tuple(shape)}")
    num_elements = 1
    for size in shape:
        num_elements *= size
    return int(num_elements // block_size * block_bytes)
