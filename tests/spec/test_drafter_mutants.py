"""Bugs put back into the drafter, one at a time: each must be caught.

Stale drafts leave answers right, so equality here means equality of drafts with those of eager
steps, place by place. Every stale read is caught by the sanitizer, which names the buffer.
"""

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest

from stoop.check.mutants.base import Mutant, Patch, draft_mutant
from stoop.check.mutants.harness import DRAFT_MUTANTS as MUTANTS
from stoop.check.mutants.harness import TinyEngines, healthy, run_mutant
from stoop.check.mutants.pieces import decode_in_pieces
from stoop.spec.decode_lane import DraftDecodeLane
from support import fake_flashinfer
from support.mutants import assert_caught, documented_rows, rows

EVERY = bool(os.environ.get("STOOP_TEST_ALL"))


def choose() -> list[Mutant]:
    """Each with each of its backends; those of several modes take turns with them."""
    modes: dict[tuple[str, str], list[Mutant]] = {}
    for mutant in MUTANTS:
        modes.setdefault((mutant.name, mutant.backend), []).append(mutant)
    several = [each for each in modes.values() if len(each) > 1]
    left_out = [m for turn, each in enumerate(several) for m in each if m is not each[turn % 2]]
    return [mutant for mutant in MUTANTS if EVERY or not any(mutant is m for m in left_out)]


CHOSEN = choose()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> TinyEngines:
    return TinyEngines(tmp_path_factory.mktemp("engines"))


@pytest.mark.parametrize("mutant", CHOSEN, ids=lambda mutant: mutant.label)
def test_mutant_is_caught(
    mutant: Mutant, engines: TinyEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mutant.backend == "flashinfer":
        fake_flashinfer.install(monkeypatch)
    assert_caught(run_mutant(mutant, engines))


def without_bug(mode: str, backend: str) -> Mutant:
    return healthy(draft_mutant("any", lambda patch: None, mode, backend))


def test_every_mutant_has_its_turn() -> None:
    assert {mutant.name for mutant in CHOSEN} == {mutant.name for mutant in MUTANTS}
    assert {mutant.mode for mutant in CHOSEN} == {mutant.mode for mutant in MUTANTS}


@pytest.mark.parametrize(
    ("mode", "backend"),
    itertools.product(("full", "step", "full_decode_only"), ("reference", "hostplan"))
    if EVERY
    else [("full", "reference"), ("step", "hostplan"), ("full_decode_only", "hostplan")],
)
def test_the_same_engines_without_mutants_are_clean(
    engines: TinyEngines, mode: str, backend: str
) -> None:
    outcome = engines.run(without_bug(mode, backend), sanitize=True)
    assert outcome.error is None
    assert outcome.differs is None


@pytest.mark.parametrize(
    ("mode", "backend"),
    [
        ("none", "hostplan"),
        ("full_and_piecewise", "hostplan"),
        ("step", "hostplan"),
        ("step", "flashinfer"),
    ],
)
def test_metadata_of_the_target_is_built_once_a_step(
    engines: TinyEngines, mode: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One build serves the target's pass and draft prefill, captured or not. In the other modes,
    every mutant whose answers are right is held to it."""
    if backend == "flashinfer":
        fake_flashinfer.install(monkeypatch)
    outcome = engines.run(without_bug(mode, backend), sanitize=False)
    assert (outcome.failed, outcome.min_builds, outcome.max_builds) == (False, 1, 1)


def test_pieces_that_pad_requests_too_are_clean(engines: TinyEngines) -> None:
    """So it is the missing padding that the mutant is caught for, not pieces as such."""
    padded = DraftDecodeLane._batch

    def apply(patch: Patch) -> None:
        decode_in_pieces(patch)
        patch.setattr(DraftDecodeLane, "_batch", padded)

    mutant = replace(without_bug("piecewise", "hostplan"), apply=apply)
    assert run_mutant(mutant, engines).problems() == []


def test_the_documents_table_is_this_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "speculation.md").read_text()
    assert documented_rows(text, "| mutant | drafts differ | sanitizer |") == rows(MUTANTS)
