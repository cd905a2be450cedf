"""Choose the GEMM for small batches by measurement.

Every candidate is timed in a graph, over more copies of the weight than the L2 cache can hold: the
weights come from memory, as in a decode step. Results are kept in the cache folder, for this GPU,
these libraries and these kernels.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from stoop.config.environ import cache_dir
from stoop.ops.kernels import gated, launch, linear, norm
from stoop.ops.kernels.gated import launch_gated
from stoop.ops.kernels.linear_choice import (
    AFTER_LOOP,
    AT_START,
    MAX_NORMED,
    MAX_TOKENS_WITHOUT_DOT,
    WITH_LAST_LOADS,
    Decision,
    GemmTiling,
    LinearShape,
    bucket_of,
    install,
)

MANY_BYTES = 192 * 2**20  # of weights: more than three times the L2 cache of an H200
MAX_COPIES = 192
LAUNCHES = 16  # at least, in one graph, or the start of the graph would dominate
REPEATS = 5
EPS = 1e-5

Key = tuple[LinearShape, int]


# Arguments of `GemmTiling` without the signal: candidates that were fastest somewhere on an H200.
_PLAIN = (
    (4, 1, 1024, 4), (8, 1, 1024, 4), (2, 1, 2048, 8), (4, 1, 2048, 8), (8, 1, 2048, 8),
    (2, 1, 2048, 4),
)  # fmt: skip
_PLAIN_OF_FEW = (
    (2, 1, 1024, 4), (4, 1, 1024, 4), (4, 1, 1024, 8), (8, 1, 1024, 8), (2, 1, 2048, 8),
    (4, 1, 2048, 8), (4, 1, 512, 4), (8, 1, 512, 4),
)  # fmt: skip
_WHOLE = ((8, 4, 256, 4), (16, 4, 256, 4), (32, 4, 256, 4), (16, 8, 256, 8))
_SHORT = (
    (16, 4, 64, 4, 4), (16, 4, 128, 4, 4), (16, 1, 64, 1, 5), (32, 1, 64, 1, 5), (64, 1, 64, 1, 4),
)  # fmt: skip
_LONG = (
    (16, 4, 128, 4, 5), (32, 4, 128, 4, 4), (32, 2, 128, 2, 4), (32, 2, 64, 2, 4),
)  # fmt: skip
# With 8 or 16 tokens per program.
_IN_PARTS = (
    (16, 4, 256, 4, 1), (32, 4, 256, 4, 1), (16, 4, 128, 4, 4), (32, 1, 64, 1, 5),
)  # fmt: skip
_GATED_OF_MANY = (
    (256, 1, 64, 8, 4), (128, 1, 64, 8, 4), (128, 1, 64, 4, 3), (64, 1, 64, 4, 4),
    (64, 1, 128, 4, 3),
)  # fmt: skip
_LONG_OF_MANY = ((32, 4, 64, 4, 5), (64, 2, 64, 2, 4), (64, 1, 64, 1, 4), (16, 4, 128, 4, 5))


def candidates(shape: LinearShape, bucket: int) -> list[GemmTiling]:
    """The tilings worth a trial for a shape and a bucket of tokens."""
    plain = [GemmTiling(*t, dot=False) for t in (_PLAIN if bucket == 1 else _PLAIN_OF_FEW)]
    if bucket == 1:
        return plain
    parts = []
    if shape.num_inputs < 2048 and bucket > 8 and shape.kind != "logits":
        parts = [
            GemmTiling(*t, tokens=tokens)
            for tokens in (8, 16)
            for t in _IN_PARTS
            if tokens < bucket and (t[4] > 1 or t[1] * t[2] >= shape.num_inputs)
        ]
    if bucket > MAX_NORMED and shape.kind == "gated":
        return parts + [GemmTiling(*t) for t in _GATED_OF_MANY]
    if bucket > 64:
        return parts  # otherwise cuBLAS fills a GPU with this many tokens
    if bucket > MAX_NORMED and shape.kind not in ("linear", "logits"):
        return parts  # with all tokens in a program, the fused parts do not fit in registers
    whole = [GemmTiling(*t) for t in _WHOLE if t[1] * t[2] >= shape.num_inputs and bucket <= 32]
    if bucket <= MAX_TOKENS_WITHOUT_DOT:
        whole = plain + whole
    if shape.num_inputs < 2048:
        return parts + whole + [GemmTiling(*t) for t in _SHORT]
    if bucket > 8:
        return whole + [GemmTiling(*t) for t in _LONG_OF_MANY]
    signals = (AT_START, WITH_LAST_LOADS, AFTER_LOOP)
    return whole + [GemmTiling(*t, signal) for t in _LONG for signal in signals]


class Trial:
    """Times one GEMM over many copies of its weight."""

    def __init__(self, shape: LinearShape, device: torch.device) -> None:
        size = shape.num_outputs * shape.num_inputs
        num_copies = min(MAX_COPIES, -(-MANY_BYTES // (2 * size)))
        options: Any = {"dtype": shape.dtype, "device": device}
        self.shape = shape
        self.weights = torch.empty(num_copies, shape.num_outputs, shape.num_inputs, **options)
        self.weights.normal_(std=shape.num_inputs**-0.5)
        self.norm = torch.ones(shape.num_inputs, **options)

    def times(self, num_tokens: int, found: Iterable[Decision]) -> Iterator[tuple[float, Decision]]:
        """Microseconds per call, for those tilings that the device can run."""
        call = self.call(num_tokens)
        num_calls = max(LAUNCHES, len(self.weights))
        for decision in found:

            def run(decision: Decision = decision) -> None:
                for index in range(num_calls):
                    call(self.weights[index % len(self.weights)], decision)

            try:
                yield 1e3 * time_graph(run) / num_calls, decision
            except triton.runtime.errors.OutOfResources:
                continue

    def call(self, num_tokens: int) -> Callable[[Tensor, Decision], None]:
        """The GEMM with one weight, as ops/linear.py would run it under a decision.

        Calls follow one another, so that memory is not idle before each.
        """
        kind = self.shape.kind
        options: Any = {"dtype": self.shape.dtype, "device": self.weights.device}
        x = torch.randn(num_tokens, self.shape.num_inputs, **options)
        num_outputs = self.shape.num_outputs // (2 if kind == "gated" else 1)
        residual = torch.randn(num_tokens, num_outputs, **options)
        out = torch.empty_like(residual, dtype=torch.float32 if kind == "logits" else None)

        def by_kernel(weight: Tensor, tiling: GemmTiling) -> None:
            if kind == "gated" and not tiling.norms(num_tokens):
                launch_gated(norm.rms_norm(x, self.norm, EPS), weight, None, out, tiling)
                return
            linear.launch(
                x,
                weight,
                out,
                tiling,
                norm=(self.norm if kind in ("norm", "gated") else None, EPS),
                residual=residual if kind == "add" else None,
                gated=kind == "gated",
            )

        def by_cublas(weight: Tensor) -> None:
            if kind == "add":
                residual.addmm_(x, weight.t())
                return
            if kind == "logits":
                torch.mm(x, weight.t(), out_dtype=torch.float32)
                return
            y = F.linear(
                norm.rms_norm(x, self.norm, EPS) if kind in ("norm", "gated") else x, weight
            )
            if kind == "gated":
                norm.silu_and_mul(y)

        return lambda weight, tiling: by_kernel(weight, tiling) if tiling else by_cublas(weight)


def time_graph(function: Callable[[], object], repeats: int = REPEATS) -> float:
    """The median time of a replay, in milliseconds."""
    function()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


@dataclass(frozen=True)
class Measured:
    """The decision for one shape and bucket of tokens; times in microseconds."""

    shape: LinearShape
    bucket: int
    decision: Decision
    time: float
    cublas_time: float


def tune(
    shapes: Iterable[LinearShape], tokens: Sequence[int], device: torch.device
) -> Iterator[Measured]:
    """Measure shapes that the cache folder does not know yet, for batches of `tokens` tokens.

    The results serve engines that start later.
    """
    path = _path(device)
    buckets = sorted({bucket_of(n) for n in tokens})
    for shape in dict.fromkeys(shapes):
        missing = [bucket for bucket in buckets if (shape, bucket) not in load(path)]
        if not missing:
            continue
        trial = Trial(shape, device)
        for bucket in missing:
            times = list(trial.times(bucket, [None, *candidates(shape, bucket)]))
            best, decision = min(times, key=lambda pair: pair[0])
            save(path, load(path) | {(shape, bucket): decision})
            yield Measured(shape, bucket, decision, best, times[0][0])
        del trial


def follow_measured(device: torch.device) -> int:
    """Use what was measured on this GPU; returns the number of decisions.

    Call this before the first GEMM.
    """
    known = load(_path(device))
    install(known)
    return len(known)


def _path(device: torch.device) -> Path:
    modules = (launch, linear, gated)
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in modules)
    facts = (torch.cuda.get_device_name(device), torch.__version__, triton.__version__)
    name = hashlib.sha256(repr(facts).encode() + sources).hexdigest()[:16]
    return cache_dir() / "linear" / f"{name}.json"


def load(path: Path) -> dict[Key, Decision]:
    try:
        rows = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {
        (LinearShape(kind, outputs, inputs, getattr(torch, dtype)), bucket): tiling
        and GemmTiling(**tiling)
        for (kind, outputs, inputs, dtype), bucket, tiling in rows
    }


def save(path: Path, decisions: dict[Key, Decision]) -> None:
    rows = [
        ((s.kind, s.num_outputs, s.num_inputs, str(s.dtype).removeprefix("torch.")), bucket,
         tiling and asdict(tiling))
        for (s, bucket), tiling in decisions.items()
    ]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(rows))
    temporary.replace(path)  # atomic, if several processes write it
