"""What every HTTP request passes: its id, the key, limits, draining, and its line in the log."""

import asyncio
import hmac
import itertools
import json
import logging
import re
import time
import uuid
from typing import Any

from stoop.server.errors import CLIENT_GONE, ApiError, ClientGone, unavailable
from stoop.server.service import Service
from stoop.server.settings import host_name
from stoop.server.transport import (
    ARRIVAL,
    RAW_SEND,
    RECORD,
    UNIQUE_ID,
    Message,
    Receive,
    Send,
    internal_error,
)

log = logging.getLogger("stoop.server.requests")

BODY_SECONDS = 60.0  # for a client to send its whole body
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# These need no key and are answered while the server drains.
PUBLIC = ("/", "/health", "/metrics", "/version", "/ping", "/favicon.ico")
QUIET = ("/health", "/metrics", "/stats", "/ping")  # not in the log if all is well


class Gate:
    """ASGI middleware, outside of the app."""

    def __init__(self, app: Any, service: Service, public: tuple[str, ...] = ()) -> None:
        self.app = app
        self.service = service
        self.public = frozenset((*PUBLIC, *public))
        self.keys = [key.encode() for key in service.settings.api_keys]
        self.hosts = service.settings.hosts
        self._numbers = itertools.count()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record: dict[str, Any] = {"id": uuid.uuid4().hex, "route": scope["path"], "status": 0}
        scope[RECORD], scope[RAW_SEND] = record, send
        started = time.perf_counter()
        service = self.service
        service.num_requests += 1
        service.idle.clear()
        send = _Marked(send, record)
        try:
            await self._answer(scope, receive, send, record)
        except ClientGone:
            record["status"] = CLIENT_GONE
        except ApiError as error:
            await _reply(error, scope, receive, send)
        except Exception as error:
            failure = internal_error(error)
            if not record["status"]:
                await _reply(failure, scope, receive, send)
        finally:
            service.num_requests -= 1
            if not service.num_requests:
                service.idle.set()
            if record["status"] == CLIENT_GONE:
                record["finish"] = "disconnect"
            elif record["status"] >= 400:
                service.metrics.refused(record["status"])
            record["duration_ms"] = round((time.perf_counter() - started) * 1000, 1)
            self._log(scope, record)

    async def _answer(
        self, scope: Any, receive: Receive, send: Send, record: dict[str, Any]
    ) -> None:
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id")
        if given is not None:
            text = given.decode("latin-1")
            if not REQUEST_ID.fullmatch(text):
                raise ApiError(
                    400,
                    "X-Request-Id: use at most 128 letters, digits and any of . _ : -",
                    param="X-Request-Id",
                )
            record["id"] = text
        # Requests may share an id, which the engine does not allow.
        scope[UNIQUE_ID] = f"{record['id']}.{next(self._numbers)}"
        self._check_host(headers)
        public = scope["path"] in self.public
        if not public and scope["method"] != "OPTIONS":
            self._check_key(headers)
            if self.service.draining:
                raise unavailable("draining")
        if not public and scope["method"] in ("POST", "PUT", "PATCH", "DELETE"):
            receive = await self._read_body(headers, receive)
        scope[ARRIVAL] = time.perf_counter()
        await self.app(scope, receive, send)

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """Refuse names that only another site's page would use; browsers always send one."""
        given = headers.get(b"host")
        if self.hosts is None or given is None:
            return
        name = host_name(given.decode("latin-1"))
        if name not in self.hosts:
            shown = json.dumps(name[:200])
            raise ApiError(
                403,
                f"this server does not go by the name {shown} of the Host header: call it "
                "localhost, or start it with --allow-host and that name",
                code="host_not_allowed",
            )

    def _check_key(self, headers: dict[bytes, bytes]) -> None:
        if not self.keys:
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        token = given.strip() if scheme.lower() == b"bearer" else b""
        # Every key is compared, in constant time, so that timing tells nothing.
        if sum(hmac.compare_digest(token, key) for key in self.keys):
            return
        raise ApiError(
            401,
            "the API key is missing or wrong: send `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )

    async def _read_body(self, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        """Read the whole body, within the limits, and return a `receive` that has it."""
        limit = self.service.settings.max_body_bytes
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > limit:
            raise _too_large(limit)
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    more = message.get("more_body", False)
                    if size > limit:
                        raise _too_large(limit)
        except TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {BODY_SECONDS:g} s: send it again"
            ) from None
        body = b"".join(parts)
        _check_json_header(headers, body)
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        return replay

    def _log(self, scope: Any, record: dict[str, Any]) -> None:
        settings = self.service.settings
        if not settings.log_requests or not log.isEnabledFor(logging.INFO):
            return
        if scope["path"] in QUIET and record["status"] < 400:
            return
        if settings.log_format == "json":
            head = {"time": round(time.time(), 3), "level": "INFO", "logger": log.name}
            log.info(json.dumps({**head, **record}))
            return
        log.info(" ".join(f"{name}={_value(value)}" for name, value in record.items()))


class _Marked:
    """`send` that adds the request's id to the head of a response, and notes its status."""

    def __init__(self, send: Send, record: dict[str, Any]) -> None:
        self._send = send
        self._record = record

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._record["status"] = message["status"]
            header = (b"x-request-id", self._record["id"].encode())
            message = {**message, "headers": [*message.get("headers", ()), header]}
        await self._send(message)


async def _reply(error: ApiError, scope: Any, receive: Receive, send: Send) -> None:
    await error.response()(scope, receive, send)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body has more than {limit} bytes: send less", code="body_too_large")


def _check_json_header(headers: dict[bytes, bytes], body: bytes) -> None:
    """Browsers send JSON to other origins only after asking; other types they send at once."""
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if body and kind != b"application/json" and not kind.endswith(b"+json"):
        raise ApiError(
            415,
            "the body must be JSON: send it with `Content-Type: application/json`",
            code="unsupported_media_type",
        )


def _value(value: Any) -> str:
    text = str(value)
    plain = text.isascii() and text.isprintable() and not any(c in text for c in ' "=')
    return text if plain and text else json.dumps(text)
