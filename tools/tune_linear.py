"""Times small-batch GEMMs with cuBLAS and with stoop's kernels, and whole models' linear layers.

On a CUDA device: PYTHONPATH=. python tools/tune_linear.py
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stoop.ops.kernels import linear, norm
from stoop.ops.kernels.linear_choice import (
    Decision,
    GemmTiling,
    Kind,
    LinearShape,
    bucket_of,
    install,
    uses_skinny,
)
from stoop.ops.kernels.linear_tuning import EPS, Trial, candidates, time_graph

BF16 = torch.bfloat16
TOKENS = (1, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Model:
    layers: int
    hidden: int
    qkv: int
    inner: int
    vocabulary: int

    def shapes(self) -> Iterator[LinearShape]:
        yield LinearShape("norm", self.qkv, self.hidden, BF16)
        yield LinearShape("add", self.hidden, self.hidden, BF16)
        yield LinearShape("gated", 2 * self.inner, self.hidden, BF16)
        yield LinearShape("add", self.hidden, self.inner, BF16)
        yield LinearShape("logits", self.vocabulary, self.hidden, BF16)


MODELS = {
    "SmolLM2-135M": Model(30, 576, 960, 1536, 49152),
    "Llama-1B": Model(16, 2048, 3072, 8192, 128256),
    "Llama-8B": Model(32, 4096, 6144, 14336, 128256),
}
HEADS = {  # EAGLE-3: qkv of two concatenated inputs, fc of three taps, logits of 32000 tokens
    "EAGLE-3 of 1B": ((3072, 4096), (2048, 6144), (32000, 2048)),
    "EAGLE-3 of 8B": ((6144, 8192), (4096, 12288), (32000, 4096)),
}


def all_shapes() -> dict[str, list[LinearShape]]:
    shapes = {name: list(model.shapes()) for name, model in MODELS.items()}
    for name, sizes in HEADS.items():
        kinds: tuple[Kind, ...] = ("linear", "linear", "logits")
        shapes[name] = [LinearShape(k, *size, BF16) for k, size in zip(kinds, sizes, strict=True)]
    return shapes


def compile_only(job: tuple[LinearShape, int, GemmTiling]) -> None:
    """Compile a kernel into Triton's disk cache, in a separate process."""
    from triton.runtime.jit import JITFunction

    if not hasattr(JITFunction, "launch_too"):
        JITFunction.launch_too = run = JITFunction.run
        JITFunction.run = lambda *args, **options: run(*args, **{**options, "warmup": True})
    shape, bucket, tiling = job
    trial = Trial(shape, torch.device("meta"))
    trial.call(bucket)(trial.weights[0], tiling)


def precompile(shapes: list[LinearShape], buckets: list[int]) -> None:
    jobs = {
        (s.kind, s.num_inputs, b, t, s.num_outputs > 2**14): (s, b, t)
        for s in shapes
        for b in buckets
        for t in candidates(s, b)
    }
    with multiprocessing.get_context("fork").Pool(16) as pool:
        pool.map(compile_only, list(jobs.values()), chunksize=4)


def measure(shape: LinearShape, bucket: int, trial: Trial) -> dict[str, object]:
    found = sorted(
        trial.times(bucket, [None, *candidates(shape, bucket)]), key=lambda pair: pair[0]
    )
    cublas = next(us for us, tiling in found if tiling is None)
    ours, tiling = next((pair for pair in found if pair[1] is not None), (float("inf"), None))
    floor = shape.num_outputs * shape.num_inputs * 2 / 4.55e6
    size = f"{shape.num_outputs}x{shape.num_inputs}"
    print(
        f"{shape.kind:6} {size:>12} {bucket:3} tokens: floor {floor:6.2f}  cuBLAS {cublas:6.2f}  "
        f"ours {ours:6.2f} us  {tiling and astuple(tiling)}"
    )
    install({(shape, bucket): tiling if ours <= cublas else None})
    return {"kind": shape.kind, "size": size, "tokens": bucket, "cublas": cublas, "ours": ours,
            "tiling": tiling and astuple(tiling)}  # fmt: skip


class Chain:
    """All linear layers of a model with norms, gates and residuals, but without attention."""

    def __init__(self, model: Model) -> None:
        def draw(rows: int, inputs: int, copies: int = model.layers) -> Tensor:
            weight = torch.empty(copies, rows, inputs, dtype=BF16, device="cuda")
            return weight.normal_(std=inputs**-0.5)

        hidden, inner = model.hidden, model.inner
        self.qkv, self.o = draw(model.qkv, hidden), draw(hidden, hidden)
        self.gate_up, self.down = draw(2 * inner, hidden), draw(hidden, inner)
        (self.head,) = draw(model.vocabulary, hidden, 1)
        self.norm = torch.ones(hidden, dtype=BF16, device="cuda")

    def milliseconds(self, num_tokens: int, *, fused: bool) -> float:
        stream = torch.randn(num_tokens, len(self.norm), device="cuda").to(BF16)
        attended = torch.randn_like(stream)
        return time_graph(lambda: (self.fused if fused else self.plain)(stream, attended))

    def fused(self, stream: Tensor, attended: Tensor) -> None:
        """Run the chosen kernels; where cuBLAS is chosen, the unfused operations of `plain`."""
        for qkv, o, gate_up, down in zip(self.qkv, self.o, self.gate_up, self.down, strict=True):
            if uses_skinny("norm", stream, qkv):
                linear.norm_linear(stream, self.norm, EPS, qkv)
            else:
                F.linear(norm.rms_norm(stream, self.norm, EPS), qkv)
            stream = self.add(attended, o, stream)
            if uses_skinny("gated", stream, gate_up):
                inner = linear.norm_linear_silu(stream, self.norm, EPS, gate_up)
            else:
                normed = norm.rms_norm(stream, self.norm, EPS)
                inner = norm.silu_and_mul(F.linear(normed, gate_up))
            stream = self.add(inner, down, stream)
        normed = norm.rms_norm(stream, self.norm, EPS)
        if uses_skinny("logits", normed, self.head):
            linear.skinny_linear(normed, self.head, None, torch.float32)
        else:
            F.linear(normed, self.head).float()

    @staticmethod
    def add(x: Tensor, weight: Tensor, stream: Tensor) -> Tensor:
        if uses_skinny("add", x, weight):
            return linear.linear_add(x, weight, None, stream)
        return torch.addmm(stream, x, weight.t())

    def plain(self, stream: Tensor, attended: Tensor) -> None:
        for qkv, o, gate_up, down in zip(self.qkv, self.o, self.gate_up, self.down, strict=True):
            F.linear(norm.rms_norm(stream, self.norm, EPS), qkv)
            stream = torch.addmm(stream, attended, o.t())
            normed = norm.rms_norm(stream, self.norm, EPS)
            inner = norm.silu_and_mul(F.linear(normed, gate_up))
            stream = torch.addmm(stream, inner, down.t())
        F.linear(norm.rms_norm(stream, self.norm, EPS), self.head).float()


def main() -> None:
    start = time.monotonic()
    shapes = all_shapes()
    buckets = sorted({bucket_of(tokens) for tokens in TOKENS})
    precompile([s for group in shapes.values() for s in group], buckets)
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    rows = []
    decided: dict[LinearShape, Decision] = {}
    for name, group in shapes.items():
        print(name)
        for shape in group:
            if shape in decided:
                continue
            decided[shape] = None
            trial = Trial(shape, torch.device("cuda"))
            rows += [{"model": name, **measure(shape, bucket, trial)} for bucket in buckets]
            sys.stdout.flush()
    chains = []
    for name, model in MODELS.items():
        chain = Chain(model)
        for tokens in TOKENS:
            times = [chain.milliseconds(tokens, fused=fused) for fused in (False, True)]
            print(f"{name}, {tokens} tokens: cuBLAS {times[0]:.3f} ms, as decided {times[1]:.3f}")
            chains.append({"model": name, "tokens": tokens, "cublas": times[0], "ours": times[1]})
        del chain
    seconds = time.monotonic() - start
    print(json.dumps({"seconds": seconds, "chains": chains, "products": rows}))


if __name__ == "__main__":
    main()
