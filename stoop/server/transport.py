"""Sends answers: whole ones, and streams of server-sent events with little work per chunk."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Protocol

from fastapi.responses import Response
from starlette.requests import Request

from stoop.core.deltas import RequestDelta
from stoop.core.sampling_params import SamplingParams
from stoop.server.errors import (
    CLIENT_GONE,
    INTERNAL,
    ApiError,
    ClientGone,
    as_api_error,
    timed_out,
)
from stoop.server.generation import Generation, WholeAnswer
from stoop.server.prompts import EncodedPrompt
from stoop.server.service import Service

log = logging.getLogger(__name__)
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]

RAW_SEND = "stoop.send"  # in the scope: the connection's own, below all wrappers
RECORD = "stoop.record"  # in the scope: what the log line will have
UNIQUE_ID = "stoop.unique_id"  # in the scope: for the engine
ARRIVAL = "stoop.arrival"  # in the scope: when the body was complete, by `time.perf_counter`
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not collect chunks
]
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
ERROR_SECONDS = 5.0  # for a client to take the error that ends its stream


def internal_error(error: BaseException) -> ApiError:
    """A bug: the log has its traceback, the client a sentence."""
    log.error("a request failed", exc_info=error)
    return ApiError(500, INTERNAL, code="internal_error")


def json_response(value: Any) -> Response:
    return Response(json.dumps(value).encode(), media_type="application/json")


def make_generation(
    service: Service,
    request: Request,
    prompts: Sequence[EncodedPrompt],
    params: SamplingParams,
    *,
    priority: int | None,
    operation: str,
    shown: Any,
) -> Generation:
    """operation: the name that traces give it. shown: the prompt, for a log that has prompts"""
    record = request.scope[RECORD]
    if service.settings.log_prompts:
        record["prompt"] = shown
    return Generation(
        service,
        request.scope[UNIQUE_ID],
        prompts,
        params,
        priority=priority or 0,
        arrival=request.scope[ARRIVAL],
        record=record,
        trace=service.tracer.start(request.headers, operation, record["id"], params),
    )


# ---- whole answers ----


async def whole_answers(request: Request, generation: Generation) -> list[WholeAnswer]:
    """All answers, complete. They are aborted if the client goes or time is up."""
    task = asyncio.ensure_future(generation.whole())
    watcher = asyncio.ensure_future(_gone(request.receive))
    seconds = generation.service.settings.request_timeout
    try:
        done, _ = await asyncio.wait(
            (task, watcher), timeout=seconds or None, return_when=asyncio.FIRST_COMPLETED
        )
        if task in done:
            return task.result()
        if watcher in done:
            raise ClientGone
        generation.is_late = lambda: True
        raise timed_out(seconds)
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# ---- streams ----


class Writer(Protocol):
    """Makes the bytes of a stream's events."""

    def chunk(self, delta: RequestDelta) -> bytes: ...

    def end(self) -> bytes: ...

    def error(self, error: ApiError) -> bytes: ...


class EventStream(Response):
    """A response that streams. The status is sent with the first bytes, so that errors before them
    have one of their own. While there is nothing to send, comments keep the connection open."""

    def __init__(self, service: Service, generation: Generation, writer: Writer) -> None:
        self.service = service
        self.generation = generation
        self.writer = writer
        self.background = None
        self._started = False
        self._writing = False
        self._num_writes = 0
        self._gone = False

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        self._send_start = send
        self._send: Send = scope.get(RAW_SEND, send)
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.ensure_future(self._watch(receive, task))
        try:
            await self._run()
        except asyncio.CancelledError:
            if not self._gone:
                raise
            task.uncancel()
            record = scope.setdefault(RECORD, {})
            record["finish"] = "disconnect"
            if not self._started:
                record["status"] = CLIENT_GONE
        finally:
            watcher.cancel()

    async def _run(self) -> None:
        limit = self.service.settings.request_timeout or None
        try:
            async with asyncio.timeout(limit) as timer:
                self.generation.is_late = timer.expired
                await self._pump()
        except TimeoutError:
            await self._fail(timed_out(self.service.settings.request_timeout))
        except Exception as error:
            found = as_api_error(error, self.service.llm.state)
            await self._fail(found or internal_error(error))

    async def _pump(self) -> None:
        writer, write = self.writer, self._write
        async with contextlib.aclosing(self.generation.deltas()) as deltas:
            async for delta in deltas:
                body = writer.chunk(delta)
                if body:
                    await write(body)
        await self._write(writer.end(), more=False)

    async def _write(self, body: bytes, more: bool = True) -> None:
        self._writing = True
        if not self._started:
            await self._start()
        self._num_writes += 1
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._writing = False

    async def _start(self) -> None:
        self._started = True
        await self._send_start({"type": "http.response.start", "status": 200, "headers": HEADERS})

    async def _fail(self, error: ApiError) -> None:
        """End with an error; a client that reads nothing does not get it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ERROR_SECONDS):
                await self._write_error(error)

    async def _write_error(self, error: ApiError) -> None:
        if self._started:
            self.generation.record["error"] = error.status_code
            self.service.metrics.refused(error.status_code)  # the gate saw 200
            await self._write(self.writer.error(error), more=False)
            return
        self._started = True
        response = error.response()
        await self._send_start(
            {
                "type": "http.response.start",
                "status": error.status_code,
                "headers": response.raw_headers,
            }
        )
        await self._send({"type": "http.response.body", "body": response.body, "more_body": False})

    async def _watch(self, receive: Receive, task: "asyncio.Task[Any]") -> None:
        """Cancel the stream when the client goes; write comments while it waits."""
        seen = 0
        while True:
            try:
                async with asyncio.timeout(self.service.settings.keep_alive):
                    message = await receive()
            except TimeoutError:
                if self._num_writes == seen and not self._writing:
                    await self._write(COMMENT)
                seen = self._num_writes
                continue
            if message["type"] == "http.disconnect":
                self._gone = True
                task.cancel()
                return
