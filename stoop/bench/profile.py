"""What torch.profiler says of some steps: a Chrome trace, and figures that are read out of it.

The profiler slows the host down, most of all if it notes operations; kernels hardly change.
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
    """Times in microseconds."""

    name: str
    start: float
    duration: float
    correlation: int  # the same for a call and all that it set off on the device; 0: none
    thread: Any

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class Trace:
    """Each list in order of time."""

    device: list[Event]  # kernels, copies and fills
    ops: list[Event]  # on the host, one inside another; may be left out beside a device


@dataclass(frozen=True)
class DeviceTimes:
    """Of one step."""

    kernels_per_step: float  # copies and fills among them
    busy_ms: float  # a kernel runs
    paused_ms: float  # none runs, but a graph is under way


@dataclass(frozen=True)
class KernelRow:
    name: str
    calls: float  # a step
    us: float  # a step
    share: float  # of all rows


@contextmanager
def tracing(device: str, path: Path, with_ops: bool = True) -> Iterator[Callable[[], None]]:
    """Write a Chrome trace of what runs from the call of the yielded function on.

    What runs before it warms the profiler up.
    """
    cuda = device.startswith("cuda")
    activities = [ProfilerActivity.CUDA] if cuda else []
    if with_ops or not cuda:
        activities.append(ProfilerActivity.CPU)

    def begin() -> None:
        wait()  # what is under way belongs to the warm-up
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
    """By name, the dearest first: kernels, or without a device, operations by their own time.

    A kernel may start while the one before it still runs: what counts is by how much it ends later.
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
    """Without namespaces, arguments and the end of long template lists."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    name = re.sub(r"(?:\w+::)+", "", name).split("(")[0].strip()
    return name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + "…"


def _busy_and_paused(events: list[Event]) -> tuple[float, float]:
    """Events may overlap, on streams of their own."""
    busy = paused = 0.0
    last: Event | None = None  # of those so far, the one that ends last
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
    """Each event's time that none before it covers: they add up to the time that any runs."""
    last = 0.0
    for event in events:
        yield event, max(0.0, event.end - max(event.start, last))
        last = max(last, event.end)


def _own_times(ops: list[Event]) -> Iterator[tuple[Event, float]]:
    """Each operation's time less that of the operations inside it."""
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
