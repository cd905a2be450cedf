"""Mixed load on a real server: good clients, bad clients and clients that vanish.

Everything follows a seed. At the end the server must be where it began: no open request, no used
block, no more files and hardly more memory; and every well-formed request must have been answered,
or refused with a code.
"""

import asyncio
import contextlib
import json
import os
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoop.bench.serve_http import BrokenExchange, Collected, Pool, Server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NUM_CLIENTS = 10
BUSY = {429, 503}  # refusals that a well-formed request may get
SETTLE_SECONDS = 60.0  # for the server to become idle
REQUEST_SECONDS = 60.0  # for one exchange
# Growth of a process after the warm-up, which is fragmentation: what the allocators keep.
MAX_GROWTH = 24 << 20  # bytes
NUM_KNOWN = 6  # prompts whose greedy answers are compared
WORDS = [
    "lorem",
    "ipsum",
    "dolor",
    "sit",
    "amet",
    "consectetur",
    "adipiscing",
    "elit",
    "sed",
    "do",
    "eiusmod",
    "tempor",
]


@dataclass(frozen=True)
class Vitals:
    """What must be the same before and after."""

    num_running: int
    num_waiting: int
    kv_usage: float
    files: dict[str, int]  # open file descriptors by process
    memory: dict[str, int]  # bytes in RAM by process
    core_pid: int
    num_restarts: int


@dataclass
class SoakReport:
    """What happened. failures: sentences; none means that all is well"""

    seed: int
    seconds: float = 0.0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)  # kind, outcome
    failures: list[str] = field(default_factory=list)
    before: Vitals | None = None
    after: Vitals | None = None
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        return sum(self.outcomes.values())

    def describe(self) -> str:
        shown = "\n".join(f"  {failure}" for failure in self.failures[:20])
        return f"soak with seed {self.seed}: {len(self.failures)} failures\n{shown}"


class Failure(Exception):
    """The server did something that it must not."""


class Soak:
    """Load on one server. server_pid: of the process that serves HTTP

    exact: greedy answers do not depend on the batch, so they are compared
    """

    def __init__(self, url: str, server_pid: int, *, seed: int, exact: bool = True) -> None:
        self.server = Server.parse(url, None)
        self.server_pid = server_pid
        self.seed = seed
        self.exact = exact
        self.report = SoakReport(seed)
        self.known: dict[str, dict[str, Any]] = {}  # answers by prompt
        self.max_len = 0
        self.grammars = False
        self.counting = False  # outcomes; not during the warm-up
        self._kinds: list[tuple[int, str, Kind]] = []

    # ---- the whole of it ----

    async def run(self, seconds: float, warm_seconds: float) -> SoakReport:
        await self._learn()
        await self._load(warm_seconds)
        report = self.report
        report.before = await self.settle()
        self.counting, began = True, time.monotonic()
        await self._load(seconds)
        report.seconds = time.monotonic() - began
        report.after = await self.settle()
        report.stats = await self.stats()
        await self._compare_known()
        report.failures += changes(report.before, report.after)
        return report

    async def _learn(self) -> None:
        """What the server is, and what it answers while nothing else happens."""
        models = (await self.get("/v1/models"))["data"]
        self.max_len = models[0]["max_model_len"]
        draw = random.Random(self.seed)
        for _ in range(NUM_KNOWN):
            prompt = words(draw, draw.randint(1, 12))
            self.known[prompt] = await self._ask_known(prompt)
        probe = {"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": "[ab]+"}}
        self.grammars = (await self.post(TEXT, probe)).status == 200
        self._kinds = kinds(self)

    async def _ask_known(self, prompt: str) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = await self.post(TEXT, body)
        if answer.status != 200:
            raise Failure(f"a request on an idle server got {answer.status}: {answer.body[:200]!r}")
        return dict(json.loads(answer.body)["choices"][0])

    async def _compare_known(self) -> None:
        for prompt, expected in self.known.items():
            if await self._ask_known(prompt) != expected:
                self.report.failures.append(f"afterwards the answer to {prompt!r} is another")

    async def _load(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_CLIENTS):
                group.create_task(self._client(number, until))

    async def _client(self, number: int, until: float) -> None:
        draw = random.Random(f"{self.seed}:{self.counting}:{number}")
        weights = [weight for weight, _, _ in self._kinds]
        while time.monotonic() < until:
            _, name, kind = draw.choices(self._kinds, weights)[0]
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    outcome = await kind(draw)
            except Failure as failure:
                outcome = "failed"
                self.report.failures.append(f"{name}: {failure}")
            except TimeoutError:
                outcome = "no end"
                self.report.failures.append(f"{name}: no end after {REQUEST_SECONDS:g} s")
            except (BrokenExchange, OSError) as error:
                outcome = "broken"
                self.report.failures.append(f"{name}: {type(error).__name__}: {error}")
            if self.counting:
                self.report.outcomes[name, outcome] += 1
            if len(self.report.failures) > 100:
                return

    # ---- requests ----

    async def exchange(self, request: bytes) -> Collected:
        pool, answer = Pool(self.server), Collected()
        try:
            await pool.exchange(request, answer)
        finally:
            pool.close()
        return answer

    async def get(self, path: str) -> Any:
        answer = await self.exchange(self.server.request(path))
        if answer.status != 200:
            raise Failure(f"{path} answered {answer.status}")
        return json.loads(answer.body) if "json" in answer.content_type else answer.body

    async def stats(self) -> dict[str, Any]:
        return dict(await self.get("/stats"))

    def make(self, path: str, body: Any) -> bytes:
        return self.server.request(path, json.dumps(body).encode())

    async def post(self, path: str, body: Any) -> Collected:
        return await self.exchange(self.make(path, body))

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.server.host, self.server.port, limit=2**12)

    # ---- the server's state ----

    async def settle(self) -> Vitals:
        """Wait until the server is idle and its files are closed; then measure it."""
        deadline = time.monotonic() + SETTLE_SECONDS
        last: Vitals | None = None
        while True:
            await asyncio.sleep(0.5)
            now = await self.vitals()
            idle = not (now.num_running or now.num_waiting or now.kv_usage)
            if idle and last is not None and last.files == now.files:
                return now
            if time.monotonic() > deadline:
                return now  # what is left open is a failure, and changes() says so
            last = now

    async def vitals(self) -> Vitals:
        stats = await self.stats()
        pids = {"server": self.server_pid, "core": stats["core_pid"]}
        return Vitals(
            stats["num_requests_running"],
            stats["num_requests_waiting"],
            stats["kv_cache_usage"],
            {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()},
            {name: resident_bytes(pid) for name, pid in pids.items()},
            stats["core_pid"],
            stats["num_restarts"],
        )


Kind = Callable[[random.Random], Awaitable[str]]


def changes(before: Vitals, after: Vitals) -> list[str]:
    """What is not back where it began."""
    found = []
    if after.num_running or after.num_waiting:
        found.append(f"{after.num_running} requests still run and {after.num_waiting} wait")
    if after.kv_usage:
        found.append(f"{after.kv_usage:.1%} of the KV cache is still in use")
    if after.num_restarts or after.core_pid != before.core_pid:
        found.append("the core died and was restarted")
    for name, count in after.files.items():
        if count > before.files[name]:
            found.append(f"the {name} has {count} open files, {before.files[name]} before")
    for name, size in after.memory.items():
        growth = size - before.memory[name]
        if growth > MAX_GROWTH:
            found.append(f"the {name} grew by {growth >> 20} MiB, more than {MAX_GROWTH >> 20}")
    return found


def resident_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


# ---- checks of answers ----


def refusal(answer: Collected, *expected: int) -> str:
    """An error of OpenAI's shape, with one of the expected codes."""
    if answer.status not in expected:
        raise Failure(f"status {answer.status} instead of {expected}: {answer.body[:300]!r}")
    try:
        error = json.loads(answer.body)["error"]
        assert error["message"] and error["type"]
    except (ValueError, KeyError, TypeError, AssertionError):
        raise Failure(f"an error without a message: {answer.body[:300]!r}") from None
    return str(answer.status)


def whole_answer(answer: Collected, num_choices: int) -> list[dict[str, Any]] | None:
    """The choices of a complete answer; None if it was refused because the server is busy."""
    if answer.status != 200:
        refusal(answer, *BUSY)
        return None
    choices = json.loads(answer.body)["choices"]
    if len(choices) != num_choices or not all(c["finish_reason"] for c in choices):
        raise Failure(
            f"{len(choices)} choices, {num_choices} were asked for: {answer.body[:300]!r}"
        )
    return list(choices)


def streamed_answer(answer: Collected, num_choices: int) -> list[str] | None:
    """The texts of a complete stream; None if it was refused because the server is busy."""
    if answer.status != 200:
        refusal(answer, *BUSY)
        return None
    *events, rest = answer.body.replace(b": keep-alive\n\n", b"").split(b"\n\n")
    if rest or events[-1] != b"data: [DONE]":
        raise Failure(f"a stream without an end: {answer.body[-200:]!r}")
    texts, ended = [""] * num_choices, [0] * num_choices
    for event in events[:-1]:
        chunk = json.loads(event.removeprefix(b"data: "))
        if "error" in chunk:
            if chunk["error"]["code"] == "queue_full":
                return None
            raise Failure(f"an error in a stream: {chunk}")
        for choice in chunk["choices"]:
            delta = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] += delta or ""
            ended[choice["index"]] += choice["finish_reason"] is not None
    if ended != [1] * num_choices:
        raise Failure(f"the choices ended {ended} times")
    return texts


# ---- what clients do ----


def kinds(soak: Soak) -> list[tuple[int, str, Kind]]:
    """Weights, names and functions. A function returns its outcome in a word."""
    good, bad, rude = Good(soak), Bad(soak), Rude(soak)
    found: list[tuple[int, str, Kind]] = [
        (6, "chat", good.chat),
        (8, "stream", good.stream),
        (3, "long", good.long),
        (4, "batch", good.batch),
        (4, "known", good.known),
        (2, "odd sampling", good.odd_sampling),
        (2, "reads", good.reads),
        (2, "bad JSON", bad.not_json),
        (2, "unknown field", bad.unknown_field),
        (2, "bad value", bad.bad_value),
        (2, "prompt too long", bad.too_long),
        (1, "body too large", bad.too_large),
        (1, "no such route", bad.no_route),
        (6, "leaves mid-stream", rude.leaves_mid_stream),
        (4, "leaves while waiting", rude.leaves_while_waiting),
        (2, "half a request", rude.half_a_request),
        (2, "slow reader", rude.slow_reader),
        (1, "slow sender", rude.slow_sender),
        (1, "garbage", rude.garbage),
    ]
    if soak.grammars:
        found.append((4, "grammar", good.grammar))
    return found


class Good:
    """Well-formed requests."""

    def __init__(self, soak: Soak) -> None:
        self.soak = soak

    def _length(self, draw: random.Random) -> int:
        return draw.choice([1, 4, 16, 16, 40, self.soak.max_len // 4])

    def _chat_body(self, draw: random.Random, **more: Any) -> dict[str, Any]:
        size = draw.choice([1, 5, 5, self.soak.max_len // 32])
        messages = [{"role": "user", "content": words(draw, size)}]
        body = {"messages": messages, "max_tokens": self._length(draw), **more}
        return body | {"temperature": draw.choice([0, 0.7, 1.5]), "seed": draw.randrange(99)}

    async def chat(self, draw: random.Random) -> str:
        n = draw.choice([1, 1, 1, 3])
        answer = await self.soak.post(CHAT, self._chat_body(draw, n=n))
        return "refused" if whole_answer(answer, n) is None else "answered"

    async def stream(self, draw: random.Random) -> str:
        n = draw.choice([1, 1, 1, 2])
        body = self._chat_body(draw, n=n, stream=True, ignore_eos=True)
        if draw.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
        answer = await self.soak.post(CHAT, body)
        return "refused" if streamed_answer(answer, n) is None else "answered"

    async def long(self, draw: random.Random) -> str:
        """Answers that take so many blocks that some are preempted and resumed."""
        body = self._chat_body(draw, n=3, stream=True, ignore_eos=True)
        answer = await self.soak.post(CHAT, body | {"max_tokens": self.soak.max_len // 3})
        return "refused" if streamed_answer(answer, 3) is None else "answered"

    async def batch(self, draw: random.Random) -> str:
        prompts: list[Any] = [words(draw, draw.randint(1, 8)) for _ in range(draw.randint(1, 3))]
        if draw.random() < 0.3:
            prompts = [[draw.randrange(256) for _ in prompt] for prompt in prompts]
        n, stream = draw.choice([1, 2]), draw.random() < 0.5
        body = {"prompt": prompts, "n": n, "max_tokens": self._length(draw), "stream": stream}
        answer = await self.soak.post(TEXT, body)
        check = streamed_answer if stream else whole_answer
        return "refused" if check(answer, n * len(prompts)) is None else "answered"

    async def known(self, draw: random.Random) -> str:
        """A greedy request, streamed or not, has the same answer as on an idle server."""
        prompt = draw.choice(list(self.soak.known))
        expected = self.soak.known[prompt]["text"]
        stream = draw.random() < 0.5
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = await self.soak.post(TEXT, {**body, "stream": stream})
        if stream:
            texts = streamed_answer(answer, 1)
        else:
            choices = whole_answer(answer, 1)
            texts = None if choices is None else [choices[0]["text"]]
        if texts is None:
            return "refused"
        if self.soak.exact and texts != [expected]:
            raise Failure(f"the answer to {prompt!r} is {texts[0]!r} instead of {expected!r}")
        return "answered"

    async def odd_sampling(self, draw: random.Random) -> str:
        body = self._chat_body(
            draw,
            logprobs=True,
            top_logprobs=draw.choice([0, 3]),
            presence_penalty=draw.choice([-2, 0, 1.5]),
            frequency_penalty=draw.choice([0, 0.5]),
            repetition_penalty=draw.choice([1, 1.3]),
            logit_bias={str(draw.randrange(200)): draw.choice([-100, 5])},
            top_k=draw.choice([0, 5]),
            top_p=draw.choice([0.1, 1]),
            min_p=draw.choice([0, 0.2]),
            stop=["x", "the"],
            min_tokens=draw.choice([0, 1]),
            num_speculative_tokens=0 if draw.random() < 0.3 else None,
        )
        answer = await self.soak.post(CHAT, body)
        return "refused" if whole_answer(answer, 1) is None else "answered"

    async def grammar(self, draw: random.Random) -> str:
        structure: dict[str, Any] = draw.choice(
            [
                {"regex": "[a-c]{3,9}"},
                {"choice": ["yes", "no", "perhaps"]},
                {"json": {"type": "object", "properties": {"a": {"type": "boolean"}}}},
            ]
        )
        body = {"prompt": words(draw, 3), "max_tokens": 30, "structured_outputs": structure}
        if draw.random() < 0.2:
            body["structured_outputs"] = {"regex": "(unclosed"}
            return refusal(await self.soak.post(TEXT, body), 400, *BUSY)
        answer = await self.soak.post(TEXT, body)
        choices = whole_answer(answer, 1)
        if choices is None:
            return "refused"
        if "choice" in structure and choices[0]["text"] not in structure["choice"]:
            raise Failure(f"{choices[0]['text']!r} is no choice of {structure}")
        return "answered"

    async def reads(self, draw: random.Random) -> str:
        path = draw.choice(["/health", "/metrics", "/stats", "/v1/models", "/version"])
        await self.soak.get(path)
        body = {"prompt": words(draw, 3)}
        answer = await self.soak.post("/tokenize", body)
        if answer.status != 200 or not json.loads(answer.body)["tokens"]:
            raise Failure(f"/tokenize answered {answer.status}")
        return "answered"


class Bad:
    """Requests that must be refused, each with its code."""

    def __init__(self, soak: Soak) -> None:
        self.soak = soak

    async def not_json(self, draw: random.Random) -> str:
        data = draw.choice(
            [b"{", b"", b"[1, 2", b'{"messages": \xff\xfe}', b"null", b"7", b"[" * 999]
        )
        path = draw.choice([CHAT, TEXT])
        return refusal(await self.soak.exchange(self.soak.server.request(path, data)), 400, 422)

    async def unknown_field(self, draw: random.Random) -> str:
        body = {"prompt": "a", "max_tokens": 2, draw.choice(["best_offf", "prompt_embeds"]): 1}
        return refusal(await self.soak.post(TEXT, body), 400)

    async def bad_value(self, draw: random.Random) -> str:
        name, value = draw.choice(
            [
                ("temperature", -1),
                ("n", 0),
                ("max_tokens", "many"),
                ("stop", [1]),
                ("logit_bias", {"a": 3}),
                ("top_p", 2),
                ("prompt", []),
                ("prompt", [10**12]),
                ("model", "another"),
            ]
        )
        body = {"prompt": "a", "max_tokens": 2, name: value}
        # A full queue refuses a request before its prompt is looked at.
        return refusal(await self.soak.post(TEXT, body), 400, 404, 429)

    async def too_long(self, draw: random.Random) -> str:
        text = "x" * draw.choice([self.soak.max_len, self.soak.max_len * 40])
        if draw.random() < 0.5:
            return refusal(await self.soak.post(TEXT, {"prompt": [7] * len(text)}), 400, 429)
        # A real tokenizer joins letters, and repeats fit then: words do not.
        return refusal(await self.soak.post(TEXT, {"prompt": " ".join(text)}), 400, 429)

    async def too_large(self, draw: random.Random) -> str:
        """By its length alone: the server need not read it."""
        request = self.soak.server.request(TEXT, b"")
        request = request.replace(b"Content-Length: 0", b"Content-Length: 999999999")
        return refusal(await self.soak.exchange(request), 413)

    async def no_route(self, draw: random.Random) -> str:
        path = draw.choice(["/v1/none", "/v2/chat/completions", "/../etc/passwd"])
        answer = await self.soak.post(path, {})
        return refusal(answer, 404, 405)


class Rude:
    """Clients that do not keep to the protocol. None may harm another."""

    def __init__(self, soak: Soak) -> None:
        self.soak = soak

    def _stream_body(self, draw: random.Random) -> dict[str, Any]:
        messages = [{"role": "user", "content": words(draw, draw.randint(1, 9))}]
        length = self.soak.max_len // 2
        return {"messages": messages, "max_tokens": length, "stream": True, "ignore_eos": True}

    async def leaves_mid_stream(self, draw: random.Random) -> str:
        reader, writer = await self.soak.open()
        try:
            body = {**self._stream_body(draw), "n": draw.choice([1, 1, 4])}
            writer.write(self.soak.make(CHAT, body))
            head = await reader.readexactly(12)
            if head == b"HTTP/1.1 429":
                return "refused"
            for _ in range(draw.randint(0, 8)):
                if not await reader.read(draw.choice([1, 50, 2000])):
                    raise Failure("a long stream had an end")
        except asyncio.IncompleteReadError as error:
            raise Failure(f"no answer: {error}") from None
        finally:
            leave(writer, hard=draw.random() < 0.5)
        return "left"

    async def leaves_while_waiting(self, draw: random.Random) -> str:
        _, writer = await self.soak.open()
        try:
            writer.write(self.soak.make(CHAT, {**self._stream_body(draw), "stream": False}))
            await writer.drain()
            await asyncio.sleep(draw.random() * 0.2)
        finally:
            leave(writer, hard=draw.random() < 0.5)
        return "left"

    async def half_a_request(self, draw: random.Random) -> str:
        _, writer = await self.soak.open()
        request = self.soak.make(CHAT, self._stream_body(draw))
        try:
            writer.write(request[: draw.randrange(1, len(request))])
            await writer.drain()
            await asyncio.sleep(draw.random() * 0.2)
        finally:
            leave(writer, hard=draw.random() < 0.5)
        return "left"

    async def slow_reader(self, draw: random.Random) -> str:
        """Reads byte by byte, then not at all, with a small window; then goes."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        body = self._stream_body(draw)
        if draw.random() < 0.5:  # large chunks, which fill the server's buffers
            body |= {"logprobs": True, "top_logprobs": 20}
        try:
            await loop.sock_connect(connection, (self.soak.server.host, self.soak.server.port))
            await loop.sock_sendall(connection, self.soak.make(CHAT, body))
            for _ in range(draw.randint(5, 60)):
                if not await loop.sock_recv(connection, 1):
                    break
                await asyncio.sleep(0.005)
            await asyncio.sleep(draw.random() * 2)
        finally:
            connection.close()
        return "left"

    async def slow_sender(self, draw: random.Random) -> str:
        """A body in small pieces is a request like any other."""
        reader, writer = await self.soak.open()
        request = self.soak.make(TEXT, {"prompt": words(draw, 2), "max_tokens": 3})
        request = request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
        try:
            for place in range(0, len(request), 24):
                writer.write(request[place : place + 24])
                await writer.drain()
                await asyncio.sleep(0.02)
            data = await reader.read(-1)
        finally:
            leave(writer, hard=False)
        status = int(data.split(b" ", 2)[1]) if data.startswith(b"HTTP/1.1 ") else 0
        if status not in {200, *BUSY}:
            raise Failure(f"status {status}: {data[:200]!r}")
        return "answered" if status == 200 else "refused"

    async def garbage(self, draw: random.Random) -> str:
        """Bytes that are not HTTP: whatever comes back, the connection must end."""
        reader, writer = await self.soak.open()
        data = draw.choice([b"\x00" * 100, draw.randbytes(300), b"GET / HTTP/9.9\r\n\r\n"])
        try:
            writer.write(data + b"\r\n\r\n")
            await writer.drain()
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(1):
                    await reader.read(-1)
        finally:
            leave(writer, hard=False)
        return "left"


def leave(writer: asyncio.StreamWriter, *, hard: bool) -> None:
    """Close a connection. hard: with a reset, as a process that dies does"""
    if hard:
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
