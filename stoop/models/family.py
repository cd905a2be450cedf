"""A family of models: everything that stoop needs to know to load one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoop.checkpoint.gguf_layout import GGUFLayout
from stoop.config.schema import ModelSpec
from stoop.models.base import Model
from stoop.models.mtp import MtpHead


@dataclass(frozen=True)
class Family:
    """How to recognise, read and build the models of one family.

    models/llama.py has an example; examples/my_family.py defines one outside stoop.
    """

    architectures: tuple[str, ...]  # the names that config.json has under `architectures`
    # Turns a config.json and its architecture into a spec, a frozen dataclass of hashable values;
    # end tokens are added to it afterwards.
    read_spec: Callable[[dict[str, Any], str], ModelSpec]
    # Turns the spec into a model with unfilled weights, on the default device and in the default
    # dtype. Usually the model's class.
    build: Callable[[Any], Model]
    # The names that config.json has under `model_type`, in the order of `architectures`. Draft
    # heads in the speculators layout name their layers by them.
    model_types: tuple[str, ...] = ()
    gguf: GGUFLayout | None = None  # None if its GGUF files cannot be loaded
    layer_prefix: str = "model.layers."  # of a layer's tensor names, before the layer's index
    # How tensor names may begin instead, each with how the model's own begin. The weights decide,
    # whatever the architecture is called.
    aliases: Mapping[str, str] = field(default_factory=dict)
    # Adds to a config.json what it leaves to the weights, which are in the same folder; `read_spec`
    # gets the result.
    complete: Callable[[dict[str, Any], Path], dict[str, Any]] | None = None
    # Turns an `MtpSpec` into the draft head that the family's checkpoints hold, with unfilled
    # weights; None if they hold none. Usually the head's class.
    build_mtp: Callable[[Any], MtpHead] | None = None
