"""Metrics: both sets of names, their values, restarts of the core, and scrapes without one."""

import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stoop.core.outputs import RequestTimes
from stoop.server import metric_names
from stoop.server.metrics import Histogram, ServerMetrics
from support.fake_core import FakeCore, snapshot

# What vLLM's boards, the Gateway API's inference extension and llm-d read.
VLLM_NAMES = {
    "gauge": [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "vllm:cache_config_info",
    ],
    "counter": [
        "vllm:prompt_tokens",
        "vllm:prompt_tokens_cached",
        "vllm:generation_tokens",
        "vllm:num_preemptions",
        "vllm:prefix_cache_queries",
        "vllm:prefix_cache_hits",
        "vllm:request_success",
        "vllm:spec_decode_num_drafts",
        "vllm:spec_decode_num_draft_tokens",
        "vllm:spec_decode_num_accepted_tokens",
        "vllm:spec_decode_num_accepted_tokens_per_pos",
    ],
    "histogram": [
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
        "vllm:request_time_per_output_token_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
        "vllm:request_inference_time_seconds",
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
        "vllm:request_params_n",
        "vllm:request_params_max_tokens",
    ],
}
ONLY_OURS = {
    "gauge": [
        "stoop_kv_cache_blocks",
        "stoop_kv_cache_bytes",
        "stoop_requests_running_limit",
        "stoop_core_heartbeat_age_seconds",
        "stoop_core_healthy",
        "stoop_requests_open",
        "stoop_http_requests_open",
        "stoop_info",
        "stoop_spec_policy_info",
    ],
    "counter": [
        "stoop_steps",
        "stoop_steps_by_drafts",
        "stoop_requests_computed_again",
        "stoop_spec_drafts_not_made",
        "stoop_spec_draft_tokens_by_position",
        "stoop_step_seconds",
        "stoop_tokens_computed",
        "stoop_tokens_padded",
        "stoop_core_restarts",
        "stoop_requests",
        "stoop_requests_refused",
    ],
}
OURS_FOR_VLLM = {
    "gauge": [
        "stoop_requests_running",
        "stoop_requests_waiting",
        "stoop_kv_cache_usage_ratio",
        "stoop_cache_config_info",
    ],
    "counter": [
        "stoop_prompt_tokens",
        "stoop_prompt_tokens_cached",
        "stoop_generation_tokens",
        "stoop_preemptions",
        "stoop_prefix_cache_queried_tokens",
        "stoop_prefix_cache_hit_tokens",
        "stoop_requests_finished",
        "stoop_spec_drafts",
        "stoop_spec_draft_tokens",
        "stoop_spec_accepted_tokens",
        "stoop_spec_accepted_tokens_by_position",
    ],
    "histogram": [
        "stoop_time_to_first_token_seconds",
        "stoop_inter_token_latency_seconds",
        "stoop_request_time_per_output_token_seconds",
        "stoop_e2e_request_latency_seconds",
        "stoop_request_queue_time_seconds",
        "stoop_request_prefill_time_seconds",
        "stoop_request_decode_time_seconds",
        "stoop_request_inference_time_seconds",
        "stoop_request_prompt_tokens",
        "stoop_request_generation_tokens",
        "stoop_request_params_n",
        "stoop_request_params_max_tokens",
    ],
}
TIMES = SimpleNamespace(arrival=10.0, admitted=10.5, first_token=11.0, last_token=13.0)
TIMES.finished = 13.25


def families(metrics: ServerMetrics) -> dict[str, Any]:
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain; version=")
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        assert family.name not in found
        found[family.name] = family
    return found


def value(metrics: ServerMetrics, sample: str, **labels: str) -> float:
    for family in families(metrics).values():
        for each in family.samples:
            if each.name == sample and labels.items() <= each.labels.items():
                return each.value
    raise AssertionError(f"{sample} {labels} is not in the exposition")


@pytest.fixture(params=[False, True], ids=["ours", "vllm"])
def vllm(request: pytest.FixtureRequest) -> bool:
    return request.param


def used(core: FakeCore, vllm: bool) -> ServerMetrics:
    """Metrics after one request of each kind."""
    metrics = ServerMetrics(core, "a model", vllm)
    metrics.request_arrived()
    metrics.first_token(0.05)
    metrics.inter_token(0.06, 3)
    metrics.observe(
        TIMES, num_prompt=12, num_cached=8, num_output=5, finish_reason="stop", max_tokens=64
    )
    metrics.refused(429)
    return metrics


def test_every_name_of_both_sets_is_there(vllm: bool) -> None:
    found = families(used(FakeCore(), vllm))
    expected = [ONLY_OURS, VLLM_NAMES if vllm else OURS_FOR_VLLM]
    kinds = {name: kind for each in expected for kind, names in each.items() for name in names}
    own = {name: family for name, family in found.items() if not name.startswith("process_")}
    assert {name: family.type for name, family in own.items()} == kinds
    assert "process_resident_memory_bytes" in found


def test_every_family_has_help_labels_and_a_sample(vllm: bool) -> None:
    for name, family in families(used(FakeCore(), vllm)).items():
        assert family.documentation.endswith((".", "by HTTP status.")) or "process" in name
        assert family.samples, name
        for sample in family.samples:
            if not name.startswith("process_"):
                assert sample.labels["model_name"] == "a model"
                assert sample.labels.get("engine") == ("0" if vllm else None)


def test_values_come_from_the_core() -> None:
    metrics = used(FakeCore(), vllm=False)
    assert value(metrics, "stoop_requests_running") == 5
    assert value(metrics, "stoop_requests_waiting") == 2
    assert value(metrics, "stoop_kv_cache_usage_ratio") == 0.25
    assert value(metrics, "stoop_prefix_cache_hit_tokens_total") == 64
    assert value(metrics, "stoop_steps_total", mode="full") == 20
    assert value(metrics, "stoop_steps_by_drafts_total", drafts="3") == 18
    assert value(metrics, "stoop_requests_computed_again_total") == 6
    assert value(metrics, "stoop_spec_drafts_not_made_total") == 36
    assert value(metrics, "stoop_tokens_padded_total") == 50
    assert value(metrics, "stoop_spec_accepted_tokens_by_position_total", position="1") == 20
    assert value(metrics, "stoop_spec_accepted_tokens_by_position_total", position="3") == 7
    assert value(metrics, "stoop_spec_draft_tokens_by_position_total", position="3") == 20
    assert value(metrics, "stoop_core_healthy") == 1
    assert value(metrics, "stoop_requests_open") == 7
    assert value(metrics, "stoop_info", spec_method="eagle3", num_speculative_tokens="3") == 1
    policy = "3 drafts at 1 to 64 requests, none above 64"
    assert value(metrics, "stoop_spec_policy_info", policy=policy) == 1


def test_without_a_varying_number_of_drafts_there_is_no_policy() -> None:
    found = snapshot()
    del found["spec_decode_policy"]
    core = FakeCore(found)
    assert "stoop_spec_policy_info" not in families(used(core, vllm=False))


def test_vllm_labels() -> None:
    metrics = used(FakeCore(), vllm=True)
    per_pos = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert value(metrics, per_pos, position="0") == 20  # from 0, as in vLLM
    assert value(metrics, "stoop_spec_draft_tokens_by_position_total", position="2") == 20
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 0
    assert value(metrics, "vllm:cache_config_info", block_size="16", num_gpu_blocks="512") == 1


def test_values_come_from_the_server() -> None:
    metrics = used(FakeCore(), vllm=False)
    assert value(metrics, "stoop_requests_total") == 1
    assert value(metrics, "stoop_requests_refused_total", code="429") == 1
    assert value(metrics, "stoop_requests_finished_total", finish_reason="stop") == 1
    assert value(metrics, "stoop_prompt_tokens_cached_total") == 8
    for name, seconds in {
        "time_to_first_token": 0.05,
        "e2e_request_latency": 3.25,
        "request_queue_time": 0.5,
        "request_prefill_time": 0.5,
        "request_decode_time": 2.0,
        "request_inference_time": 2.5,
        "request_time_per_output_token": 0.5,
    }.items():
        assert value(metrics, f"stoop_{name}_seconds_sum") == pytest.approx(seconds), name
        assert value(metrics, f"stoop_{name}_seconds_count") == 1, name
    assert value(metrics, "stoop_inter_token_latency_seconds_sum") == pytest.approx(0.06)
    assert value(metrics, "stoop_inter_token_latency_seconds_count") == 3  # they share the time
    assert value(metrics, "stoop_inter_token_latency_seconds_bucket", le="0.015") == 0
    assert value(metrics, "stoop_inter_token_latency_seconds_bucket", le="0.025") == 3
    assert value(metrics, "stoop_request_params_max_tokens_sum") == 64


def test_a_request_that_never_started_has_no_times_of_tokens() -> None:
    metrics = ServerMetrics(FakeCore(), "a model", False)
    times = RequestTimes(arrival=1.0, finished=3.0)
    metrics.observe(times, num_prompt=3, num_cached=None, num_output=0, finish_reason="abort")
    assert value(metrics, "stoop_e2e_request_latency_seconds_sum") == 2.0
    assert value(metrics, "stoop_request_decode_time_seconds_count") == 0
    assert value(metrics, "stoop_request_queue_time_seconds_count") == 0
    assert value(metrics, "stoop_request_params_max_tokens_count") == 0


def test_the_histogram_agrees_with_prometheus_client() -> None:
    import prometheus_client

    bounds = (0.1, 0.5, 1.0)
    theirs = prometheus_client.Histogram("h", "help", buckets=bounds, registry=None)
    ours = Histogram(bounds)
    for each in (0.0, 0.1, 0.10001, 0.5, 0.7, 1.0, 5.0):
        theirs.observe(each)
        ours.observe(each)
    samples = {(s.name, s.labels.get("le")): s.value for s in theirs.collect()[0].samples}
    for bound, count in ours.cumulative():
        assert samples["h_bucket", bound] == count
    assert samples["h_sum", None] == ours.sum


# ---- restarts, and a core that is down ----


def counters(metrics: ServerMetrics) -> dict[tuple[Any, ...], float]:
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families(metrics).values()
        if family.type == "counter" and not family.name.startswith("process_")
        for sample in family.samples
    }


@pytest.mark.parametrize(
    "after",
    [
        snapshot(1, pid=200),  # behind the old one
        snapshot(9, pid=200),  # ahead of it already: only the process tells
    ],
)
def test_a_restart_keeps_counters_from_falling(after: dict[str, Any]) -> None:
    core = FakeCore(snapshot(4))
    metrics = ServerMetrics(core, "a model", False)
    seen = [counters(metrics)]
    # The old process counted on after the scrape. The new one has a name before it has numbers.
    last = snapshot(5) | {"core_pid": 200, "num_restarts": 1}
    for state, found in (
        ("restarting", RuntimeError("down")),
        ("restarting", {}),
        ("restarting", last),
        ("ready", after),
        ("ready", after),
    ):
        core.state, core.found = state, found
        seen.append(counters(metrics))
    for earlier, later in pairwise(seen):
        assert [key for key in earlier if later[key] < earlier[key]] == []
    scale = after["num_preemptions"]
    label = (("model_name", "a model"),)
    assert seen[-1]["stoop_preemptions_total", *label] == 5 + scale
    assert seen[-1]["stoop_steps_total", ("mode", "full"), *label] == 20 * (5 + scale)
    by_position = ("stoop_spec_accepted_tokens_by_position_total", *label, ("position", "2"))
    assert seen[-1][by_position] == 13 * (5 + scale)


def test_tokens_taken_back_are_no_restart() -> None:
    core = FakeCore(snapshot(4))
    metrics = ServerMetrics(core, "a model", False)
    before = counters(metrics)
    core.found = snapshot(4) | {"num_generated_tokens": 358}  # a stop string dropped two
    assert counters(metrics) == before


def test_restarts_are_counted_while_the_core_is_down() -> None:
    core = FakeCore(snapshot() | {"num_restarts": 2})
    metrics = ServerMetrics(core, "a model", False)
    assert value(metrics, "stoop_core_restarts_total") == 2
    core.found, core.healthy = RuntimeError("down"), False
    assert value(metrics, "stoop_core_restarts_total") == 2
    assert value(metrics, "stoop_core_healthy") == 0
    assert value(metrics, "stoop_time_to_first_token_seconds_count") == 0


def test_open_http_requests() -> None:
    metrics = ServerMetrics(FakeCore(), "a model", False)
    assert value(metrics, "stoop_http_requests_open") == 0
    metrics.http_open = lambda: 3
    assert value(metrics, "stoop_http_requests_open") == 3


def test_no_registry_is_shared() -> None:
    import prometheus_client

    before = prometheus_client.generate_latest()
    first, second = used(FakeCore(), False), ServerMetrics(FakeCore(), "another", True)
    assert value(second, "stoop_requests_total") == 0 and value(first, "stoop_requests_total") == 1
    assert b"stoop_" not in before + prometheus_client.generate_latest()


def test_names_are_unique() -> None:
    tables = (metric_names.CORE_GAUGES, metric_names.CORE_COUNTERS)
    tables += (metric_names.CORE_COUNTER_GROUPS, metric_names.HISTOGRAMS)
    keys = [metric.key for table in tables for metric in table]
    assert len(keys) == len(set(keys))


def test_the_document_names_every_metric() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()
    written = set(re.findall(r"`((?:stoop_|vllm:)\w+)`", text))
    exposed = set()
    for vllm in (False, True):
        for name, family in families(used(FakeCore(), vllm)).items():
            if not name.startswith("process_"):
                exposed.add(f"{name}_total" if family.type == "counter" else name)
    # What the text says of vLLM's LoRA metric is that there is none.
    assert written - {"stoop_", "vllm:lora_requests_info"} == exposed
