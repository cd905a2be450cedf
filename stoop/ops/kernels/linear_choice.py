"""Who multiplies few tokens, and how the product is cut: cuBLAS or our kernel, by shape.

A decision is made once, by measurement (see linear_tuning.py) or else by rules, and holds for the
process: so a replayed graph and an eager call take the same path and give the same bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stoop.ops.kernels.choice import uses_kernels

Kind = Literal["linear", "logits", "add", "norm", "gated"]
HALF = (torch.bfloat16, torch.float16)
BUCKETS = (1, 8, 16, 32, 64)  # a decision holds for all numbers of tokens up to one of these
MAX_TOKENS = BUCKETS[-1]

# When the next kernel may be launched: its programs then ask for their weights and wait.
AT_START, WITH_LAST_LOADS, AFTER_LOOP = range(3)


@dataclass(frozen=True)
class LinearShape:
    """A product: what is fused with it, and its weight.

    linear: x @ weight.T; logits: in float32; add: plus the residual; norm: of the normalised x;
    gated: of that too, then silu(gate) * up
    """

    kind: Kind
    num_outputs: int  # rows of the weight
    num_inputs: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Tiling:
    """How a product is cut.

    rows: of the weight a program, of which half are gates where there are any
    ways: parts of a block of inputs, each multiplied by a warp of its own
    block_k: inputs of a part
    dot: by tensor cores, for at least 8 tokens; else by plain multiplications, for one
    """

    rows: int
    ways: int
    block_k: int
    num_warps: int
    num_stages: int = 1
    signal: int = AT_START
    dot: bool = True

    def block_t(self, num_tokens: int) -> int:
        return max(8, bucket_of(num_tokens)) if self.dot else 1


Decision = Tiling | None  # None: cuBLAS, with norm and activation as kernels of their own
_decisions: dict[tuple[LinearShape, int], Decision] = {}


def bucket_of(num_tokens: int) -> int:
    return next(bucket for bucket in BUCKETS if num_tokens <= bucket)


def uses_skinny(kind: Kind, x: Tensor, weight: Tensor) -> bool:
    """Whether our kernel serves this call. x: [tokens, inputs], weight: [outputs, inputs]"""
    if not (0 < x.shape[0] <= MAX_TOKENS and x.dtype in HALF and uses_kernels(x)):
        return False
    return (
        decide(LinearShape(kind, weight.shape[0], weight.shape[1], x.dtype), x.shape[0]) is not None
    )


def decide(shape: LinearShape, num_tokens: int) -> Decision:
    key = (shape, bucket_of(num_tokens))
    if key not in _decisions:
        _decisions[key] = default(*key)
    return _decisions[key]


def install(decisions: Mapping[tuple[LinearShape, int], Decision]) -> None:
    """Follow these from now on, except where a decision was made already: graphs may hold it."""
    for key, decision in decisions.items():
        _decisions.setdefault(key, decision)


def tiling_for(shape: LinearShape, num_tokens: int) -> Tiling:
    """Also of shapes that cuBLAS is to serve, for whoever asks for our kernel by name."""
    return decide(shape, num_tokens) or ANYWHERE


ANYWHERE = Tiling(32, 1, 64, 1, 4)  # fits all shapes; good for few


def default(shape: LinearShape, bucket: int) -> Decision:
    """What to do unmeasured: as it was best on an H200, for Llama's sizes or SmolLM2's."""
    small = shape.num_inputs <= 1024  # all inputs of a row at once
    if bucket == 1:
        if small:
            return Tiling(8 if shape.num_outputs >= 2**15 else 4, 1, 1024, 4, dot=False)
        return Tiling(2 if shape.num_outputs <= 4096 else 4, 1, 2048, 8, dot=False)
    if bucket == 64 or (bucket > 8 and not small and shape.kind in ("norm", "gated")):
        return None
    if shape.kind in ("linear", "logits") and shape.num_outputs >= 2**14:
        return Tiling(16 if bucket == 8 else 64, 1, 64, 1, 4) if small else Tiling(32, 2, 128, 2, 4)
    if small:
        return _default_of_small(shape, bucket)
    if shape.kind == "gated":
        return Tiling(32, 2, 64, 2, 4, WITH_LAST_LOADS)
    if shape.kind == "norm" and shape.num_outputs > 4096:
        return Tiling(32, 2, 128, 2, 4, AFTER_LOOP)
    if bucket == 8:
        return Tiling(16, 4, 128, 4, 5, WITH_LAST_LOADS)
    return Tiling(32, 4, 64, 4, 5) if shape.num_outputs > 2048 else Tiling(16, 4, 128, 4, 5)


def _default_of_small(shape: LinearShape, bucket: int) -> Tiling:
    if bucket > 8 and shape.kind in ("norm", "gated"):
        return Tiling(32 if shape.kind == "gated" else 16, 1, 64, 1, 5)
    if shape.kind == "gated":
        return Tiling(32, 4, 256, 4)
    return Tiling(8 if bucket == 8 and shape.num_outputs <= 640 else 16, 4, 256, 4)
