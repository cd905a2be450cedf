"""Run-ahead changes when results are read and nothing else: drafters, graph modes and backends."""

import functools
import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest

from stoop import LLM
from stoop.check.workloads import GREEDY, Trace
from stoop.checkpoint import toy
from stoop.scheduler.block_pool import NULL_BLOCK
from support.drafters import DrafterStore, make_spec_llm, pairwise, run

DRAFTERS = ("eagle-noisy", "eagle3-some", "eagle3-variant", "ngram-right")
KS = (0, 1, 4)
MODES = ("none", "full", "step")
BACKENDS = ("reference", "hostplan")
AHEAD = (1, 2, 4)
EVERY = bool(os.environ.get("STOOP_TEST_ALL"))


def choose() -> Iterator[tuple[str, int, str, str, int]]:
    """Pairs, where heads take turns."""
    heads = itertools.cycle(DRAFTERS[:-1])
    for head, *others in pairwise((True, False), KS, MODES, BACKENDS, AHEAD):
        yield next(heads) if head else DRAFTERS[-1], *others


CHOSEN = list(itertools.product(DRAFTERS, KS, MODES, BACKENDS, AHEAD) if EVERY else choose())


@pytest.fixture(scope="module")
def in_step(drafters: DrafterStore) -> "functools._lru_cache_wrapper[Trace]":
    """The plain loop, eagerly."""

    @functools.lru_cache
    def trace(name: str, num_tokens: int) -> Trace:
        return run(make_spec_llm(drafters.get(name), num_tokens, run_ahead=0), num_tokens)

    return trace


@pytest.mark.parametrize(("name", "num_tokens", "mode", "backend", "ahead"), CHOSEN)
def test_run_ahead_equals_the_plain_loop(
    drafters: DrafterStore,
    in_step,
    name: str,
    num_tokens: int,
    mode: str,
    backend: str,
    ahead: int,
) -> None:
    """Answers are equal, and so are the drafts after the same text."""
    llm = make_spec_llm(
        drafters.get(name),
        num_tokens,
        run_ahead=ahead,
        graph_mode=mode,
        attention_backend=backend,
        sanitize=mode != "none",
    )
    trace, expected = run(llm, num_tokens), in_step(name, num_tokens)
    assert trace.answers == expected.answers
    assert trace.finish_reasons == expected.finish_reasons
    assert trace.metrics["num_generated_tokens"] == expected.metrics["num_generated_tokens"]
    assert trace.metrics["num_preemptions"] > 0
    # Preemption comes at other moments, and cuts runs of drafts at other places.
    common = trace.drafts.keys() & expected.drafts.keys()
    assert len(common) > 0.7 * len(expected.drafts)
    assert all(trace.drafts[key] == expected.drafts[key] for key in common)


def answers(llm: LLM, places: range) -> list[tuple[Any, ...]]:
    """Requests that end at every place of their answers: by a stop token, or by their number."""
    walk = [9]
    while len(walk) < 9:
        walk.append(toy.successor(walk[-1]))
    stops = [GREEDY.replace(stop_token_ids=[5, walk[place]]) for place in places]
    stops += [GREEDY.replace(stop_token_ids=[walk[6]], min_tokens=place) for place in places]
    stops += [GREEDY.replace(max_tokens=place) for place in places]
    outputs = llm.generate([[9]] * len(stops), stops)
    found = [output.outputs[0] for output in outputs]
    return [(a.token_ids, a.finish_reason, a.stop_reason, vars(a.spec)) for a in found]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("eagle3-right", "step"),
        ("ngram-right", "none"),
        *([("eagle3-right", "none"), ("ngram-right", "step")] if EVERY else []),
    ],
)
def test_a_request_may_end_at_every_place_of_a_run(
    drafters: DrafterStore, name: str, mode: str
) -> None:
    """The device ends it in the middle of a run, the host learns of it steps later."""
    found = []
    for ahead in (0, 1) if mode == "step" else (0, 1, 2, 4):
        options: dict[str, Any] = {"graph_mode": mode, "sanitize": mode != "none"}
        llm = make_spec_llm(drafters.get(name), 3, run_ahead=ahead, num_kv_blocks=64, **options)
        found.append((answers(llm, range(1, 9)), llm.metrics()))
        llm.engine.scheduler.check_idle()
    (expected, metrics), *others = found
    lengths = [len(token_ids) for token_ids, *_ in expected]
    assert lengths[:8] == lengths[16:] == [*range(1, 9)]
    assert lengths[8:13] == [6] * 5 and min(lengths[13:16]) > 6  # the sixth came too early
    for each, counted in others:
        assert each == expected
        for name_ in ("num_generated_tokens", "num_requests_finished", "num_prompt_tokens"):
            assert counted[name_] == metrics[name_]
        assert {k: v for k, v in counted.items() if k.startswith("spec_")} == {
            k: v for k, v in metrics.items() if k.startswith("spec_")
        }
        assert counted["num_preemptions"] == metrics["num_preemptions"] == 0


@pytest.mark.parametrize(
    ("name", "backend"), [("eagle3-some", "reference"), ("eagle-noisy", "hostplan")]
)
def test_an_ended_row_does_no_harm_by_what_it_attends_to(
    drafters: DrafterStore, in_step, name: str, backend: str
) -> None:
    """Its place in the batch stays: what it attends to there must not spread."""
    llm = make_spec_llm(drafters.get(name), 3, run_ahead=2, attention_backend=backend)
    for cache in llm.engine.runner.kv_caches:
        cache[:, NULL_BLOCK] = float("nan")
    assert run(llm, 3).answers == in_step(name, 3).answers
    assert all(bool(cache[:, NULL_BLOCK].isnan().all()) for cache in llm.engine.runner.kv_caches)
