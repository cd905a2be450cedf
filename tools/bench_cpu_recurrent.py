"""Recurrent layers on a CPU: the token loops in C++ beside torch's, one layer, one request.

    python tools/bench_cpu_recurrent.py --threads 2

Sizes are those of Qwen3.5-0.8B and Granite-4.0-H-micro. The last line is JSON. Run it on an
otherwise idle machine.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from stoop.ops import delta_net as delta
from stoop.ops import mamba
from stoop.ops.native.library import find_native, native_problem
from stoop.ops.recurrent import RecurrentRows

LOG = 4  # tokens of a log: three drafts


def rows_of(count: int) -> RecurrentRows:
    """One request in the middle of its text, with three logged tokens."""
    context, pending = 64, torch.full((2,), 3)
    bounds = [torch.tensor(each, dtype=torch.int32) for each in ([0, count], [context])]
    lengths = torch.tensor([context + count], dtype=torch.int32)
    return RecurrentRows(*bounds, lengths, torch.tensor([0]), pending, count <= LOG)


def delta_layer(count: int, native: bool) -> Callable[[], object]:
    heads, size = 16, 128
    state = delta.DeltaState(
        torch.randn(2, heads, size, size),
        torch.randn(2, LOG, heads, size) / size**0.5,
        torch.randn(2, LOG, heads, size),
        torch.rand(2, LOG, heads),
    )
    gates = delta.DeltaGates(
        torch.randn(count, heads * size), torch.randn(count, heads), torch.randn(count, heads)
    )
    weights = delta.DeltaWeights(
        torch.zeros(heads), torch.zeros(heads), torch.ones(size), 1e-6, native
    )
    qkv, rows = torch.randn(count, 3 * heads * size), rows_of(count)
    return lambda: delta.delta_net(qkv, gates, weights, rows, state)


def mamba_layer(count: int, native: bool) -> Callable[[], object]:
    heads, head_dim, size = 48, 64, 128
    state = mamba.MambaState(
        torch.randn(2, heads, head_dim, size),
        torch.randn(2, LOG, heads, head_dim),
        torch.randn(2, LOG, 2, 1, size),
        torch.rand(2, LOG, 2, heads),
    )
    ones = torch.ones(heads)
    weights = mamba.MambaWeights(ones, ones, ones, native=native)
    xbc, dt = torch.randn(count, heads * head_dim + 2 * size), torch.randn(count, heads)
    rows = rows_of(count)
    return lambda: mamba.mamba(xbc, dt, weights, rows, state)


def milliseconds(call: Callable[[], object], seconds: float) -> float:
    call()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=2.0, help="for each figure")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if find_native() is None:
        parser.error(f"there are no CPU kernels: {native_problem()}")
    record: dict[str, dict[str, float]] = {}
    for name, make in (("delta net", delta_layer), ("Mamba-2", mamba_layer)):
        for count in (1, LOG, 512):
            slow, fast = (
                milliseconds(make(count, native), options.seconds) for native in (False, True)
            )
            record[f"{name}, {count}"] = {"torch_ms": round(slow, 3), "native_ms": round(fast, 3)}
            print(f"{name:>9}, {count:3} tokens: torch {slow:8.2f} ms, C++ {fast:7.2f} ms")
    print(json.dumps({"threads": options.threads, **record}))


if __name__ == "__main__":
    main()
