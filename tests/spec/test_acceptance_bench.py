"""`stoop bench acceptance` beside drafters of known quality."""

from collections.abc import Callable
from typing import Any

import pytest

from stoop import LLM
from stoop.bench import acceptance
from stoop.bench.acceptance import AcceptanceReport, AcceptanceSettings, measure_acceptance
from support.drafters import Drafter, DrafterStore, make_spec_llm

# The first tokens come with the prompts; 24 more are whole steps for K = 1, 2, 3 and 5.
MAX_TOKENS = 25
QUESTIONS = {
    "a.jsonl": [[3, 1, 4], [15, 9, 26, 5, 35], [8, 9]],
    "b.jsonl": [[7 * n % 64 for n in range(20)], [2]],
}


def settings_of(
    draft_counts: tuple[int, ...], timed_counts: tuple[int, ...], **changes: Any
) -> AcceptanceSettings:
    options = {"temperatures": (0.0, 1.0), "max_tokens": MAX_TOKENS, "batch_size": 1}
    return AcceptanceSettings(
        draft_counts, timed_counts, **{**options, "acceptance_batch": 3, **changes}
    )


def starter(drafter: Drafter, started: list[Any] | None = None, **options: Any) -> Callable:
    def start(k: int, batch: int) -> LLM:
        llm = make_spec_llm(drafter, k, max_num_seqs=batch, enable_prefix_caching=False, **options)
        if started is not None:
            started.append((k, batch, llm.engine.scheduler.stats.spec))
        return llm

    return start


def measure(drafter: Drafter, settings: AcceptanceSettings, **options: Any) -> AcceptanceReport:
    return measure_acceptance(starter(drafter, **options), QUESTIONS, settings, lambda line: None)


def rates(report: AcceptanceReport) -> list[Any]:
    return [(r.questions, r.temperature, r.num_drafts, r.run.counts) for r in report.rows]


@pytest.mark.parametrize("name", ["eagle-right", "eagle3-right"])
def test_a_head_that_is_always_right_gives_k_plus_one(name: str, drafters: DrafterStore) -> None:
    likeliest = {"draft_sample_method": "greedy"}  # right about which it is, less so how likely
    report = measure(drafters.get(name), settings_of((1, 2, 3, 5), (2,)), spec=likeliest)
    assert len(report.rows) == 2 * 2 * 4
    for row in report.rows:
        assert row.run.counts.mean_acceptance_length == row.num_drafts + 1
        assert row.run.counts.acceptance_rates == [1.0] * row.num_drafts
        assert row.run.num_tokens == row.plain.num_tokens == MAX_TOKENS * row.run.num_answers


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("eagle3-noisy", {}),
        ("eagle3-noisy", {"draft_sample_method": "greedy"}),
        ("eagle-noisy", {"draft_sample_method": "probabilistic"}),
        ("ngram", {}),
    ],
)
def test_fewer_drafts_of_one_engine_are_those_of_an_engine_of_that_k(
    name: str, spec: dict[str, Any], drafters: DrafterStore
) -> None:
    drafter = drafters.get(name)
    together = measure(drafter, settings_of((2, 4), ()), spec=spec)
    alone = measure(drafter, settings_of((2, 4), (2, 4)), spec=spec)
    assert rates(together) == rates(alone)
    assert not any(row.timed for row in together.rows) and all(row.timed for row in alone.rows)
    assert any(0 < rate < 1 for row in alone.rows for rate in row.run.counts.acceptance_rates)


def test_a_random_head_is_told_from_a_right_one(drafters: DrafterStore) -> None:
    settings = settings_of((1, 3), (3,), temperatures=(0.0,))
    report = measure(drafters.get("eagle3-random"), settings)
    assert all(row.run.counts.num_drafts > 0 for row in report.rows)
    assert all(row.run.counts.mean_acceptance_length < 1.3 for row in report.rows)


def test_rates_are_the_engines_counters(
    drafters: DrafterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "WARM_TOKENS", 1)  # ends with the prompt: no drafts
    started: list[Any] = []
    start = starter(drafters.get("eagle3-some"), started)
    settings = settings_of((1, 3), (3,), temperatures=(0.0,))
    report = measure_acceptance(start, {"a": QUESTIONS["a.jsonl"]}, settings, lambda line: None)
    assert [(k, batch) for k, batch, _ in started] == [(3, 1), (1, 3), (0, 1)]
    one, three = report.rows
    assert three.run.counts == started[0][2]
    assert one.run.counts == started[1][2]
    assert 1 < one.run.counts.mean_acceptance_length < 2
    record = three.as_record()
    assert record["acceptance_rates"] == started[0][2].acceptance_rates
    assert record["speedup"] == record["tokens_per_s"] / record["plain_tokens_per_s"]
    assert one.as_record()["tokens_per_s"] is one.as_record()["speedup"] is None


def test_a_k_that_is_only_timed_has_a_row_too(drafters: DrafterStore) -> None:
    settings = settings_of((1,), (3,), temperatures=(0.0,))
    report = measure(drafters.get("ngram-right"), settings)
    assert [(row.num_drafts, row.timed) for row in report.rows] == [(1, False), (3, True)] * 2


def test_a_run_can_be_repeated(drafters: DrafterStore) -> None:
    drafter, settings = drafters.get("eagle3-noisy"), settings_of((2,), (), temperatures=(1.0,))
    first, second = (measure(drafter, settings) for _ in range(2))
    assert rates(first) == rates(second)
