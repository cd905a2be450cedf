"""LFM2: short convolutions, and attention in some layers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from stoop.layers.attention import Attention
from stoop.layers.norm import RMSNorm
from stoop.layers.recurrent import ShortConv
from stoop.layers.stateful import ForwardContext
from stoop.layers.weights import WeightView, prefixed, renamed
from stoop.models.config_reader import Reader, with_defaults
from stoop.models.decoder import MLP, DecoderSpec
from stoop.models.decoder_config import read_decoder_spec, read_num_layers
from stoop.models.family import Family
from stoop.models.hybrid import ATTENTION, HybridModel, read_layer_indices, read_layer_types
from stoop.models.hybrid_gguf import LFM2_LAYOUT
from stoop.ops.rope import Rotation

ARCHITECTURE = "Lfm2ForCausalLM"
CONV = "conv"
ATTENTION_NAMES = {"o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
MLP_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@dataclass(frozen=True, kw_only=True)
class Lfm2Spec(DecoderSpec):
    layer_types: tuple[str, ...]
    conv_width: int
    conv_bias: bool


class Lfm2Layer(nn.Module):
    def __init__(self, spec: Lfm2Spec, kind: str) -> None:
        super().__init__()
        self.operator_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.conv = self.self_attn = None
        if kind == CONV:
            self.conv = ShortConv(spec.hidden_size, spec.conv_width, bias=spec.conv_bias)
        else:
            self.self_attn = Attention(spec, window=None)
        self.ffn_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.feed_forward = MLP(spec)

    def forward(
        self, stream: Tensor, rotation: Rotation, ctx: ForwardContext, keep: bool = False
    ) -> Tensor:
        norm = self.operator_norm
        if self.conv is not None:
            stream = self.conv(stream, norm, stream, ctx, keep)
        else:
            assert self.self_attn is not None
            stream = self.self_attn(stream, norm, stream, rotation, ctx, keep)
        mixed: Tensor = self.feed_forward(stream, self.ffn_norm)
        return mixed

    def weight_views(self) -> Iterator[WeightView]:
        yield from prefixed("operator_norm", self.operator_norm.weight_views())
        yield from prefixed("ffn_norm", self.ffn_norm.weight_views())
        if self.conv is not None:
            yield from prefixed("conv", self.conv.weight_views())
        if self.self_attn is not None:
            views = renamed(ATTENTION_NAMES, self.self_attn.weight_views())
            yield from prefixed("self_attn", views)
        yield from prefixed("feed_forward", renamed(MLP_NAMES, self.feed_forward.weight_views()))


class Lfm2Model(HybridModel):
    spec: Lfm2Spec
    norm_name = "embedding_norm"

    def make_layers(self) -> Iterable[nn.Module]:
        return [Lfm2Layer(self.spec, kind) for kind in self.spec.layer_types]


def read_spec(config: dict[str, Any], architecture: str) -> Lfm2Spec:
    reader = Reader(config)
    num_layers = read_num_layers(config)
    given = (config.get(key) for key in ("tie_embedding", "tie_word_embeddings"))
    tied = next((flag for flag in given if flag is not None), True)
    base = read_decoder_spec(
        with_defaults(config, {"rope_theta": 1e6, "max_position_embeddings": 128_000})
        | {
            "intermediate_size": _intermediate_size(config),
            "num_key_value_heads": reader.whole("num_key_value_heads", default=8),
            "rms_norm_eps": reader.number("norm_eps", default=1e-5),
            "tie_word_embeddings": tied,
        },
        architecture,
        qk_norm=True,
    )
    kinds = read_layer_types(config, (CONV, ATTENTION)) or _by_index(config, num_layers)
    return Lfm2Spec(
        **vars(base),
        layer_types=kinds,
        conv_width=reader.whole("conv_L_cache", default=3),
        conv_bias=reader.flag("conv_bias"),
    )


def _by_index(config: dict[str, Any], num_layers: int) -> tuple[str, ...]:
    """Older configs list the attention layers; without a list, all layers have attention."""
    places = read_layer_indices(config, "full_attn_idxs")
    if places is None:
        return (ATTENTION,) * num_layers
    return tuple(ATTENTION if index in places else CONV for index in range(num_layers))


def _intermediate_size(config: dict[str, Any]) -> int:
    """Configs give the size of an MLP without a gate; two thirds of it, rounded up, is meant."""
    reader = Reader(config)
    size = reader.whole("block_ff_dim" if config.get("block_ff_dim") else "intermediate_size")
    adjusts = config.get("block_auto_adjust_ff_dim")
    if adjusts is not None and not reader.flag("block_auto_adjust_ff_dim"):
        return size
    size = int(2 * size / 3)
    size = int(reader.number("block_ffn_dim_multiplier", default=1.0) * size)
    multiple = reader.whole("block_multiple_of", default=256)
    return -(-size // multiple) * multiple


LFM2 = Family(
    architectures=(ARCHITECTURE,),
    model_types=("lfm2",),
    read_spec=read_spec,
    build=Lfm2Model,
    gguf=LFM2_LAYOUT,
)
