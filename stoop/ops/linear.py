"""GEMMs, and what is fused with them in a decoder layer.

Each takes a `Weight`, whose scheme does the work: see ops/weight.py for the protocol, and
ops/dense.py and ops/packed.py for the schemes.
"""

from torch import Tensor

from stoop.ops.weight import Weight


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias. x: [tokens, inputs], weight: [outputs, inputs]"""
    return weight.scheme.linear(x, weight, bias)


def logits_of(x: Tensor, weight: Weight) -> Tensor:
    """x @ weight.T in float32 or better."""
    return weight.scheme.logits(x, weight)


def linear_add(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    stream: Tensor,
    *,
    keep: bool = False,
    prefetch_weight: bool = False,
) -> Tensor:
    """stream + x @ weight.T + bias

    stream: [tokens, outputs]; keep: it must not be overwritten with the sum
    prefetch_weight: load the weight before x is ready, since memory is mostly idle until then
    """
    return weight.scheme.linear_add(
        x, weight, bias, stream, keep=keep, prefetch_weight=prefetch_weight
    )


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Weight, bias: Tensor | None
) -> Tensor:
    """rms_norm(x) @ weight.T + bias"""
    return weight.scheme.norm_linear(x, norm_weight, eps, weight, bias)


def norm_linear_silu(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Weight, bias: Tensor | None
) -> Tensor:
    """silu(gate) * up, with [gate, up] = rms_norm(x) @ weight.T + bias

    weight: [2n, inputs], bias: [2n]; returns [tokens, n]
    """
    return weight.scheme.norm_linear_silu(x, norm_weight, eps, weight, bias)
