"""OpenTelemetry traces: one span by request, if an endpoint is configured.

Attributes have the names of OpenTelemetry's conventions for generative AI; those that they lack
(`gen_ai.latency.*`) have vLLM's. No text of prompts or answers is recorded.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from stoop.config.errors import ConfigError
from stoop.server.hooks import RequestTrace, Tracer
from stoop.server.metrics import Times, intervals
from stoop.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

MISSING = (
    "--otlp-traces-endpoint needs OpenTelemetry: install it with pip install 'stoop[otel]', or "
    "pip install opentelemetry-sdk opentelemetry-exporter-otlp"
)
CHAT, COMPLETION = "chat", "text_completion"  # operations
# A field of a request's sampling parameters, and its attribute.
PARAMS = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "seed": "seed",
    "n": "choice.count",
}
LATENCIES = {
    "e2e": "e2e",
    "queue": "time_in_queue",
    "prefill": "time_in_model_prefill",
    "decode": "time_in_model_decode",
    "inference": "time_in_model_inference",
}


class SpanTrace(RequestTrace):
    def __init__(self, span: "Span") -> None:
        self._span = span

    def end(
        self,
        times: Times,
        *,
        num_prompt: int,
        num_cached: int | None,
        num_output: int,
        finish_reasons: Sequence[str],
    ) -> None:
        found: dict[str, Any] = {
            "gen_ai.usage.input_tokens": num_prompt,
            "gen_ai.usage.output_tokens": num_output,
            "gen_ai.usage.cache_read.input_tokens": num_cached or 0,
            "gen_ai.response.finish_reasons": list(finish_reasons),
        }
        if times.first_token is not None:
            found["gen_ai.latency.time_to_first_token"] = times.first_token - times.arrival
        for key, seconds in intervals(times).items():
            found[f"gen_ai.latency.{LATENCIES[key]}"] = seconds
        self._span.set_attributes(found)
        self._span.end()

    def fail(self, code: int, message: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes({"error.type": str(code), "http.response.status_code": code})
        self._span.set_status(Status(StatusCode.ERROR, message))
        self._span.end()


class OpenTelemetryTracer(Tracer):
    """Sends spans to an OTLP endpoint, from a thread of its own."""

    def __init__(self, exporter: "SpanExporter", model_name: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Variables like OTEL_SERVICE_NAME win over these.
        resource = Resource.create({"service.version": __version__})
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "stoop"}))
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("stoop.server", __version__)
        self._context = TraceContextTextMapPropagator()
        self._model_name = model_name

    def start(
        self, headers: Mapping[str, str], operation: str, request_id: str, params: Any = None
    ) -> RequestTrace:
        from opentelemetry.trace import SpanKind

        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "stoop",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.id": request_id,
        }
        for field, name in PARAMS.items():
            value = getattr(params, field, None)
            if value is not None:
                attributes[f"gen_ai.request.{name}"] = value
        lower = {name.lower(): value for name, value in headers.items()}
        span = self._tracer.start_span(
            f"{operation} {self._model_name}",
            context=self._context.extract(lower),
            kind=SpanKind.SERVER,
            attributes=attributes,
        )
        return SpanTrace(span)

    def shutdown(self) -> None:
        self._provider.shutdown()


def make_tracer(endpoint: str, model_name: str) -> Tracer:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint}: use http://HOST:4317 for gRPC, or "
            "http://HOST:4318/v1/traces for HTTP"
        )
    protocol = "http" if parts.path.strip("/") else "grpc"  # gRPC endpoints have no path
    try:
        module = import_module(f"opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter")
        return OpenTelemetryTracer(module.OTLPSpanExporter(endpoint=endpoint), model_name)
    except ImportError:
        raise ConfigError(MISSING) from None
