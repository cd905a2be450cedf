"""RMSNorm."""

from collections.abc import Iterator

from torch import Tensor, nn

from stoop.layers.weights import WeightView, empty_parameter, vector_view
from stoop.ops.norm import rms_norm


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def weight_views(self) -> Iterator[WeightView]:
        yield vector_view("weight", self.weight)
