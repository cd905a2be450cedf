"""While an engine lives the garbage collector passes over it; dropped, it goes away."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoop import LLM
from stoop.engine import engine
from stoop.worker.device import NEW_OBJECTS, exempt_from_collection


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    gc.collect()
    gc.unfreeze()
    yield
    gc.freeze()


def test_an_exempt_engine_is_passed_over_and_goes_with_its_owner(text_model: Path) -> None:
    llm = LLM(str(text_model), device="cpu")
    exempt_from_collection(llm.engine)
    assert gc.get_freeze_count() > 0
    runner = weakref.ref(llm.engine.runner)
    del llm
    assert gc.get_freeze_count() == 0, "the engine is held by something, or its end went unnoticed"
    gc.collect()
    assert runner() is None, "what the engine held is still there"


def test_few_collections_while_an_exempt_engine_lives(text_model: Path) -> None:
    """What steps make goes without any. One set of objects more than the usual limit is made."""
    usual = gc.get_threshold()
    llm = LLM(str(text_model), device="cpu")

    def count_collections() -> int:
        started = sum(each["collections"] for each in gc.get_stats())
        kept = [[number] for number in range(usual[0] + 100)]
        assert kept
        return sum(each["collections"] for each in gc.get_stats()) - started

    assert count_collections() > 0
    exempt_from_collection(llm.engine)
    exempt_from_collection(llm.engine)
    assert count_collections() == 0
    del llm
    assert gc.get_threshold() == usual
    assert count_collections() > 0


def test_the_users_own_threshold_stays(text_model: Path) -> None:
    """Collection that is off stays off, whether before the engine or since."""
    usual = gc.get_threshold()
    try:
        for before, later in ((0, 0), (700, 0), (700, 50_000), (50_000, 50_000)):
            gc.set_threshold(before, 7, 5)
            llm = LLM(str(text_model), device="cpu")
            exempt_from_collection(llm.engine)
            assert gc.get_threshold() == (NEW_OBJECTS if before == 700 else before, 7, 5)
            gc.set_threshold(later, 7, 5)
            del llm
            assert gc.get_threshold() == (later, 7, 5)
    finally:
        gc.set_threshold(*usual)


def test_the_first_of_two_engines_to_end_restores_the_threshold(text_model: Path) -> None:
    usual = gc.get_threshold()
    for first in (0, 1):
        llms = [LLM(str(text_model), device="cpu") for _ in range(2)]
        for llm in llms:
            exempt_from_collection(llm.engine)
        assert gc.get_threshold()[0] == NEW_OBJECTS
        del llm
        llms.pop(first)
        llms.pop()
        assert gc.get_threshold() == usual


def test_frozen_cycles_would_stay_without_their_owner(text_model: Path) -> None:
    """The mutant: nothing is unfrozen, and memory is never given back."""
    llm = LLM(str(text_model), device="cpu")
    llm.engine.runner.itself = llm.engine.runner  # type: ignore[attr-defined]
    gc.freeze()
    runner = weakref.ref(llm.engine.runner)
    del llm
    gc.collect()
    assert runner() is not None
    gc.unfreeze()
    gc.collect()
    assert runner() is None


def test_an_engine_on_a_cpu_is_not_exempt(
    text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exempt: list[object] = []
    monkeypatch.setattr(engine, "exempt_from_collection", exempt.append)
    llm = LLM(str(text_model), device="cpu")
    assert exempt == [] and llm.config.device.device == "cpu"
