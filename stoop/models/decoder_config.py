"""Reads the `config.json` of Llama-like families into a `DecoderSpec`.

What all families share is read here. What differs is an argument, which each family's own file
decides.
"""

from typing import Any

from stoop.config.errors import CheckpointError
from stoop.config.values import MAX_SHOWN, shown
from stoop.models.config_reader import (
    MAX_LAYERS,
    MAX_SIZE,
    Reader,
    checkpoint_dtype,
    token_ids,
)
from stoop.models.decoder import DecoderSpec
from stoop.models.rope_config import reach, read_rope, read_rotary_dim

# What transformers assumes for a windowed architecture whose config does not say.
DEFAULT_WINDOW = 4096

Windows = tuple[int | None, ...]


def read_decoder_spec(
    config: dict[str, Any],
    architecture: str,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    windows: Windows = (),
    partial_rotary: bool = False,
) -> DecoderSpec:
    """Read the spec.

    windows: one per layer; empty for full attention in all of them
    partial_rotary: some dimensions of a head may stay as they are
    """
    _refuse_unsupported(config)
    reader = Reader(config)
    num_heads = reader.whole("num_attention_heads")
    hidden_size = reader.whole("hidden_size")
    head_dim = reader.whole("head_dim", default=hidden_size // num_heads)
    num_layers = read_num_layers(config)
    max_position = reader.whole("max_position_embeddings")
    num_kv_heads = reader.whole("num_key_value_heads", default=num_heads)
    _check_heads(num_heads, num_kv_heads, head_dim)
    rotary_dim = read_rotary_dim(config, head_dim, partial_rotary)
    rope = read_rope(config, max_position, rotary_dim or head_dim)
    return DecoderSpec(
        architecture=architecture,
        vocab_size=reader.whole("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.whole("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=reader.number("rms_norm_eps", default=1e-6),
        max_position=reach(rope, max_position),
        rope=rope,
        rotary_dim=rotary_dim,
        dtype=checkpoint_dtype(config),
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        windows=windows or (None,) * num_layers,
        bos_token_id=next(iter(token_ids("bos_token_id", config.get("bos_token_id"))), None),
    )


def read_num_layers(config: dict[str, Any]) -> int:
    return Reader(config).whole("num_hidden_layers", most=MAX_LAYERS)


def _check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if head_dim % 2:
        raise CheckpointError(
            f"config.json has head_dim={head_dim}, but rotary embeddings need an even number: fix "
            "the config"
        )
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json has {num_heads} heads, which {num_kv_heads} key-value heads do not "
            "divide: fix the config"
        )
    if num_heads * head_dim > MAX_SIZE:
        raise CheckpointError(
            f"config.json has {num_heads} heads of {head_dim} values, more than the {MAX_SIZE} "
            "that stoop supports: fix the config or fetch it again"
        )


def _refuse_unsupported(config: dict[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization and not _has_only_kv_scales(quantization):
        named = isinstance(quantization, dict)
        method = quantization.get("quant_method", "unknown") if named else quantization
        raise CheckpointError(
            f"the checkpoint is quantised ({str(method)[:MAX_SHOWN]}), which stoop cannot load: "
            "use the unquantised one, or a GGUF file"
        )
    if config.get("hidden_act") not in (None, "silu", "swish"):
        raise CheckpointError(
            f"hidden_act={shown(config['hidden_act'])} is not supported: use a model with silu"
        )


def _has_only_kv_scales(quantization: object) -> bool:
    """Whether only the KV cache is to be quantised, to fp8, and no weights are."""
    if not isinstance(quantization, dict) or quantization.get("config_groups"):
        return False
    kept = quantization.get("kv_cache_scheme")
    named = quantization.get("quant_method") == "compressed-tensors"
    return (
        named
        and isinstance(kept, dict)
        and (kept.get("num_bits"), kept.get("type")) == (8, "float")
    )


def read_windows(config: dict[str, Any], first_windowed: int = 0) -> Windows:
    """The sliding window of each layer; empty if the config names no window.

    first_windowed: the first layer with a window, if the config has no `layer_types`
    """
    num_layers = read_num_layers(config)
    window = config.get("sliding_window", DEFAULT_WINDOW)
    if window is None:
        return ()
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise CheckpointError(
            f"config.json has sliding_window={shown(window)}: use a number of at least 1"
        )
    window = min(window, MAX_SIZE)  # no model has more positions
    layer_types = config.get("layer_types")
    if layer_types is None:
        return tuple(window if i >= first_windowed else None for i in range(num_layers))
    if not isinstance(layer_types, list):
        raise CheckpointError(
            f"config.json has layer_types={shown(layer_types)} where a list is needed: fix the "
            "config or fetch it again"
        )
    if len(layer_types) != num_layers:
        raise CheckpointError(
            f"config.json has {len(layer_types)} layer_types for {num_layers} layers: fix the "
            "config or fetch it again"
        )
    for kind in layer_types:
        if kind not in ("sliding_attention", "full_attention"):
            raise CheckpointError(
                f"config.json has {shown(kind)} among its layer_types: use a model with only "
                "sliding_attention and full_attention"
            )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
