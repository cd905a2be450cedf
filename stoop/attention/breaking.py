"""Attention in a piecewise capture: left to Python, on tensors of the graphs around it."""

from torch import Tensor

from stoop.attention.base import AttentionShape, ForwardContext
from stoop.graph.manager import GraphBackend


class BreakingContext:
    def __init__(self, backend: GraphBackend) -> None:
        self.backend = backend

    def attend(self, layer: int, shape: AttentionShape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(q.shape)

        def call(context: ForwardContext, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
            out.copy_(context.attend(layer, shape, q, k, v))

        self.backend.host_call(call, q, k, v, out)
        return out
