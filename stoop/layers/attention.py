"""Self-attention: project, rotate, store, attend, project."""

from collections.abc import Iterator

from torch import Tensor, nn

from stoop.attention.base import AttentionShape, ForwardContext
from stoop.config.schema import ModelSpec
from stoop.layers.linear import FusedLinear
from stoop.layers.norm import RMSNorm
from stoop.layers.weights import WeightSlot, prefixed
from stoop.ops.rope import apply_rope


class Attention(nn.Module):
    """`layer` numbers its KV cache; `in_size` is that of the input where it is not the model's."""

    def __init__(
        self, spec: ModelSpec, layer: int, *, window: int | None, in_size: int | None = None
    ) -> None:
        super().__init__()
        self.layer = layer
        self.q_size = spec.num_heads * spec.head_dim
        self.kv_size = spec.num_kv_heads * spec.head_dim
        self.shape = AttentionShape(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            scale=spec.head_dim**-0.5,
            window=window,
        )
        self.qkv_proj = FusedLinear(
            ("q_proj", "k_proj", "v_proj"),
            in_size or spec.hidden_size,
            (self.q_size, self.kv_size, self.kv_size),
            spec.qkv_bias,
        )
        self.o_proj = FusedLinear(("o_proj",), self.q_size, (spec.hidden_size,), spec.o_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else None

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], ctx: ForwardContext) -> Tensor:
        shape = self.shape
        num_heads, num_kv_heads = shape.num_heads, shape.num_kv_heads
        qkv = self.qkv_proj(x).view(-1, num_heads + 2 * num_kv_heads, shape.head_dim)
        qk, v = qkv.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split((num_heads, num_kv_heads), dim=1)
            q, k = apply_rope(self.q_norm(q), *rotary), apply_rope(self.k_norm(k), *rotary)
        else:
            q, k = apply_rope(qk, *rotary).split((num_heads, num_kv_heads), dim=1)
        out = ctx.attend(self.layer, shape, q, k, v)
        return self.o_proj(out.reshape(-1, self.q_size))

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from self.qkv_proj.weight_slots()
        yield from self.o_proj.weight_slots()
        if self.q_norm is not None and self.k_norm is not None:
            yield from prefixed("q_norm", self.q_norm.weight_slots())
            yield from prefixed("k_norm", self.k_norm.weight_slots())
