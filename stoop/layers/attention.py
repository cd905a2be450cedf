"""Self-attention: project, rotate, store, attend, project."""

from collections.abc import Iterator

from torch import Tensor, nn

from stoop.attention.base import AttentionShape, ForwardContext
from stoop.config.schema import AttentionSpec
from stoop.layers.linear import FusedLinear
from stoop.layers.norm import RMSNorm
from stoop.layers.weights import WeightSlot, prefixed
from stoop.ops.rope import HeadNorms, Rotation


class Attention(nn.Module):
    """`layer` numbers its KV cache; `in_size` is that of the input where it is not the model's."""

    def __init__(
        self, spec: AttentionSpec, layer: int, *, window: int | None, in_size: int | None = None
    ) -> None:
        super().__init__()
        self.layer = layer
        self.q_size = spec.num_heads * spec.head_dim
        self.kv_size = spec.num_kv_heads * spec.head_dim
        self.shape = AttentionShape.of(spec, window)
        self.qkv_proj = FusedLinear(
            ("q_proj", "k_proj", "v_proj"),
            in_size or spec.hidden_size,
            (self.q_size, self.kv_size, self.kv_size),
            spec.qkv_bias,
        )
        self.o_proj = FusedLinear(("o_proj",), self.q_size, (spec.hidden_size,), spec.o_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else None

    def forward(
        self,
        x: Tensor,
        norm: RMSNorm | None,
        stream: Tensor,
        rotation: Rotation,
        ctx: ForwardContext,
        keep: bool = False,
    ) -> Tensor:
        """The stream with what `x`, normalised by `norm`, attends to.

        keep: the stream is used later, too, so its memory must not be taken
        """
        shape = self.shape
        qkv = self.qkv_proj(x) if norm is None else self.qkv_proj.of_norm(x, norm)
        qkv = qkv.view(-1, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        out = ctx.attend(self.layer, shape, qkv, rotation, norms)
        return self.o_proj.onto(
            out.reshape(-1, self.q_size), stream, keep=keep, prefetch_weight=True
        )

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from self.qkv_proj.weight_slots()
        yield from self.o_proj.weight_slots()
        if self.q_norm is not None and self.k_norm is not None:
            yield from prefixed("q_norm", self.q_norm.weight_slots())
            yield from prefixed("k_norm", self.k_norm.weight_slots())
