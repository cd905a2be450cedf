"""Requests to the app without a network: whole answers, and connections that can be cut."""

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

import httpx

from stoop.server.app import make_app
from stoop.server.service import Service
from stoop.server.settings import ServerSettings
from support.fake_llm import FakeLLM

USER = [{"role": "user", "content": "hi"}]


def make_server(llm: FakeLLM | None = None, **settings: Any) -> tuple[Any, Service]:
    """The app, and the service that it uses."""
    given = {"model_names": ("m",), **settings}
    service = Service(llm or FakeLLM(), ServerSettings(**given))  # type: ignore[arg-type]
    return make_app(service), service


def call(app: Any, method: str, path: str, **more: Any) -> httpx.Response:
    """One request, answered as a whole."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **more)

    return asyncio.run(send())


def post(app: Any, path: str, body: Any, **more: Any) -> httpx.Response:
    return call(app, "POST", path, json=body, **more)


def events(text: str) -> list[Any]:
    """The data of server-sent events; [DONE] is left as text."""
    found = []
    for block in text.split("\n\n"):
        for line in block.splitlines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                found.append(data if data == "[DONE]" else json.loads(data))
    return found


def refusal(response: httpx.Response, status: int, text: str = "") -> dict[str, Any]:
    """The error of a refused request, which has OpenAI's shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert text in body["error"]["message"], body
    return body["error"]


class Connection:
    """One request on a connection that the test can cut. Use inside a running loop."""

    def __init__(self, app: Any, path: str, body: Any, headers: Mapping[str, str] = {}) -> None:
        content = json.dumps(body).encode()
        given = {"content-type": "application/json", **headers}
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(k.encode(), v.encode()) for k, v in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self._to_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._to_app.put_nowait({"type": "http.request", "body": content, "more_body": False})
        self.status: int | None = None
        self.body = b""
        self.ended = False
        self.full = False  # the client reads no more: what is sent waits
        self._news = asyncio.Event()
        self.task = asyncio.ensure_future(app(self.scope, self._to_app.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        if self.full:
            await asyncio.Event().wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")
            self.ended = not message.get("more_body", False)
        self._news.set()

    async def wait_for(self, text: bytes, seconds: float = 10.0) -> None:
        """Until the body has this text."""
        async with asyncio.timeout(seconds):
            while text not in self.body:
                self._news.clear()
                await self._news.wait()

    def cut(self) -> None:
        self._to_app.put_nowait({"type": "http.disconnect"})


class LogLines(logging.Handler):
    """The lines of requests, while this is entered."""

    def __enter__(self) -> "LogLines":
        self.lines: list[str] = []
        self._log = logging.getLogger("stoop.server.requests")
        self._before = self._log.level
        self._log.addHandler(self)
        self._log.setLevel(logging.INFO)
        return self

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __exit__(self, *error: object) -> None:
        self._log.removeHandler(self)
        self._log.setLevel(self._before)
