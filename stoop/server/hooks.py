"""Metrics and traces, if they are installed; otherwise objects that do nothing."""

import importlib
from typing import Any, Protocol

from stoop.core.outputs import RequestTimes


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
