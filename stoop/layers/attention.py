"""Self-attention: project, rotate, store, attend, project."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from stoop.attention.base import AttentionShape, PagedMetadata
from stoop.core.state import PagedState
from stoop.layers.linear import FusedLinear
from stoop.layers.norm import RMSNorm, join_normed
from stoop.layers.stateful import ForwardContext, StatefulLayer
from stoop.layers.weights import WeightView, prefixed
from stoop.ops.kv_store import NO_SCALES
from stoop.ops.norm import mul_sigmoid
from stoop.ops.rope import HeadNorms, Rotation, rotate, rotate_and_store


class AttentionSpec(Protocol):
    """The fields of a family's spec that attention reads."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def rms_norm_eps(self) -> float: ...

    @property
    def qkv_bias(self) -> bool: ...

    @property
    def o_bias(self) -> bool: ...

    @property
    def qk_norm(self) -> bool: ...


class Attention(StatefulLayer):
    """Self-attention with a paged KV cache.

    in_size: of the input, if it is not `hidden_size`; scale: of scores, if it is not
    head_dim**-0.5. Norms of q and k (`spec.qk_norm`) are of each head by itself; a subclass that
    normalises otherwise overrides `head_norms`. norm_offset: of these norms (`RMSNorm`)
    """

    gated = False  # whether `q_proj` also has a gate for every element of the output

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        window: int | None,
        in_size: int | None = None,
        scale: float | None = None,
        norm_offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.q_size = spec.num_heads * spec.head_dim
        self.kv_size = spec.num_kv_heads * spec.head_dim
        scale = spec.head_dim**-0.5 if scale is None else scale
        self.shape = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, scale, window)
        self.kv_scales = NO_SCALES  # of a cache in fp8; any other has none
        self.paged = PagedState(spec.num_kv_heads, spec.head_dim, spec.head_dim, window=window)
        self.qkv_proj = FusedLinear(
            ("q_proj", "k_proj", "v_proj"),
            in_size or spec.hidden_size,
            (self.q_size * (1 + self.gated), self.kv_size, self.kv_size),
            spec.qkv_bias,
        )
        self.o_proj = FusedLinear(("o_proj",), self.q_size, (spec.hidden_size,), spec.o_bias)
        norm = (spec.head_dim, spec.rms_norm_eps, norm_offset)
        self.q_norm = RMSNorm(*norm) if spec.qk_norm else None
        self.k_norm = RMSNorm(*norm) if spec.qk_norm else None

    @property
    def state(self) -> PagedState:
        return self.paged

    @property
    def head_norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)

    def forward(
        self,
        x: Tensor,
        norm: RMSNorm | None,
        stream: Tensor,
        rotation: Rotation,
        ctx: ForwardContext,
        keep: bool = False,
    ) -> Tensor:
        """Add the attention of `x`, normalised by `norm`, to the stream.

        keep: the caller still needs the input stream, so it must not be overwritten
        """
        out = self._attend(x, norm, rotation, ctx)
        return self.o_proj.onto(out, stream, keep=keep, prefetch_weight=not self.gated)

    def branch(self, x: Tensor, norm: RMSNorm, rotation: Rotation, ctx: ForwardContext) -> Tensor:
        """The output alone, for families that scale it."""
        return self.o_proj(self._attend(x, norm, rotation, ctx))

    def _attend(
        self, x: Tensor, norm: RMSNorm | None, rotation: Rotation, ctx: ForwardContext
    ) -> Tensor:
        shape = self.shape
        qkv = self.qkv_proj(x) if norm is None else self.qkv_proj.of_norm(x, norm)
        qkv = qkv.view(-1, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        return ctx.run(self, qkv, rotation).reshape(-1, self.q_size)

    def core(
        self, cache: Tensor, metadata: PagedMetadata, qkv: Tensor, rotation: Rotation
    ) -> Tensor:
        """Rotate queries and keys, store keys and values, and attend.

        qkv: [tokens, heads + 2 * kv_heads, head_dim]; returns [tokens, heads, head_dim]
        """
        kv_heads, slots = self.shape.num_kv_heads, metadata.slot_mapping
        norms, scales = self.head_norms, self.kv_scales
        if self._packed_norms:
            qkv, norms = self._normed(qkv), None
        q = rotate_and_store(qkv, kv_heads, rotation, norms, cache, slots, scales)
        if scales == NO_SCALES:
            return metadata.attend(self.shape, q, cache)
        # The scale of keys is undone in the scores, that of values in the output.
        scale = self.shape.scale * scales.k
        scaled = replace(self.shape, scale=scale, value_scale=scales.v)
        return metadata.attend(scaled, q, cache)

    @property
    def _packed_norms(self) -> bool:
        """Whether the kernels that run all layers in one call compute these norms elsewhere, too:
        their sums are then of the same order."""
        return type(self) is Attention and self.q_norm is not None and self.q_norm.packed

    def _normed(self, qkv: Tensor) -> Tensor:
        """qkv with the heads of q and k normalised"""
        assert self.q_norm is not None and self.k_norm is not None
        num_heads, kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        *heads, values = qkv.split([1] * (num_heads + kv_heads) + [kv_heads], dim=1)
        norms = [self.q_norm] * num_heads + [self.k_norm] * kv_heads
        joined = join_normed([head.squeeze(1) for head in heads], norms)
        return torch.cat((joined.view(-1, len(norms), self.shape.head_dim), values), dim=1)

    def empty_output(self, qkv: Tensor, rotation: Rotation) -> Tensor:
        return qkv.new_empty(qkv.shape[0], self.shape.num_heads, self.shape.head_dim)

    def rotated(self, qkv: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, for a context without a cache."""
        return rotate(qkv, self.shape.num_kv_heads, rotation, self.head_norms)

    def weight_views(self) -> Iterator[WeightView]:
        yield from self.qkv_proj.weight_views()
        yield from self.o_proj.weight_views()
        if self.q_norm is not None and self.k_norm is not None:
            yield from prefixed("q_norm", self.q_norm.weight_views())
            yield from prefixed("k_norm", self.k_norm.weight_views())


class GatedAttention(Attention):
    """Attention whose output is multiplied by a sigmoid, element by element.

    A checkpoint's `q_proj` has each head's queries and then its gates. Here the gates of all heads
    come first, so that queries, keys and values are neighbours.
    """

    gated = True

    def _attend(
        self, x: Tensor, norm: RMSNorm | None, rotation: Rotation, ctx: ForwardContext
    ) -> Tensor:
        projected = self.qkv_proj(x) if norm is None else self.qkv_proj.of_norm(x, norm)
        gate, qkv = projected[:, : self.q_size], projected[:, self.q_size :]
        out = ctx.run(self, qkv.unflatten(1, (-1, self.shape.head_dim)), rotation)
        return mul_sigmoid(out.reshape(-1, self.q_size), gate)

    def weight_views(self) -> Iterator[WeightView]:
        heads, head_dim = self.shape.num_heads, self.shape.head_dim
        place = torch.arange(2 * self.q_size, device="cpu").view(heads, 2, head_dim)
        order = place.flip(1).transpose(0, 1).flatten()
        for view in super().weight_views():
            yield view._replace(order=order) if view.name.startswith("q_proj.") else view
