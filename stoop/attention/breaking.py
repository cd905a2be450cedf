"""Attention in a piecewise capture: left to Python, on tensors of the graphs around it."""

from torch import Tensor

from stoop.attention.base import AttentionShape, ForwardContext
from stoop.graph.manager import GraphBackend
from stoop.ops.rope import HeadNorms, Rotation


class BreakingContext:
    def __init__(self, backend: GraphBackend) -> None:
        self.backend = backend

    def attend(
        self,
        layer: int,
        shape: AttentionShape,
        qkv: Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
    ) -> Tensor:
        out = qkv.new_empty(qkv.shape[0], shape.num_heads, shape.head_dim)

        def call(context: ForwardContext, qkv: Tensor, positions: Tensor, out: Tensor) -> None:
            turned = Rotation(rotation.table, positions)
            out.copy_(context.attend(layer, shape, qkv, turned, norms))

        self.backend.host_call(call, qkv, rotation.positions, out)
        return out
