"""Speculation changes speed and nothing else: answers, and drafts in every graph mode."""

import functools
import itertools
import os
from collections.abc import Iterator

import pytest

from support.drafters import (
    BACKENDS,
    DRAFTERS,
    KS,
    MODES,
    DrafterStore,
    Trace,
    make_spec_llm,
    pairwise,
    run,
)

EVERY = bool(os.environ.get("STOOP_TEST_ALL"))
# Drafters of a kind differ in what they guess: they take turns.
KINDS = {
    "eagle": ("eagle-random", "eagle-noisy", "eagle-right"),
    "eagle3": ("eagle3-random", "eagle3-noisy", "eagle3-variant", "eagle3-right", "eagle3-some"),
    "ngram": ("ngram", "ngram-right"),
}


def choose() -> Iterator[tuple[str, int, str, str]]:
    """Pairs, where one draft differs from several and numbers above it take turns; of the most
    drafts, which take longest, one head in one graph."""
    turns = {kind: itertools.cycle(names) for kind, names in KINDS.items()}
    several = itertools.cycle((2, 3, 2, 5))
    for kind, alone, mode, backend in pairwise(tuple(KINDS), (True, False), MODES, BACKENDS):
        yield next(turns[kind]), 1 if alone else next(several), mode, backend
    yield "eagle3-noisy", KS[-1], "step", "reference"


CHOSEN = list(itertools.product(DRAFTERS, KS, MODES, BACKENDS) if EVERY else choose())


@pytest.fixture(scope="module")
def plain(drafters: DrafterStore) -> "functools._lru_cache_wrapper[Trace]":
    """Answers without speculation, by target."""

    @functools.lru_cache
    def answers(name: str) -> Trace:
        return run(make_spec_llm(drafters.get(name), 0), 0)

    return answers


@pytest.mark.parametrize(("name", "num_tokens", "mode", "backend"), CHOSEN)
def test_speculation_equals_plain_decoding(
    drafters: DrafterStore, plain, eager, name: str, num_tokens: int, mode: str, backend: str
) -> None:
    """Answers equal those without speculation, and drafts those of eager steps, place by place."""
    llm = make_spec_llm(
        drafters.get(name),
        num_tokens,
        graph_mode=mode,
        attention_backend=backend,
        sanitize=mode != "none",
    )
    trace = run(llm, num_tokens)
    expected = plain(_twin(name))
    assert trace.answers == expected.answers
    assert trace.finish_reasons == expected.finish_reasons
    assert trace.drafts == eager(name, num_tokens).drafts
    assert trace.per_position == eager(name, num_tokens).per_position
    assert sum(map(len, trace.drafts.values())) > 40


def test_every_drafter_has_its_turn() -> None:
    assert {name for name, *_ in CHOSEN} == set(DRAFTERS)
    assert {num_tokens for _, num_tokens, *_ in CHOSEN} == set(KS)
    assert {name for names in KINDS.values() for name in names} == set(DRAFTERS)


def test_the_workload_holds_what_it_claims(plain, eager) -> None:
    for name, num_tokens in (("eagle3-random", 3), ("eagle3-right", 5)):
        trace = eager(name, num_tokens)
        assert trace.metrics["num_preemptions"] > 0
        assert trace.metrics["prefix_cache_hit_tokens"] > 0
        assert "length" in trace.finish_reasons
        lengths = {len(drafts) for drafts in trace.drafts.values()}
        assert lengths >= {0, num_tokens // 2, num_tokens}
    longest = max(known for _, known in eager("eagle3-right", 5).drafts)
    assert longest == 72
    assert sum(eager("eagle3-random", 3).per_position) < 8
    for name in ("eagle-noisy", "eagle3-noisy"):  # some right, some wrong
        noisy = eager(name, 3)
        assert 0.1 < noisy.per_position[1] / noisy.metrics["spec_decode_num_drafts"] < 0.8


@functools.lru_cache
def _twin(name: str) -> str:
    """A drafter with the same target: plain answers are its target's."""
    random = name in ("eagle-random", "eagle3-random", "eagle3-variant", "ngram")
    return "eagle-random" if random else "eagle-right"
