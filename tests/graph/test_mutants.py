"""Bugs put back into the target's graphs, one at a time: each must be caught.

Each mutant is caught by the equality of tokens with eager steps, by the sanitizer, or by both;
every stale read by the sanitizer, which names the buffer.
"""

from pathlib import Path

import pytest

from stoop.check.mutants.base import Mutant, applied
from stoop.check.mutants.graphs import MUTANTS
from stoop.graph.sanitizer import SanitizerError
from support.checkpoints import CheckpointStore
from support.graph_workload import Answers, make_graph_llm, run


@pytest.fixture(scope="module")
def folder(checkpoints: CheckpointStore) -> Path:
    return checkpoints.get("llama3", dtype="float64")


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    return run(make_graph_llm(folder))


def failure(folder: Path, mutant: Mutant, expected: Answers, sanitize: bool) -> Exception | None:
    """What went wrong with the mutant: an error, or answers that differ."""
    options = {"graph_mode": mutant.mode, "attention_backend": mutant.backend}
    try:
        answers = run(make_graph_llm(folder, sanitize=sanitize, **options))
    except (SanitizerError, RuntimeError, IndexError, AssertionError, ValueError) as error:
        return error
    return None if answers.token_ids == expected.token_ids else ValueError("other tokens")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.label)
def test_mutant_is_caught(mutant: Mutant, folder: Path, expected: Answers) -> None:
    with applied(mutant):
        plain = failure(folder, mutant, expected, sanitize=False)
        watched = failure(folder, mutant, expected, sanitize=True)
    assert (plain is not None) == mutant.by_equality, plain
    assert plain is not None or watched is not None
    if mutant.by_sanitizer:
        assert watched is not None
    if mutant.buffer is not None:
        assert isinstance(watched, SanitizerError), watched
        assert getattr(watched, "buffer", None) == mutant.buffer, watched
        assert f"`{mutant.buffer}`" in str(watched)


def test_the_same_engines_without_mutants_are_clean(folder: Path, expected: Answers) -> None:
    for mode, backend in {(m.mode, m.backend) for m in MUTANTS}:
        healthy = Mutant("none", lambda patch: None, mode, backend)
        assert failure(folder, healthy, expected, sanitize=True) is None


def test_the_documents_table_is_this_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "graphs.md").read_text()
    for mutant in MUTANTS:
        named = f"`{mutant.buffer}`" if mutant.buffer else "yes"
        sanitizer = named if mutant.by_sanitizer else "no"
        equality = "yes" if mutant.by_equality else "no"
        assert f"| {mutant.label} | {equality} | {sanitizer} |" in text
