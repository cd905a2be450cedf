"""The families of models that can be loaded: stoop's own and registered ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from stoop.checkpoint.gguf_layout import register_layout
from stoop.config.errors import CheckpointError, ConfigError
from stoop.config.schema import ModelSpec
from stoop.config.values import MAX_SHOWN, shown
from stoop.models.bamba import BAMBA
from stoop.models.config_reader import eos_token_ids, read_json
from stoop.models.family import Family
from stoop.models.granite_hybrid import GRANITE_HYBRID
from stoop.models.lfm2 import LFM2
from stoop.models.llama import LLAMA
from stoop.models.mistral import MISTRAL
from stoop.models.qwen import QWEN2, QWEN3
from stoop.models.qwen3_5 import QWEN3_5, QWEN3_5_VISION

_families: dict[str, Family] = {}  # by architecture


def register_model(family: Family) -> None:
    """Let stoop load models of another family in this process."""
    if not isinstance(family, Family):
        raise ConfigError(f"register_model got {shown(family)}: pass a stoop.models.family.Family")
    for name in family.architectures:
        if name in _families:
            raise ConfigError(
                f"the architecture {name} is registered already: give your family another name"
            )
    _families.update(dict.fromkeys(family.architectures, family))
    if family.gguf is not None:
        register_layout(family.gguf)


for _family in (
    *(LLAMA, MISTRAL, QWEN2, QWEN3),
    *(LFM2, QWEN3_5, QWEN3_5_VISION, GRANITE_HYBRID, BAMBA),
):
    register_model(_family)


def architectures() -> tuple[str, ...]:
    """The architectures that can be loaded."""
    return tuple(_families)


def model_types() -> dict[str, str]:
    """Architectures by the `model_type` of their configs."""
    return {
        model_type: architecture
        for family in _families.values()
        for model_type, architecture in zip(family.model_types, family.architectures, strict=False)
    }


def find_family(architecture: str) -> Family:
    return _families[architecture]


def read_model_spec(folder: Path) -> ModelSpec:
    """Read the spec of the model in a folder from its config.json."""
    config = read_json(folder / "config.json")
    architecture = _architecture(config)
    family = find_family(architecture)
    completed = config if family.complete is None else family.complete(config, folder)
    spec = family.read_spec(completed, architecture)
    return replace(spec, eos_token_ids=eos_token_ids(folder, config))


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    names = names if isinstance(names, list) else [names]
    for name in names:
        if isinstance(name, str) and name in _families:
            return name
    found = ", ".join(map(str, names))[:MAX_SHOWN]
    found = found or f"none (model_type {shown(config.get('model_type'))})"
    raise CheckpointError(
        f"the model's architecture is {found}: stoop loads {', '.join(_families)}"
    )
