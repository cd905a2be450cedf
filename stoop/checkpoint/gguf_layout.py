"""What a family of models declares about its GGUF files: tensor names, and how to make config.json.

The converter knows no family; families register their layouts (models/registry.py).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stoop.config.errors import CheckpointError
from stoop.config.values import MAX_SHOWN


class ModelFields:
    """The metadata of one file, read under its architecture's prefix."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.architecture = str(metadata.get("general.architecture", "unnamed"))

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str) -> int:
        """A required count that must be the same for all layers."""
        value = self.get(key)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int) or value <= 0:
            raise CheckpointError(
                f"the GGUF field {self.architecture}.{key} is {_shown(value)}, "
                "where one positive number is needed: use another file of this model"
            )
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float):
            raise CheckpointError(
                f"the GGUF field {self.architecture}.{key} is missing: "
                "use another file of this model"
            )
        return shortest_float(value)


@dataclass(frozen=True)
class GGUFContents:
    """The contents of a file that its config.json is made from."""

    fields: ModelFields
    shapes: Mapping[str, tuple[int, ...]]  # of tensors, by the file's names
    rope_factors: list[float] | None  # divisors of the rotary frequencies


def _always(fields: ModelFields) -> bool:
    return True


def _not_rotated(part: str, fields: ModelFields) -> int:
    return 0


@dataclass(frozen=True)
class GGUFLayout:
    """How the GGUF files of one family map to its Hugging Face checkpoints."""

    architecture: str  # the file's general.architecture
    outer_names: Mapping[str, str]  # tensors outside layers
    layer_names: Mapping[str, str]  # parts of blk.N, without .weight and .bias
    needed: tuple[str, ...]  # keys of both that every file has
    config: Callable[[GGUFContents], dict[str, Any]]  # config.json, without dtype and token ids
    # Several families may share an architecture: the first that accepts a file converts it.
    accepts: Callable[[ModelFields], bool] = _always
    # The number of heads whose rows llama.cpp reordered in this part of a layer; 0 for none.
    num_rotated_heads: Callable[[str, ModelFields], int] = _not_rotated
    layer_prefix: str = "model.layers."


_layouts: list[GGUFLayout] = []


def register_layout(layout: GGUFLayout) -> None:
    _layouts.append(layout)


def find_layout(fields: ModelFields) -> GGUFLayout:
    if not _layouts:
        raise CheckpointError(
            "no model family is registered: import stoop.models.registry before GGUF files are read"
        )
    for layout in _layouts:
        if layout.architecture == fields.architecture and layout.accepts(fields):
            return layout
    known = ", ".join(dict.fromkeys(layout.architecture for layout in _layouts))
    raise CheckpointError(
        f"GGUF files of architecture {fields.architecture[:MAX_SHOWN]!r} cannot be loaded: "
        f"use one of {known}"
    )


def shortest_float(value: float) -> float:
    """The shortest decimal that rounds to this float32: 1e-05, not 9.999999747378752e-06."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value


def _shown(value: Any) -> str:
    if value is None:
        return "missing"
    return "a list with a value per layer" if isinstance(value, list) else repr(value)[:MAX_SHOWN]
