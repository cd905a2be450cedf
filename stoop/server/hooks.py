"""What endpoints tell metrics and traces, and objects that do nothing with it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from stoop.core.outputs import RequestTimes


class Metrics(Protocol):
    """What endpoints tell the metrics; `stoop.server.metrics.ServerMetrics` implements it."""

    http_open: Callable[[], int]  # HTTP requests being answered

    def request_arrived(self) -> None: ...
    def first_token(self, seconds: float) -> None: ...
    def inter_token(self, seconds: float, count: int) -> None: ...
    def refused(self, code: int) -> None: ...
    def observe(
        self,
        times: RequestTimes,
        *,
        num_prompt: int,
        num_cached: int,
        num_output: int,
        finish_reason: str,
        n: int,
        max_tokens: int | None,
    ) -> None: ...
    def render(self) -> tuple[bytes, str]: ...


class NoMetrics:
    """For tests of endpoints alone."""

    http_open: Callable[[], int]

    def request_arrived(self) -> None: ...
    def first_token(self, seconds: float) -> None: ...
    def inter_token(self, seconds: float, count: int) -> None: ...
    def refused(self, code: int) -> None: ...
    def observe(
        self,
        times: RequestTimes,
        *,
        num_prompt: int,
        num_cached: int,
        num_output: int,
        finish_reason: str,
        n: int,
        max_tokens: int | None,
    ) -> None: ...

    def render(self) -> tuple[bytes, str]:
        return b"", "text/plain; charset=utf-8"


class RequestTrace(Protocol):
    """A request's span; one of the two is called, once."""

    def end(
        self,
        times: RequestTimes,
        *,
        num_prompt: int,
        num_cached: int,
        num_output: int,
        finish_reasons: Sequence[str],
    ) -> None: ...

    def fail(self, code: int, message: str) -> None: ...


class Tracer(Protocol):
    """`stoop.server.tracing.make_tracer` returns one."""

    def start(
        self, headers: Mapping[str, str], operation: str, request_id: str, params: Any = None
    ) -> RequestTrace: ...

    def shutdown(self) -> None: ...


class _NoTrace:
    def end(
        self,
        times: RequestTimes,
        *,
        num_prompt: int,
        num_cached: int,
        num_output: int,
        finish_reasons: Sequence[str],
    ) -> None: ...

    def fail(self, code: int, message: str) -> None: ...


NO_TRACE = _NoTrace()


class NoTracer:
    """Without an endpoint for traces."""

    def start(
        self, headers: Mapping[str, str], operation: str, request_id: str, params: Any = None
    ) -> RequestTrace:
        return NO_TRACE

    def shutdown(self) -> None: ...


def make_tracer(endpoint: str | None, model_name: str) -> Tracer:
    if endpoint is None:
        return NoTracer()
    from stoop.server import tracing  # with OpenTelemetry, which few servers have

    return tracing.make_tracer(endpoint, model_name)
