"""Mistral: Llama with a sliding window."""

from typing import Any

from stoop.checkpoint.gguf_layout import GGUFContents
from stoop.models.config_reader import Reader
from stoop.models.decoder import DecoderModel, DecoderSpec
from stoop.models.decoder_config import read_decoder_spec, read_windows
from stoop.models.decoder_gguf import decoder_config, decoder_layout, sliding_window
from stoop.models.family import Family

ARCHITECTURE = "MistralForCausalLM"


def read_spec(config: dict[str, Any], architecture: str) -> DecoderSpec:
    bias = Reader(config).flag("attention_bias")
    windows = read_windows(config)
    return read_decoder_spec(config, architecture, qkv_bias=bias, o_bias=bias, windows=windows)


def _gguf_config(file: GGUFContents) -> dict[str, Any]:
    return decoder_config(file, ARCHITECTURE, "mistral")


MISTRAL = Family(
    architectures=(ARCHITECTURE,),
    model_types=("mistral",),
    read_spec=read_spec,
    build=DecoderModel,
    # GGUF calls it llama too.
    gguf=decoder_layout(
        "llama",
        _gguf_config,
        accepts=lambda fields: sliding_window(fields) is not None,
        paired=True,
    ),
)
