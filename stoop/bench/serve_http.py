"""A small HTTP/1.1 client for event streams, on asyncio's transports.

A benchmark's client must cost less than the server that it measures. Here a read from the socket is
one callback, which takes the time once and cuts the bytes into chunks; no task wakes up until an
answer ends.
"""

import asyncio
import ssl
import time
from dataclasses import dataclass
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from stoop.config.errors import ConfigError

MAX_HEAD = 64 * 1024  # bytes of a response's headers
_CLOSE = frozenset(("close",))


@dataclass(frozen=True)
class Server:
    """Where requests go."""

    host: str
    port: int
    tls: bool
    prefix: str  # path before /v1
    api_key: str | None

    @staticmethod
    def parse(url: str, api_key: str | None) -> "Server":
        """Read `http://host:port`, with or without `/v1` at the end."""
        advice = "use http://host:port, such as http://127.0.0.1:8000"
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise ConfigError(f"--url {url!r}: {advice}") from None
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(f"--url {url!r}: {advice}")
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigError(f"--url {url!r} has more than a host, a port and a path: {advice}")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key):
            raise ConfigError("--api-key: use printable ASCII characters")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        if not prefix.isascii() or not prefix.isprintable() or " " in prefix:
            raise ConfigError(f"--url {url!r}: {advice}")
        return Server(host, port or (443 if tls else 80), tls, prefix, api_key)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"

    def request(self, path: str, body: bytes | None = None) -> bytes:
        """The bytes of a GET, or of a POST of JSON."""
        host = self.url.split("/")[2]
        lines = [
            f"{'GET' if body is None else 'POST'} {self.prefix}{path} HTTP/1.1",
            f"Host: {host}",
            "Accept: text/event-stream, application/json",
        ]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


class Sink(Protocol):
    """Takes a response as it arrives."""

    def start(self, status: int, content_type: str) -> None: ...

    def feed(self, data: bytes, now: float) -> None: ...


class BrokenExchange(Exception):
    """The connection ended, or sent something other than HTTP, before the response was complete."""


class Connection(asyncio.Protocol):
    """One connection, which serves one exchange at a time and may be used again."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.num_bytes = 0  # received in this exchange
        self.reusable = True
        self._sink: Sink | None = None
        self._done: asyncio.Future[None] | None = None
        self._buffer = b""
        self._in_head = True
        self._chunked = False
        self._left: int | None = None  # bytes of the body to come; None: until the end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    async def exchange(self, request: bytes, sink: Sink) -> None:
        """Send a request and wait until its whole response has been fed to the sink."""
        assert self._done is None and self.transport is not None
        self._sink, self._done = sink, asyncio.get_running_loop().create_future()
        self._buffer, self._in_head, self.num_bytes = b"", True, 0
        self.transport.write(request)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._sink = self._done = None

    def close(self) -> None:
        self.reusable = False
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._sink is None:  # nothing was asked for
            self.close()
            return
        self.num_bytes += len(data)
        self._buffer = self._buffer + data if self._buffer else data
        try:
            self._advance(now)
        except (ValueError, IndexError) as error:
            self._fail(f"the server sent something other than HTTP ({error})")

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        to_the_end = not self._in_head and not self._chunked and self._left is None
        if exc is None and to_the_end:
            self._finish()
        else:
            self._fail("the connection broke off" + (f" ({exc})" if exc else ""))

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, problem: str) -> None:
        self.reusable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(BrokenExchange(problem))

    def _advance(self, now: float) -> None:
        if self._in_head and not self._read_head():
            return
        assert self._sink is not None
        if self._chunked:
            self._read_chunks(now)
            return
        data, self._buffer = self._buffer, b""
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
        self._sink.feed(data, now)
        if self._left == 0:
            self._finish()

    def _read_head(self) -> bool:
        """Whether the headers are complete."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD:
                raise ValueError("headers without an end")
            return False
        head, self._buffer = self._buffer[:end].decode("latin-1"), self._buffer[end + 4 :]
        first, *lines = head.split("\r\n")
        version, code = first.split(" ", 2)[:2]
        if not version.startswith("HTTP/1."):
            raise ValueError(f"a first line of {first[:40]!r}")
        if code == "100":  # "continue" comes before the real response
            return self._read_head()
        pairs = (line.split(":", 1) for line in lines)
        headers = {pair[0].strip().lower(): pair[1].strip() for pair in pairs}
        self._chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        length = headers.get("content-length")
        self._left = int(length) if length is not None and not self._chunked else None
        if headers.get("connection", "").lower() in _CLOSE:
            self.reusable = False
        self._in_head = False
        assert self._sink is not None
        self._sink.start(int(code), headers.get("content-type", ""))
        return True

    def _read_chunks(self, now: float) -> None:
        assert self._sink is not None
        buffer, place = self._buffer, 0
        while True:
            line = buffer.find(b"\r\n", place)
            if line < 0:
                break
            size = int(buffer[place:line].split(b";")[0], 16)
            if size == 0:  # trailers may follow
                if buffer.find(b"\r\n\r\n", line) >= 0:
                    self._finish()
                break
            end = line + 2 + size
            if len(buffer) < end + 2:
                break
            self._sink.feed(buffer[line + 2 : end], now)
            place = end + 2
        self._buffer = buffer[place:]


class Pool:
    """Connections to one server. A used one is kept for the next request."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if server.tls else None

    async def exchange(self, request: bytes, sink: Sink) -> None:
        """Send a request; `OSError` if the server cannot be reached."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.reusable:
                continue
            try:
                await connection.exchange(request, sink)
            except BrokenExchange:
                if connection.num_bytes:
                    raise
                continue  # the server closed it while it was idle
            self._keep(connection)
            return
        connection = await self._connect()
        await connection.exchange(request, sink)
        self._keep(connection)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        server = self.server
        _, connection = await loop.create_connection(
            Connection, server.host, server.port, ssl=self._tls
        )
        return connection

    def _keep(self, connection: Connection) -> None:
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()


class Collected:
    """A sink that keeps a whole response."""

    def __init__(self) -> None:
        self.status = 0
        self.content_type = ""
        self.body = b""

    def start(self, status: int, content_type: str) -> None:
        self.status, self.content_type = status, content_type

    def feed(self, data: bytes, now: float) -> None:
        self.body += data


def new_event_loop() -> Any:
    """uvloop's where it is installed: it halves the cost of a read."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
