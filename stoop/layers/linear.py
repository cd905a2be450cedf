"""Linear layers, single or fused: several projections of one input in one matrix."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from stoop.layers.norm import RMSNorm
from stoop.layers.weights import MatrixLayer, WeightView, empty_parameter, vector_view
from stoop.ops.linear import linear, linear_add, norm_linear, norm_linear_silu


class FusedLinear(MatrixLayer):
    """Projections of one input, stacked into one matrix and computed by one GEMM."""

    weight: nn.Parameter

    def __init__(
        self, names: Sequence[str], in_size: int, out_sizes: Sequence[int], bias: bool
    ) -> None:
        super().__init__("weight", sum(out_sizes), in_size)
        self.names = list(names)
        self.out_sizes = list(out_sizes)
        self.bias = empty_parameter(sum(out_sizes)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.matrix, self.bias)

    def onto(
        self, x: Tensor, stream: Tensor, *, keep: bool = False, prefetch_weight: bool = False
    ) -> Tensor:
        """Add the outputs to the residual stream. Options are those of `linear_add`."""
        options = {"keep": keep, "prefetch_weight": prefetch_weight}
        return linear_add(x, self.matrix, self.bias, stream, **options)

    def of_norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return norm_linear(x, norm.weight, norm.eps, self.matrix, self.bias)

    def gated_of_norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """silu of the first half of the outputs, times the second half."""
        return norm_linear_silu(x, norm.weight, norm.eps, self.matrix, self.bias)

    def weight_views(self) -> Iterator[WeightView]:
        start = 0
        for name, size in zip(self.names, self.out_sizes, strict=True):
            yield self._view(f"{name}.weight", start, size)
            if self.bias is not None:
                yield vector_view(f"{name}.bias", self.bias[start : start + size])
            start += size
