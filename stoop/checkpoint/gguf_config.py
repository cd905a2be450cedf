"""What a GGUF file says about its model, in the words of a Hugging Face config.json."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any

from stoop.checkpoint.gguf_file import MAX_SHOWN
from stoop.config.errors import CheckpointError

MODEL_CLASSES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
MISTRAL_CLASS = ("mistral", "MistralForCausalLM")


class ModelFields:
    """The metadata of one file, read under its architecture's prefix."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.architecture = str(metadata.get("general.architecture", "unnamed"))
        if self.architecture not in MODEL_CLASSES:
            raise CheckpointError(
                f"GGUF files of architecture {self.architecture[:MAX_SHOWN]!r} cannot be loaded: "
                f"use one of {', '.join(MODEL_CLASSES)}"
            )

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str) -> int:
        """A count that must be there, and be the same for all layers."""
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


def build_config(
    metadata: Mapping[str, Any],
    tensor_shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    rope_factors: list[float] | None,
) -> dict[str, Any]:
    """config.json for tensors of these GGUF names and shapes."""
    fields = ModelFields(metadata)
    if fields.get("expert_count", 0):
        raise CheckpointError(
            "GGUF files of mixture-of-experts models cannot be loaded: use a dense model"
        )
    num_heads = fields.number("attention.head_count")
    hidden_size = fields.number("embedding_length")
    head_dim = int(fields.get("attention.key_length") or hidden_size // num_heads)
    _check_rotary(fields, head_dim)
    sliding_window = fields.get("attention.sliding_window") or None
    model_type, model_class = _model_class(fields.architecture, sliding_window)
    config: dict[str, Any] = {
        "architectures": [model_class],
        "model_type": model_type,
        "hidden_size": hidden_size,
        "intermediate_size": fields.number("feed_forward_length"),
        "num_hidden_layers": fields.number("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _num_kv_heads(fields, num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": fields.number("context_length"),
        "rope_theta": fields.real("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(fields, rope_factors),
        "vocab_size": tensor_shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in tensor_shapes,
        "attention_bias": any(name.endswith("attn_q.bias") for name in tensor_shapes),
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in tensor_shapes),
        "sliding_window": sliding_window,
        "torch_dtype": dtype,
    }
    if model_type.startswith("qwen"):
        config["use_sliding_window"] = sliding_window is not None
        config["max_window_layers"] = 0 if sliding_window else config["num_hidden_layers"]
    return config | token_ids(metadata)


def build_generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json; every id that ends a turn is an end-of-sequence id."""
    ids = token_ids(metadata)
    ends = [ids.get("eos_token_id"), *_turn_ends(metadata)]
    unique_ends = list(dict.fromkeys(end for end in ends if end is not None))
    if unique_ends:
        ids["eos_token_id"] = unique_ends if len(unique_ends) > 1 else unique_ends[0]
    return ids


def token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The ids of bos, eos and padding, those that the file names."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    named = {key: metadata.get(f"tokenizer.ggml.{name}_token_id") for key, name in keys.items()}
    return {key: token_id for key, token_id in named.items() if token_id is not None}


def shortest_float(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05 rather than 9.999999747378752e-06."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value


def _turn_ends(metadata: Mapping[str, Any]) -> Iterable[int | None]:
    return (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))


def _model_class(architecture: str, sliding_window: int | None) -> tuple[str, str]:
    if architecture == "llama" and sliding_window:
        return MISTRAL_CLASS
    return MODEL_CLASSES[architecture]


def _num_kv_heads(fields: ModelFields, num_heads: int) -> int:
    if fields.get("attention.head_count_kv") is None:
        return num_heads
    return fields.number("attention.head_count_kv")


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
        # GGUF multiplies yarn's own factor; config.json gives the product.
        scaling["attention_factor"] = attention_factor * (0.1 * math.log(factor) + 1.0)
    for key in ("beta_fast", "beta_slow"):
        beta = fields.get(f"rope.scaling.yarn_{key}")
        if beta is not None:
            scaling[key] = shortest_float(beta)
    return scaling


def _shown(value: Any) -> str:
    if value is None:
        return "missing"
    return "a list with a value per layer" if isinstance(value, list) else repr(value)[:MAX_SHOWN]
