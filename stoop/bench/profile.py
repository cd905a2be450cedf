"""Profiles steps with torch.profiler: writes a Chrome trace and computes statistics from it.

The profiler slows down the host, most of all when it records operations; kernels hardly change.
"""

import gzip
import json
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

NAME_LENGTH = 64

_DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Event:
    """An event of a trace; times are in microseconds."""

    name: str
    start: float
    duration: float
    correlation: int  # shared by a host call and the device work it launches; 0: none
    thread: Any

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class Trace:
    """The events of a Chrome trace, sorted by time."""

    device: list[Event]  # kernels, copies and fills
    ops: list[Event]  # nested host operations; not always recorded on a GPU


@dataclass(frozen=True)
class DeviceTimes:
    """Device statistics per step."""

    kernels_per_step: float  # including copies and fills
    busy_ms: float  # at least one kernel runs
    paused_ms: float  # no kernel runs, but a graph is being replayed


@dataclass(frozen=True)
class KernelRow:
    """The calls and the time of a kernel or operation."""

    name: str
    calls: float  # per step
    us: float  # per step
    share: float  # of the time of all rows


@contextmanager
def tracing(device: str, path: Path, with_ops: bool = True) -> Iterator[Callable[[], None]]:
    """Write a Chrome trace of the block, starting at the call of the yielded function.

    Work before that call warms up the profiler.
    """
    cuda = device.startswith("cuda")
    activities = [ProfilerActivity.CUDA] if cuda else []
    if with_ops or not cuda:
        activities.append(ProfilerActivity.CPU)

    def begin() -> None:
        wait()  # work in flight belongs to the warm-up
        profiler.step()

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize(device)

    plan = schedule(wait=0, warmup=1, active=1)
    with warnings.catch_warnings(), profile(activities=activities, schedule=plan) as profiler:
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        yield begin
        wait()
    profiler.export_chrome_trace(str(path))


def read_trace(path: Path) -> Trace:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        content = json.load(file)
    found: dict[str, list[Event]] = defaultdict(list)
    for entry in content["traceEvents"]:
        if entry["ph"] == "X" and "cat" in entry:
            found[entry["cat"]].append(_event(entry))

    def of(*kinds: str) -> list[Event]:
        return sorted((e for k in kinds for e in found[k]), key=lambda e: (e.start, -e.duration))

    return Trace(device=of(*_DEVICE_KINDS), ops=of("cpu_op"))


def _event(entry: dict[str, Any]) -> Event:
    correlation = entry.get("args", {}).get("correlation", 0)
    return Event(entry["name"], entry["ts"], entry["dur"], correlation, entry["tid"])


def device_times(trace: Trace, num_steps: int) -> DeviceTimes:
    busy, paused = _busy_and_paused(trace.device)
    return DeviceTimes(
        kernels_per_step=len(trace.device) / num_steps,
        busy_ms=busy / num_steps / 1000,
        paused_ms=paused / num_steps / 1000,
    )


def kernel_rows(trace: Trace, num_steps: int) -> list[KernelRow]:
    """Return kernels by name, most expensive first; without a GPU, operations by self time.

    Kernels may overlap: a kernel counts for the time by which it ends after all earlier ones.
    """
    spent: dict[str, list[float]] = defaultdict(list)
    for event, us in _added_times(trace.device) if trace.device else _own_times(trace.ops):
        spent[event.name].append(us)
    total = sum(sum(times) for times in spent.values())
    rows = [
        KernelRow(name, len(times) / num_steps, sum(times) / num_steps, sum(times) / total)
        for name, times in spent.items()
    ]
    return sorted(rows, key=lambda row: -row.us)


def short_name(name: str) -> str:
    """Shorten a kernel name: no namespaces, no arguments, truncated template lists."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    name = re.sub(r"(?:\w+::)+", "", name).split("(")[0].strip()
    return name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + "…"


def _busy_and_paused(events: list[Event]) -> tuple[float, float]:
    """Return busy and paused time; events on different streams may overlap."""
    busy = paused = 0.0
    last: Event | None = None  # the event so far that ends last
    for event in events:
        if last is None or event.start >= last.end:
            if last is not None and event.correlation == last.correlation:
                paused += event.start - last.end
            busy += event.duration
        else:
            busy += max(0.0, event.end - last.end)
        if last is None or event.end > last.end:
            last = event
    return busy, paused


def _added_times(events: list[Event]) -> Iterator[tuple[Event, float]]:
    """Yield each event's time not covered by earlier ones; the sum is the busy time."""
    last = 0.0
    for event in events:
        yield event, max(0.0, event.end - max(event.start, last))
        last = max(last, event.end)


def _own_times(ops: list[Event]) -> Iterator[tuple[Event, float]]:
    """Return each operation's time without that of operations nested in it."""
    own = [op.duration for op in ops]
    open_ops: dict[Any, list[int]] = defaultdict(list)  # by thread
    for place, op in enumerate(ops):
        stack = open_ops[op.thread]
        while stack and ops[stack[-1]].end <= op.start:
            stack.pop()
        if stack:
            own[stack[-1]] -= op.duration
        stack.append(place)
    return zip(ops, own, strict=True)
