"""Metrics and traces, if they are installed; otherwise objects that do nothing."""

import logging
from typing import Any, Protocol

from stoop.core.outputs import RequestTimes

log = logging.getLogger(__name__)


class Metrics(Protocol):
    """What endpoints tell the metrics; `stoop.server.metrics.ServerMetrics` implements it."""

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
    ) -> None: ...
    def render(self) -> tuple[bytes, str]: ...


class NoMetrics:
    """For tests, and for a server without prometheus_client."""

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
    ) -> None: ...

    def render(self) -> tuple[bytes, str]:
        return b"# no metrics: pip install 'stoop[serve]'\n", "text/plain; charset=utf-8"


def make_metrics(llm: Any, model_name: str, vllm_names: bool) -> Metrics:
    try:
        from stoop.server.metrics import ServerMetrics
    except ImportError as error:
        log.info("no metrics: %s", error)
        return NoMetrics()
    return ServerMetrics(llm, model_name, vllm_names)  # type: ignore[no-any-return]
