"""A family of models outside of stoop: import this module, then load its checkpoints as any other.

    import my_family, stoop
    llm = stoop.LLM("path/to/a/gull", ...)

"Gull" is made up. It is Llama with another config layout, other tensor names, and embeddings that
are multiplied by a scale. A family says three things: how to read its config.json into a spec, what
its class computes, and what its checkpoints call each tensor.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import stoop
from stoop.layers.rope import RopeSpec
from stoop.layers.weights import WeightView
from stoop.models.config_reader import Reader, checkpoint_dtype
from stoop.models.decoder import DecoderModel, DecoderSpec
from stoop.models.family import Family

# Parts of stoop's names for a decoder's tensors, and Gull's for them.
NAMES = {
    "model.embed_tokens": "wte",
    "model.norm": "final_norm",
    "lm_head": "unembed",
    "model.layers": "blocks",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    "self_attn": "attn",
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "out",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}


@dataclass(frozen=True, kw_only=True)
class GullSpec(DecoderSpec):
    embedding_scale: float


def read_spec(config: dict[str, Any], architecture: str) -> GullSpec:
    """`Reader` refuses what is missing or of a wrong type with a sentence."""
    reader = Reader(config)
    hidden_size, num_heads = reader.whole("n_embd"), reader.whole("n_head")
    return GullSpec(
        architecture=architecture,
        vocab_size=reader.whole("n_vocab"),
        hidden_size=hidden_size,
        intermediate_size=reader.whole("n_inner"),
        num_layers=reader.whole("n_layer"),
        num_heads=num_heads,
        num_kv_heads=reader.whole("n_kv_head", default=num_heads),
        head_dim=hidden_size // num_heads,
        rms_norm_eps=reader.number("norm_eps", default=1e-5),
        max_position=reader.whole("n_ctx"),
        rope=RopeSpec(theta=reader.number("rotary_base", default=10000.0)),
        dtype=checkpoint_dtype(config),
        embedding_scale=reader.number("embd_scale", default=1.0),
    )


class GullModel(DecoderModel):
    spec: GullSpec

    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids) * self.spec.embedding_scale

    def weight_views(self) -> Iterator[WeightView]:
        """Every tensor that a checkpoint must have, with the view that it is loaded into."""
        for view in super().weight_views():
            yield view._replace(name=gull_name(view.name))


def gull_name(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


stoop.register_model(
    Family(
        architectures=("GullForCausalLM",),
        read_spec=read_spec,
        build=GullModel,
        layer_prefix="blocks.",
    )
)
