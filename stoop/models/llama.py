"""Llama 2 and 3, and models in their layout such as SmolLM2."""

from typing import Any

from stoop.checkpoint.gguf_layout import GGUFContents
from stoop.models.config_reader import Reader
from stoop.models.decoder import DecoderModel, DecoderSpec
from stoop.models.decoder_config import read_decoder_spec
from stoop.models.decoder_gguf import decoder_config, decoder_layout, sliding_window
from stoop.models.family import Family

ARCHITECTURE = "LlamaForCausalLM"


def read_spec(config: dict[str, Any], architecture: str) -> DecoderSpec:
    reader = Reader(config)
    bias = reader.flag("attention_bias")
    return read_decoder_spec(
        config, architecture, qkv_bias=bias, o_bias=bias, mlp_bias=reader.flag("mlp_bias")
    )


def _gguf_config(file: GGUFContents) -> dict[str, Any]:
    return decoder_config(file, ARCHITECTURE, "llama")


LLAMA = Family(
    architectures=(ARCHITECTURE,),
    model_types=("llama",),
    read_spec=read_spec,
    build=DecoderModel,
    # Files with a sliding window are Mistral's.
    gguf=decoder_layout(
        "llama", _gguf_config, accepts=lambda fields: sliding_window(fields) is None, paired=True
    ),
)
