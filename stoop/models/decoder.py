"""The decoder that the Llama-like families share: Llama, SmolLM2, Mistral, Qwen2 and Qwen3.

They differ in biases, norms of q and k, windows and rotary scaling. `DecoderSpec` has a field for
each, so one class serves them all. It knows nothing of requests, graphs or speculation.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from stoop.config.schema import ModelSpec
from stoop.layers.attention import Attention
from stoop.layers.embedding import Embedding, OutputHead
from stoop.layers.linear import FusedLinear
from stoop.layers.norm import RMSNorm
from stoop.layers.rope import RopeSpec, RotaryTable
from stoop.layers.stateful import ForwardContext
from stoop.layers.weights import WeightView, prefixed
from stoop.model_state.base import ModelState, ModelStateSetup
from stoop.model_state.default import DefaultModelState
from stoop.models.base import parameter_bytes
from stoop.models.fused import FusedLayers, LayerParts, fuse
from stoop.ops.rope import Rotation

# Derived values that some checkpoints store, in any layer or at the top.
DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$|\.self_attn\.masked_bias$")


@dataclass(frozen=True, kw_only=True)
class DecoderSpec(ModelSpec):
    """A dense Llama-like decoder, with every convention spelled out."""

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # each head of q and k by itself
    windows: tuple[int | None, ...] = ()  # [num_layers] sliding window, None for full attention
    rotary_dim: int | None = None  # dimensions of a head that are rotated; None for all

    @property
    def rotated(self) -> int:
        return self.head_dim if self.rotary_dim is None else self.rotary_dim


class MLP(nn.Module):
    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        sizes = (spec.intermediate_size, spec.intermediate_size)
        self.gate_up_proj = FusedLinear(
            ("gate_proj", "up_proj"), spec.hidden_size, sizes, spec.mlp_bias
        )
        self.down_proj = FusedLinear(
            ("down_proj",), spec.intermediate_size, (spec.hidden_size,), spec.mlp_bias
        )

    def forward(self, stream: Tensor, norm: RMSNorm) -> Tensor:
        return self.down_proj.onto(self.gate_up_proj.gated_of_norm(stream, norm), stream)

    def weight_views(self) -> Iterator[WeightView]:
        yield from self.gate_up_proj.weight_views()
        yield from self.down_proj.weight_views()


class DecoderLayer(nn.Module):
    def __init__(self, spec: DecoderSpec, window: int | None = None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = Attention(spec, window=window)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec)

    def forward(
        self, stream: Tensor, rotation: Rotation, ctx: ForwardContext, keep: bool = False
    ) -> Tensor:
        """Add attention and MLP to the stream. keep: the caller still needs the input stream"""
        stream = self.self_attn(stream, self.input_layernorm, stream, rotation, ctx, keep)
        return self.mlp(stream, self.post_attention_layernorm)

    @property
    def parts(self) -> LayerParts:
        return LayerParts(
            self.input_layernorm,
            self.self_attn,
            self.post_attention_layernorm,
            self.mlp.gate_up_proj,
            self.mlp.down_proj,
        )

    def weight_views(self) -> Iterator[WeightView]:
        yield from prefixed("input_layernorm", self.input_layernorm.weight_views())
        yield from prefixed("self_attn", self.self_attn.weight_views())
        yield from prefixed(
            "post_attention_layernorm", self.post_attention_layernorm.weight_views()
        )
        yield from prefixed("mlp", self.mlp.weight_views())


class DecoderModel(nn.Module):
    """A `Model` (models/base.py).

    A family with other layers gives another `layer_class`, which is called with the spec and the
    layer's window, or overrides `make_layers`. Layers have `weight_views()` and the `forward` of
    `DecoderLayer`.
    """

    layer_class: Callable[[Any, int | None], nn.Module] = DecoderLayer
    prefix = "model"  # of all tensor names in a checkpoint but that of the LM head
    norm_name = "norm"  # of the last norm

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(self.make_layers())
        self.norm = self.make_norm()
        self.lm_head = OutputHead(
            spec.vocab_size,
            spec.hidden_size,
            self.embed_tokens if spec.tie_word_embeddings else None,
        )
        self.rotary: RotaryTable | None = None
        self.fused: FusedLayers | None = None

    def make_layers(self) -> Iterable[nn.Module]:
        windows = self.spec.windows or (None,) * self.spec.num_layers
        return [self.layer_class(self.spec, window) for window in windows]

    def make_norm(self) -> RMSNorm:
        return RMSNorm(self.spec.hidden_size, self.spec.rms_norm_eps)

    def prepare(self, num_positions: int) -> None:
        """Build the rotary table on the weights' device; take the kernels that serve all layers."""
        self.rotary = RotaryTable(
            self.spec.rope,
            self.spec.rotated,
            num_positions,
            device=self.device,
            dtype=self.dtype,
        )
        if all(type(layer) is DecoderLayer for layer in self.layers):
            self.fused = fuse([cast(DecoderLayer, layer).parts for layer in self.layers])

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of computation; matrices may be stored in another one, norms in a wider one."""
        return self.embed_tokens.compute_dtype or self.embed_tokens.weight.dtype

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        ctx: ForwardContext,
        taps: Sequence[int] = (),
        out: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """See `Model.__call__`."""
        assert self.rotary is not None, "call prepare() first"
        rotation = self.rotary.at(positions)
        stream = self.embed(input_ids)
        tapped = None if self.fused is None else self.fused.run(ctx, stream, rotation, taps)
        if tapped is None:
            stream, tapped = self._run_layers(stream, rotation, ctx, taps)
        if out is None:
            out = self.norm(stream)
        else:
            self.norm.into(stream, out)
        return out, tapped

    def _run_layers(
        self, stream: Tensor, rotation: Rotation, ctx: ForwardContext, taps: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """One layer after the other; returns the stream, and as it entered the layers `taps`."""
        streams: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            tapped = index in taps
            if tapped:
                streams[index] = stream
            stream = layer(stream, rotation, ctx, keep=tapped)
        streams[len(self.layers)] = stream
        return stream, [streams[tap] for tap in taps]

    def embed(self, input_ids: Tensor) -> Tensor:
        """The input of the first layer: [tokens] ids to [tokens, hidden_size]."""
        embedded: Tensor = self.embed_tokens(input_ids)
        return embedded

    def make_model_state(self, setup: ModelStateSetup) -> ModelState:
        return DefaultModelState(setup)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [n, hidden_size] to [n, vocab_size], in float32 or better."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def weight_views(self) -> Iterator[WeightView]:
        """Every tensor that a Hugging Face checkpoint of this model must have."""
        yield from prefixed(f"{self.prefix}.embed_tokens", self.embed_tokens.weight_views())
        for index, layer in enumerate(self.layers):
            views = cast(DecoderLayer, layer).weight_views()
            yield from prefixed(f"{self.prefix}.layers.{index}", views)
        yield from prefixed(f"{self.prefix}.{self.norm_name}", self.norm.weight_views())
        yield from prefixed("lm_head", self.lm_head.weight_views())

    def is_derived(self, name: str) -> bool:
        """Whether a checkpoint tensor can be derived from others and is not loaded."""
        return bool(DERIVED.search(name)) or (self.lm_head.tied and name == "lm_head.weight")

    def bytes_read(self) -> int:
        """Bytes of weights that a step with few tokens reads.

        It looks up a few rows of the embedding, and reads all of it only as a tied LM head.
        """
        unread = 0 if self.lm_head.tied else parameter_bytes(self.embed_tokens)
        return parameter_bytes(self) - unread
