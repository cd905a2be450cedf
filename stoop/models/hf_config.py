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

# Far above what any model has. A damaged config must not make us allocate memory by its numbers.
MAX_SIZE = 1 << 24
MAX_LAYERS = 1024
MAX_SHOWN = 80  # characters of a value in an error message


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
    num_layers = reader.whole("num_hidden_layers", most=MAX_LAYERS)
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
    if num_heads * head_dim > MAX_SIZE:
        raise CheckpointError(
            f"config.json has {num_heads} heads of {head_dim} values, more than the {MAX_SIZE} "
            "that stoop supports: fix the config or fetch it again"
        )
    qwen2 = architecture == "Qwen2ForCausalLM"
    attention_bias = reader.flag("attention_bias")
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
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        qkv_bias=qwen2 or attention_bias,
        o_bias=attention_bias and not qwen2,
        mlp_bias=architecture == "LlamaForCausalLM" and reader.flag("mlp_bias"),
        qk_norm=architecture == "Qwen3ForCausalLM",
        windows=_windows(config, architecture, num_layers),
        bos_token_id=next(iter(_token_ids("bos_token_id", config.get("bos_token_id"))), None),
        eos_token_ids=eos_token_ids,
    )


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}: is it a model folder?") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): check the file") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): fetch it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object: fetch it again")
    return content


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    names = names if isinstance(names, list) else [names]
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    found = ", ".join(map(str, names))[:MAX_SHOWN]
    found = found or f"none (model_type {shown(config.get('model_type'))})"
    raise CheckpointError(
        f"the model's architecture is {found}: stoop loads {', '.join(ARCHITECTURES)}"
    )


def _refuse_unsupported(config: dict[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        named = isinstance(quantization, dict)
        method = quantization.get("quant_method", "unknown") if named else quantization
        raise CheckpointError(
            f"the checkpoint is quantised ({str(method)[:MAX_SHOWN]}), which stoop cannot load: "
            "use the unquantised one, or a GGUF file"
        )
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(
            f"hidden_act={shown(config['hidden_act'])} is not supported: only silu is"
        )
    if config.get("partial_rotary_factor") not in (None, 1.0):
        raise CheckpointError("partial_rotary_factor other than 1 is not supported")


def shown(value: Any) -> str:
    """A value for an error message, which stays one sentence however long the value is."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


class Reader:
    """Values of a config, each checked; null counts as missing."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def whole(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise CheckpointError(
                f"config.json has {key}={shown(value)} where a whole number from 1 to {most} is "
                "needed: fix the config or fetch it again"
            )
        return value

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key)
        return as_number(key, default if value is None else value, positive=False)

    def flag(self, key: str) -> bool:
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(
                f"config.json has {key}={shown(value)} where true or false is needed: fix the "
                "config or fetch it again"
            )
        return bool(value)


def as_number(name: str, value: Any, positive: bool = True) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # a whole number of hundreds of digits
            number = math.inf
        if math.isfinite(number) and (number > 0 or (number == 0 and not positive)):
            return number
    kind = "a positive number" if positive else "a number of at least 0"
    raise CheckpointError(
        f"config.json has {name}={shown(value)} where {kind} is needed: fix the config or fetch it "
        "again"
    )


def _dtype(config: dict[str, Any]) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    dtype = dtype.removeprefix("torch.")
    if dtype not in DTYPES:
        raise CheckpointError(
            f"config.json has dtype {shown(dtype)}: stoop loads {', '.join(DTYPES)}"
        )
    return dtype


def _rope(config: dict[str, Any], max_position: int, head_dim: int) -> RopeSpec:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise CheckpointError(
            f"config.json has rope scaling {shown(scaling)} where an object is needed"
        )
    numbers = {k: as_number(k, scaling[k]) for k in _ROPE_NUMBERS if scaling.get(k) is not None}
    theta = as_number(
        "rope_theta", scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
    )
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if scaling.get("partial_rotary_factor") not in (None, 1.0):
        raise CheckpointError("partial_rotary_factor other than 1 is not supported")
    original = _original_positions(scaling, config, max_position)
    try:
        if kind == "default":
            return RopeSpec(theta)
        if kind == "linear":
            return RopeSpec(theta, "linear", factor=numbers["factor"])
        if kind == "llama3":
            return RopeSpec(
                theta,
                "llama3",
                factor=numbers["factor"],
                original_max_position=original,
                low_freq_factor=numbers["low_freq_factor"],
                high_freq_factor=numbers["high_freq_factor"],
            )
        if kind == "yarn":
            return _yarn(theta, scaling, numbers, original, max_position)
        if kind == "factors":
            return RopeSpec(theta, "factors", factors=_factors(scaling["factors"], head_dim // 2))
    except KeyError as error:
        raise CheckpointError(
            f"config.json lacks {error.args[0]!r} of its {kind} rope scaling: fix the config"
        ) from None
    raise CheckpointError(
        f"rope scaling {shown(kind)} is not supported: stoop knows default, linear, llama3 and yarn"
    )


def _original_positions(scaling: dict[str, Any], config: dict[str, Any], max_position: int) -> int:
    """Positions that the model was trained on before its rotary embedding was stretched."""
    key = "original_max_position_embeddings"
    value = scaling.get(key) or config.get(key)
    return max(1, min(int(as_number(key, value)), MAX_SIZE)) if value else max_position


def _factors(given: Any, count: int) -> tuple[float, ...]:
    factors = given if isinstance(given, list) else [given]
    if len(factors) != count:
        raise CheckpointError(
            f"rope_scaling has {len(factors)} factors where {count} are needed: fix the config"
        )
    return tuple(as_number("factors", value) for value in factors)


def _reach(rope: RopeSpec, max_position: int) -> int:
    """Positions that the model can serve: some configs of stretched models state the old limit."""
    stretched = rope.original_max_position * rope.factor if rope.kind == "yarn" else 0
    if stretched > MAX_SIZE:
        raise CheckpointError(
            f"config.json stretches {rope.original_max_position} positions by {rope.factor:g}, to "
            f"more than the {MAX_SIZE} that stoop supports: fix the config or fetch it again"
        )
    return max(max_position, int(stretched))


_ROPE_NUMBERS = (
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
)


def _yarn(
    theta: float,
    scaling: dict[str, Any],
    numbers: dict[str, float],
    original: int,
    max_position: int,
) -> RopeSpec:
    factor = numbers.get("factor", max_position / original)
    attention_factor = numbers.get("attention_factor")
    if attention_factor is None:
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and all_dim:
            attention_factor = _mscale(factor, as_number("mscale", mscale)) / _mscale(
                factor, as_number("mscale_all_dim", all_dim)
            )
        else:
            attention_factor = _mscale(factor, 1.0)
    truncate = scaling.get("truncate")
    return RopeSpec(
        theta,
        "yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=numbers.get("beta_fast", 32.0),
        beta_slow=numbers.get("beta_slow", 1.0),
        attention_factor=attention_factor,
        truncate=truncate is None or Reader(scaling).flag("truncate"),
    )


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _windows(config: dict[str, Any], architecture: str, num_layers: int) -> tuple[int | None, ...]:
    reader = Reader(config)
    window = config.get("sliding_window", DEFAULT_WINDOW)
    if architecture.startswith("Qwen") and not reader.flag("use_sliding_window"):
        window = None
    if architecture == "LlamaForCausalLM" or window is None:
        return (None,) * num_layers
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise CheckpointError(f"config.json has sliding_window={shown(window)}: it is at least 1")
    window = min(window, MAX_SIZE)  # no model has more positions
    layer_types = config.get("layer_types")
    if layer_types is not None and not isinstance(layer_types, list):
        raise CheckpointError(
            f"config.json has layer_types={shown(layer_types)} where a list is needed: fix the "
            "config or fetch it again"
        )
    if layer_types is not None and len(layer_types) != num_layers:
        raise CheckpointError(
            f"config.json has {len(layer_types)} layer_types for {num_layers} layers: fix the "
            "config or fetch it again"
        )
    if layer_types is None and architecture.startswith("Qwen"):
        first = int(reader.number("max_window_layers", default=num_layers))
        layer_types = [
            "sliding_attention" if i >= first else "full_attention" for i in range(num_layers)
        ]
    if layer_types is None:
        return (window,) * num_layers
    for kind in layer_types:
        if kind not in ("sliding_attention", "full_attention"):
            raise CheckpointError(
                f"config.json has {shown(kind)} among its layer_types: stoop knows "
                "sliding_attention and full_attention"
            )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _eos_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """End-of-text tokens: the generation config's if it has them, else the model's."""
    generation = folder / "generation_config.json"
    value = read_json(generation).get("eos_token_id") if generation.exists() else None
    if value is None:
        value = config.get("eos_token_id")
    return _token_ids("eos_token_id", value)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise CheckpointError(
            f"{name} is {shown(value)} where token ids are needed: fix the config"
        )
    return tuple(ids)
