"""Specs of models that have no weights."""

from stoop.layers.rope import RopeSpec
from stoop.models.decoder import DecoderSpec


def tiny_spec() -> DecoderSpec:
    return DecoderSpec(
        architecture="LlamaForCausalLM",
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        rms_norm_eps=1e-5,
        max_position=512,
        rope=RopeSpec(theta=10000.0),
        dtype="float32",
    )
