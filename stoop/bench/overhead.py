"""What serving costs: the same requests offline, through `AsyncLLM`, and through a server.

Each side runs in a process of its own, one after the other. All get the same prompts as token ids,
greedy and with a fixed number of tokens, so they do the same work:

- offline: `LLM.generate` with all requests at once, of which `clients` run at a time
- async: `AsyncLLM`, whose core is in another process; `clients` streams at a time, no HTTP
- server: `stoop serve`, with `clients` connections that stream

Time to first token is measured before that, with one request at a time.
"""

import asyncio
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from stoop.async_llm import AsyncLLM
from stoop.bench.apart import run_apart
from stoop.bench.serve import Load, Plan, agree, find_model, run_load
from stoop.bench.serve_http import Server
from stoop.bench.serve_prompts import Prompts
from stoop.config.errors import StoopError
from stoop.core.sampling_params import SamplingParams
from stoop.llm import LLM

TIMEOUT = 600.0  # seconds for one request
READY = re.compile(r"https?://[^\s,/]+")  # in the line that the server prints when it is ready


class SideFailed(StoopError):
    """One of the sides could not be measured."""


@dataclass(frozen=True)
class Work:
    """The requests of every side."""

    prompts: Sequence[Sequence[int]]  # token ids; no two alike
    alone: Sequence[Sequence[int]]  # asked one at a time, for the time to first token
    output_len: int
    clients: int

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=self.output_len, ignore_eos=True)

    @property
    def num_tokens(self) -> int:
        return len(self.prompts) * self.output_len


@dataclass(frozen=True)
class Engine:
    """What every side runs."""

    model: str
    options: dict[str, Any]
    server_args: Sequence[str]  # the same as flags of `stoop serve`
    processes: int = 1  # of the load on the server


@dataclass
class Figures:
    """What one side did."""

    tokens_per_s: float
    ttft_ms: list[float]
    client: dict[str, float] = field(default_factory=dict)

    @property
    def ttft(self) -> float:
        return statistics.median(self.ttft_ms)


def measure_overhead(
    engine: Engine, work: Work, report: Callable[[str, int, int | None], None]
) -> dict[str, Figures]:
    """Every side in turn, by name."""
    sides: dict[str, Callable[[Engine, Work], Figures]] = {
        "offline": measure_offline,
        "async": measure_async,
        "server": measure_server,
    }
    found: dict[str, Figures] = {}
    for done, (name, measure) in enumerate(sides.items()):
        report(name, done, len(sides))
        figures = run_apart(measure, engine, work)
        if isinstance(figures, str):
            raise SideFailed(f"{name} could not be measured: {figures}")
        found[name] = figures
    report("done", len(sides), len(sides))
    return found


def measure_offline(engine: Engine, work: Work) -> Figures:
    llm = LLM(engine.model, **engine.options)
    first = []
    for prompt in work.alone:
        started = time.perf_counter()
        for _ in llm.stream(list(prompt), work.params):
            first.append(time.perf_counter() - started)
            break
    started = time.perf_counter()
    outputs = llm.generate([list(prompt) for prompt in work.prompts], work.params, use_tqdm=False)
    seconds = time.perf_counter() - started
    _check_tokens(work, sum(len(output.outputs[0].token_ids) for output in outputs))
    return Figures(work.num_tokens / seconds, _settled(first))


def measure_async(engine: Engine, work: Work) -> Figures:
    return asyncio.run(_measure_async(engine, work))


async def _measure_async(engine: Engine, work: Work) -> Figures:
    llm = await AsyncLLM.start(engine.model, **engine.options)
    first = []
    for prompt in work.alone:
        started = time.perf_counter()
        stream = llm.stream(list(prompt), work.params)
        async for _ in stream:
            first.append(time.perf_counter() - started)
            break
        await stream.aclose()
    waiting, counts = iter(work.prompts), []

    async def client() -> None:
        for prompt in waiting:
            async for delta in llm.stream(list(prompt), work.params):
                counts.append(sum(len(answer.token_ids) for answer in delta.answers))

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(work.clients):
            group.create_task(client())
    seconds = time.perf_counter() - started
    await llm.shutdown()
    _check_tokens(work, sum(counts))
    return Figures(work.num_tokens / seconds, _settled(first))


def measure_server(engine: Engine, work: Work) -> Figures:
    with running_server(engine) as url:
        server = Server.parse(url, None)
        prompts = TokenPrompts(
            model=find_model(server),
            chat=False,
            output_len=work.output_len,
            input_len=0,
            seed=0,
            extra={"temperature": 0, "ignore_eos": True},
            prompts=tuple(map(tuple, work.alone)),
        )
        plan = Plan(server, prompts, Load(concurrency=1, num_requests=len(work.alone)), TIMEOUT)
        plan = agree(plan)
        alone = run_load(plan, 1, lambda done: None)
        every = replace(prompts, prompts=tuple(map(tuple, work.prompts)), usage=plan.prompts.usage)
        load = Load(concurrency=work.clients, num_requests=len(work.prompts))
        plan = replace(plan, prompts=every, load=load)
        outcome = run_load(plan, engine.processes, lambda done: None)
    failed = [answer for answer in outcome.answers + alone.answers if not answer.ok]
    if failed:
        raise SideFailed(f"{len(failed)} requests failed, one with {failed[0].error}")
    _check_tokens(work, sum(answer.num_tokens for answer in outcome.answers))
    seconds = max(a.end for a in outcome.answers) - min(a.start for a in outcome.answers)
    busy = {"cpu_share": outcome.cpu_seconds / outcome.seconds}
    return Figures(work.num_tokens / seconds, _settled([a.ttft for a in alone.answers]), busy)


@dataclass(frozen=True)
class TokenPrompts(Prompts):
    """Prompts that are given, as token ids."""

    prompts: tuple[tuple[int, ...], ...] = ()

    def _prompt(self, index: int) -> dict[str, Any]:
        return {"prompt": list(self.prompts[index % len(self.prompts)])}


@contextmanager
def running_server(engine: Engine) -> Iterator[str]:
    """A server on a free port of this machine; yields its address."""
    command = [sys.executable, "-m", "stoop", "serve", engine.model, "--port", "0"]
    process = subprocess.Popen(
        [*command, *engine.server_args],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            found = READY.search(line)
            if found:
                break
        else:
            raise SideFailed(f"the server did not start: {''.join(lines[-3:]).strip()}")
        # It logs every request, and would wait once the pipe is full.
        reader = threading.Thread(target=process.stderr.read, daemon=True)
        reader.start()
        yield found.group()
    finally:
        process.terminate()
        process.wait(timeout=60)


def _check_tokens(work: Work, found: int) -> None:
    if found != work.num_tokens:
        raise SideFailed(
            f"it generated {found} tokens instead of {work.num_tokens}: raise max_model_len, or "
            "ask for shorter answers"
        )


def _settled(seconds: Sequence[float]) -> list[float]:
    """Milliseconds, without the first few, which pay for warming up."""
    return [each * 1000 for each in seconds[min(3, len(seconds) - 1) :]]
