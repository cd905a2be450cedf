"""What an EAGLE head should draft, and the features its target should give it, in plain torch.

Written from the head's specification and not from the engine: no cache, no batch, no graph. Every
draft recomputes all positions. Numbers keep the dtype of the tensors; only the angles of RoPE are
float32, as in the libraries that the checkpoints were trained with.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stoop.layers.rope import RopeSpec
from stoop.models.decoder import DecoderSpec
from stoop.models.eagle import EagleSpec


class ReferenceDrafter:
    """One head with its target's embedding and output matrices, [target_vocab, hidden] each."""

    def __init__(
        self,
        spec: EagleSpec,
        tensors: Mapping[str, Tensor],
        target_embedding: Tensor,
        target_lm_head: Tensor,
    ) -> None:
        self.spec = spec
        self.tensors = dict(tensors)
        self.decoder = Decoder(spec.decoder, self.tensors)
        self.embedding = tensors["embed_tokens.weight"] if spec.own_embedding else target_embedding
        self.lm_head = tensors["lm_head.weight"] if spec.own_lm_head else target_lm_head
        self._check()

    def draft(
        self, token_ids: Sequence[int], streams: Tensor, count: int
    ) -> tuple[list[int], Tensor]:
        """`count` greedy drafts as the target numbers them, and their logits [count, drafts].

        token_ids: the n known tokens, at least 2
        streams: what the target shows of positions 0 to n - 2. EAGLE-3: its tapped residual
        streams [n - 1, taps, target_hidden]; EAGLE-1: its normalised last states
        [n - 1, target_hidden].
        """
        if len(token_ids) < 2 or len(streams) != len(token_ids) - 1:
            raise ValueError(f"{len(token_ids)} tokens do not go with {len(streams)} streams")
        features = self.features(streams)
        next_ids = list(token_ids[1:])
        drafts: list[int] = []
        chosen_from = [self.lm_head.new_empty(0, self.lm_head.shape[0])]
        for _ in range(count):
            outputs, logits = self.run_slots(features, next_ids)
            drafts.append(self.target_id(first_best(logits[-1])))
            chosen_from.append(logits[-1:])
            features = torch.cat((features, self.feedback(outputs[-1:])))
            next_ids.append(drafts[-1])
        return drafts, torch.cat(chosen_from)

    def features(self, streams: Tensor) -> Tensor:
        """[slots, hidden] of the target's streams; those of EAGLE-1 are features already."""
        if self.spec.method == "eagle":
            return streams
        if self.spec.fc_norms:
            streams = torch.stack(
                [self._norm(f"fc_norm.{i}", streams[:, i]) for i in range(len(self.spec.taps))],
                dim=1,
            )
        joined = streams.flatten(start_dim=1)  # tap after tap
        if self.spec.norm_before_fc:
            joined = self._norm("input_norm", joined)
        return self._fc(joined)

    def run_slots(self, features: Tensor, next_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Outputs [slots, hidden] before any norm, and logits [slots, drafts], of slots 0, 1, ...

        features: [slots, hidden], of position i in slot i
        next_ids: the token of position i + 1 for slot i
        """
        embedded = self.embedding[torch.tensor(list(next_ids), device=self.embedding.device)]
        if self.spec.method == "eagle":
            x = self._first_layer_eagle1(embedded, features)
        else:
            x = self._first_layer_eagle3(embedded, features)
        for layer in range(1, self.spec.decoder.num_layers):
            x = self.decoder.layer(layer, x)
        last = x if self.spec.method == "eagle" else self._norm("norm", x)
        return x, last @ self.lm_head.T

    def feedback(self, outputs: Tensor) -> Tensor:
        """The feature that replaces the target's at the next position."""
        if self.spec.method == "eagle3" and self.spec.norm_output:
            return self._norm("norm", outputs)
        return outputs

    def target_id(self, draft_id: int) -> int:
        if not self.spec.maps_vocabulary:
            return draft_id
        return draft_id + int(self.tensors["d2t"][draft_id])

    def _first_layer_eagle1(self, embedded: Tensor, features: Tensor) -> Tensor:
        """A Llama layer without the norm before its attention."""
        x = self._fc(torch.cat((embedded, features), dim=1))
        x = x + self.decoder.attention(0, x)
        return x + self.decoder.mlp(0, x)

    def _first_layer_eagle3(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Attention reads both inputs side by side; the residual stream is the feature's."""
        normed = self._norm("layers.0.hidden_norm", features)
        both = torch.cat((self._norm("layers.0.input_layernorm", embedded), normed), dim=1)
        residual = normed if self.spec.norm_before_residual else features
        x = residual + self.decoder.attention(0, both)
        return x + self.decoder.mlp(0, x)

    def _fc(self, x: Tensor) -> Tensor:
        return linear(x, self.tensors, "fc", self.spec.fc_bias)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.spec.decoder.rms_norm_eps)

    def _check(self) -> None:
        """Refuse what the specification leaves open, or contradicts."""
        spec = self.spec
        if spec.norm_before_fc and spec.fc_norms:
            raise ValueError("norm_before_fc and fc_norms exclude each other")
        if bool(spec.taps) != (spec.method == "eagle3"):
            raise ValueError("EAGLE-3 needs taps, EAGLE-1 has none")
        eagle3_only = (
            *(spec.norm_before_fc, spec.fc_norms),
            *(spec.norm_before_residual, spec.norm_output),
        )
        if spec.method == "eagle" and any(eagle3_only):
            raise ValueError("EAGLE-1 has none of EAGLE-3's norms")
        if self.lm_head.shape[0] != spec.decoder.vocab_size:
            raise ValueError(f"{self.lm_head.shape[0]} logits, {spec.decoder.vocab_size} drafts")
        if spec.maps_vocabulary and len(self.tensors["d2t"]) != spec.decoder.vocab_size:
            raise ValueError("d2t must have one offset for each draft")


class TargetReference:
    """A Llama model in the tensor names of Hugging Face.

    taps: layers whose entering residual stream is returned; the number of layers is the stream that
    leaves the last one; all of them by default.
    """

    def __init__(
        self, spec: DecoderSpec, tensors: Mapping[str, Tensor], taps: Sequence[int] | None = None
    ) -> None:
        self.spec = spec
        self.taps = tuple(range(spec.num_layers + 1) if taps is None else taps)
        self.embedding = tensors["model.embed_tokens.weight"]
        self.lm_head = self.embedding if spec.tie_word_embeddings else tensors["lm_head.weight"]
        self.norm = tensors["model.norm.weight"]
        self.decoder = Decoder(spec, tensors, prefix="model.")

    def streams(self, token_ids: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Taps [n, taps, hidden], normalised last states [n, hidden] and logits [n, vocab]."""
        x = self.embedding[torch.tensor(list(token_ids), device=self.embedding.device)]
        entering = [x]
        for layer in range(self.spec.num_layers):
            entering.append(self.decoder.layer(layer, entering[-1]))
        normed = rms_norm(entering[-1], self.norm, self.spec.rms_norm_eps)
        taps = torch.stack([entering[tap] for tap in self.taps], dim=1)
        return taps, normed, normed @ self.lm_head.T


class Decoder:
    """Llama layers over one sequence whose positions are 0, 1, ..."""

    def __init__(self, spec: DecoderSpec, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        if spec.qk_norm:
            raise ValueError("the reference has no norms of queries and keys")
        self.spec = spec
        self.tensors = tensors
        self.prefix = prefix

    def layer(self, layer: int, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden], the residual stream."""
        x = x + self.attention(layer, self._norm(layer, "input_layernorm", x))
        return x + self.mlp(layer, x)

    def attention(self, layer: int, x: Tensor) -> Tensor:
        """[tokens, inputs] -> [tokens, hidden], with neither norm nor residual."""
        spec, name = self.spec, f"{self.prefix}layers.{layer}.self_attn"
        tokens = len(x)

        def heads(projection: str, num: int) -> Tensor:
            """[num, tokens, head_dim]"""
            y = linear(x, self.tensors, f"{name}.{projection}", spec.qkv_bias)
            return y.view(tokens, num, spec.head_dim).transpose(0, 1)

        positions = torch.arange(tokens, device=x.device)
        q = rotate(heads("q_proj", spec.num_heads), positions, spec.rope)
        k = rotate(heads("k_proj", spec.num_kv_heads), positions, spec.rope)
        v = heads("v_proj", spec.num_kv_heads)
        group = spec.num_heads // spec.num_kv_heads  # query heads that share a key head
        k, v = (y.repeat_interleave(group, dim=0) for y in (k, v))
        distance = positions[:, None] - positions[None, :]
        seen = distance >= 0
        window = spec.windows[layer] if spec.windows else None
        if window is not None:
            seen &= distance < window
        scores = (q @ k.transpose(1, 2)) / math.sqrt(spec.head_dim)
        weights = scores.masked_fill(~seen, -math.inf).softmax(dim=-1)
        joined = (weights @ v).transpose(0, 1).flatten(start_dim=1)
        return linear(joined, self.tensors, f"{name}.o_proj", spec.o_bias)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden], with its norm, without the residual."""
        name, bias = f"{self.prefix}layers.{layer}.mlp", self.spec.mlp_bias
        x = self._norm(layer, "post_attention_layernorm", x)
        gate = linear(x, self.tensors, f"{name}.gate_proj", bias)
        up = linear(x, self.tensors, f"{name}.up_proj", bias)
        return linear(gate * gate.sigmoid() * up, self.tensors, f"{name}.down_proj", bias)

    def _norm(self, layer: int, name: str, x: Tensor) -> Tensor:
        weight = self.tensors[f"{self.prefix}layers.{layer}.{name}.weight"]
        return rms_norm(x, weight, self.spec.rms_norm_eps)


def linear(x: Tensor, tensors: Mapping[str, Tensor], name: str, bias: bool) -> Tensor:
    y = x @ tensors[f"{name}.weight"].T
    return y + tensors[f"{name}.bias"] if bias else y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + eps))


def rotate(x: Tensor, positions: Tensor, rope: RopeSpec) -> Tensor:
    """[heads, tokens, head_dim]: component i turns together with component i + head_dim / 2."""
    frequencies = rope_frequencies(rope, x.shape[-1]).to(x.device)
    angles = positions.float()[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rope_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """[head_dim / 2] float32, in radians by position."""
    base = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if rope.kind == "default":
        return base
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_position / (2 * math.pi / base)  # over the original length
        low, high = rope.low_freq_factor, rope.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - keep) * base / rope.factor + keep * base
    raise ValueError(f"the reference has no RoPE of kind {rope.kind}")


def first_best(logits: Tensor) -> int:
    """The index of the greatest value, the lowest of equals."""
    return int((logits == logits.max()).nonzero()[0])
