"""Traces: parents, attributes, failures, and what is missing without the library."""

import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from stoop.config.errors import ConfigError
from stoop.server import hooks
from stoop.server.tracing import CHAT, OpenTelemetryTracer, make_tracer

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

TIMES = SimpleNamespace(
    arrival=10.0, admitted=10.5, first_token=11.0, last_token=13.0, finished=13.25
)
COUNTS = {"num_prompt": 12, "num_cached": 8, "num_output": 5, "finish_reasons": ["stop"]}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def only_span(tracer: OpenTelemetryTracer, exporter: InMemorySpanExporter) -> ReadableSpan:
    tracer.shutdown()  # sends what is left
    (span,) = exporter.get_finished_spans()
    return span


def test_a_request_is_a_span_with_genai_attributes(exporter: InMemorySpanExporter) -> None:
    tracer = OpenTelemetryTracer(exporter, "a-model")
    params = SimpleNamespace(max_tokens=64, temperature=0.5, top_p=1.0, top_k=20, n=1, seed=None)
    tracer.start({}, CHAT, "chatcmpl-1", params).end(TIMES, **COUNTS)
    span = only_span(tracer, exporter)
    assert span.name == "chat a-model" and span.kind == SpanKind.SERVER and span.parent is None
    assert span.resource.attributes["service.name"] == "stoop"
    assert span.status.status_code == StatusCode.UNSET
    assert dict(span.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "stoop",
        "gen_ai.request.model": "a-model",
        "gen_ai.response.model": "a-model",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 20,
        "gen_ai.request.choice.count": 1,
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.latency.time_to_first_token": 1.0,
        "gen_ai.latency.e2e": 3.25,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_in_model_prefill": 0.5,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.time_in_model_inference": 2.5,
    }


def test_traceparent_is_honoured(exporter: InMemorySpanExporter) -> None:
    tracer = OpenTelemetryTracer(exporter, "a-model")
    headers = {"Traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}
    tracer.start(headers, CHAT, "1").end(TIMES, **COUNTS)
    span = only_span(tracer, exporter)
    assert span.context is not None and span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.context.trace_state.get("a") == "b"


@pytest.mark.parametrize("header", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01"])
def test_a_bad_traceparent_starts_a_trace(exporter: InMemorySpanExporter, header: str) -> None:
    tracer = OpenTelemetryTracer(exporter, "a-model")
    tracer.start({"traceparent": header}, CHAT, "1").end(TIMES, **COUNTS)
    assert only_span(tracer, exporter).parent is None


def test_a_failure_has_a_status(exporter: InMemorySpanExporter) -> None:
    tracer = OpenTelemetryTracer(exporter, "a-model")
    tracer.start({}, CHAT, "1").fail(503, "the core died")
    span = only_span(tracer, exporter)
    assert span.status.status_code == StatusCode.ERROR
    assert span.status.description == "the core died"
    assert span.attributes is not None and span.attributes["error.type"] == "503"


def test_without_an_endpoint_nothing_happens() -> None:
    tracer = hooks.make_tracer(None, "a-model")
    assert type(tracer) is hooks.Tracer
    trace = tracer.start({}, CHAT, "1")
    trace.end(TIMES, **COUNTS)
    trace.fail(500, "no")
    tracer.shutdown()


@pytest.mark.parametrize(
    ("endpoint", "protocol"), [("http://h:4317", "grpc"), ("https://h:4318/v1/traces", "http")]
)
def test_the_endpoint_chooses_the_protocol(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, protocol: str
) -> None:
    module = ModuleType("exporter")
    given = []

    class Exporter(InMemorySpanExporter):
        def __init__(self, endpoint: str) -> None:
            super().__init__()
            given.append(endpoint)

    module.OTLPSpanExporter = Exporter  # type: ignore[attr-defined]
    name = f"opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter"
    monkeypatch.setitem(sys.modules, name, module)
    tracer = make_tracer(endpoint, "a-model")
    tracer.shutdown()
    assert given == [endpoint]


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install opentelemetry-sdk opentelemetry-exporter"):
        make_tracer("http://localhost:4317", "a-model")


def test_the_extra_has_both_protocols() -> None:
    """`opentelemetry-exporter-otlp-proto-http` alone lacks the gRPC of port 4317."""
    project = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    assert [each.partition(">")[0] for each in extras["otel"]] == [
        "opentelemetry-sdk",
        "opentelemetry-exporter-otlp",
    ]


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://h", "http://", ""])
def test_a_bad_endpoint_is_one_sentence(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"use http://HOST:4317"):
        make_tracer(endpoint, "a-model")
