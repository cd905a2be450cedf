"""Measures the time of a decode step in the engine's own loop, and its memory-bandwidth floor.

A step cannot be faster than one read of the weights and the live KV: that is the floor. The engine
counts steps. The clock runs from when every request has its first token until each has a given
number of tokens more, so the result does not depend on how many steps are in flight.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from stoop.bench.offline import Load, random_prompts
from stoop.bench.profile import DeviceTimes, Trace, device_times, read_trace, tracing
from stoop.bench.shape_configs import EAGLE3, ShapeHead
from stoop.bench.shapes import open_shape
from stoop.bench.spec import Start
from stoop.config.errors import ConfigError, MemoryShortage
from stoop.core.request import Request, TokenRules
from stoop.core.sampling_params import SamplingParams
from stoop.engine.engine import Engine
from stoop.layers.stateful import stateful_layers
from stoop.llm import LLM
from stoop.models.loader import DUMMY_STD
from stoop.ops.kv_store import as_bytes

WARM_STEPS = 4
PROFILED_STEPS = 16
SPARE_TOKENS = 16  # after the last timed step, for drafts and steps in flight
READ_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}  # far more than any cache holds

PARAMS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


@dataclass(frozen=True)
class StepLoad:
    """Requests that decode in one batch."""

    batch: int
    length: int  # context tokens per request
    planted: bool  # the context's KV is random, not computed
    steps: int  # timed steps

    @property
    def live_length(self) -> float:
        """Average KV tokens per request that a timed step reads."""
        return self.length + WARM_STEPS + (self.steps + 1) / 2


@dataclass(frozen=True)
class Span:
    """A measured sequence of steps."""

    seconds: float
    steps: int
    tokens: int
    waited: float  # seconds the host waited for the device

    @property
    def ms_per_step(self) -> float:
        return self.seconds / self.steps * 1000

    @property
    def host_ms(self) -> float:
        return (self.seconds - self.waited) / self.steps * 1000


@dataclass(frozen=True)
class StepBytes:
    """The bytes that a step has to read."""

    target: int  # the target's weights
    head: int  # the draft head's weights, over all its passes
    kv: float

    @property
    def total(self) -> float:
        return self.target + self.head + self.kv


@dataclass(frozen=True)
class StepRow:
    """The result for one load."""

    load: StepLoad
    spans: list[Span]  # one per repeat
    bytes: StepBytes
    bandwidth: float  # bytes per second
    device: DeviceTimes | None  # None on a CPU

    @property
    def ms_per_step(self) -> float:
        return statistics.median(span.ms_per_step for span in self.spans)

    @property
    def host_ms(self) -> float:
        return statistics.median(span.host_ms for span in self.spans)

    @property
    def idle_ms(self) -> float | None:
        """Step time minus device time. Only the device time is measured under the profiler, which
        slows down the host but hardly the device."""
        if self.device is None:
            return None
        return max(0.0, self.ms_per_step - self.device.busy_ms - self.device.paused_ms)

    @property
    def floor_ms(self) -> float:
        return self.bytes.total / self.bandwidth * 1000

    def as_record(self) -> dict[str, Any]:
        num_steps = sum(span.steps for span in self.spans)
        unknown = {field.name: None for field in fields(DeviceTimes)}
        return {
            "batch": self.load.batch,
            "live_length": self.load.live_length,
            "ms_per_step": self.ms_per_step,
            "ms_per_step_all": [span.ms_per_step for span in self.spans],
            "floor_ms": self.floor_ms,
            "ratio": self.ms_per_step / self.floor_ms,
            "tb_per_s": self.bytes.total / self.ms_per_step / 1e9,
            "bytes": asdict(self.bytes),
            "tokens_per_step": sum(s.tokens for s in self.spans) / num_steps / self.load.batch,
            **(asdict(self.device) if self.device else unknown),
            "idle_ms": self.idle_ms,
            "host_ms": self.host_ms,
        }


@dataclass(frozen=True)
class StepReport:
    """The results for all loads."""

    shape: str
    llm: LLM
    start_s: float  # time to start the engine
    first_token_s: float  # time to the first tokens of the first batch
    bandwidth: float
    rows: list[StepRow]


def measure_steps(
    shape: str,
    num_drafts: int,
    loads: Sequence[StepLoad],
    repeat: int,
    engine: dict[str, Any],
    start: Start,
    head: ShapeHead = EAGLE3,
) -> StepReport:
    """Start an engine and measure all loads."""
    started = time.perf_counter()
    llm = start_shaped(shape, num_drafts, loads, engine, start, head)
    start_s = time.perf_counter() - started
    with decoding(llm, loads[0]) as first:
        first_token_s = first.first_token_s
    bandwidth = read_bandwidth(llm.config.device.device)
    rows = [_measure(llm, load, repeat, bandwidth) for load in loads]
    return StepReport(shape, llm, start_s, first_token_s, bandwidth, rows)


def start_shaped(
    shape: str,
    num_drafts: int,
    loads: Sequence[StepLoad],
    engine: dict[str, Any],
    start: Start,
    head: ShapeHead = EAGLE3,
) -> LLM:
    """Start an engine that is large enough for the loads."""
    sizes = engine_sizes(loads, num_drafts, engine)
    with open_shape(shape, num_drafts, sizes["max_model_len"], head) as (model, options):
        try:
            return start(model, {**engine, **options, **sizes})
        except MemoryShortage as error:
            raise ConfigError(
                f"--shape {shape}: {error.problem}; choose a smaller shape, or lower --batch, "
                "--prompt-len or --context"
            ) from None


def engine_sizes(
    loads: Sequence[StepLoad], num_drafts: int, engine: dict[str, Any]
) -> dict[str, Any]:
    """Return engine sizes with room for all requests of a load until the last timed step."""
    batch = max(load.batch for load in loads)
    block_size = max(1, engine["block_size"])  # the engine refuses smaller ones
    num_decoding = batch * (num_drafts + 1)
    max_tokens = engine["max_num_batched_tokens"]
    if max_tokens is None:
        max_tokens = max(2048, 2 * num_decoding)
    if max_tokens < 2 * num_decoding:
        raise ConfigError(
            f"max_num_batched_tokens={max_tokens} leaves too little for prompts next to the "
            f"{num_decoding} tokens of decoding requests: use at least {2 * num_decoding}"
        )
    longest = max(load.length for load in loads)
    unseen = max(min(load.length, block_size) if load.planted else load.length for load in loads)
    # Steps by which the first decoding request is ahead; prompts get at least half of each step.
    ahead = 1 + -(-batch * unseen // (max_tokens // 2))
    answer = 2 * WARM_STEPS + max(PROFILED_STEPS, *(load.steps for load in loads))
    max_model_len = longest + ahead + answer + SPARE_TOKENS + num_drafts
    return {
        "max_model_len": max_model_len,
        "max_num_seqs": batch,
        "max_num_batched_tokens": max_tokens,
        "num_kv_blocks": batch * -(-max_model_len // block_size) + 1,
    }


def record_steps(llm: LLM, load: StepLoad, path: Path, with_ops: bool = True) -> tuple[Trace, Span]:
    """Profile some steps, write a Chrome trace to `path`, and return it.

    The steps are in the middle of the timed ones, so that their average context is the same.
    """
    with decoding(llm, load) as run, tracing(llm.config.device.device, path, with_ops) as begin:
        run.advance(WARM_STEPS + max(0, load.steps - PROFILED_STEPS) // 2)
        begin()
        span = run.advance(PROFILED_STEPS)
    return read_trace(path), span


def _measure(llm: LLM, load: StepLoad, repeat: int, bandwidth: float) -> StepRow:
    spans = []
    for _ in range(repeat):
        with decoding(llm, load) as run:
            run.advance(WARM_STEPS)
            spans.append(run.advance(load.steps))
    times = None
    if llm.config.device.device != "cpu":
        with tempfile.TemporaryDirectory() as root:
            trace, span = record_steps(llm, load, Path(root, "trace.json"), with_ops=False)
        times = device_times(trace, span.steps)
    return StepRow(load, spans, step_bytes(llm, load.batch, load.live_length), bandwidth, times)


# ---- decoding requests ----


class Decoding:
    """A load's requests, which generate until `close`. As in `LLM.generate`, a request has an
    output only when it ends."""

    def __init__(self, llm: LLM, load: StepLoad) -> None:
        self.llm, engine = llm, llm.engine
        self.names = [f"step-{index}" for index in range(load.batch)]
        prompts = random_prompts(llm, Load(load.batch, load.length, 1))
        for name, prompt in zip(self.names, prompts, strict=True):
            if load.planted:
                plant_prefix(engine, prompt)
            engine.add_request(name, prompt, PARAMS, final_only=True)
        self.requests = list(engine.scheduler.waiting)  # no others, since the engine was idle
        self.first_token_s = self.advance(1).seconds

    def advance(self, num_tokens: int) -> Span:
        """Step until every request has `num_tokens` more than the slowest has now."""
        engine, outputs = self.llm.engine, self.llm.engine.runner.outputs
        goal = min(request.num_output_tokens for request in self.requests) + num_tokens
        before, waited, started = engine.metrics(), outputs.waited, time.perf_counter()
        while min(request.num_output_tokens for request in self.requests) < goal:
            for output in engine.step():
                raise AssertionError(f"{output.request_id} ended before it was timed")
        seconds = time.perf_counter() - started
        after = engine.metrics()
        num_steps = after["num_steps"] - before["num_steps"]
        num_tokens = after["num_generated_tokens"] - before["num_generated_tokens"]
        return Span(seconds, num_steps, num_tokens, outputs.waited - waited)

    def close(self) -> None:
        for name in self.names:
            self.llm.engine.abort_request(name)
        while self.llm.engine.has_work:
            self.llm.engine.step()


@contextmanager
def decoding(llm: LLM, load: StepLoad) -> Iterator[Decoding]:
    run = Decoding(llm, load)
    try:
        yield run
    finally:
        run.close()


def plant_prefix(engine: Engine, prompt: Sequence[int]) -> None:
    """Insert the prompt's full blocks into the prefix cache, with small random KV."""
    scheduler = engine.scheduler
    writer = Request("planted", tuple(prompt), TokenRules(PARAMS, seed=0, max_tokens=1))
    num_blocks = (len(prompt) - 1) // scheduler.block_size
    writer.block_ids = scheduler.pool.allocate(num_blocks)
    writer.num_computed = num_blocks * scheduler.block_size
    for cache in engine.runner.kv_caches:
        noise = DUMMY_STD * torch.randn_like(cache[:, :1], dtype=torch.float32)
        as_bytes(cache)[:, writer.block_ids] = as_bytes(noise.to(cache.dtype))
    scheduler.prefix_cache.insert(writer)
    scheduler.pool.release(writer.block_ids)


# ---- the floor ----


def step_bytes(llm: LLM, batch: int, live_length: float) -> StepBytes:
    """Count the weights once, the head's once per pass, and live KV once per attention pass."""
    runner, layout = llm.engine.runner, llm.engine.runner.state_layout
    own = len(stateful_layers(runner.model))
    kv = layout.context_bytes(live_length, layout.states[:own])
    head, num_passes = 0, llm.config.schedule.num_drafts
    if runner.draft_model is not None:
        head = runner.draft_model.bytes_read(num_passes)
        kv += num_passes * layout.context_bytes(live_length, layout.states[own:])
    return StepBytes(runner.model.bytes_read(), head, batch * kv)


def read_bandwidth(device: str) -> float:
    """Measure memory read bandwidth in bytes per second, as the best of several reductions."""
    size = READ_BYTES[torch.device(device).type]
    data = torch.ones(size // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for num_rows in (1, 1 << 10, 1 << 14) * 3:
        best = min(best, _seconds_to_sum(data.view(num_rows, -1)))
    return size / best


def _seconds_to_sum(data: torch.Tensor, times: int = 4) -> float:
    def wait() -> None:
        if data.is_cuda:
            torch.cuda.synchronize(data.device)

    wait()
    started = time.perf_counter()
    for _ in range(times):
        data.sum(dim=1)
    wait()
    return (time.perf_counter() - started) / times


def device_name(device: str) -> str:
    return device if device == "cpu" else torch.cuda.get_device_name(device)
