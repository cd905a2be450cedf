"""Bugs put back into the drafter, one at a time: each must be caught.

Stale drafts leave answers right, so equality here means equality of drafts with those of eager
steps, place by place. Every stale read is caught by the sanitizer, which names the buffer.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoop.check.mutants.base import Mutant, applied
from stoop.check.mutants.drafts import MUTANTS
from stoop.graph.refusals import CaptureError
from stoop.graph.sanitizer import SanitizerError
from support.drafters import DrafterStore, Trace, make_spec_llm, run


@pytest.fixture(scope="module")
def expected(drafters: DrafterStore) -> Callable[[str, int], Trace]:
    @functools.lru_cache
    def trace(name: str, num_tokens: int) -> Trace:
        return run(make_spec_llm(drafters.get(name), num_tokens), num_tokens)

    return trace


def failure(
    drafters: DrafterStore, mutant: Mutant, expected: Trace, sanitize: bool
) -> Exception | None:
    """What went wrong with the mutant: an error, or drafts and answers that differ."""
    options = {"graph_mode": mutant.mode, "attention_backend": mutant.backend}
    try:
        assert mutant.drafter is not None
        drafter = drafters.get(mutant.drafter)
        llm = make_spec_llm(drafter, mutant.num_drafts, sanitize=sanitize, **options)
        trace = run(llm, mutant.num_drafts)
    except (CaptureError, SanitizerError, RuntimeError, IndexError, AssertionError) as error:
        return error
    if trace.answers != expected.answers:
        return ValueError("other answers")
    return None if trace.drafts == expected.drafts else ValueError("other drafts")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.label)
def test_mutant_is_caught(mutant: Mutant, drafters: DrafterStore, expected: Any) -> None:
    healthy = expected(mutant.drafter, mutant.num_drafts)
    with applied(mutant):
        plain = failure(drafters, mutant, healthy, sanitize=False)
        watched = failure(drafters, mutant, healthy, sanitize=True)
    assert (plain is not None) == mutant.by_equality, plain
    assert plain is not None or watched is not None
    if mutant.by_sanitizer:
        assert watched is not None
    if mutant.buffer is not None:
        assert isinstance(watched, SanitizerError), watched
        assert getattr(watched, "buffer", None) == mutant.buffer, watched
        assert f"`{mutant.buffer}`" in str(watched)


@pytest.mark.parametrize("mode", ["full", "step", "full_decode_only"])
@pytest.mark.parametrize("backend", ["reference", "hostplan"])
def test_the_same_engines_without_mutants_are_clean(
    drafters: DrafterStore, expected: Any, mode: str, backend: str
) -> None:
    healthy = Mutant(
        "none", lambda patch: None, mode, backend, drafter="eagle3-noisy", num_drafts=3
    )
    trace = expected(healthy.drafter, healthy.num_drafts)
    assert failure(drafters, healthy, trace, sanitize=True) is None


def test_the_documents_table_is_this_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "speculation.md").read_text()
    for mutant in MUTANTS:
        named = f"`{mutant.buffer}`" if mutant.buffer else "yes"
        sanitizer = named if mutant.by_sanitizer else "no"
        equality = "yes" if mutant.by_equality else "no"
        assert f"| {mutant.label} | {equality} | {sanitizer} |" in text
