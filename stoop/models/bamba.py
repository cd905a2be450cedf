"""Bamba: Mamba-2, and attention that rotates half of each head in some layers."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from stoop.layers.attention import Attention
from stoop.layers.norm import RMSNorm
from stoop.layers.recurrent import Mamba2
from stoop.layers.stateful import ForwardContext
from stoop.layers.weights import WeightView, prefixed
from stoop.models.config_reader import Reader, with_defaults
from stoop.models.decoder import MLP
from stoop.models.decoder_config import read_decoder_spec
from stoop.models.family import Family
from stoop.models.hybrid import (
    ATTENTION,
    MAMBA,
    HybridModel,
    MambaHybridSpec,
    read_layer_indices,
    read_mamba,
)
from stoop.ops.rope import Rotation

ARCHITECTURE = "BambaForCausalLM"
# What transformers assumes where a config does not say.
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
}


class BambaLayer(nn.Module):
    def __init__(self, spec: MambaHybridSpec, kind: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mamba = self.self_attn = None
        if kind == MAMBA:
            self.mamba = Mamba2(spec.mamba)
        else:
            self.self_attn = Attention(spec, window=None)
        self.pre_ff_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.feed_forward = MLP(spec)

    def forward(
        self, stream: Tensor, rotation: Rotation, ctx: ForwardContext, keep: bool = False
    ) -> Tensor:
        norm = self.input_layernorm
        if self.mamba is not None:
            stream = self.mamba(stream, norm, stream, ctx, keep)
        else:
            assert self.self_attn is not None
            stream = self.self_attn(stream, norm, stream, rotation, ctx, keep)
        mixed: Tensor = self.feed_forward(stream, self.pre_ff_layernorm)
        return mixed

    def weight_views(self) -> Iterator[WeightView]:
        yield from prefixed("input_layernorm", self.input_layernorm.weight_views())
        yield from prefixed("pre_ff_layernorm", self.pre_ff_layernorm.weight_views())
        if self.mamba is not None:
            yield from prefixed("mamba", self.mamba.weight_views())
        if self.self_attn is not None:
            yield from prefixed("self_attn", self.self_attn.weight_views())
        yield from prefixed("feed_forward", self.feed_forward.weight_views())


class BambaModel(HybridModel):
    spec: MambaHybridSpec
    norm_name = "final_layernorm"

    def make_layers(self) -> Iterable[nn.Module]:
        return [BambaLayer(self.spec, kind) for kind in self.spec.layer_types]


def read_spec(config: dict[str, Any], architecture: str) -> MambaHybridSpec:
    reader = Reader(config)
    bias = reader.flag("attention_bias")
    base = read_decoder_spec(
        # transformers rotates half of a head, whatever stands beside rope_parameters.
        with_defaults(config, DEFAULTS) | {"partial_rotary_factor": 0.5},
        architecture,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=reader.flag("mlp_bias"),
        partial_rotary=True,
    )
    attends = read_layer_indices(config, "attn_layer_indices") or set()
    kinds = (ATTENTION if index in attends else MAMBA for index in range(base.num_layers))
    return MambaHybridSpec(
        **vars(base),
        layer_types=tuple(kinds),
        mamba=read_mamba(config, base.hidden_size, base.rms_norm_eps),
    )


BAMBA = Family(
    architectures=(ARCHITECTURE,), model_types=("bamba",), read_spec=read_spec, build=BambaModel
)
