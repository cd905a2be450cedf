"""The Grafana dashboards are current, complete, and name only metrics that exist."""

import json
import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import make_dashboards
from stoop.server.metrics import ServerMetrics
from support.fake_core import FakeCore

PANELS = [
    "Requests",
    "Tokens",
    "Running and waiting",
    "Time to first token",
    "Inter-token latency",
    "End to end",
    "KV cache in use",
    "Prefix cache hit rate",
    "Preemptions",
    "Acceptance by position",
    "Mean acceptance length",
    "Steps by graph mode",
    "Padding",
    "Refused",
    "Restarts of the core",
]


@pytest.fixture(params=make_dashboards.FILES.items(), ids=lambda item: item[0])
def board(request: pytest.FixtureRequest) -> tuple[dict[str, Any], bool]:
    name, vllm = request.param
    return json.loads((make_dashboards.FOLDER / name).read_text()), vllm


def exposed(vllm: bool) -> dict[str, set[str]]:
    """Labels by name of every sample."""
    metrics = ServerMetrics(FakeCore(), "a model", vllm)
    metrics.refused(429)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def queries(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


def series(query: str) -> list[str]:
    return re.findall(r"\b(?:stoop_|vllm:)\w+", query)


def test_the_files_are_what_the_script_writes() -> None:
    for name, vllm in make_dashboards.FILES.items():
        written = (make_dashboards.FOLDER / name).read_text()
        assert written == make_dashboards.text_of(vllm), "run python tools/make_dashboards.py"


def test_every_metric_is_exposed(board: tuple[dict[str, Any], bool]) -> None:
    found, vllm = board
    exists = exposed(vllm)
    variables = [each["query"]["query"] for each in found["templating"]["list"][1:]]
    named = [name for query in [*queries(found), *variables] for name in series(query)]
    assert len(named) > 30
    assert [name for name in named if name not in exists] == []


def test_every_label_is_exposed(board: tuple[dict[str, Any], bool]) -> None:
    found, vllm = board
    exists = exposed(vllm)
    for panel in found["panels"]:
        for target in panel.get("targets", ()):
            grouped = re.findall(r"by \((\w+)\)", target["expr"])
            grouped += re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            (labels, *_) = (exists[name] for name in series(target["expr"]))
            assert set(grouped) <= labels | {"instance"}, target  # Prometheus adds the instance


def test_panels_do_not_overlap_and_none_is_missing(board: tuple[dict[str, Any], bool]) -> None:
    found, _ = board
    taken: set[tuple[int, int]] = set()
    for panel in found["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in found["panels"]]
    assert len(set(ids)) == len(ids)
    assert set(PANELS) <= {panel["title"] for panel in found["panels"]}
    assert all("${datasource}" in str(p["datasource"]) for p in found["panels"] if "targets" in p)


def test_brackets_are_balanced(board: tuple[dict[str, Any], bool]) -> None:
    for query in queries(board[0]):
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}")
        assert "<" not in query
