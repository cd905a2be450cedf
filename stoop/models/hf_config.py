"""A checkpoint's `config.json` into a `ModelSpec`, with nothing guessed.

Reads the layout of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and of 5
(`rope_parameters`, `dtype`).
"""

import json
import math
from pathlib import Path
from typing import Any

from stoop.config.errors import CheckpointError
from stoop.config.schema import DTYPES, ModelSpec, RopeSpec

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)

# What transformers assumes of a windowed architecture whose config does not say.
DEFAULT_WINDOW = 4096


def read_model_spec(folder: Path) -> ModelSpec:
    config = read_json(folder / "config.json")
    return model_spec(config, _architecture(config), _eos_ids(folder, config))


def model_spec(
    config: dict[str, Any], architecture: str, eos_token_ids: tuple[int, ...] = ()
) -> ModelSpec:
    """The spec of a config whose architecture is settled: a model's, or that of a head's layers."""
    _refuse_unsupported(config)
    reader = Reader(config)
    num_heads = reader.whole("num_attention_heads")
    hidden_size = reader.whole("hidden_size")
    head_dim = reader.whole("head_dim", default=hidden_size // num_heads)
    num_layers = reader.whole("num_hidden_layers")
    max_position = reader.whole("max_position_embeddings")
    num_kv_heads = reader.whole("num_key_value_heads", default=num_heads)
    rope = _rope(config, max_position, head_dim)
    if head_dim % 2:
        raise CheckpointError(f"config.json has head_dim={head_dim}: rotary needs an even one")
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json has {num_heads} heads over {num_kv_heads} key-value heads, which does "
            "not divide: mend the config"
        )
    qwen2 = architecture == "Qwen2ForCausalLM"
    attention_bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        architecture=architecture,
        vocab_size=reader.whole("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.whole("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=reader.number("rms_norm_eps", default=1e-6),
        max_position=_reach(rope, max_position),
        rope=rope,
        dtype=_dtype(config),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qwen2 or attention_bias,
        o_bias=attention_bias and not qwen2,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        windows=_windows(config, architecture, num_layers),
        bos_token_id=_first(config.get("bos_token_id")),
        eos_token_ids=eos_token_ids,
    )


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}: is it a model folder?") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): fetch it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object: fetch it again")
    return content


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    found = ", ".join(names) or f"none (model_type {config.get('model_type')!r})"
    raise CheckpointError(
        f"the model's architecture is {found}: stoop loads {', '.join(ARCHITECTURES)}"
    )


def _refuse_unsupported(config: dict[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        named = isinstance(quantization, dict)
        method = quantization.get("quant_method", "unknown") if named else quantization
        raise CheckpointError(
            f"the checkpoint is quantised ({method}), which stoop cannot load: use the "
            "unquantised one, or a GGUF file"
        )
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(f"hidden_act={config['hidden_act']!r} is not supported: only silu is")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError("partial_rotary_factor other than 1 is not supported")


class Reader:
    """Required numbers of a config, each checked."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(
                f"config.json has {key}={value!r} where a positive whole number is needed: "
                "mend the config or fetch it again"
            )
        return value

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key, default)
        if not isinstance(value, int | float) or value < 0:
            raise CheckpointError(f"config.json has {key}={value!r} where a number is needed")
        return float(value)


def _dtype(config: dict[str, Any]) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    dtype = dtype.removeprefix("torch.")
    if dtype not in DTYPES:
        raise CheckpointError(f"config.json has dtype {dtype!r}: stoop loads {', '.join(DTYPES)}")
    return dtype


def _rope(config: dict[str, Any], max_position: int, head_dim: int) -> RopeSpec:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise CheckpointError(f"config.json has rope scaling {scaling!r} where an object is needed")
    theta = scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
    for name, value in ((k, scaling[k]) for k in _ROPE_NUMBERS if scaling.get(k) is not None):
        _positive(name, value)
    theta = _positive("rope_theta", theta)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    original = int(
        scaling.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or max_position
    )
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError("partial_rotary_factor other than 1 is not supported")
    try:
        if kind == "default":
            return RopeSpec(theta)
        if kind == "linear":
            return RopeSpec(theta, "linear", factor=float(scaling["factor"]))
        if kind == "llama3":
            return RopeSpec(
                theta,
                "llama3",
                factor=float(scaling["factor"]),
                original_max_position=original,
                low_freq_factor=float(scaling["low_freq_factor"]),
                high_freq_factor=float(scaling["high_freq_factor"]),
            )
        if kind == "yarn":
            return _yarn(theta, scaling, original, max_position)
        if kind == "factors":
            factors = tuple(float(value) for value in scaling["factors"])
            if len(factors) != head_dim // 2:
                raise CheckpointError(
                    f"rope_scaling has {len(factors)} factors where {head_dim // 2} are needed"
                )
            return RopeSpec(theta, "factors", factors=factors)
    except KeyError as error:
        raise CheckpointError(
            f"config.json lacks {error.args[0]!r} of its {kind} rope scaling: mend the config"
        ) from None
    raise CheckpointError(
        f"rope scaling {kind!r} is not supported: stoop knows default, linear, llama3 and yarn"
    )


def _reach(rope: RopeSpec, max_position: int) -> int:
    """Positions that the model can serve: some configs of stretched models state the old limit."""
    stretched = int(rope.original_max_position * rope.factor) if rope.kind == "yarn" else 0
    return max(max_position, stretched)


_ROPE_NUMBERS = (
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
)


def _positive(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(f"config.json has {name}={value!r} where a positive number is needed")
    return float(value)


def _yarn(theta: float, scaling: dict[str, Any], original: int, max_position: int) -> RopeSpec:
    factor = float(scaling.get("factor") or max_position / original)
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and all_dim:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, all_dim)
        else:
            attention_factor = _mscale(factor, 1.0)
    return RopeSpec(
        theta,
        "yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=float(attention_factor),
        truncate=bool(scaling.get("truncate", True)),
    )


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _windows(config: dict[str, Any], architecture: str, num_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window", DEFAULT_WINDOW)
    if architecture.startswith("Qwen") and not config.get("use_sliding_window", False):
        window = None
    if architecture == "LlamaForCausalLM" or window is None:
        return (None,) * num_layers
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise CheckpointError(f"config.json has sliding_window={window!r}: it is at least 1")
    layer_types = config.get("layer_types")
    if layer_types is not None and len(layer_types) != num_layers:
        raise CheckpointError(
            f"config.json has {len(layer_types)} layer_types for {num_layers} layers: mend it"
        )
    if layer_types is None and architecture.startswith("Qwen"):
        first = config.get("max_window_layers")
        first = num_layers if first is None else int(first)
        layer_types = [
            "sliding_attention" if i >= first else "full_attention" for i in range(num_layers)
        ]
    if layer_types is None:
        return (int(window),) * num_layers
    return tuple(int(window) if kind == "sliding_attention" else None for kind in layer_types)


def _first(value: Any) -> int | None:
    if isinstance(value, list):
        return int(value[0]) if value else None
    return None if value is None else int(value)


def _eos_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """End-of-text tokens: the generation config's if it has them, else the model's."""
    generation = folder / "generation_config.json"
    value = read_json(generation).get("eos_token_id") if generation.exists() else None
    if value is None:
        value = config.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise CheckpointError(f"eos_token_id is {value!r} where token ids are needed")
    return tuple(ids)
