"""What endpoints tell metrics and traces. The classes here do nothing with it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stoop.core.outputs import RequestTimes


class Metrics:
    """`stoop.server.metrics.ServerMetrics` counts."""

    http_open: Callable[[], int]  # HTTP requests being answered

    def request_arrived(self) -> None: ...

    def first_token(self, seconds: float) -> None:
        """A request's first output came this long after its arrival."""

    def inter_token(self, seconds: float, count: int) -> None:
        """`count` tokens came in this time, after an earlier one."""

    def refused(self, code: int) -> None:
        """A request was answered with this HTTP status instead of a completion."""

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
    ) -> None:
        """A request has ended. `num_output` counts the tokens of all its answers."""

    def render(self) -> tuple[bytes, str]:
        """The body of `/metrics` and its content type."""
        return b"", "text/plain; charset=utf-8"


class RequestTrace:
    """A request's span. Exactly one of the two methods is called, once."""

    def end(
        self,
        times: RequestTimes,
        *,
        num_prompt: int,
        num_cached: int,
        num_output: int,
        finish_reasons: Sequence[str],
    ) -> None: ...

    def fail(self, code: int, message: str) -> None:
        """The request was refused, or broke off, with this HTTP status."""


NO_TRACE = RequestTrace()


class Tracer:
    """`stoop.server.tracing.OpenTelemetryTracer` sends spans."""

    def start(
        self, headers: Mapping[str, str], operation: str, request_id: str, params: Any = None
    ) -> RequestTrace:
        """A request has come. `params` are its sampling parameters."""
        return NO_TRACE

    def shutdown(self) -> None:
        """Send what is left."""


def make_tracer(endpoint: str | None, model_name: str) -> Tracer:
    """For the value of `--otlp-traces-endpoint`."""
    if endpoint is None:
        return Tracer()
    from stoop.server import tracing  # with OpenTelemetry, which few servers have

    return tracing.make_tracer(endpoint, model_name)
