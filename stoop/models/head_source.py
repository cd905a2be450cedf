"""What a draft head's folder says: its `config.json`, in either layout, and its tensors.

There is the layout of the EAGLE authors (one flat config) and that of speculators (the layers'
config nested).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoop.checkpoint.weights import WeightReader
from stoop.config.errors import CheckpointError
from stoop.config.schema import DraftMethod
from stoop.models.config_reader import MAX_SHOWN, Reader, read_json, shown
from stoop.models.registry import architectures, model_types

TAPS = "eagle_aux_hidden_state_layer_ids"
OWNER = "the draft head"  # in sentences about its tensors
METHODS: dict[str, DraftMethod] = {"eagle": "eagle", "eagle3": "eagle3"}
EAGLE3_TENSOR = "layers.0.hidden_norm.weight"  # that only weights of EAGLE-3 have

# LlamaForCausalLM, LlamaForCausalLMEagle3, EagleLlamaForCausalLM and the like.
_ARCHITECTURE = re.compile(r"(Eagle3?)?(\w+?ForCausalLM)(Eagle3?)?")
_PREFIXES = {
    "midlayer.": "layers.0.",
    "transformer.": "layers.0.",
    "fusion_fc.": "fc.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
# The mask of drafted tokens follows from d2t; the others are derived values.
_IGNORED = re.compile(r"^t2d$|(^|\.)rotary_emb\.inv_freq$|\.self_attn\.masked_bias$")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class HeadSource:
    """What the folder says."""

    folder: Path
    speculators: bool
    config: dict[str, Any]
    layers: dict[str, Any]  # the config of its layers: nested in speculators', else the same
    shapes: dict[str, Shape] | None  # by canonical name; None: no weights are there to look at
    tied: bool  # its own embedding is its output matrix too

    def said(self, key: str) -> Any:
        """The config's value for `key`, which may be in `eagle_config` too; None: it has none."""
        nested = self.config.get("eagle_config") or {}
        places = [self.config.get(key), nested.get(key)]
        if key == TAPS:
            places.append(nested.get("layer_ids"))  # as some call it
        found = [value for value in places if value is not None]
        if any(value != found[0] for value in found):
            raise CheckpointError(
                f"config.json has {key}={shown(found[0])} and, in eagle_config, "
                f"{shown(found[-1])}: keep the one that the head was trained with"
            )
        return found[0] if found else None

    def has(self, name: str) -> bool | None:
        return None if self.shapes is None else name in self.shapes

    def size(self, name: str, axis: int, default: int) -> int:
        """Of a tensor along an axis; that of one which is not there is the default."""
        shape = (self.shapes or {}).get(name, ())
        return shape[axis] if len(shape) > axis else default


def read_source(folder: Path, dummy: bool) -> HeadSource:
    config = read_json(folder / "config.json")
    nested = config.get("eagle_config")
    if nested is not None and not isinstance(nested, dict):
        raise CheckpointError(
            f"config.json has eagle_config={shown(nested)} where an object is needed"
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
            f"{folder / 'config.json'} is of speculators but has no transformer_layer_config: "
            "fetch it again"
        )
    if config.get("layernorms"):
        raise CheckpointError(
            "config.json has layernorms=True, an EAGLE-1 head with the norms of HASS, which is not "
            "supported: use a head without them"
        )
    # The type of the weights stands at the top.
    types = {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
    return {**types, **layers}


def head_architecture(source: HeadSource) -> tuple[DraftMethod | None, str]:
    """The method that the config names, None if it names none, and the kind of its layers."""
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
                f"the head's layers are of model_type {shown(model_type)}: stoop loads "
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
        f"the head's architecture is {found}: stoop loads EAGLE heads with layers of "
        f"{', '.join(architectures())}, such as LlamaForCausalLMEagle3"
    )


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """The names of `EagleHead.weight_slots` to those in a checkpoint, whichever layout it has."""
    stored: dict[str, str] = {}
    for name in sorted(names):
        canonical = name.removeprefix("model.")
        for prefix, replacement in _PREFIXES.items():
            if canonical.startswith(prefix):
                canonical = replacement + canonical.removeprefix(prefix)
        if canonical in stored:
            raise CheckpointError(
                f"{OWNER} has both {stored[canonical]} and {name}, which mean the same tensor: "
                "remove one of them"
            )
        stored[canonical] = name
    return stored


def stored_names(names: Iterable[str], tied: bool) -> dict[str, str]:
    """Canonical names to stored ones, of what is loaded; a tied output matrix is the embedding."""
    stored = {
        canonical: name
        for canonical, name in canonical_names(names).items()
        if not _IGNORED.search(canonical)
    }
    # EAGLE-1 uses the target's output matrix, whatever its config copied from the target.
    if tied and EAGLE3_TENSOR in stored and "embed_tokens.weight" in stored:
        stored.setdefault("lm_head.weight", stored["embed_tokens.weight"])
    return stored


def proposed_drafts(folder: Path) -> int | None:
    """The number of drafts that a head in the speculators layout names, if it does."""
    settings = read_json(folder / "config.json").get("speculators_config") or {}
    methods = settings.get("proposal_methods") or [] if isinstance(settings, dict) else []
    first = methods[0] if isinstance(methods, list) and methods else {}
    value = first.get("speculative_tokens") if isinstance(first, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
