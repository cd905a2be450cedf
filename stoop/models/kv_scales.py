"""Reads the scales of keys and values, which some checkpoints have for a KV cache in fp8.

They are single numbers for each attention layer. Their tensors lie beside the projections, under
names that differ between the tools that wrote them.
"""

import math
import re
from collections.abc import Iterable, Mapping

from stoop.checkpoint.weights import WeightReader
from stoop.config.errors import CheckpointError
from stoop.layers.attention import Attention
from stoop.models.base import Module
from stoop.ops.kv_store import KVScales

SCALE = re.compile(
    r"\.(attn\.)?(k|v|kv|q|prob)_scale$|\.(k_proj\.k|v_proj\.v|qkv_proj\.[kv])_scale$"
    r"|\.[kv]_proj\.output_scale$"
)
# Scales of queries and of softmax weights, for engines that round these too.
_UNUSED = ("q_scale", "prob_scale")
_NAMES = {
    kind: (
        f"{kind}_scale",
        f"attn.{kind}_scale",
        f"{kind}_proj.{kind}_scale",
        f"qkv_proj.{kind}_scale",
        f"{kind}_proj.output_scale",
        "kv_scale",
        "attn.kv_scale",
    )
    for kind in ("k", "v")
}


def without_scales(names: Iterable[str]) -> list[str]:
    """The names that are not of scales."""
    return [name for name in names if not SCALE.search(name)]


def load_kv_scales(module: Module, reader: WeightReader, stored: Mapping[str, str]) -> None:
    """Give attention layers the scales that the checkpoint has.

    stored: names in the checkpoint, by the names that the module uses
    """
    scales = {
        name: place
        for name, place in stored.items()
        if SCALE.search(name) and not name.endswith(_UNUSED)
    }
    if not scales:
        return
    layers = _attention_layers(module)
    for name, place in scales.items():
        if not any(name.startswith(prefix) for prefix in layers):
            raise CheckpointError(
                f"tensor {place} is a scale of a layer that the model does not have: the config "
                "and the weights do not belong together"
            )
    used: set[str | None] = set()
    for prefix, layer in layers.items():
        found = {kind: _find(prefix, names, scales) for kind, names in _NAMES.items()}
        used.update(found.values())
        layer.kv_scales = KVScales(
            **{kind: _read(reader, name) for kind, name in found.items() if name is not None}
        )
    unknown = [place for place in scales.values() if place not in used]
    if unknown:
        raise CheckpointError(
            f"tensor {unknown[0]} is a scale under a name that stoop does not know: use "
            "kv_cache_dtype=auto, which reads none"
        )


def _attention_layers(module: Module) -> dict[str, Attention]:
    """Attention layers, by the prefix of their tensors' names. Views of the same memory tell."""
    names = {view.data.data_ptr(): view.name for view in module.weight_views()}
    layers = {}
    for layer in module.modules():
        if isinstance(layer, Attention):
            own = next(layer.weight_views())
            layers[names[own.data.data_ptr()].removesuffix(own.name)] = layer
    return layers


def _find(prefix: str, names: Iterable[str], scales: Mapping[str, str]) -> str | None:
    return next((scales[prefix + name] for name in names if prefix + name in scales), None)


def _read(reader: WeightReader, name: str) -> float:
    if math.prod(reader.shape(name)) != 1:
        raise CheckpointError(
            f"tensor {name} has shape {list(reader.shape(name))}, and stoop has one scale for all "
            "keys or values of a layer: use kv_cache_dtype=auto, which reads none"
        )
    value = float(reader.tensor(name).float())
    if not math.isfinite(value) or value <= 0:
        raise CheckpointError(
            f"tensor {name} is {value}, and a scale must be above 0: fetch the model again, or use "
            "kv_cache_dtype=auto, which reads none"
        )
    return value
