"""Which GEMM serves small batches, cuBLAS or our kernel, and with which tiling, by shape.

A decision is made once per process, by measurement (linear_tuning.py) or else by rules. So a
replayed graph and an eager call take the same path and give the same bits.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stoop.ops.kernels.choice import has_large_tiles, uses_kernels

Kind = Literal["linear", "logits", "add", "norm", "gated"]
HALF = (torch.bfloat16, torch.float16)
# A decision holds for all numbers of tokens in a bucket: up to this one, above the one before.
BUCKETS = (1, 4, 8, 16, 32, 64, 128)
MAX_TOKENS = BUCKETS[-1]
MAX_TOKENS_WITHOUT_DOT = 4  # up to which plain multiplications may serve
MAX_NORMED = 32  # tokens per program if it norms them; "gated" serves more with the norm outside

# When the next kernel may be launched: its programs then prefetch their weights and wait.
AT_START, WITH_LAST_LOADS, AFTER_LOOP = range(3)


@dataclass(frozen=True)
class LinearShape:
    """A GEMM: what is fused with it, and the shape of its weight.

    linear: x @ weight.T; logits: the same in float32; add: plus the residual; norm: with x
    normalised; gated: with x normalised, then silu(gate) * up, which has its own kernel for many
    tokens (gated.py)
    """

    kind: Kind
    num_outputs: int  # rows of the weight
    num_inputs: int
    dtype: torch.dtype


@dataclass(frozen=True)
class GemmTiling:
    """Tile sizes and launch options of a GEMM kernel.

    rows: rows of the weight per program; for "gated", half of them are gates
    ways: parts of a block of inputs, each multiplied by its own warp
    block_k: inputs per part
    dot: use tensor cores, padded to at least 8 tokens; else plain multiplications, for a few tokens
    tokens: tokens per program, 8, 16 or 32; 0 for all, so that the weight is read only once
    """

    rows: int
    ways: int
    block_k: int
    num_warps: int
    num_stages: int = 1
    signal: int = AT_START
    dot: bool = True
    tokens: int = 0

    def block_t(self, num_tokens: int) -> int:
        """Tokens per program in a batch of `num_tokens`."""
        if self.tokens:
            return self.tokens
        return max(8, bucket_of(num_tokens)) if self.dot else bucket_of(num_tokens)

    def norms(self, num_tokens: int) -> bool:
        """Whether a program can norm its tokens itself."""
        return self.block_t(num_tokens) <= MAX_NORMED


Decision = GemmTiling | None  # None: cuBLAS, with norm and activation as kernels of their own
_decisions: dict[tuple[LinearShape, int], Decision] = {}
_recorded: dict[LinearShape, None] | None = None


@contextmanager
def recording() -> Iterator[dict[LinearShape, None]]:
    """Record which GEMMs are called; cuBLAS serves them, and nothing is decided."""
    global _recorded
    _recorded = {}
    try:
        yield _recorded
    finally:
        _recorded = None


def bucket_of(num_tokens: int) -> int:
    return next(bucket for bucket in BUCKETS if num_tokens <= bucket)


def uses_skinny(kind: Kind, x: Tensor, weight: Tensor) -> bool:
    """Whether our kernel serves this call. x: [tokens, inputs], weight: [outputs, inputs]"""
    if x.dtype not in HALF or not uses_kernels(x):
        return False
    # A large hidden state times the norm's weight, before it is scaled, overflows float16. (This
    # includes tilings with the norm outside: cuBLAS serves all of float16.)
    if kind in _NORMS and x.dtype == torch.float16:
        return False
    shape = LinearShape(kind, weight.shape[0], weight.shape[1], x.dtype)
    if _recorded is not None:
        _recorded[shape] = None
        return False
    few = 0 < x.shape[0] <= MAX_TOKENS and x.is_contiguous()
    if not few:
        return False
    if not has_large_tiles(x.device):  # the rules assume more shared memory than it has
        return _decisions.get((shape, bucket_of(x.shape[0]))) is not None
    return decide(shape, x.shape[0]) is not None


def decide(shape: LinearShape, num_tokens: int) -> Decision:
    key = (shape, bucket_of(num_tokens))
    if key not in _decisions:
        _decisions[key] = default(*key)
    return _decisions[key]


def install(decisions: Mapping[tuple[LinearShape, int], Decision]) -> None:
    """Use these decisions, except where one was made already: graphs may have captured it."""
    for key, decision in decisions.items():
        _decisions.setdefault(key, decision)


def tiling_for(shape: LinearShape, num_tokens: int) -> GemmTiling:
    """The tiling for our kernel, also for shapes that cuBLAS would serve."""
    return decide(shape, num_tokens) or FALLBACK_TILING


FALLBACK_TILING = GemmTiling(32, 1, 64, 1, 4)  # fits all shapes, though fast for few of them


def default(shape: LinearShape, bucket: int) -> Decision:
    """The decision without measurements: the first rule that fits. They were tuned on an H200."""
    for kinds, buckets, max_inputs, max_outputs, decision in _RULES:
        fits = shape.num_inputs <= max_inputs and shape.num_outputs <= max_outputs
        if fits and shape.kind in kinds and bucket in buckets:
            return decision
    many_gated = shape.kind == "gated" and bucket > MAX_NORMED
    return _gated_of_many(shape, bucket) if many_gated else None


def _gated_of_many(shape: LinearShape, bucket: int) -> Decision:
    """One program per SM, or two for half as many tokens; cuBLAS if too many SMs would be idle."""
    num_programs = -(-shape.num_outputs // 256)
    capacity = -(-num_programs // H200_SMS) * H200_SMS
    if shape.num_inputs < 2048 or num_programs < 0.8 * capacity:
        return None
    return GemmTiling(128 if bucket == 64 else 256, 1, 64, 8, 4)


_ANY = 2**31
H200_SMS = 132
_NORMS = ("norm", "gated")
_PLAIN = ("linear", "add", "logits")
_RULES: tuple[tuple[tuple[str, ...], tuple[int, ...], int, int, Decision], ...] = (
    # kinds, buckets of tokens, most inputs, most outputs, tiling
    (("norm",), (1,), 1024, _ANY, GemmTiling(8, 1, 1024, 4, dot=False)),
    (("gated",), (1,), 1024, 4096, GemmTiling(4, 1, 1024, 4, dot=False)),
    (("gated",), (1,), 1024, 2**14, GemmTiling(4, 1, 1024, 2, dot=False)),
    (_PLAIN, (1,), 1024, 2**14, GemmTiling(4, 1, 1024, 4, dot=False)),
    ((*_PLAIN, "gated"), (1,), 1024, _ANY, GemmTiling(8, 1, 1024, 4, dot=False)),
    (_NORMS, (1,), _ANY, _ANY, GemmTiling(8, 1, 2048, 8, dot=False)),
    (_PLAIN, (1,), 2048, 1024, GemmTiling(2, 1, 2048, 8, dot=False)),
    (_PLAIN, (1,), 4096, 1024, GemmTiling(4, 1, 4096, 8, dot=False)),
    (_PLAIN, (1,), _ANY, _ANY, GemmTiling(2, 1, 2048, 8, dot=False)),
    # Small models. They are bound by latency: what is read more than once is in a cache.
    (("norm",), (16, 32), 1024, 1024, GemmTiling(16, 4, 256, 4, tokens=8)),
    (("norm",), (64,), 1024, 1024, GemmTiling(16, 4, 256, 4, tokens=16)),
    (("norm",), (128,), 1024, 1024, GemmTiling(32, 1, 64, 1, 5, tokens=16)),
    (("gated",), (32,), 1024, 4096, GemmTiling(32, 4, 256, 4, tokens=16)),
    (("gated",), (64,), 1024, 4096, GemmTiling(32, 1, 64, 1, 5, tokens=16)),
    (_PLAIN, (16,), 1024, 640, GemmTiling(16, 4, 256, 4, tokens=8)),
    (_PLAIN, (32, 64), 1024, 640, GemmTiling(32, 4, 256, 4, tokens=16)),
    (_PLAIN, (16,), 2047, 640, GemmTiling(16, 4, 128, 4, 4, tokens=8)),
    (_PLAIN, (64,), 2047, 640, GemmTiling(16, 4, 128, 4, 4, tokens=16)),
    (_PLAIN, (4, 8), 1024, 640, GemmTiling(8, 4, 256, 4)),
    (("norm",), (4, 8), 1024, 4096, GemmTiling(16, 4, 256, 4)),
    (("norm",), (4, 8), 1024, 6144, GemmTiling(16, 2, 128, 2, 4)),
    (("norm",), (4, 8), 1024, _ANY, GemmTiling(32, 2, 128, 2, 4)),
    ((*_PLAIN, "norm"), (4, 8, 16, 32), 1024, 2**14, GemmTiling(16, 4, 256, 4)),
    (("gated",), (4, 8), 1024, 4096, GemmTiling(32, 4, 256, 4)),
    (("gated",), (4, 8), 1024, _ANY, GemmTiling(32, 2, 128, 2, 4)),
    (("gated",), (16,), 1024, _ANY, GemmTiling(32, 1, 64, 1, 5)),
    (_PLAIN, (4, 8), 1024, _ANY, GemmTiling(16, 1, 64, 1, 5)),
    (_PLAIN, (16, 32), 1024, _ANY, GemmTiling(64, 1, 64, 1, 4)),
    (_PLAIN, (4, 8, 16, 32), 2047, 2**14, GemmTiling(16, 4, 128, 4, 4)),
    # Large models.
    (("gated",), (4, 8), _ANY, _ANY, GemmTiling(32, 2, 64, 2, 4, WITH_LAST_LOADS)),
    (("norm",), (4, 8), _ANY, 4096, GemmTiling(32, 2, 128, 2, 4, WITH_LAST_LOADS)),
    (("norm",), (4, 8), _ANY, _ANY, GemmTiling(32, 2, 128, 2, 4, AFTER_LOOP)),
    (_PLAIN, (4, 8), 2048, 1024, GemmTiling(8, 4, 128, 4, 4, WITH_LAST_LOADS)),
    (_PLAIN, (4, 8), 4096, 1024, GemmTiling(8, 4, 128, 4, 6, WITH_LAST_LOADS)),
    (_PLAIN, (4, 8), _ANY, 2048, GemmTiling(16, 4, 128, 4, 5, WITH_LAST_LOADS)),
    (_PLAIN, (4, 8), _ANY, 4096, GemmTiling(32, 4, 128, 4, 4)),
    (_PLAIN, (4, 8), _ANY, _ANY, GemmTiling(32, 2, 128, 2, 4, AFTER_LOOP)),
    (_PLAIN, (16, 32), _ANY, 2048, GemmTiling(16, 4, 128, 4, 5)),
    (("add",), (16,), _ANY, _ANY, GemmTiling(16, 4, 128, 4, 5)),
    (("add",), (32,), _ANY, _ANY, GemmTiling(32, 4, 64, 4, 5)),
    (("logits",), (32,), _ANY, 2**16, None),
    (("logits",), (16, 32), _ANY, _ANY, GemmTiling(64, 2, 64, 2, 4)),
    (("logits",), (64,), _ANY, _ANY, GemmTiling(64, 1, 64, 1, 4)),
)
