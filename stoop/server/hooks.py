"""Metrics and traces, if they are installed; otherwise objects that do nothing."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from stoop.config.errors import ConfigError
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
    """For tests, and for a server without prometheus_client."""

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
        return b"# no metrics: pip install 'stoop[serve]'\n", "text/plain; charset=utf-8"


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
    module = optional("stoop.server.tracing")
    if module is None:
        raise ConfigError("--otlp-traces-endpoint: this stoop sends no traces, so leave it out")
    made: Tracer = module.make_tracer(endpoint, model_name)
    return made


def make_metrics(llm: Any, model_name: str, vllm_names: bool) -> Metrics:
    module = optional("stoop.server.metrics")
    if module is None:
        return NoMetrics()
    made: Metrics = module.ServerMetrics(llm, model_name, vllm_names)
    return made


def optional(name: str) -> Any:
    """A module, or None if stoop was built without it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None
