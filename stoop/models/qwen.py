"""Qwen2, with biases of q, k and v, and Qwen3, which has norms of q and k instead."""

from typing import Any

from stoop.checkpoint.gguf_layout import GGUFContents
from stoop.models.config_reader import Reader
from stoop.models.decoder import DecoderModel, DecoderSpec
from stoop.models.decoder_config import (
    Windows,
    read_decoder_spec,
    read_num_layers,
    read_windows,
)
from stoop.models.decoder_gguf import decoder_config, decoder_layout
from stoop.models.family import Family


def read_qwen2(config: dict[str, Any], architecture: str) -> DecoderSpec:
    Reader(config).flag("attention_bias")  # checked, though Qwen2 has biases in any case
    return read_decoder_spec(config, architecture, qkv_bias=True, windows=_windows(config))


def read_qwen3(config: dict[str, Any], architecture: str) -> DecoderSpec:
    bias = Reader(config).flag("attention_bias")
    return read_decoder_spec(
        config,
        architecture,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        windows=_windows(config),
    )


def _windows(config: dict[str, Any]) -> Windows:
    """Windows are off by default; if on, the layers from `max_window_layers` on have one."""
    reader = Reader(config)
    if not reader.flag("use_sliding_window"):
        return ()
    num_layers = read_num_layers(config)
    return read_windows(config, int(reader.number("max_window_layers", default=num_layers)))


def _gguf_config(file: GGUFContents, architecture: str, model_type: str) -> dict[str, Any]:
    config = decoder_config(file, architecture, model_type)
    windowed = config["sliding_window"] is not None
    return config | {
        "use_sliding_window": windowed,
        "max_window_layers": 0 if windowed else config["num_hidden_layers"],
    }


QWEN2 = Family(
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    read_spec=read_qwen2,
    build=DecoderModel,
    gguf=decoder_layout("qwen2", lambda file: _gguf_config(file, "Qwen2ForCausalLM", "qwen2")),
)
QWEN3 = Family(
    architectures=("Qwen3ForCausalLM",),
    model_types=("qwen3",),
    read_spec=read_qwen3,
    build=DecoderModel,
    gguf=decoder_layout("qwen3", lambda file: _gguf_config(file, "Qwen3ForCausalLM", "qwen3")),
)
