"""The Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen2 and Qwen3.

They differ in biases, norms of q and k, windows and rotary scaling, all of which `ModelSpec` spells
out; so they are one model. It knows nothing of requests, graphs or speculation.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from stoop.attention.base import ForwardContext
from stoop.config.schema import ModelSpec
from stoop.layers.attention import Attention
from stoop.layers.embedding import Embedding, OutputHead
from stoop.layers.linear import FusedLinear
from stoop.layers.norm import RMSNorm
from stoop.layers.rope import RotaryTable
from stoop.layers.weights import WeightSlot, prefixed
from stoop.ops.norm import silu_and_mul
from stoop.ops.rope import Rotation


class MLP(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        sizes = (spec.intermediate_size, spec.intermediate_size)
        self.gate_up_proj = FusedLinear(
            ("gate_proj", "up_proj"), spec.hidden_size, sizes, spec.mlp_bias
        )
        self.down_proj = FusedLinear(
            ("down_proj",), spec.intermediate_size, (spec.hidden_size,), spec.mlp_bias
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)))

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from self.gate_up_proj.weight_slots()
        yield from self.down_proj.weight_slots()


class DecoderLayer(nn.Module):
    def __init__(self, spec: ModelSpec, layer: int, window: int | None = None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = Attention(spec, layer, window=window)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec)

    def forward(
        self,
        branch: Tensor,
        residual: Tensor | None,
        rotation: Rotation,
        ctx: ForwardContext,
    ) -> tuple[Tensor, Tensor]:
        """Takes and returns (branch, residual): the stream is their sum, added by the next norm."""
        if residual is None:
            normed, residual = self.input_layernorm(branch), branch
        else:
            normed, residual = self.input_layernorm.add(branch, residual)
        attended = self.self_attn(normed, rotation, ctx)
        normed, residual = self.post_attention_layernorm.add(attended, residual)
        return self.mlp(normed), residual

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from prefixed("input_layernorm", self.input_layernorm.weight_slots())
        yield from prefixed("self_attn", self.self_attn.weight_slots())
        yield from prefixed(
            "post_attention_layernorm", self.post_attention_layernorm.weight_slots()
        )
        yield from prefixed("mlp", self.mlp.weight_slots())


class LlamaModel(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size)
        windows = spec.windows or (None,) * spec.num_layers
        self.layers = nn.ModuleList(DecoderLayer(spec, i, w) for i, w in enumerate(windows))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.lm_head = OutputHead(
            spec.vocab_size,
            spec.hidden_size,
            self.embed_tokens if spec.tie_word_embeddings else None,
        )
        self.rotary: RotaryTable | None = None

    def prepare(self, num_positions: int) -> None:
        """Make what is derived rather than loaded: the rotary table, on the weights' device."""
        weight = self.embed_tokens.weight
        self.rotary = RotaryTable(
            self.spec.rope,
            self.spec.head_dim,
            num_positions,
            device=weight.device,
            dtype=weight.dtype,
        )

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        ctx: ForwardContext,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """[tokens] ids and positions to [tokens, hidden_size] normalised hidden states.

        Returned with them: the residual stream as it enters each layer of `taps`, or, for the
        number of layers, as it leaves the last one.
        """
        assert self.rotary is not None, "call prepare() first"
        rotation = self.rotary.at(positions)
        branch: Tensor = self.embed_tokens(input_ids)
        residual: Tensor | None = None
        streams: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in taps:
                streams[index] = branch if residual is None else residual + branch
            branch, residual = layer(branch, residual, rotation, ctx)
        assert residual is not None
        hidden, streams[len(self.layers)] = self.norm.add(branch, residual)
        return hidden, [streams[tap] for tap in taps]

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] to [n, vocab_size], in float32 or better."""
        logits = self.lm_head(hidden)
        return logits if logits.dtype == torch.float64 else logits.float()

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Every tensor that a Hugging Face checkpoint of this model must have."""
        yield from prefixed("model.embed_tokens", self.embed_tokens.weight_slots())
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield from prefixed(f"model.layers.{index}", layer.weight_slots())
        yield from prefixed("model.norm", self.norm.weight_slots())
        yield from prefixed("lm_head", self.lm_head.weight_slots())
