"""A server with OpenAI's interface whose every byte and delay a test writes beforehand."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

DONE = b"data: [DONE]\n\n"


@dataclass
class Script:
    """A response: its events, each with the seconds to wait before it."""

    events: Sequence[tuple[float, bytes]] = ()
    status: int = 200
    content_type: str = "text/event-stream"
    body: bytes = b""  # instead of events, if the status is not 200
    breaks_off: bool = False  # the connection closes after the last event, without an end
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """A request that arrived."""

    time: float
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


Answering = Callable[[int, Seen], Script]  # by the number of the POST request


def event(text: str, tokens: int | None = None, finish: str | None = None) -> bytes:
    """A chunk of a chat. tokens: its share of the running usage, if any"""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    chunk: dict[str, Any] = {"choices": [choice]}
    if tokens is not None:
        chunk["usage"] = {"prompt_tokens": 5, "completion_tokens": tokens}
    return f"data: {json.dumps(chunk)}\n\n".encode()


def final_usage(tokens: int, **details: Any) -> bytes:
    usage = {"prompt_tokens": 5, "completion_tokens": tokens, **details}
    return f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode()


def refusal(status: int, message: str) -> Script:
    body = json.dumps({"error": {"message": message, "type": "error", "code": status}}).encode()
    return Script(status=status, content_type="application/json", body=body)


class ScriptedServer:
    """Serves until its block ends, from a thread of its own."""

    def __init__(self, answering: Answering, models: Sequence[str] = ("scripted",)) -> None:
        self.answering = answering
        self.models = models
        self.seen: list[Seen] = []  # POST requests
        self.num_connections = 0
        self.url = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._exchange(reader, writer):
                pass
        writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.rstrip().split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = first.split(" ")
        if method == "GET":
            models = {"object": "list", "data": [{"id": name} for name in self.models]}
            data = json.dumps(models).encode()
            script = Script(status=200, content_type="application/json", body=data)
        else:
            seen = Seen(time.perf_counter(), path, headers, json.loads(body))
            self.seen.append(seen)
            script = self.answering(len(self.seen) - 1, seen)
        return await self._play(script, writer)

    async def _play(self, script: Script, writer: asyncio.StreamWriter) -> bool:
        extra = "".join(f"{k}: {v}\r\n" for k, v in script.headers.items())
        head = f"HTTP/1.1 {script.status} x\r\nContent-Type: {script.content_type}\r\n{extra}"
        if script.body or script.status != 200:
            writer.write(f"{head}Content-Length: {len(script.body)}\r\n\r\n".encode() + script.body)
            await writer.drain()
            return True
        writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        for delay, data in script.events:
            if delay:
                await asyncio.sleep(delay)
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()
        if script.breaks_off:
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return "connection" not in {name.lower() for name in script.headers}


@contextmanager
def serving(answering: Answering, **options: Any) -> Iterator[ScriptedServer]:
    server = ScriptedServer(answering, **options)
    loop = asyncio.new_event_loop()
    listening = loop.run_until_complete(asyncio.start_server(server._serve, "127.0.0.1", 0))
    host, port = listening.sockets[0].getsockname()[:2]
    server.url = f"http://{host}:{port}"
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(_stop(listening), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _stop(listening: asyncio.Server) -> None:
    """On the loop's own thread: asyncio's servers are not safe to close from another."""
    listening.close()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
