"""Errors in the shape that OpenAI's clients read, and what each status means."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from stoop.config.errors import CoreDied, RequestError, RequestLost

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
RETRY_AFTER = 1  # seconds


class ApiError(HTTPException):
    """One request cannot be answered. `message` is one sentence that says what to do."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        more = {} if retry_after is None else {"retry-after": str(retry_after)}
        super().__init__(status, message, headers={**(headers or {}), **more})
        self.message = message
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status_code, "invalid_request_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def content(self) -> bytes:
        return json.dumps(self.body).encode()

    def response(self) -> Response:
        return Response(
            self.content, self.status_code, headers=self.headers, media_type="application/json"
        )


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


def refuse(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unavailable(state: str) -> ApiError:
    """The engine cannot take requests now. state: that of `AsyncLLM`, or draining"""
    message = {
        "restarting": "the engine is restarting: try again in a few seconds",
        "dead": "the engine has stopped and its restarts are used up: restart the server",
        "draining": "the server is shutting down: send the request to another one",
        "stopped": "the server is shutting down: send the request to another one",
    }.get(state, f"the engine is {state}: try again later")
    seconds = 30 if state == "dead" else 5
    return ApiError(503, message, code=f"engine_{state}", retry_after=seconds)


def timed_out(seconds: float) -> ApiError:
    return ApiError(
        504,
        f"the answer was not complete after {seconds:g} s: ask for fewer tokens, or try again",
        code="request_timeout",
    )


def as_api_error(error: BaseException, state: str = "ready") -> ApiError | None:
    """What a client is told about an exception; None if it is a bug.

    state: that of the engine, for errors that say that it is gone
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return refuse(str(error))
    if isinstance(error, RequestLost):
        return ApiError(500, str(error), code="generation_failed")
    if isinstance(error, CoreDied):
        return unavailable(state if state != "ready" else "restarting")
    return None


# ---- what FastAPI finds wrong ----


def describe(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """One error of a request that does not fit its model: the most telling one."""
    # Of a union, each alternative reports its own error: the last part that fits most is deepest.
    chosen = max(errors, key=lambda each: len(each["loc"]))
    for each in errors:
        if each["type"] in ("extra_forbidden", "missing", "json_invalid"):
            chosen = each
            break
    where = [str(part) for part in chosen["loc"] if part != "body"]
    if chosen["type"] == "json_invalid":
        reason = chosen.get("ctx", {}).get("error", "it cannot be read")
        return refuse(f"the body is not JSON ({reason}): send one JSON object", code="invalid_json")
    param = ".".join(where) or None
    if chosen["type"] == "extra_forbidden":
        return refuse(f"stoop does not know `{param}`: leave it out", param, "unknown_parameter")
    if chosen["type"] == "missing":
        return refuse(
            f"`{param or 'body'}` is missing: add it", param, "missing_required_parameter"
        )
    reason = chosen["msg"].lower()
    return refuse(f"`{param or 'body'}`: {reason}", param, "invalid_value")


CLIENT_GONE = 499  # for the log: no one reads this answer
INTERNAL = "the server failed on this request: see its log"


def add_handlers(app: FastAPI, state: Callable[[], str]) -> None:
    """Make every error of the app one of ours. state: that of the engine"""

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return describe(error.errors()).response()

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error, ApiError):
            return error.response()
        path = request.url.path
        message = {
            404: f"there is no {path}: see /openapi.json",
            405: f"{path} does not take {request.method}: see /openapi.json",
        }.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def refused(request: Request, error: Exception) -> Response:
        found = as_api_error(error, state())
        # A bug is raised again after this answer, and logged at the gate.
        return (found or ApiError(500, INTERNAL, code="internal_error")).response()

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientGone, gone)
    for kind in (RequestError, RequestLost, CoreDied, Exception):
        app.add_exception_handler(kind, refused)
