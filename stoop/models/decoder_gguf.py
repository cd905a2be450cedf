"""GGUF files of the Llama-like families: tensor names, and a config.json from the metadata."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from stoop.checkpoint.gguf_layout import GGUFContents, GGUFLayout, ModelFields, shortest_float
from stoop.config.errors import CheckpointError
from stoop.config.values import MAX_SHOWN

OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NEEDED = (
    "token_embd.weight", "output_norm.weight",
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output",
    "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
)  # fmt: skip


def decoder_layout(
    architecture: str,
    config: Callable[[GGUFContents], dict[str, Any]],
    *,
    accepts: Callable[[ModelFields], bool] | None = None,
    paired: bool = False,
) -> GGUFLayout:
    """The layout of one family. paired: llama.cpp interleaves the halves of each q and k head"""
    options: dict[str, Any] = {"check": refuse_experts}
    if paired:
        options["num_rotated_heads"] = paired_heads
    if accepts is not None:
        options["accepts"] = accepts
    return GGUFLayout(architecture, OUTER_NAMES, LAYER_NAMES, NEEDED, config, **options)


def sliding_window(fields: ModelFields) -> int | None:
    return fields.get("attention.sliding_window") or None


def paired_heads(part: str, fields: ModelFields) -> int:
    """The heads of q and k, which llama.cpp reorders in some families."""
    num_heads = fields.number("attention.head_count")
    if part == "attn_q":
        return num_heads
    return num_kv_heads(fields, num_heads) if part == "attn_k" else 0


def refuse_experts(fields: ModelFields) -> None:
    if fields.get("expert_count", 0):
        raise CheckpointError(
            "GGUF files of mixture-of-experts models cannot be loaded: use a dense model"
        )


def decoder_config(
    file: GGUFContents, architecture: str, model_type: str, *, partial_rotary: bool = False
) -> dict[str, Any]:
    """The config.json of a GGUF file, from its metadata and tensor shapes.

    partial_rotary: the family may rotate a part of each head
    """
    fields, shapes = file.fields, file.shapes
    refuse_experts(fields)
    num_heads = fields.number("attention.head_count")
    hidden_size = fields.number("embedding_length")
    head_dim = int(fields.get("attention.key_length") or hidden_size // num_heads)
    if not partial_rotary:
        _check_rotary(fields, head_dim)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden_size,
        "intermediate_size": fields.number("feed_forward_length"),
        "num_hidden_layers": fields.number("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads(fields, num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": fields.number("context_length"),
        "rope_theta": fields.real("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(fields, file.rope_factors),
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": any(name.endswith("attn_q.bias") for name in shapes),
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in shapes),
        "sliding_window": sliding_window(fields),
    }


def num_kv_heads(fields: ModelFields, num_heads: int) -> int:
    if fields.get("attention.head_count_kv") is None:
        return num_heads
    return fields.number("attention.head_count_kv", skip_zeros=True)


def is_recurrent(layer: int, fields: ModelFields) -> bool:
    """Whether a layer has no attention: hybrids give its number of KV heads as 0."""
    given = fields.get("attention.head_count_kv")
    if not isinstance(given, list):
        return False
    if layer >= len(given):
        raise CheckpointError(
            f"this GGUF file has KV heads of {len(given)} layers, but more layers: download it "
            "again"
        )
    return given[layer] == 0


def _check_rotary(fields: ModelFields, head_dim: int) -> None:
    rotary_dim = fields.get("rope.dimension_count") or head_dim
    if rotary_dim != head_dim:
        raise CheckpointError(
            f"this GGUF file rotates {rotary_dim} of {head_dim} dimensions of a head, "
            "which cannot be loaded: use a model with full rotary embeddings"
        )


def _rope_scaling(fields: ModelFields, factors: list[float] | None) -> dict[str, Any] | None:
    scaling = _named_scaling(fields)
    if factors is None or all(factor == 1.0 for factor in factors):
        return scaling
    if scaling is not None:
        raise CheckpointError(
            f"this GGUF file scales rotary embeddings both by rope_freqs and by "
            f"{scaling['rope_type']}, which cannot be loaded: use another file of this model"
        )
    return {"rope_type": "factors", "factors": factors}


def _named_scaling(fields: ModelFields) -> dict[str, Any] | None:
    legacy_factor = fields.get("rope.scale_linear")
    kind = fields.get("rope.scaling.type", "linear" if legacy_factor else "none")
    factor = float(fields.get("rope.scaling.factor", legacy_factor) or 1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": shortest_float(factor)}
    if kind == "yarn":
        return _yarn_scaling(fields, factor)
    raise CheckpointError(
        f"GGUF files with rotary scaling of kind {str(kind)[:MAX_SHOWN]!r} cannot be loaded: "
        "use one with linear or yarn scaling, or none"
    )


def _yarn_scaling(fields: ModelFields, factor: float) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": shortest_float(factor),
        "original_max_position_embeddings": fields.get(
            "rope.scaling.original_context_length", fields.get("context_length")
        ),
    }
    attention_factor = fields.get("rope.scaling.attn_factor")
    if attention_factor is not None and attention_factor != 1.0:
        # GGUF stores a multiplier of yarn's own factor; config.json has the product.
        scaling["attention_factor"] = attention_factor * (0.1 * math.log(factor) + 1.0)
    for key in ("beta_fast", "beta_slow"):
        beta = fields.get(f"rope.scaling.yarn_{key}")
        if beta is not None:
            scaling[key] = shortest_float(beta)
    return scaling
