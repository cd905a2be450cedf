"""Times the kernels of recurrent layers on a CUDA device, beside what moving their state takes.

    PYTHONPATH=. python tools/bench_recurrent.py [--shape qwen3.5-0.8b] [--sweep]

Steps: convolution and delta net (for LFM2, its convolution) of decode batches, in a graph over as
many layers as do not fit the L2 cache. The floor is one read and one write of the state at the
bandwidth of a copy. Beside it: what it takes to multiply the state by a number and do nothing else,
by torch and in the tiles of the step kernel. Prompts: each kernel by itself, over one prompt. The
last line is JSON.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoop.ops.causal_conv import ConvState
from stoop.ops.delta_net import DeltaGates, DeltaState, DeltaWeights
from stoop.ops.kernels import causal_conv, delta_net
from stoop.ops.kernels.linear_tuning import time_graph
from stoop.ops.recurrent import RecurrentRows

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
MANY_BYTES = 192 * 2**20  # more than three times the L2 cache of an H200
COPY_BYTES = 2**30
# Columns and warps of a program of the step kernel.
STEP_TILES = ((8, 1), (16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 4), (128, 8))
# Columns, warps and stages of the scan, and warps of what prepares it.
SCAN_TILES = (
    (16, 4, 2, 8), (16, 4, 1, 4), (32, 4, 2, 4), (32, 4, 2, 8), (32, 4, 1, 8), (32, 8, 2, 8),
    (64, 4, 2, 8), (64, 8, 2, 8),
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    key_heads: int
    value_heads: int
    dim: int
    width: int
    hidden: int = 0  # of a short convolution, which has no heads

    @property
    def channels(self) -> int:
        return self.hidden or (2 * self.key_heads + self.value_heads) * self.dim


SHAPES = {
    "qwen3.5-0.8b": Shape(16, 16, 128, 4),
    "qwen3.5-9b": Shape(16, 32, 128, 4),
    "lfm2-1.2b": Shape(0, 0, 0, 3, hidden=2048),
}


def draw(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


class Layer:
    """The state and inputs of one layer. Inputs are shared by all layers of a batch."""

    def __init__(self, shape: Shape, batch: int, log_len: int) -> None:
        self.shape, slots = shape, batch + 1
        self.conv_weight = draw(shape.channels, 1, shape.width)
        self.conv = ConvState(
            draw(slots, shape.width - 1, shape.channels), draw(slots, log_len, shape.channels)
        )
        heads, dim, wide = shape.value_heads, shape.dim, torch.float32
        if not heads:
            return
        self.delta = DeltaState(
            draw(slots, heads, dim, dim, dtype=wide),
            draw(slots, log_len, shape.key_heads, dim, dtype=wide) * dim**-0.5,
            draw(slots, log_len, heads, dim, dtype=wide),
            torch.rand(slots, log_len, heads, device=DEVICE),
        )
        decays = torch.rand(heads, device=DEVICE) * 4 - 4
        ones = torch.ones(dim, device=DEVICE, dtype=DTYPE)
        self.weights = DeltaWeights(decays, decays, ones, 1e-6)

    def run(self, x: Tensor, rows: RecurrentRows) -> Tensor:
        shape = self.shape
        if shape.hidden:
            return causal_conv.gated_conv(x, self.conv_weight, None, rows, self.conv)
        values, heads = shape.value_heads * shape.dim, shape.value_heads
        mixed, *gates = x.split((shape.channels, values, heads, heads), dim=1)
        qkv = causal_conv.causal_conv(mixed, self.conv_weight, None, rows, self.conv)
        return delta_net.delta_net(qkv, DeltaGates(*gates), self.weights, rows, self.delta)

    @property
    def state_bytes(self) -> int:
        """Of the slots of a batch, without the sink."""
        kept = self.delta.matrix if self.shape.value_heads else self.conv.window
        return kept[1:].numel() * kept.element_size()


def inputs_of(shape: Shape, tokens: int) -> Tensor:
    if shape.hidden:
        return draw(tokens, 3 * shape.hidden)
    return draw(tokens, shape.channels + shape.value_heads * (shape.dim + 2))


def rows_of(batch: int, query_len: int, context: int, pending: int, log_len: int) -> RecurrentRows:
    def numbers(values: Tensor) -> Tensor:
        return values.to(DEVICE, torch.int32)

    contexts = torch.full((batch,), context)
    return RecurrentRows(
        numbers(torch.arange(batch + 1) * query_len),
        numbers(contexts),
        numbers(contexts + query_len),
        torch.randperm(batch).to(DEVICE),
        torch.full((batch + 1,), pending, device=DEVICE),
        short=query_len <= log_len,
    )


def copy_bandwidth() -> float:
    """Bytes read and written, per second, by a kernel: the copy engine may be slower."""
    source = torch.ones(COPY_BYTES // 4, dtype=torch.float32, device=DEVICE)
    target = torch.empty_like(source)
    milliseconds = time_graph(lambda: torch.mul(source, 2.0, out=target), 9)
    return 2 * COPY_BYTES / (milliseconds * 1e-3)


@triton.jit
def _scale_kernel(matrix_ptr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr):
    part = tl.program_id(0)
    column = part % (DV // BV) * BV + tl.arange(0, BV)
    place = (part // (DV // BV) * DK + tl.arange(0, DK))[:, None] * DV + column[None, :]
    state = tl.load(matrix_ptr + place, cache_modifier=".cg")
    tl.store(matrix_ptr + place, state * 0.999)


def time_in_place(shape: Shape, batch: int) -> dict[str, float]:
    """Microseconds of one layer's state."""
    size = batch * shape.value_heads * shape.dim**2
    states = [draw(size, dtype=torch.float32) for _ in range(max(4, MANY_BYTES // (4 * size)))]
    columns = delta_net.STEP_COLUMNS
    programs = size // (shape.dim * columns)

    def run() -> None:
        for state in states:
            _scale_kernel[(programs,)](
                state, DK=shape.dim, DV=shape.dim, BV=columns, num_warps=delta_net.STEP_WARPS
            )

    by_torch = time_graph(lambda: [state.mul_(0.999) for state in states], 9)
    times = {"torch": by_torch, f"{columns} columns": time_graph(run, 9)}
    return {name: time * 1e3 / len(states) for name, time in times.items()}


def time_steps(shape: Shape, batch: int, query_len: int, bandwidth: float) -> dict[str, Any]:
    """Microseconds of one layer, with half of a former step's tokens pending."""
    first = Layer(shape, batch, query_len)
    count = max(4, min(192, -(-MANY_BYTES // first.state_bytes)))
    layers = [first, *(Layer(shape, batch, query_len) for _ in range(count - 1))]
    rows = rows_of(batch, query_len, 100, (query_len + 1) // 2, query_len)
    x = inputs_of(shape, batch * query_len)

    def run() -> None:
        for layer in layers:
            layer.run(x, rows)

    time = time_graph(run, 9) * 1e3 / count
    floor = 2 * first.state_bytes / bandwidth * 1e6
    return {"batch": batch, "tokens": query_len, "us": time, "floor_us": floor}


def show_steps(name: str, results: list[dict[str, Any]]) -> None:
    print(f"\n{name}: one layer of a decode step\nbatch tokens      us   floor   ratio")
    for each in results:
        ratio = each["us"] / each["floor_us"]
        print(
            f"{each['batch']:5} {each['tokens']:6} {each['us']:7.2f} {each['floor_us']:7.2f} "
            f"{ratio:7.2f}"
        )


def prompt_kernels(shape: Shape, tokens: int) -> dict[str, Callable[[], Any]]:
    """Each kernel over a prompt, by itself; and all together."""
    layer, rows = Layer(shape, 1, 1), rows_of(1, tokens, 0, 0, 1)
    x = inputs_of(shape, tokens)
    together = {"all": lambda: layer.run(x, rows)}
    if shape.hidden:
        return together
    heads, dim, state = shape.value_heads, shape.dim, layer.delta
    mixed, *gates = x.split((shape.channels, heads * dim, heads, heads), dim=1)
    z, b, a = gates
    qkv = causal_conv.causal_conv(mixed, layer.conv_weight, None, rows, layer.conv)
    wide: dict[str, Any] = {"dtype": torch.float32, "device": DEVICE}
    raw, w = (torch.zeros(tokens, heads, dim, **wide) for _ in range(2))
    p, scales = torch.zeros(tokens, heads, 64, **wide), torch.zeros(3, tokens, heads, **wide)
    keys = torch.zeros(tokens, shape.key_heads, dim, **wide)
    decays, out = torch.zeros(tokens, heads, **wide), torch.empty_like(z)
    logs = (state.key_log, state.update_log, state.decay_log)
    both = (layer.weights.a_log, layer.weights.dt_bias)
    given = rows.tensors
    return together | {
        "convolution": lambda: causal_conv.causal_conv(
            mixed, layer.conv_weight, None, rows, layer.conv
        ),
        "prepare": lambda: delta_net.delta_prepare_(
            qkv, b, a, *both, *given[:4], 1, w, raw, p, scales
        ),
        "scan": lambda: delta_net.delta_scan_(
            qkv, *given, state.matrix, *logs, w, raw, p, scales
        ),
        "step": lambda: delta_net.delta_step_(
            qkv, b, a, *both, *given, state.matrix, *logs, raw, keys, decays
        ),
        "finish": lambda: delta_net.delta_finish_(
            raw, keys, decays, z, layer.weights.norm, 1e-6, *given[:4], False, state.key_log,
            state.decay_log, out,
        ),
    }  # fmt: skip


def time_prompt(shape: Shape, tokens: int) -> dict[str, float]:
    """Microseconds of each kernel."""
    return {name: time_graph(run, 9) * 1e3 for name, run in prompt_kernels(shape, tokens).items()}


def sweep_steps(shape: Shape, batches: list[int], bandwidth: float) -> list[dict[str, Any]]:
    found = []
    chosen = delta_net.STEP_COLUMNS, delta_net.STEP_WARPS
    for columns, warps in STEP_TILES:
        delta_net.STEP_COLUMNS, delta_net.STEP_WARPS = columns, warps
        for batch in batches:
            for query_len in (1, 4):
                result = time_steps(shape, batch, query_len, bandwidth)
                found.append({"columns": columns, "warps": warps, **result})
                print(f"step {columns:3} columns, {warps} warps: batch {batch:3}, "
                      f"{query_len} tokens: {result['us']:8.2f} us")  # fmt: skip
    delta_net.STEP_COLUMNS, delta_net.STEP_WARPS = chosen
    return found


def sweep_scans(shape: Shape, tokens: int) -> list[dict[str, Any]]:
    found = []
    for columns, warps, stages, prepare_warps in SCAN_TILES:
        delta_net.SCAN_COLUMNS, delta_net.SCAN_WARPS = columns, warps
        delta_net.SCAN_STAGES, delta_net.PREPARE_WARPS = stages, prepare_warps
        kernels = prompt_kernels(shape, tokens)
        try:
            times = {name: time_graph(kernels[name], 9) * 1e3 for name in ("prepare", "scan")}
        except Exception as error:  # too much shared memory
            print(f"scan {columns} columns, {warps} warps, {stages} stages: {error}")
            continue
        tile = {"columns": columns, "warps": warps, "stages": stages, "prepare": prepare_warps}
        found.append({"tile": tile, **times})
        print(f"scan {columns:3} columns, {warps} warps, {stages} stages: {times['scan']:8.1f} us; "
              f"prepare with {prepare_warps} warps: {times['prepare']:8.1f} us")  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, action="append", help="all by default")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4], help="of a decode row")
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--sweep", action="store_true", help="try tiles of other sizes, too")
    options = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: a copy moves {bandwidth / 1e12:.2f} TB/s")
    report: dict[str, Any] = {"bandwidth": bandwidth}
    for name in options.shape or SHAPES:
        shape, found = SHAPES[name], {}
        found["steps"] = [
            time_steps(shape, batch, query_len, bandwidth)
            for batch in options.batch
            for query_len in options.tokens
        ]
        show_steps(name, found["steps"])
        if shape.value_heads:
            found["in_place"] = time_in_place(shape, options.batch[-1])
            told = ", ".join(f"{how} {time:.2f}" for how, time in found["in_place"].items())
            print(f"the state of batch {options.batch[-1]} multiplied in place, us: {told}")
        found["prompt"] = time_prompt(shape, options.prompt)
        print(f"a prompt of {options.prompt} tokens, us:", end=" ")
        print(", ".join(f"{kernel} {time:.1f}" for kernel, time in found["prompt"].items()))
        if options.sweep and shape.value_heads:
            found["step_tiles"] = sweep_steps(shape, options.batch, bandwidth)
            found["scan_tiles"] = sweep_scans(shape, options.prompt)
        report[name] = found
    print(json.dumps(report))


if __name__ == "__main__":
    main()
