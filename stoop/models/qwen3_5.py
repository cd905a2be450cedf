"""Qwen3.5: gated delta nets, and gated attention in every fourth layer.

Norms multiply by 1 + weight, except those inside the delta nets. Hub checkpoints are multimodal:
their text part is loaded, the vision tower is left out. They also hold an MTP head, which drafts if
it is asked to.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from stoop.checkpoint.weights import WeightReader
from stoop.config.errors import CheckpointError
from stoop.config.values import shown
from stoop.layers.attention import GatedAttention
from stoop.layers.norm import RMSNorm
from stoop.layers.recurrent import DeltaNet, DeltaNetShape
from stoop.layers.stateful import ForwardContext
from stoop.layers.weights import WeightView, prefixed
from stoop.models.config_reader import MAX_LAYERS, Reader
from stoop.models.decoder import MLP, DecoderSpec
from stoop.models.decoder_config import read_decoder_spec, read_num_layers
from stoop.models.family import Family
from stoop.models.hybrid import HybridModel, read_layer_types
from stoop.models.mtp import MtpHead
from stoop.models.qwen3_5_gguf import QWEN3_5_LAYOUT
from stoop.ops.rope import Rotation

LINEAR, FULL = "linear_attention", "full_attention"
NORM_OFFSET = 1.0
DEFAULT_INTERVAL = 4  # layers from one with full attention to the next
ROTATED, DEFAULT_ROTATED = "partial_rotary_factor", 0.25  # of a head's dimensions
MTP_LAYERS = "mtp_num_hidden_layers"
# In multimodal checkpoints, and in those that transformers saves after loading one as text.
ALIASES = {"model.language_model.": "model."}
TIED = "tie_word_embeddings"
MTP_NAMES = {
    "fc": "mtp.fc",
    "embedding_norm": "mtp.pre_fc_norm_embedding",
    "feature_norm": "mtp.pre_fc_norm_hidden",
    "layer": "mtp.layers.0",
    "norm": "mtp.norm",
}


@dataclass(frozen=True, kw_only=True)
class Qwen35Spec(DecoderSpec):
    layer_types: tuple[str, ...]
    delta: DeltaNetShape


class Qwen35Layer(nn.Module):
    def __init__(self, spec: Qwen35Spec, kind: str) -> None:
        super().__init__()
        size, eps = spec.hidden_size, spec.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, NORM_OFFSET)
        self.linear_attn = self.self_attn = None
        if kind == LINEAR:
            self.linear_attn = DeltaNet(spec.delta)
        else:
            self.self_attn = GatedAttention(spec, window=None, norm_offset=NORM_OFFSET)
        self.post_attention_layernorm = RMSNorm(size, eps, NORM_OFFSET)
        self.mlp = MLP(spec)

    def forward(
        self, stream: Tensor, rotation: Rotation, ctx: ForwardContext, keep: bool = False
    ) -> Tensor:
        norm = self.input_layernorm
        if self.linear_attn is not None:
            stream = self.linear_attn(stream, norm, stream, ctx, keep)
        else:
            assert self.self_attn is not None
            stream = self.self_attn(stream, norm, stream, rotation, ctx, keep)
        mixed: Tensor = self.mlp(stream, self.post_attention_layernorm)
        return mixed

    def weight_views(self) -> Iterator[WeightView]:
        yield from prefixed("input_layernorm", self.input_layernorm.weight_views())
        if self.linear_attn is not None:
            yield from prefixed("linear_attn", self.linear_attn.weight_views())
        if self.self_attn is not None:
            yield from prefixed("self_attn", self.self_attn.weight_views())
        norm = self.post_attention_layernorm
        yield from prefixed("post_attention_layernorm", norm.weight_views())
        yield from prefixed("mlp", self.mlp.weight_views())


class Qwen35Mtp(MtpHead):
    prefix = "mtp."
    names = MTP_NAMES

    def make_layer(self) -> nn.Module:
        spec = self.spec.target
        assert isinstance(spec, Qwen35Spec), spec
        return Qwen35Layer(spec, FULL)

    def make_norm(self) -> RMSNorm:
        return RMSNorm(self.spec.hidden_size, self.spec.target.rms_norm_eps, NORM_OFFSET)


class Qwen35Model(HybridModel):
    spec: Qwen35Spec

    def make_layers(self) -> Iterable[nn.Module]:
        return [Qwen35Layer(self.spec, kind) for kind in self.spec.layer_types]

    def make_norm(self) -> RMSNorm:
        return RMSNorm(self.spec.hidden_size, self.spec.rms_norm_eps, NORM_OFFSET)

    def is_derived(self, name: str) -> bool:
        elsewhere = (Qwen35Mtp.prefix, "model.visual.")
        return name.startswith(elsewhere) or super().is_derived(name)


def read_spec(config: dict[str, Any], architecture: str) -> Qwen35Spec:
    reader = Reader(config)
    _refuse_unsupported(reader)
    bias = reader.flag("attention_bias")
    fraction = config.get(ROTATED)
    assumed = {
        "head_dim": reader.whole("head_dim", default=256),
        "num_key_value_heads": reader.whole("num_key_value_heads", default=4),
        ROTATED: DEFAULT_ROTATED if fraction is None else fraction,
    }
    base = read_decoder_spec(
        config | assumed,
        architecture,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        partial_rotary=True,
    )
    return Qwen35Spec(
        **vars(base) | {"num_mtp_layers": _mtp_layers(reader)},
        layer_types=read_layer_types(config, (LINEAR, FULL)) or _by_interval(config),
        delta=_read_delta(reader, base),
    )


def read_vision_spec(config: dict[str, Any], architecture: str) -> Qwen35Spec:
    """As in transformers, the flag of ties is the one outside the text part."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError(
            f"config.json has text_config={shown(text)} where an object is needed: fix the config "
            "or fetch it again"
        )
    outer = ("dtype", "torch_dtype", "quantization_config")
    given = {key: config[key] for key in outer if config.get(key) is not None}
    given |= {key: value for key, value in text.items() if value is not None}
    return read_spec(given | {TIED: config.get(TIED)}, architecture)


def complete_vision(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Where only the text part has a flag of ties, it counts if no LM head is stored."""
    text = config.get("text_config")
    if config.get(TIED) is not None or not isinstance(text, dict):
        return config
    return config | {TIED: None if _has_lm_head(folder) else text.get(TIED)}


def _has_lm_head(folder: Path) -> bool:
    try:
        with WeightReader(folder) as reader:
            return "lm_head.weight" in reader.names()
    except CheckpointError:  # loading says what is wrong; random weights need no files
        return False


def _refuse_unsupported(reader: Reader) -> None:
    config = reader.config
    if config.get("attn_output_gate") is not None and not reader.flag("attn_output_gate"):
        raise CheckpointError("attn_output_gate=false is not supported: use a Qwen3.5 model")
    if config.get("output_gate_type") not in (None, "swish", "silu"):
        raise CheckpointError(
            f"output_gate_type={shown(config['output_gate_type'])} is not supported: use a model "
            "with swish"
        )


def _mtp_layers(reader: Reader) -> int:
    return reader.whole(MTP_LAYERS, most=MAX_LAYERS) if reader.config.get(MTP_LAYERS) else 0


def _by_interval(config: dict[str, Any]) -> tuple[str, ...]:
    interval = Reader(config).whole("full_attention_interval", default=DEFAULT_INTERVAL)
    places = range(1, read_num_layers(config) + 1)
    return tuple(LINEAR if place % interval else FULL for place in places)


def _read_delta(reader: Reader, base: DecoderSpec) -> DeltaNetShape:
    keys = reader.whole("linear_num_key_heads", default=16)
    values = reader.whole("linear_num_value_heads", default=32)
    if values % keys:
        raise CheckpointError(
            f"config.json has {values} linear value heads, which {keys} key heads do not divide: "
            "fix the config"
        )
    return DeltaNetShape(
        hidden_size=base.hidden_size,
        num_key_heads=keys,
        num_value_heads=values,
        key_dim=reader.whole("linear_key_head_dim", default=128),
        value_dim=reader.whole("linear_value_head_dim", default=128),
        conv_width=reader.whole("linear_conv_kernel_dim", default=4),
        eps=base.rms_norm_eps,
    )


QWEN3_5 = Family(
    architectures=("Qwen3_5ForCausalLM",),
    model_types=("qwen3_5_text",),
    read_spec=read_spec,
    build=Qwen35Model,
    gguf=QWEN3_5_LAYOUT,
    aliases=ALIASES,
    build_mtp=Qwen35Mtp,
)
QWEN3_5_VISION = Family(
    architectures=("Qwen3_5ForConditionalGeneration",),
    model_types=("qwen3_5",),
    read_spec=read_vision_spec,
    build=Qwen35Model,
    aliases=ALIASES,
    complete=complete_vision,
    build_mtp=Qwen35Mtp,
)
