"""Writes the Grafana dashboards: docs/grafana/stoop.json, and stoop-vllm-names.json for a server
that runs with `--metrics-names vllm`. A test checks that the files are what this script writes.

    python tools/make_dashboards.py
"""

import json
import re
from pathlib import Path
from typing import Any

from stoop.server import metric_names
from stoop.server.metric_names import Metric

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "grafana"
FILES = {"stoop.json": False, "stoop-vllm-names.json": True}
WIDTH, HEIGHT = 8, 8  # of a panel; a row has 24
# Title, unit, description, and queries with their legends.
Panel = tuple[str, str, str, list[tuple[str, str]]]
CHOSEN = 'model_name=~"$model", instance=~"$instance"'


def by_name() -> dict[str, Metric]:
    found = [each for each in vars(metric_names).values() if isinstance(each, Metric)]
    for each in vars(metric_names).values():
        if isinstance(each, tuple):
            found += [metric for metric in each if isinstance(metric, Metric)]
    return {metric.name: metric for metric in found}


def query(text: str, vllm: bool) -> str:
    """PromQL from a short form: `<name>` is a series of ours, with the chosen labels, and
    `rate<name>` its sum of rates. A suffix is written inside the brackets."""
    metrics = by_name()

    def series(match: re.Match[str]) -> str:
        name = match[1]
        suffix = re.search(r"_(total|bucket|sum|count)$", name)
        plain = name if name in metrics else name[: suffix.start()] if suffix else name
        (full, *_) = metrics[plain].names(vllm)
        return f"{full}{name[len(plain) :]}{{{CHOSEN}}}"

    text = re.sub(r"rate<(\w+)>", r"sum(rate(<\1>[$__rate_interval]))", text)
    return re.sub(r"<(\w+)>", series, text)


def quantiles(histogram: str) -> list[tuple[str, str]]:
    return [
        (
            f"p{percent}",
            f"histogram_quantile({percent / 100}, sum by (le) "
            f"(rate(<{histogram}_bucket>[$__rate_interval])))",
        )
        for percent in (50, 90, 99)
    ]


def traffic_row(vllm: bool) -> list[Panel]:
    reason = metric_names.FINISHED.label_name(vllm)
    return [
        (
            "Requests",
            "reqps",
            "Arrived and ended, by reason.",
            [
                ("arrived", "rate<requests_total>"),
                (
                    f"{{{{{reason}}}}}",
                    f"sum by ({reason}) (rate(<requests_finished_total>[$__rate_interval]))",
                ),
            ],
        ),
        (
            "Tokens",
            "short",
            "Per second. Prompt tokens include those found in the prefix cache.",
            [
                ("prompt", "rate<prompt_tokens_total>"),
                ("generated", "rate<generation_tokens_total>"),
                ("from the prefix cache", "rate<prompt_tokens_cached_total>"),
            ],
        ),
        (
            "Running and waiting",
            "short",
            "Requests in the scheduler.",
            [
                ("running", "sum(<requests_running>)"),
                ("waiting", "sum(<requests_waiting>)"),
                ("limit of running", "sum(<requests_running_limit>)"),
                ("open HTTP requests", "sum(<http_requests_open>)"),
            ],
        ),
    ]


def latency_row() -> list[Panel]:
    return [
        (
            "Time to first token",
            "s",
            "From arrival to the first token.",
            quantiles("time_to_first_token_seconds"),
        ),
        (
            "Inter-token latency",
            "s",
            "Per token after the first. Tokens of one step share its time evenly.",
            quantiles("inter_token_latency_seconds"),
        ),
        (
            "Time per output token",
            "s",
            "By request: decode time over tokens.",
            quantiles("request_time_per_output_token_seconds"),
        ),
        (
            "End to end",
            "s",
            "From arrival to the end of the answer.",
            quantiles("e2e_request_latency_seconds"),
        ),
        (
            "Where the time goes",
            "s",
            "Means by request.",
            [
                (
                    part,
                    f"rate<request_{part}_time_seconds_sum> / "
                    f"rate<request_{part}_time_seconds_count>",
                )
                for part in ("queue", "prefill", "decode")
            ],
        ),
        (
            "Lengths",
            "short",
            "Mean tokens by request.",
            [
                (
                    kind,
                    f"rate<request_{kind}_tokens_sum> / rate<request_{kind}_tokens_count>",
                )
                for kind in ("prompt", "generation")
            ],
        ),
    ]


def cache_row() -> list[Panel]:
    return [
        (
            "KV cache in use",
            "percentunit",
            "Share of blocks.",
            [("{{instance}}", "<kv_cache_usage_ratio>")],
        ),
        (
            "Prefix cache hit rate",
            "percentunit",
            "Share of looked-up prompt tokens that were found.",
            [
                (
                    "hits",
                    "rate<prefix_cache_hit_tokens_total> / rate<prefix_cache_queried_tokens_total>",
                )
            ],
        ),
        (
            "Preemptions",
            "short",
            "Per second. Many: the KV cache is too small for the load.",
            [("preemptions", "rate<preemptions_total>")],
        ),
    ]


def speculation_row() -> list[Panel]:
    return [
        (
            "Acceptance by position",
            "percentunit",
            "Share of the drafts verified at this position that were accepted.",
            [
                (
                    "draft {{position}}",
                    "sum by (position) (rate(<spec_accepted_tokens_by_position_total>"
                    "[$__rate_interval])) / sum by (position) "
                    "(rate(<spec_draft_tokens_by_position_total>[$__rate_interval]))",
                )
            ],
        ),
        (
            "Mean acceptance length",
            "short",
            "Tokens of a step: the accepted drafts and one more.",
            [("length", "1 + rate<spec_accepted_tokens_total> / rate<spec_drafts_total>")],
        ),
        (
            "Draft tokens",
            "short",
            "Per second.",
            [
                ("verified", "rate<spec_draft_tokens_total>"),
                ("accepted", "rate<spec_accepted_tokens_total>"),
            ],
        ),
    ]


def engine_row() -> list[Panel]:
    return [
        (
            "Steps by graph mode",
            "ops",
            "How the target's batches ran.",
            [("{{mode}}", "sum by (mode) (rate(<steps_total>[$__rate_interval]))")],
        ),
        (
            "Padding",
            "percentunit",
            "Share of computed tokens that only filled a graph.",
            [
                (
                    "wasted",
                    "rate<tokens_padded_total> / "
                    "(rate<tokens_computed_total> + rate<tokens_padded_total>)",
                )
            ],
        ),
        (
            "Time in steps",
            "percentunit",
            "Share of time that the core computes.",
            [("{{instance}}", "rate(<step_seconds_total>[$__rate_interval])")],
        ),
    ]


def trouble_row() -> list[Panel]:
    return [
        (
            "Refused",
            "reqps",
            "Answered with an error, by HTTP status.",
            [
                (
                    "{{code}}",
                    "sum by (code) (rate(<requests_refused_total>[$__rate_interval]))",
                )
            ],
        ),
        (
            "Restarts of the core",
            "short",
            "Since the server's start.",
            [("{{instance}}", "<core_restarts_total>")],
        ),
        (
            "Health",
            "short",
            "1: the core's process lives and its loop turns.",
            [
                ("{{instance}}", "<core_healthy>"),
                ("heartbeat age {{instance}}", "<core_heartbeat_age_seconds>"),
            ],
        ),
    ]


def rows(vllm: bool) -> list[tuple[str, list[Panel]]]:
    """Titles, and the panels below them."""
    return [
        ("Traffic", traffic_row(vllm)),
        ("Latency", latency_row()),
        ("Cache", cache_row()),
        ("Speculation", speculation_row()),
        ("Engine", engine_row()),
        ("Trouble", trouble_row()),
    ]


def variable(name: str, label: str, running: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": f"label_values({running}, {name_of(name)})", "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "options": [],
    }


def name_of(variable_name: str) -> str:
    return {"model": "model_name"}.get(variable_name, variable_name)


def row_json(number: int, title: str, top: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
        "panels": [],
    }


def panel_json(number: int, panel: Panel, x: int, y: int, vllm: bool) -> dict[str, Any]:
    title, unit, description, queries = panel
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "description": description,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "min": 0,
                "custom": {"lineWidth": 2, "fillOpacity": 8, "showPoints": "never"},
            }
            | ({"max": 1} if unit == "percentunit" else {}),
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(65 + index), "expr": query(expr, vllm), "legendFormat": legend}
            for index, (legend, expr) in enumerate(queries)
        ],
    }


def dashboard(vllm: bool) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    top = 0
    for title, of_row in rows(vllm):
        found.append(row_json(len(found) + 1, title, top))
        top += 1
        for place, panel in enumerate(of_row):
            x, y = place % 3 * WIDTH, top + place // 3 * HEIGHT
            found.append(panel_json(len(found) + 1, panel, x, y, vllm))
        top += (len(of_row) + 2) // 3 * HEIGHT
    (running,) = by_name()["requests_running"].names(vllm)
    return {
        "title": "stoop" + (" (vLLM's metric names)" if vllm else ""),
        "uid": "stoop-vllm-names" if vllm else "stoop",
        "description": "Serving with stoop: traffic, latency, cache, speculation and graphs.",
        "tags": ["stoop", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {},
                    "options": [],
                },
                variable("model", "Model", running),
                variable("instance", "Server", running),
            ]
        },
        "annotations": {"list": []},
        "panels": found,
    }


def text_of(vllm: bool) -> str:
    return json.dumps(dashboard(vllm), indent=1) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, vllm in FILES.items():
        (FOLDER / name).write_text(text_of(vllm))


if __name__ == "__main__":
    main()
