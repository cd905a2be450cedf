"""Times the Mamba-2 kernels: steps beside the floor of reading and writing the state, and prompts.

On a CUDA device: PYTHONPATH=. python tools/bench_mamba.py
Other tilings: --step 8,4 16,2 (rows, tokens ahead) --scan 512,64,64,4,2 (fields of ScanTiling)
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from stoop.ops.kernels import mamba, mamba_scan
from stoop.ops.kernels.linear_tuning import time_graph
from stoop.ops.mamba import MambaState, MambaWeights
from stoop.ops.recurrent import RecurrentRows

BF16 = torch.bfloat16
COLD_BYTES = 256 * 2**20  # of states in one graph: more than the L2 cache holds


@dataclass(frozen=True)
class Model:
    heads: int
    head_dim: int = 64
    state_size: int = 128
    groups: int = 1

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def state_bytes(self) -> int:
        return self.inner * self.state_size * 4

    def weights(self) -> MambaWeights:
        a_log, bias, d = torch.randn(3, self.heads, device="cuda")
        return MambaWeights(a_log, bias - 3, d)

    def state(self, slots: int, log_len: int) -> MambaState:
        def draw(*shape: int) -> Tensor:
            return torch.rand(slots + 1, *shape, device="cuda")

        return MambaState(
            draw(self.heads, self.head_dim, self.state_size),
            draw(log_len, self.heads, self.head_dim),
            draw(log_len, 2, self.groups, self.state_size),
            draw(log_len, 2, self.heads),
        )

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """xbc, dt and the gate; the last two are columns of one projection."""
        width = self.inner + 2 * self.groups * self.state_size
        xbc = torch.randn(tokens, width, device="cuda").to(BF16)
        projected = torch.randn(tokens, self.inner + width + self.heads, device="cuda").to(BF16)
        return xbc, projected[:, -self.heads :], projected[:, : self.inner]


MODELS = {"48 heads": Model(48), "64 heads": Model(64), "128 heads": Model(128)}


def make_rows(lengths: list[int], context: int, pending: int, log_len: int) -> RecurrentRows:
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    contexts = torch.full((len(lengths),), context, device="cuda", dtype=torch.int32)
    return RecurrentRows(
        query_start_loc=starts,
        context_lens=contexts,
        seq_lens=contexts + torch.tensor(lengths, device="cuda").int(),
        slots=torch.arange(len(lengths), device="cuda"),
        pending=torch.full((len(lengths) + 1,), pending, device="cuda"),
        short=max(lengths) <= log_len,
    )


def copy_bandwidth() -> float:
    """Bytes read and written in a second."""
    source = torch.empty(2**28, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (time_graph(lambda: target.copy_(source)) / 1e3)


def bench_steps(name: str, bandwidth: float) -> list[dict[str, object]]:
    model, found = MODELS[name], []
    for batch in (1, 8, 64):
        layers = max(2, min(64, COLD_BYTES // (model.state_bytes * batch)))
        floor = 2e6 * model.state_bytes * batch / bandwidth
        for tokens in (1, 4, 8):
            states = [model.state(batch, tokens) for _ in range(layers)]
            xbc, dt, gate = model.inputs(batch * tokens)
            rows = make_rows([tokens] * batch, 1000, tokens, tokens)
            weights, norm = model.weights(), torch.ones(model.inner, device="cuda", dtype=BF16)

            def steps(
                x: Tensor = xbc,
                d: Tensor = dt,
                w: MambaWeights = weights,
                r: RecurrentRows = rows,
                s: list[MambaState] = states,
            ) -> None:
                for state in s:
                    mamba.mamba(x, d, w, r, state)

            y = xbc[:, : model.inner].contiguous()

            def norms(y: Tensor = y, g: Tensor = gate, n: Tensor = norm, k: int = layers) -> None:
                for _ in range(k):
                    mamba.gated_norm(y, g, n, 1e-5)

            us, norm_us = (1e3 * time_graph(each) / layers for each in (steps, norms))
            print(
                f"{name}, batch {batch:3}, {tokens} tokens: step {us:7.2f} us, floor {floor:7.2f}, "
                f"{us / floor:5.2f} x; gated norm {norm_us:5.2f} us",
                flush=True,
            )
            found.append({"model": name, "batch": batch, "tokens": tokens, "us": us,
                          "floor": floor, "norm": norm_us, "rows": mamba.STEP_ROWS,
                          "ahead": mamba.TOKENS_AHEAD})  # fmt: skip
    return found


def time_by_kernel(function: Callable[[], object], repeats: int = 20) -> dict[str, float]:
    """Microseconds of each kernel; kernels that overlap are counted in full."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            function()
        torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    for event in seen.key_averages():
        times[event.key] += event.device_time_total / repeats
    return dict(times)


def bench_scans(name: str, bandwidth: float) -> list[dict[str, object]]:
    model, found = MODELS[name], []
    for prompts, length in ((1, 512), (1, 2048), (1, 8192), (16, 512)):
        xbc, dt, _ = model.inputs(prompts * length)
        weights, state = model.weights(), model.state(prompts, 4)
        rows = make_rows([length] * prompts, 0, 0, 4)

        def scan(
            x: Tensor = xbc,
            d: Tensor = dt,
            w: MambaWeights = weights,
            r: RecurrentRows = rows,
            s: MambaState = state,
        ) -> None:
            mamba.mamba(x, d, w, r, s)

        us, kernels = 1e3 * time_graph(scan), time_by_kernel(scan)
        floor = 1e6 * (xbc.numel() + prompts * length * model.inner) * 2 / bandwidth
        parts = ", ".join(f"{kernel} {time:.1f}" for kernel, time in kernels.items())
        print(
            f"{name}, {prompts} x {length} tokens: {us:.1f} us, inputs and outputs alone "
            f"{floor:.1f}; {parts}",
            flush=True,
        )
        found.append({"model": name, "prompts": prompts, "length": length, "us": us,
                      "floor": floor, "kernels": kernels,
                      "tiling": astuple(mamba_scan.scan_tiling(BF16))})  # fmt: skip
    return found


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=["48 heads"], choices=list(MODELS))
    parser.add_argument("--step", nargs="*", type=numbers, help="rows,ahead")
    parser.add_argument("--scan", nargs="*", type=numbers, help="segment,chunk,p,warps,stages")
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"copies: {bandwidth / 1e12:.2f} TB/s")
    steps, scans = [], []
    for name in args.models:
        for rows, ahead in args.step or [(mamba.STEP_ROWS, mamba.TOKENS_AHEAD)]:
            mamba.STEP_ROWS, mamba.TOKENS_AHEAD = rows, ahead
            print(f"steps of {rows} rows, {ahead} tokens ahead")
            steps += bench_steps(name, bandwidth)
        for fields in args.scan or [astuple(mamba_scan.scan_tiling(BF16))]:
            tiling = mamba_scan.ScanTiling(*fields)
            mamba_scan.scan_tiling = lambda dtype, chosen=tiling: chosen  # type: ignore[misc]
            print(tiling)
            scans += bench_scans(name, bandwidth)
    print(json.dumps({"bandwidth": bandwidth, "steps": steps, "scans": scans}))


if __name__ == "__main__":
    main()
