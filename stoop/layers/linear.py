"""Linear layers, alone or several of one input fused into one matrix."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from stoop.layers.norm import RMSNorm
from stoop.layers.weights import WeightSlot, empty_parameter
from stoop.ops.linear import linear, linear_add, norm_linear, norm_linear_silu


class FusedLinear(nn.Module):
    """Projections of one input, stacked: one matrix product instead of several."""

    def __init__(
        self, names: Sequence[str], in_size: int, out_sizes: Sequence[int], bias: bool
    ) -> None:
        super().__init__()
        self.names = list(names)
        self.out_sizes = list(out_sizes)
        self.weight = empty_parameter(sum(out_sizes), in_size)
        self.bias = empty_parameter(sum(out_sizes)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def onto(self, x: Tensor, stream: Tensor, *, keep: bool = False, idle: bool = False) -> Tensor:
        """Its outputs added to the residual stream; keep and idle as in `linear_add`."""
        return linear_add(x, self.weight, self.bias, stream, keep=keep, idle=idle)

    def of_norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return norm_linear(x, norm.weight, norm.eps, self.weight, self.bias)

    def gated_of_norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """silu of its first half times the second."""
        return norm_linear_silu(x, norm.weight, norm.eps, self.weight, self.bias)

    def weight_slots(self) -> Iterator[WeightSlot]:
        start = 0
        for name, size in zip(self.names, self.out_sizes, strict=True):
            yield WeightSlot(f"{name}.weight", self.weight.data[start : start + size])
            if self.bias is not None:
                yield WeightSlot(f"{name}.bias", self.bias.data[start : start + size])
            start += size
