"""What a draft head's folder holds: its `config.json`, in either layout, and its tensors.

Two layouts exist: the EAGLE authors' (one flat config), and that of speculators (the config of the
layers is nested).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoop.checkpoint.weights import WeightReader
from stoop.config.errors import CheckpointError
from stoop.config.schema import DraftMethod
from stoop.config.values import MAX_SHOWN, is_whole, shown
from stoop.models.config_reader import Reader, read_json
from stoop.models.decoder import DERIVED
from stoop.models.kv_scales import SCALE
from stoop.models.registry import architectures, model_types

TAPS = "eagle_aux_hidden_state_layer_ids"
OWNER = "the draft head"  # the subject of messages about its tensors
METHODS: dict[str, DraftMethod] = {"eagle": "eagle", "eagle3": "eagle3"}
EAGLE3_TENSOR = "layers.0.hidden_norm.weight"  # only EAGLE-3 heads have it

# Such as LlamaForCausalLM, LlamaForCausalLMEagle3 and EagleLlamaForCausalLM.
_ARCHITECTURE = re.compile(r"(Eagle3?)?(\w+?ForCausalLM)(Eagle3?)?")
_PREFIXES = {
    "midlayer.": "layers.0.",
    "transformer.": "layers.0.",
    "fusion_fc.": "fc.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
# t2d, the mask of drafted tokens, follows from d2t; scales of a KV cache in fp8 are read apart.
_IGNORED = re.compile(rf"^t2d$|{DERIVED.pattern}|{SCALE.pattern}")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class HeadSource:
    """The contents of the folder."""

    folder: Path
    speculators: bool
    config: dict[str, Any]
    layers: dict[str, Any]  # the config of the layers: nested for speculators, else `config`
    shapes: dict[str, Shape] | None  # of tensors, by canonical name; None if no weights are read
    tied: bool  # its own embedding is also its LM head

    def setting(self, key: str) -> Any:
        """The config's value for `key`, also looked up in `eagle_config`; None if it has none."""
        nested = self.config.get("eagle_config") or {}
        places = [self.config.get(key), nested.get(key)]
        if key == TAPS:
            places.append(nested.get("layer_ids"))  # another name for the same list
        found = [value for value in places if value is not None]
        if any(value != found[0] for value in found):
            raise CheckpointError(
                f"config.json has {key}={shown(found[0])} and, in eagle_config, "
                f"{shown(found[-1])}: keep the one that the head was trained with"
            )
        return found[0] if found else None

    def has_tensor(self, name: str) -> bool | None:
        """None if no weights are read."""
        return None if self.shapes is None else name in self.shapes

    def size(self, name: str, axis: int, default: int) -> int:
        """The size of a tensor along an axis, or the default if there is no such tensor."""
        shape = (self.shapes or {}).get(name, ())
        return shape[axis] if len(shape) > axis else default


def read_source(folder: Path, dummy: bool) -> HeadSource:
    config = read_json(folder / "config.json")
    nested = config.get("eagle_config")
    if nested is not None and not isinstance(nested, dict):
        raise CheckpointError(
            f"config.json has eagle_config={shown(nested)} where an object is needed: fix the "
            "config"
        )
    speculators = "speculators_model_type" in config
    layers = _speculators_layers(folder, config) if speculators else config
    if dummy:
        return HeadSource(folder, speculators, config, layers, None, False)
    with WeightReader(folder, allow_pickle=True) as reader:
        stored = stored_names(reader.names(), Reader(layers).flag("tie_word_embeddings"))
        shapes = {canonical: reader.shape(name) for canonical, name in stored.items()}
    tied = len(set(stored.values())) < len(stored)
    return HeadSource(folder, speculators, config, layers, shapes, tied)


def _speculators_layers(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    layers = config.get("transformer_layer_config")
    if not isinstance(layers, dict):
        raise CheckpointError(
            f"{folder / 'config.json'} has the speculators layout but no transformer_layer_config: "
            "fetch it again"
        )
    if config.get("layernorms"):
        raise CheckpointError(
            "config.json has layernorms=True, and stoop supports no EAGLE-1 head with the norms of "
            "HASS: use a head without them"
        )
    # The dtype of the weights is at the top level.
    types = {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
    return {**types, **layers}


def head_architecture(source: HeadSource) -> tuple[DraftMethod | None, str]:
    """The method that the config names, or None, and the architecture of the layers."""
    if source.speculators:
        kind = str(source.config["speculators_model_type"])
        model_type = str(source.layers.get("model_type", "llama"))
        if kind not in METHODS:
            raise CheckpointError(
                f"the head's speculators_model_type is {shown(kind)}: stoop loads "
                f"{', '.join(METHODS)}"
            )
        known = model_types()
        if model_type not in known:
            raise CheckpointError(
                f"the head's layers have model_type {shown(model_type)}: stoop loads "
                f"{', '.join(known)}"
            )
        return METHODS[kind], known[model_type]
    names = source.config.get("architectures") or []
    names = names if isinstance(names, list) else [names]
    for name in names:
        match = _ARCHITECTURE.fullmatch(str(name))
        if match and match[2] in architectures():
            return METHODS.get((match[1] or match[3] or "").lower()), match[2]
    found = ", ".join(map(str, names))[:MAX_SHOWN] or "none"
    raise CheckpointError(
        f"the head's architecture is {found}: stoop loads EAGLE heads with the layers of "
        f"{', '.join(architectures())}, such as LlamaForCausalLMEagle3"
    )


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Map the names of `EagleHead.weight_views` to those in a checkpoint of any layout."""
    stored: dict[str, str] = {}
    for name in sorted(names):
        canonical = name.removeprefix("model.")
        for prefix, replacement in _PREFIXES.items():
            if canonical.startswith(prefix):
                canonical = replacement + canonical.removeprefix(prefix)
        if canonical in stored:
            raise CheckpointError(
                f"{OWNER} has both {stored[canonical]} and {name}, two names of one tensor: remove "
                "one of them"
            )
        stored[canonical] = name
    return stored


def stored_names(names: Iterable[str], tied: bool) -> dict[str, str]:
    """Map the canonical name of each tensor to load to its name in the checkpoint.

    A tied LM head maps to the embedding.
    """
    stored = {
        canonical: name
        for canonical, name in canonical_names(names).items()
        if not _IGNORED.search(canonical)
    }
    # EAGLE-1 uses the target's LM head, even if its config copies the target's flag.
    if tied and EAGLE3_TENSOR in stored and "embed_tokens.weight" in stored:
        stored.setdefault("lm_head.weight", stored["embed_tokens.weight"])
    return stored


def proposed_drafts(folder: Path) -> int | None:
    """The number of drafts that a config in the speculators layout proposes, or None."""
    settings = read_json(folder / "config.json").get("speculators_config") or {}
    methods = settings.get("proposal_methods") or [] if isinstance(settings, dict) else []
    first = methods[0] if isinstance(methods, list) and methods else {}
    value = first.get("speculative_tokens") if isinstance(first, dict) else None
    return value if is_whole(value) and value > 0 else None
