"""Load against a server with OpenAI's interface, and the times of its answers.

Open loop: requests arrive when a random process says, whether or not earlier ones have ended, as
those of many independent users do. Closed loop: a fixed number of clients, each of which sends its
next request when its last answer has ended.
"""

import asyncio
import functools
import itertools
import json
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from stoop.bench.serve_http import BrokenExchange, Collected, Pool, Server, new_event_loop
from stoop.bench.serve_prompts import USAGE, Prompts
from stoop.bench.serve_stream import Answer, AnswerStream, message_of
from stoop.config.errors import StoopError

LAG_PERIOD = 0.01  # seconds between two looks at how late the event loop is
TELL_PERIOD = 0.1  # seconds between two reports of progress
START_DELAY = 0.1  # seconds, so that all processes are ready when the first request is due
MAX_WAITING = 30.0  # seconds for the list of models
WARM_NUMBER = 10**9  # of the first warm-up request, so that its prompt is not one of the load's

Progress = Callable[[int], None]  # answers that have ended


class ServerUnusable(StoopError):
    """The server cannot be reached, or refuses what the load consists of."""


@dataclass(frozen=True)
class Load:
    """When requests are sent."""

    rate: float | None = None  # requests per second: open loop
    concurrency: int | None = None  # clients: closed loop
    num_requests: int | None = None
    duration: float | None = None  # seconds in which requests are sent
    burstiness: float = 1.0  # shape of the gamma distribution of gaps; 1: Poisson arrivals
    seed: int = 0

    @property
    def name(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} req/s"
        return f"{self.concurrency} client{'s' if self.concurrency != 1 else ''}"

    def arrivals(self) -> list[float]:
        """The times at which requests are sent, in seconds from the start; of an open loop."""
        assert self.rate is not None
        draw = np.random.default_rng(self.seed)
        scale = 1 / (self.rate * self.burstiness)
        found: list[float] = []
        last = 0.0
        while self.num_requests is None or len(found) < self.num_requests:
            if self.duration is not None and last >= self.duration:
                break
            found.append(last)  # the first request is sent at once
            last += draw.gamma(self.burstiness, scale)
        return found


@dataclass(frozen=True)
class Plan:
    """The part of a load that one process sends."""

    server: Server
    prompts: Prompts
    load: Load
    timeout: float  # seconds for one request
    part: int = 0  # which process this is,
    num_parts: int = 1  # of how many
    first: int = 0  # number of the first request, which chooses its prompt


@dataclass
class Outcome:
    """What a process saw."""

    answers: list[Answer]
    lags: list[float]  # seconds by which the event loop woke up late
    cpu_seconds: float
    seconds: float

    @staticmethod
    def join(parts: Sequence["Outcome"]) -> "Outcome":
        answers = sorted((a for part in parts for a in part.answers), key=lambda a: a.index)
        lags = [lag for part in parts for lag in part.lags]
        cpu = max(part.cpu_seconds / part.seconds for part in parts)  # of the busiest
        seconds = max(part.seconds for part in parts)
        return Outcome(answers, lags, cpu * seconds, seconds)


# ---- before the load ----


def find_model(server: Server) -> str:
    """The first model that the server names."""
    found = fetch(server, "/v1/models")
    try:
        return str(found["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ServerUnusable(
            f"{server.url}/v1/models names no model: give one with --model"
        ) from None


def fetch(server: Server, path: str) -> Any:
    """GET an object."""

    async def ask() -> Collected:
        pool, sink = Pool(server), Collected()
        async with asyncio.timeout(MAX_WAITING):
            await pool.exchange(server.request(path), sink)
        pool.close()
        return sink

    answer = _reach(server, ask)
    if answer.status != 200:
        raise _refused(server, path, str(answer.status), message_of(answer.body))
    try:
        return json.loads(answer.body)
    except ValueError:
        raise ServerUnusable(
            f"{server.url}{path} did not answer with JSON: is it a server with OpenAI's interface?"
        ) from None


def agree(plan: Plan) -> Plan:
    """Send one request, and return the plan with the finest token counts that the server gives."""
    choices = (None,) if "stream_options" in plan.prompts.extra else USAGE
    for usage in choices:
        plan = replace(plan, prompts=replace(plan.prompts, usage=usage))
        single = replace(plan, load=Load(concurrency=1, num_requests=1), first=WARM_NUMBER)
        (answer,) = _reach(plan.server, functools.partial(drive, single, _ignore)).answers
        if answer.ok:
            return plan
        if answer.error not in ("400", "422"):
            break
    raise _refused(plan.server, plan.prompts.path, str(answer.error), answer.detail)


def warm_up(plan: Plan, count: int) -> None:
    """Send requests whose times are not used, as many at once as the load will."""
    if count:
        load = Load(concurrency=min(count, plan.load.concurrency or count), num_requests=count)
        _reach(plan.server, lambda: drive(replace(plan, load=load, first=WARM_NUMBER), _ignore))


def _reach(server: Server, ask: Callable[[], Any]) -> Any:
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(ask())
    except TimeoutError:
        why = f"no answer within {MAX_WAITING:.0f} s"
    except OSError as error:
        why = error.strerror or str(error)
    except BrokenExchange as error:
        why = str(error)
    raise ServerUnusable(
        f"no server can be reached at {server.url} ({why}): start one, or correct --url"
    )


def _refused(server: Server, path: str, error: str, detail: str) -> ServerUnusable:
    said = f": {detail}" if detail else ""
    if error in ("401", "403"):
        key = "the --api-key given" if server.api_key else "a request without an API key"
        return ServerUnusable(f"{server.url} refuses {key} ({error}{said}): correct --api-key")
    if error in ("connection", "timeout"):
        return ServerUnusable(
            f"no server can be reached at {server.url} ({detail or error}): start one, or correct "
            "--url"
        )
    if error == "404":
        return ServerUnusable(
            f"{server.url}{path} is not found (404{said}): correct --url, --model or --endpoint"
        )
    return ServerUnusable(f"{server.url}{path} cannot be measured ({error}{said})")


def _ignore(_: int) -> None:
    pass


# ---- the load, in one process ----


async def drive(
    plan: Plan,
    tell: Progress,
    bodies: "Bodies | None" = None,
    start_at: float | None = None,
) -> Outcome:
    """Send this process's part of a load and return when every answer has ended."""
    pool = Pool(plan.server)
    answers: list[Answer] = []
    bodies = bodies or Bodies(plan)
    cpu, begin = time.process_time(), start_at or time.perf_counter()
    lags: list[float] = []
    watch = asyncio.ensure_future(_watch(lags, answers, tell))

    async def send(index: int) -> None:
        answers.append(await _ask(pool, plan, index, bodies.take(index)))

    try:
        if plan.load.rate is not None:
            await _open_loop(plan, begin, send)
        else:
            await _closed_loop(plan, begin, send)
    finally:
        watch.cancel()
        pool.close()
    tell(len(answers))
    seconds = max(time.perf_counter() - begin, 1e-9)
    return Outcome(answers, lags, time.process_time() - cpu, seconds)


async def _open_loop(plan: Plan, begin: float, send: Callable[[int], Any]) -> None:
    arrivals = list(enumerate(plan.load.arrivals()))[plan.part :: plan.num_parts]
    async with asyncio.TaskGroup() as group:
        for index, due in arrivals:
            wait_for = begin + due - time.perf_counter()
            if wait_for > 0:
                await asyncio.sleep(wait_for)
            group.create_task(send(plan.first + index))


async def _closed_loop(plan: Plan, begin: float, send: Callable[[int], Any]) -> None:
    load = plan.load
    assert load.concurrency is not None
    num_clients = len(range(plan.part, load.concurrency, plan.num_parts))
    numbers: Iterator[int] = itertools.count(plan.part, plan.num_parts)
    if load.num_requests is not None:
        numbers = iter(range(plan.part, load.num_requests, plan.num_parts))

    async def client() -> None:
        for index in numbers:
            if load.duration is not None and time.perf_counter() - begin >= load.duration:
                return
            await send(plan.first + index)

    await asyncio.sleep(max(0.0, begin - time.perf_counter()))
    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(client())


async def _ask(pool: Pool, plan: Plan, index: int, body: bytes) -> Answer:
    """One request. Whatever goes wrong with it is noted in its answer."""
    answer = Answer(index)
    stream = AnswerStream(answer)
    request = plan.server.request(plan.prompts.path, body)
    answer.start = time.perf_counter()
    try:
        async with asyncio.timeout(plan.timeout):
            await pool.exchange(request, stream)
        stream.finish()
    except TimeoutError:
        answer.error, answer.detail = "timeout", f"no end after {plan.timeout:g} s"
    except BrokenExchange as error:
        answer.error = "broken stream" if answer.arrivals else "connection"
        answer.detail = str(error)
    except OSError as error:
        answer.error, answer.detail = "connection", error.strerror or str(error)
    answer.end = time.perf_counter()
    return answer


async def _watch(lags: list[float], answers: list[Answer], tell: Progress) -> None:
    """Measure how late the event loop is, and report progress now and then."""
    told = time.perf_counter()
    while True:
        before = time.perf_counter()
        await asyncio.sleep(LAG_PERIOD)
        now = time.perf_counter()
        lags.append(max(0.0, now - before - LAG_PERIOD))
        if now - told >= TELL_PERIOD:
            told = now
            tell(len(answers))


class Bodies:
    """Bodies are made before the start where their number is known, since long ones take time."""

    def __init__(self, plan: Plan) -> None:
        self._prompts = plan.prompts
        load = plan.load
        count = load.num_requests or 0
        if load.rate is not None:
            count = len(load.arrivals())
        numbers = range(plan.first + plan.part, plan.first + count, plan.num_parts)
        self._made = {index: plan.prompts.body(index) for index in numbers}

    def take(self, index: int) -> bytes:
        made = self._made.pop(index, None)
        return self._prompts.body(index) if made is None else made


# ---- the load, in several processes ----


def run_load(plan: Plan, num_processes: int, tell: Progress) -> Outcome:
    """Run a load and return what was seen. tell: called with the number of ended answers"""
    allow_many_files()
    if num_processes == 1:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(drive(plan, tell))
    context = multiprocessing.get_context("spawn")
    pipes, workers = [], []
    try:
        for part in range(num_processes):
            ours, theirs = context.Pipe()
            share = replace(plan, part=part, num_parts=num_processes)
            worker = context.Process(target=_work, args=(share, theirs), daemon=True)
            worker.start()
            theirs.close()
            pipes.append(ours)
            workers.append(worker)
        return _collect(pipes, tell)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _collect(pipes: list[Any], tell: Progress) -> Outcome:
    """Start all processes together, and take their reports until each has sent its outcome."""
    try:
        for pipe in pipes:
            pipe.recv()  # ready
        start_at = time.perf_counter() + START_DELAY  # one clock for all processes
        for pipe in pipes:
            pipe.send(start_at)
        done = dict.fromkeys(range(len(pipes)), 0)
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(pipes):
            for pipe in wait([p for i, p in enumerate(pipes) if i not in outcomes]):
                part = pipes.index(pipe)
                message = pipes[part].recv()
                if isinstance(message, Outcome):
                    outcomes[part] = message
                else:
                    done[part] = message
                tell(sum(done.values()))
    except EOFError:
        raise ServerUnusable("a process of the load ended early: use fewer --processes") from None
    return Outcome.join(list(outcomes.values()))


def _work(plan: Plan, pipe: Pipe) -> None:
    """The life of one process of several."""
    allow_many_files()
    try:
        bodies = Bodies(plan)
        pipe.send("ready")
        start_at = pipe.recv()
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            pipe.send(runner.run(drive(plan, pipe.send, bodies, start_at)))
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        pass


def allow_many_files() -> None:
    """Every open request has a socket; a usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
