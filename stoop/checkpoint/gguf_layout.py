"""What a family of models declares about its GGUF files: tensor names, and how to make config.json.

The converter knows no family; families register their layouts (models/registry.py).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stoop.config.errors import CheckpointError
from stoop.config.values import MAX_SHOWN

if TYPE_CHECKING:
    import numpy as np

Shape = tuple[int, ...]


class ModelFields:
    """The metadata of one file, read under its architecture's prefix."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.architecture = str(metadata.get("general.architecture", "unnamed"))

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, skip_zeros: bool = False) -> int:
        """A required count that must be the same for all layers.

        skip_zeros: some layers may have none
        """
        value = self.get(key)
        if isinstance(value, list):
            counts = set(value) - {0} if skip_zeros else set(value)
            value = next(iter(counts)) if len(counts) == 1 else value
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


@dataclass(frozen=True)
class Change:
    """How a tensor that llama.cpp stores otherwise becomes that of Hugging Face."""

    shape: Callable[[Shape], Shape]
    values: Callable[[np.ndarray], np.ndarray] | None = None  # float32, element by element


@dataclass(frozen=True)
class HeadOrder:
    """Groups of heads that llama.cpp stores in turns, where Hugging Face has group after group.

    In turns: the first head of every group, then the second of every group, and so on.
    """

    num_groups: int
    num_heads: int  # of all groups together
    head_size: int  # rows of a head, or columns
    num_before: int = 0  # rows before the heads, which stay
    columns: bool = False  # heads are columns of the matrix, not rows

    def fits(self, shape: Shape) -> bool:
        if self.columns and len(shape) != 2:
            return False
        size = shape[-1] if self.columns else shape[0]
        return size == self.num_before + self.num_heads * self.head_size

    def keeps_blocks(self, block_size: int) -> bool:
        """Whether blocks of so many values, which lie within rows, are moved whole."""
        return not self.columns or self.head_size % block_size == 0

    def undo(self, rows: np.ndarray) -> np.ndarray:
        """rows: the tensor as [rows, values], or each row as bytes"""
        import numpy as np

        turns = self.num_heads // self.num_groups
        if self.columns:
            heads = rows.reshape(len(rows), turns, self.num_groups, -1)
            return heads.swapaxes(1, 2).reshape(rows.shape)
        heads = rows[self.num_before :].reshape(turns, self.num_groups, self.head_size, -1)
        moved = heads.swapaxes(0, 1).reshape(-1, rows.shape[1])
        return np.concatenate((rows[: self.num_before], moved))


def same(shape: Shape) -> Shape:
    return shape


def flat(shape: Shape) -> Shape:
    return (math.prod(shape),)


def depthwise(shape: Shape) -> Shape:
    """The weight of a convolution of single channels: [channels, width] to [channels, 1, width]."""
    return (*shape[:-1], 1, *shape[-1:])


def _always(fields: ModelFields) -> bool:
    return True


def _nothing(fields: ModelFields) -> None:
    return None


def _not_rotated(part: str, fields: ModelFields) -> int:
    return 0


def _no_more(layer: int, fields: ModelFields) -> Iterable[str]:
    return ()


def _in_order(name: str, fields: ModelFields) -> HeadOrder | None:
    return None


def _by_rule(layer: int, name: str, fields: ModelFields) -> str | None:
    return None


@dataclass(frozen=True)
class GGUFLayout:
    """How the GGUF files of one family map to its Hugging Face checkpoints."""

    architecture: str  # the file's general.architecture
    outer_names: Mapping[str, str]  # tensors outside layers
    # Parts of blk.N, without .weight and .bias. Those of one new name are stacked, in this order.
    layer_names: Mapping[str, str]
    needed: tuple[str, ...]  # keys of both that every file has, in every layer
    config: Callable[[GGUFContents], dict[str, Any]]  # config.json, without dtype and token ids
    # Several families may share an architecture: the first that accepts a file converts it.
    accepts: Callable[[ModelFields], bool] = _always
    # Refuses, with a sentence, a file that the family cannot load. Called before anything else.
    check: Callable[[ModelFields], None] = _nothing
    # The number of heads whose rows llama.cpp reordered in this part of a layer; 0 for none.
    num_rotated_heads: Callable[[str, ModelFields], int] = _not_rotated
    layer_prefix: str = "model.layers."
    # Tensors of blk.N whose names do not follow the rule, by all that comes after blk.N.
    whole_names: Mapping[str, str] = field(default_factory=dict)
    # By all that comes after blk.N, or by the whole name of a tensor outside layers.
    changes: Mapping[str, Change] = field(default_factory=dict)
    # How heads are ordered in a tensor, by all that comes after blk.N; None as in Hugging Face.
    head_order: Callable[[str, ModelFields], HeadOrder | None] = _in_order
    # The whole new name of a tensor, by its layer and all that comes after blk.N; None if the
    # other rules name it.
    own_name: Callable[[int, str, ModelFields], str | None] = _by_rule
    # What this layer has beside `needed`: keys of layer_names, or all that comes after blk.N.
    needed_in_layer: Callable[[int, ModelFields], Iterable[str]] = _no_more


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
