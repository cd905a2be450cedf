"""Granite 4.0 H: Mamba-2, attention in some layers, and multipliers. Dense models only.

Its attention has no rotary embedding, unless the config asks for one. Models of the same
architecture whose layers all have attention load, too.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stoop.config.errors import CheckpointError
from stoop.config.values import shown
from stoop.layers.attention import Attention
from stoop.layers.linear import FusedLinear
from stoop.layers.norm import RMSNorm
from stoop.layers.recurrent import Mamba2
from stoop.layers.rope import RopeSpec
from stoop.layers.stateful import ForwardContext
from stoop.layers.weights import WeightView, prefixed
from stoop.models.config_reader import Reader, as_number, with_defaults
from stoop.models.decoder_config import read_decoder_spec
from stoop.models.family import Family
from stoop.models.hybrid import (
    ATTENTION,
    MAMBA,
    HybridModel,
    MambaHybridSpec,
    read_layer_types,
    read_mamba,
)
from stoop.models.hybrid_gguf import GRANITE_HYBRID_LAYOUT
from stoop.ops.rope import Rotation

ARCHITECTURE = "GraniteMoeHybridForCausalLM"
OLD_KINDS = {"attention": ATTENTION, "mamba": MAMBA}  # as transformers 4 names them
OLD_KEY = "layers_block_type"  # means `layer_types`, and counts if a config has both


@dataclass(frozen=True, kw_only=True)
class GraniteHybridSpec(MambaHybridSpec):
    embedding_multiplier: float
    residual_multiplier: float  # of what each branch adds to the stream
    attention_multiplier: float  # of scores, instead of head_dim**-0.5
    logits_scaling: float  # divides the logits


class SharedMLP(nn.Module):
    """An MLP whose gate and up projections are one tensor; shared, in models that have experts."""

    def __init__(self, spec: GraniteHybridSpec) -> None:
        super().__init__()
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.input_linear = FusedLinear(("input_linear",), hidden, (2 * inner,), bias=False)
        self.output_linear = FusedLinear(("output_linear",), inner, (hidden,), bias=False)

    def branch(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return self.output_linear(self.input_linear.gated_of_norm(x, norm))

    def weight_views(self) -> Iterator[WeightView]:
        yield from self.input_linear.weight_views()
        yield from self.output_linear.weight_views()


class GraniteHybridLayer(nn.Module):
    def __init__(self, spec: GraniteHybridSpec, kind: str) -> None:
        super().__init__()
        self.multiplier = spec.residual_multiplier
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mamba = self.self_attn = None
        if kind == MAMBA:
            self.mamba = Mamba2(spec.mamba)
        else:
            self.self_attn = Attention(spec, window=None, scale=spec.attention_multiplier)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.shared_mlp = SharedMLP(spec)

    def forward(
        self, stream: Tensor, rotation: Rotation, ctx: ForwardContext, keep: bool = False
    ) -> Tensor:
        if self.mamba is not None:
            mixed = self.mamba.branch(stream, self.input_layernorm, ctx)
        else:
            assert self.self_attn is not None
            mixed = self.self_attn.branch(stream, self.input_layernorm, rotation, ctx)
        stream = torch.add(stream, mixed, alpha=self.multiplier)
        mixed = self.shared_mlp.branch(stream, self.post_attention_layernorm)
        return torch.add(stream, mixed, alpha=self.multiplier)

    def weight_views(self) -> Iterator[WeightView]:
        yield from prefixed("input_layernorm", self.input_layernorm.weight_views())
        norm = self.post_attention_layernorm
        yield from prefixed("post_attention_layernorm", norm.weight_views())
        if self.mamba is not None:
            yield from prefixed("mamba", self.mamba.weight_views())
        if self.self_attn is not None:
            yield from prefixed("self_attn", self.self_attn.weight_views())
        yield from prefixed("shared_mlp", self.shared_mlp.weight_views())


class GraniteHybridModel(HybridModel):
    spec: GraniteHybridSpec

    def make_layers(self) -> Iterable[nn.Module]:
        return [GraniteHybridLayer(self.spec, kind) for kind in self.spec.layer_types]

    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids) * self.spec.embedding_multiplier

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) / self.spec.logits_scaling


def read_spec(config: dict[str, Any], architecture: str) -> GraniteHybridSpec:
    reader = Reader(config)
    _refuse_experts(config)
    bias = reader.flag("attention_bias")
    base = vars(
        read_decoder_spec(
            with_defaults(config, {"max_position_embeddings": 2048})
            | {"intermediate_size": reader.whole("shared_intermediate_size", default=1024)},
            architecture,
            qkv_bias=bias,
            o_bias=bias,
        )
    )
    if not _rotates(config):
        base |= {"rotary_dim": 0, "rope": RopeSpec(1.0)}
    listed = config if config.get(OLD_KEY) is None else config | {"layer_types": config[OLD_KEY]}
    kinds = read_layer_types(listed, (ATTENTION, MAMBA), OLD_KINDS)
    scaling = config.get("logits_scaling")
    return GraniteHybridSpec(
        **base,
        layer_types=kinds or (MAMBA,) * base["num_layers"],
        mamba=read_mamba(config, base["hidden_size"], base["rms_norm_eps"]),
        embedding_multiplier=reader.number("embedding_multiplier", default=1.0),
        residual_multiplier=reader.number("residual_multiplier", default=1.0),
        attention_multiplier=reader.number("attention_multiplier", default=1.0),
        logits_scaling=as_number("logits_scaling", 1.0 if scaling is None else scaling),
    )


def _refuse_experts(config: dict[str, Any]) -> None:
    experts = config.get("num_local_experts")
    experts = 8 if experts is None else experts  # what transformers assumes
    if experts != 0:
        raise CheckpointError(
            f"the model has num_local_experts={shown(experts)}, and stoop loads dense ones only: "
            "use a Granite 4.0 H without experts, such as granite-4.0-h-micro or granite-4.0-h-1b"
        )


def _rotates(config: dict[str, Any]) -> bool:
    kind = config.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise CheckpointError(
            f"config.json has position_embedding_type={shown(kind)}: use a model with rope, nope "
            "or none"
        )
    return kind == "rope"


GRANITE_HYBRID = Family(
    architectures=(ARCHITECTURE,),
    model_types=("granitemoehybrid",),
    read_spec=read_spec,
    build=GraniteHybridModel,
    gguf=GRANITE_HYBRID_LAYOUT,
)
