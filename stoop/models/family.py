"""A family of models: all that stoop must know to load one, as one value."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stoop.checkpoint.gguf_layout import GGUFLayout
from stoop.config.schema import ModelSpec
from stoop.models.base import Model


@dataclass(frozen=True)
class Family:
    """See models/llama.py for one, and examples/my_family.py for one outside of stoop."""

    architectures: tuple[str, ...]  # as `architectures` of a config.json names them
    # A config.json and its architecture to a spec. End tokens are added to it afterwards.
    read_spec: Callable[[dict[str, Any], str], ModelSpec]
    # The spec to a model, on the default device and in the default dtype, its weights not filled:
    # a class will do.
    build: Callable[[Any], Model]
    # As `model_type` names them, in the same order: draft heads in the speculators layout name
    # their layers so.
    model_types: tuple[str, ...] = ()
    gguf: GGUFLayout | None = None  # None: its GGUF files cannot be loaded
    layer_prefix: str = "model.layers."  # of a layer's tensors in checkpoints, before its number
