"""What is read out of a Chrome trace, on traces written by hand. Times in microseconds."""

import json
from pathlib import Path
from typing import Any

import pytest

from stoop.bench.profile import device_times, kernel_rows, read_trace, short_name


def event(kind: str, name: str, start: float, duration: float, correlation: int = 0) -> dict:
    args = {"correlation": correlation} if correlation else {}
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "ts": start,
        "dur": duration,
        "tid": 1,
        "args": args,
    }


def write(path: Path, *events: dict[str, Any]) -> Path:
    other = {"ph": "M", "name": "process_name", "pid": 1, "args": {}}
    path.write_text(json.dumps({"traceEvents": [other, *events]}))
    return path


def test_a_device_is_busy_or_between_kernels_of_a_graph(tmp_path: Path) -> None:
    """Two steps: a replay of two kernels, then the tokens are read back."""
    events = []
    for number, start in enumerate((0.0, 100.0)):
        replay, copy = 10 * number + 1, 10 * number + 2
        events += [
            event("cuda_runtime", "cudaGraphLaunch", start, 5, replay),
            event("kernel", "gemm", start + 10, 20, replay),
            event("kernel", "norm", start + 32, 8, replay),  # a pause of 2 inside the graph
            event("kernel", "other stream", start + 35, 9, replay),  # overlaps by 5, ends at 44
            event("cuda_runtime", "cudaMemcpyAsync", start + 20, 28, copy),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", start + 42, 2, replay),  # its own
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", start + 46, 1, copy),
            event("cuda_runtime", "cudaStreamSynchronize", start + 48, 2, copy + 1),
        ]
    events.append(event("cuda_runtime", "cudaDeviceSynchronize", 150, 40, 99))
    trace = read_trace(write(tmp_path / "trace.json", *events))
    times = device_times(trace, num_steps=2)
    assert times.kernels_per_step == 5
    assert times.busy_ms == pytest.approx((20 + 8 + 4 + 1) / 1000)
    assert times.paused_ms == pytest.approx(2 / 1000)  # 30 to 32; not 44 to 46, before the copy


def test_kernels_are_summed_by_name(tmp_path: Path) -> None:
    events = [event("kernel", "gemm", 10 * n, 3, n + 1) for n in range(4)]
    events += [event("gpu_memset", "Memset", 100, 4), event("cpu_op", "aten::mm", 0, 50)]
    rows = kernel_rows(read_trace(write(tmp_path / "trace.json", *events)), num_steps=2)
    assert [(row.name, row.calls, row.us, row.share) for row in rows] == [
        ("gemm", 2, 6, 0.75),
        ("Memset", 0.5, 2, 0.25),
    ]


def test_kernels_that_overlap_count_by_what_they_add(tmp_path: Path) -> None:
    events = [
        event("kernel", "gemm", 0, 10, 1),
        event("kernel", "norm", 4, 8, 1),  # started early: ends 2 later
        event("kernel", "copy", 5, 3, 2),  # hidden behind both
    ]
    rows = kernel_rows(read_trace(write(tmp_path / "trace.json", *events)), num_steps=1)
    assert {row.name: row.us for row in rows} == {"gemm": 10, "norm": 2, "copy": 0}


def test_without_a_device_operations_count_by_their_own_time(tmp_path: Path) -> None:
    events = [
        event("cpu_op", "aten::linear", 0, 10),
        event("cpu_op", "aten::addmm", 2, 7),
        event("cpu_op", "aten::expand", 3, 1),
        event("cpu_op", "aten::linear", 10, 4),
    ]
    rows = kernel_rows(read_trace(write(tmp_path / "trace.json", *events)), num_steps=1)
    assert {row.name: (row.calls, row.us) for row in rows} == {
        "aten::linear": (2, 3 + 4),
        "aten::addmm": (1, 6),
        "aten::expand": (1, 1),
    }


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("aten::mm", "mm"),
        ("_rms_norm_kernel", "_rms_norm_kernel"),
        ("void at::native::(anonymous namespace)::fill<int, at::F<2>>(int)", "fill<int, F<2>>"),
        ("k" * 99, "k" * 63 + "…"),
    ],
)
def test_names_are_shortened(name: str, short: str) -> None:
    assert short_name(name) == short
