"""RMSNorm, alone and side by side."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from stoop.layers.weights import WeightView, empty_parameter, vector_view
from stoop.ops.native.calls import native_norms
from stoop.ops.norm import join_norms, rms_norm, rms_norm_into, take_and_norm, take_rows


class RMSNorm(nn.Module):
    """offset: checkpoints store the weight less this number. The sum has more digits than half
    precisions have, so it is kept in float32.
    packed: the CPU kernels that serve packed weights compute it, in float32
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = empty_parameter(size, wide=bool(offset))
        self.eps = eps
        self.offset = offset
        self.packed = False

    def forward(self, x: Tensor) -> Tensor:
        return join_normed((x,), (self,)) if self.packed else rms_norm(x, self.weight, self.eps)

    def into(self, x: Tensor, out: Tensor) -> None:
        """Write the result into `out`, which has x's shape and may be rows of a buffer."""
        if self.packed:
            native_norms([x], [self.weight], self.eps, out)
        else:
            rms_norm_into(x, self.weight, self.eps, out)

    def take(self, x: Tensor, index: Tensor | None, rows: Tensor) -> Tensor:
        """Copy the rows of x in `index`, or all, to `rows` and zeros after them; returns them
        normalised.

        x: [tokens, n], index: [m] int64, rows: [at least m, n]
        """
        if not self.packed:
            return take_and_norm(x, index, rows, self.weight, self.eps)
        take_rows(x, index, rows)
        taken: Tensor = self(rows[: x.shape[0] if index is None else index.shape[0]])
        return taken

    def weight_views(self) -> Iterator[WeightView]:
        yield vector_view("weight", self.weight)._replace(offset=self.offset)


def join_normed(parts: Sequence[Tensor], norms: Sequence[RMSNorm]) -> Tensor:
    """Normalise each part [tokens, n_i] by its own norm, and put the results side by side."""
    first = norms[0]
    if not first.packed:
        return join_norms(parts, [norm.weight for norm in norms], first.eps)
    out = parts[0].new_empty(parts[0].shape[0], sum(part.shape[1] for part in parts))
    native_norms(list(parts), [norm.weight for norm in norms], first.eps, out)
    return out
