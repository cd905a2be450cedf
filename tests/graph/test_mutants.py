"""Bugs put back into the target's graphs, one at a time: each must be caught.

Each mutant is caught by the equality of tokens with eager steps, by the sanitizer, or by both;
every stale read by the sanitizer, which names the buffer.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from stoop.check.mutants.base import Mutant, Patch
from stoop.check.mutants.graphs import MUTANTS
from stoop.check.mutants.harness import Finding, Outcome, TinyEngines, healthy, run_mutant
from stoop.graph.sanitizer import StaleRead
from support.mutants import assert_caught, documented_rows, rows

EVERY = bool(os.environ.get("STOOP_TEST_ALL"))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> TinyEngines:
    return TinyEngines(tmp_path_factory.mktemp("engines"))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.label)
def test_mutant_is_caught(mutant: Mutant, engines: TinyEngines) -> None:
    assert_caught(run_mutant(mutant, engines))


def test_the_same_engines_without_mutants_are_clean(engines: TinyEngines) -> None:
    """One of each mode; with `make test-all`, each with all its backends."""
    by_label = {healthy(mutant).label: healthy(mutant) for mutant in MUTANTS}
    by_mode = {mutant.mode: mutant for mutant in by_label.values()}
    for mutant in (by_label if EVERY else by_mode).values():
        assert engines.run(mutant, sanitize=True).failed is False


def test_the_documents_table_is_this_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "graphs.md").read_text()
    assert documented_rows(text, "| mutant | equality | sanitizer |") == rows(MUTANTS)


# ---- what judges them ----

STALE = Outcome(StaleRead("FULL", "slots", 1, 2))
OTHER = Outcome(differs="other answers", max_builds=1)
CLEAN = Outcome(max_builds=1)
DECLARED = Mutant("made up", lambda patch: None, "full", buffer="slots")


@pytest.mark.parametrize(
    ("mutant", "plain", "watched", "problem"),
    [
        (DECLARED, OTHER, STALE, None),
        (DECLARED, CLEAN, STALE, "missed by equality"),
        (DECLARED, OTHER, OTHER, "missed by the sanitizer"),
        (replace(DECLARED, buffer="ids"), OTHER, STALE, "does not name `ids`"),
        (replace(DECLARED, by_equality=False), OTHER, STALE, "caught by equality, which"),
        (replace(DECLARED, refusal="try"), OTHER, STALE, "not refused with 'try'"),
        (healthy(DECLARED), CLEAN, CLEAN, None),
        (healthy(DECLARED), CLEAN, STALE, "caught by the sanitizer, which"),
        (healthy(DECLARED), Outcome(max_builds=2), CLEAN, "2 builds of the target's metadata"),
        (replace(healthy(DECLARED), by_builds=True), CLEAN, CLEAN, "1 builds of the target's"),
    ],
)
def test_what_is_not_as_declared_is_a_problem(
    mutant: Mutant, plain: Outcome, watched: Outcome, problem: str | None
) -> None:
    problems = Finding(mutant, plain, watched, exact=True).problems()
    assert bool(problems) == (problem is not None)
    assert problem is None or problem in problems[0] + problems[-1]


def test_a_patch_restores_everything_last_one_first() -> None:
    class Owner:
        value = 1

    instance = Owner()
    with Patch() as patch:
        patch.setattr(Owner, "value", 2)
        patch.setattr(Owner, "value", 3)
        patch.setattr(instance, "value", 4)
        assert (Owner.value, instance.value) == (3, 4)
        with pytest.raises(AttributeError, match="missing"):
            patch.setattr(Owner, "missing", 5)
    assert (Owner.value, instance.value) == (1, 1)


def test_a_mutant_that_no_longer_fits_the_code_is_a_problem() -> None:
    """Its own error must not count as a bug that was caught."""
    error = Outcome(TypeError("apply() takes 1 positional argument but 2 were given"))
    finding = Finding(replace(DECLARED, buffer=None), error, error, True)
    assert finding.problems() == [f"the mutant no longer fits the code: {error.error!r}"] * 2
