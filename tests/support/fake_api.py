"""A small app with the page and a scripted API, for tests in a browser and for screenshots."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from stoop.server.page import router
from support.fake_core import snapshot

TOKENS = [
    ("Falcons", 0),
    (" dive", 1),
    (" fast", 2),
    (".", 3),
    ("\n", 0),
    ("They", 0),
    (" stoop", 1),
]


@dataclass
class Script:
    """What the API answers. Steps end before each token whose draft position is 0."""

    tokens: list[tuple[str, int]] = field(default_factory=lambda: list(TOKENS))
    delay: float = 0.0  # seconds between steps
    endless: bool = False  # repeats its tokens until the client goes
    key: str | None = None
    refusal: tuple[int, dict[str, Any], dict[str, str]] | None = None  # status, body, headers
    broken: str | None = None  # "cut": the stream ends early; "error": an error event
    num_drafts: int = 3
    drafting: bool = True
    requests: list[dict[str, Any]] = field(default_factory=list)
    num_aborted: int = 0
    num_stats: int = 0
    num_generated: int = 0


def steps(tokens: list[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
    step: list[tuple[str, int]] = []
    for token in tokens:
        if token[1] == 0 and step:
            yield step
            step = []
        step.append(token)
    yield step


def make_app(script: Script) -> FastAPI:
    app = FastAPI()
    app.include_router(router())

    def refused(request: Request) -> Response | None:
        if script.key and request.headers.get("authorization") != f"Bearer {script.key}":
            return JSONResponse({"error": {"message": "no key", "code": 401}}, 401)
        return None

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        return refused(request) or JSONResponse({"data": [{"id": "SmolLM2-135M-Instruct"}]})

    @app.get("/stats")
    async def stats(request: Request) -> Response:
        script.num_stats += 1
        now = snapshot() | {
            "num_generated_tokens": 90 + script.num_generated,
            "model": "SmolLM2-135M-Instruct",
            "num_drafts": script.num_drafts,
            "drafting": script.drafting,
            "version": "0",
        }
        if not script.num_drafts:
            now |= {"spec_decode_num_drafts": 0, "spec_decode_num_accepted_tokens_per_pos": []}
        return refused(request) or JSONResponse(now)

    async def stream(asked: dict[str, Any]) -> AsyncIterator[str]:
        plain = asked.get("num_speculative_tokens") == 0
        tokens = [(text, 0 if plain else draft) for text, draft in script.tokens]
        done = False
        try:
            while True:
                for step in steps(tokens):
                    yield event(step)
                    script.num_generated += len(step)
                    await asyncio.sleep(script.delay)
                if not script.endless:
                    break
            if script.broken == "error":
                yield f"data: {json.dumps({'error': {'message': 'The grammar failed.'}})}\n\n"
            if script.broken is None:
                yield event([], "stop")
                yield "data: [DONE]\n\n"
            done = True
        finally:
            script.num_aborted += not done

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        script.requests.append(await request.json())
        if script.refusal:
            status, body, headers = script.refusal
            return JSONResponse(body, status, headers=headers)
        return refused(request) or StreamingResponse(
            stream(script.requests[-1]), media_type="text/event-stream"
        )

    return app


def event(step: list[tuple[str, int]], finish_reason: str | None = None) -> str:
    choice = {
        "index": 0,
        "delta": {"content": "".join(text for text, _ in step)},
        "tokens": [{"text": text, "draft": draft} for text, draft in step],
        "finish_reason": finish_reason,
    }
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The app on a free port of loopback, in a thread."""
    config = uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
