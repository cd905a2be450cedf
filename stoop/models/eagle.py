"""EAGLE draft heads: one or a few decoder layers that continue the target's own features.

An EAGLE-1 head joins embedding and feature by a linear layer and has neither an input norm nor a
final norm. An EAGLE-3 head condenses several of the target's streams into a feature, attends over
embedding and feature side by side, and has its own LM head, often with a smaller vocabulary.
`EagleSpec` has a field for everything that differs between published heads. The head knows nothing
of requests or graphs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from stoop.config.schema import DraftMethod, DraftTokens
from stoop.layers.attention import Attention
from stoop.layers.embedding import Embedding
from stoop.layers.linear import FusedLinear
from stoop.layers.norm import RMSNorm, join_normed
from stoop.layers.rope import RotaryTable
from stoop.layers.stateful import ForwardContext
from stoop.layers.weights import WeightView, prefixed
from stoop.models.base import Model, parameter_bytes
from stoop.models.decoder import MLP, DecoderLayer, DecoderSpec
from stoop.models.draft_output import DraftOutput
from stoop.models.fused import FusedLayers, LayerParts, fuse
from stoop.ops.norm import take_rows
from stoop.ops.rope import Rotation


@dataclass(frozen=True)
class EagleSpec:
    """An EAGLE draft head, with every convention spelled out.

    At position i the head takes the target's feature of position i and the embedding of token
    i + 1, and predicts token i + 2.
    """

    method: DraftMethod
    decoder: DecoderSpec  # the head's layers; vocab_size is that of its drafts
    target_hidden_size: int
    target_vocab_size: int
    # The target's residual stream as it enters these layers, in this order; the number of layers
    # means the stream that leaves the last one. EAGLE-1 has no taps: its feature is the target's
    # normalised last hidden state.
    taps: tuple[int, ...] = ()
    fc_bias: bool = False
    norm_before_fc: bool = False  # one norm over the concatenated taps
    fc_norms: bool = False  # one norm per tap
    norm_before_residual: bool = False  # the residual stream starts from the normalised feature
    norm_output: bool = False  # the next draft's feature is the normalised output
    own_embedding: bool = False  # else the target's
    own_lm_head: bool = True  # else the target's
    maps_vocabulary: bool = False  # drafts have ids of their own; `d2t` holds the offsets
    draft_tokens: DraftTokens | None = None  # of the target's LM head; None: all of them

    @property
    def vocab_size(self) -> int:
        chosen = self.draft_tokens
        return self.decoder.vocab_size if chosen is None else len(chosen.token_ids)

    @property
    def hidden_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def max_position(self) -> int:
        return self.decoder.max_position


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The taps that engines assume for an EAGLE-3 head whose config lists none."""
    taps = (2, num_layers // 2, num_layers - 3)
    return tuple(min(max(0, tap), num_layers) for tap in taps)


class Eagle1Layer(nn.Module):
    """A first layer without an input norm, over the joined embedding and feature."""

    def __init__(self, spec: EagleSpec) -> None:
        super().__init__()
        decoder = spec.decoder
        self.self_attn = Attention(decoder, window=_window(spec, 0))
        self.post_attention_layernorm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.mlp = MLP(decoder)

    def forward(self, joined: Tensor, rotation: Rotation, ctx: ForwardContext) -> Tensor:
        stream = self.self_attn(joined, None, joined, rotation, ctx)
        return self.mlp(stream, self.post_attention_layernorm)

    def weight_views(self) -> Iterator[WeightView]:
        yield from prefixed("self_attn", self.self_attn.weight_views())
        yield from prefixed(
            "post_attention_layernorm", self.post_attention_layernorm.weight_views()
        )
        yield from prefixed("mlp", self.mlp.weight_views())


class Eagle3Layer(nn.Module):
    """A first layer whose attention takes the embedding and the feature, concatenated."""

    def __init__(self, spec: EagleSpec) -> None:
        super().__init__()
        decoder = spec.decoder
        size, eps = decoder.hidden_size, decoder.rms_norm_eps
        self.norm_before_residual = spec.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps)  # of the embedding
        self.hidden_norm = RMSNorm(size, eps)  # of the feature
        self.self_attn = Attention(decoder, window=_window(spec, 0), in_size=2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(decoder)

    def join(
        self, token_ids: Tensor, embedding: Embedding, feature: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the layer attends over, and the residual stream."""
        joined = embedding.joined(token_ids, self.input_layernorm, feature, self.hidden_norm)
        stream = feature
        if self.norm_before_residual:
            stream = joined[:, feature.shape[1] :].contiguous()
        return joined, stream

    def forward(
        self, joined: Tensor, stream: Tensor, rotation: Rotation, ctx: ForwardContext
    ) -> Tensor:
        stream = self.self_attn(joined, None, stream, rotation, ctx, keep=True)
        return self.mlp(stream, self.post_attention_layernorm)

    @property
    def parts(self) -> LayerParts:
        mlp = self.mlp
        norm = self.post_attention_layernorm
        return LayerParts(None, self.self_attn, norm, mlp.gate_up_proj, mlp.down_proj)

    def weight_views(self) -> Iterator[WeightView]:
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            yield from prefixed(name, getattr(self, name).weight_views())
        yield from prefixed("self_attn", self.self_attn.weight_views())
        yield from prefixed("mlp", self.mlp.weight_views())


class EagleHead(DraftOutput):
    """A `DraftModel` (models/base.py)."""

    spec: EagleSpec

    def __init__(self, spec: EagleSpec) -> None:
        super().__init__()
        decoder, self.spec = spec.decoder, spec
        size, eps = decoder.hidden_size, decoder.rms_norm_eps
        self.eagle3 = spec.method == "eagle3"
        width = spec.target_hidden_size * len(spec.taps)
        fc_in = width if self.eagle3 else size + spec.target_hidden_size
        self.fc = FusedLinear(("fc",), fc_in, (size,), spec.fc_bias)
        self.input_norm = RMSNorm(width, eps) if spec.norm_before_fc else None
        self.fc_norm = nn.ModuleList(
            RMSNorm(spec.target_hidden_size, eps) for _ in (spec.taps if spec.fc_norms else ())
        )
        first = Eagle3Layer if self.eagle3 else Eagle1Layer
        self.first = first(spec)
        self.rest = nn.ModuleList(
            DecoderLayer(decoder, _window(spec, index)) for index in range(1, decoder.num_layers)
        )
        self.norm = RMSNorm(size, eps) if self.eagle3 else None
        self.embed_tokens = Embedding(spec.target_vocab_size, size) if spec.own_embedding else None
        self.make_output(spec)
        self.rotary: RotaryTable | None = None
        self.fused: FusedLayers | None = None

    def attach(self, target: Model, num_positions: int) -> None:
        """Use the target's modules where the head has none of its own; build the rotary table;
        take the kernels that serve all layers."""
        self.attach_output(target)
        norm, decoder = self.first.post_attention_layernorm.weight, self.spec.decoder
        self.rotary = RotaryTable(
            decoder.rope,
            decoder.head_dim,
            num_positions,
            device=norm.device,
            dtype=norm.dtype,
        )
        if isinstance(self.first, Eagle3Layer):
            rest = [cast(DecoderLayer, layer).parts for layer in self.rest]
            self.fused = fuse([self.first.parts, *rest])

    def condense(self, streams: Tensor) -> Tensor:
        """Map [tokens, number of taps, target_hidden_size] to EAGLE-3 features."""
        joined = streams.flatten(1)
        if self.spec.fc_norms:
            norms = [cast(RMSNorm, norm) for norm in self.fc_norm]
            joined = join_normed(streams.unbind(dim=1), norms)
        if self.input_norm is not None:
            joined = self.input_norm(joined)
        return self.fc(joined)

    def forward(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, ctx: ForwardContext
    ) -> Tensor:
        """Run one pass; returns [tokens, hidden_size], the stream as it leaves the last layer.

        token_ids: [tokens], the token after each position; features: [tokens, hidden_size], for
        EAGLE-1 of the target's hidden size
        """
        rotation, embedding = self._rotation(positions), self._embedding
        if isinstance(self.first, Eagle3Layer):
            joined, stream = self.first.join(token_ids, embedding, features)
            if self.fused is not None:
                copied = stream.clone()  # the caller keeps its features
                if self.fused.run(ctx, copied, rotation, given=joined) is not None:
                    return copied
            stream = self.first(joined, stream, rotation, ctx)
        else:
            joined = self.fc(torch.cat((embedding(token_ids), features), dim=-1))
            stream = self.first(joined, rotation, ctx)
        for layer in self.rest:
            stream = layer(stream, rotation, ctx)
        return stream

    def states(
        self,
        token_ids: Tensor,
        features: Tensor,
        positions: Tensor,
        ctx: ForwardContext,
        wanted: Tensor | None,
        out: Tensor,
    ) -> Tensor:
        """See `DraftModel`."""
        if self.fused is not None and isinstance(self.first, Eagle3Layer) and wanted is not None:
            joined, stream = self.first.join(token_ids, self._embedding, features)
            rotation = self._rotation(positions)
            found = self.fused.run_for(wanted, ctx, stream, rotation, given=joined)
            if found is not None:
                return self.take(found, None, out)
        return super().states(token_ids, features, positions, ctx, wanted, out)

    def _rotation(self, positions: Tensor) -> Rotation:
        assert self.rotary is not None, "call attach() first"
        return self.rotary.at(positions)

    @property
    def _embedding(self) -> Embedding:
        return self.embed_tokens or self.target.embed_tokens

    def finish(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Turn rows of the stream into states for `logits` and features for the next pass."""
        if self.norm is None:
            return stream, stream
        normed = self.norm(stream)
        return normed, normed if self.spec.norm_output else stream

    def take(self, stream: Tensor, index: Tensor | None, features: Tensor) -> Tensor:
        """See `DraftOutput`."""
        if self.norm is None:
            take_rows(stream, index, features)
            return features[: stream.shape[0] if index is None else index.shape[0]]
        states = self.norm.take(stream, index, features)
        if self.spec.norm_output:
            features[: states.shape[0]].copy_(states)
        return states

    def weight_views(self) -> Iterator[WeightView]:
        """Every tensor that the checkpoint must have, under canonical names (head_source.py)."""
        yield from self.fc.weight_views()  # fc.weight, fc.bias
        if self.input_norm is not None:
            yield from prefixed("input_norm", self.input_norm.weight_views())
        for index, norm in enumerate(self.fc_norm):
            assert isinstance(norm, RMSNorm)
            yield from prefixed(f"fc_norm.{index}", norm.weight_views())
        yield from prefixed("layers.0", self.first.weight_views())
        for index, layer in enumerate(self.rest, start=1):
            assert isinstance(layer, DecoderLayer)
            yield from prefixed(f"layers.{index}", layer.weight_views())
        if self.norm is not None:
            yield from prefixed("norm", self.norm.weight_views())
        if self.embed_tokens is not None:
            yield from prefixed("embed_tokens", self.embed_tokens.weight_views())
        yield from self.output_views()

    def bytes_read(self, num_passes: int) -> int:
        """Bytes of weights that this many passes over few tokens read.

        EAGLE-3 condenses the target's streams in the first pass only.
        """
        condensing = (self.fc, self.input_norm, self.fc_norm)
        once = sum(parameter_bytes(part) for part in condensing if part is not None)
        passes = [self.first, self.rest, self.norm]
        each = sum(parameter_bytes(part) for part in passes if part is not None)
        each += self.output_bytes()
        return (once if self.eagle3 else num_passes * once) + num_passes * each


def _window(spec: EagleSpec, index: int) -> int | None:
    return spec.decoder.windows[index] if spec.decoder.windows else None
