"""Assertions about mutants, and engines without any."""

from stoop.check.mutants.base import Mutant
from stoop.check.mutants.harness import Finding
from stoop.graph.sanitizer import SanitizerError


def assert_caught(finding: Finding) -> None:
    """As declared, by what the mutant declares, and by nothing else."""
    mutant, plain, watched = finding.mutant, finding.plain, finding.watched
    assert plain.failed == mutant.by_equality, plain
    assert plain.failed or watched.error is not None or mutant.by_builds
    assert (watched.error is not None) == mutant.by_sanitizer, watched
    if mutant.buffer is not None:
        assert isinstance(watched.error, SanitizerError), watched
        assert getattr(watched.error, "buffer", None) == mutant.buffer, watched
        assert f"`{mutant.buffer}`" in str(watched.error)
    if mutant.refusal is not None:
        assert mutant.refusal in str(plain.error)
        assert mutant.refusal in str(watched.error)
    if not plain.failed:
        assert plain.max_builds == (2 if mutant.by_builds else 1)
    assert finding.problems() == []
    assert finding.cells == mutant.cells


def documented_rows(text: str, header: str) -> list[str]:
    """The rows of a document's table."""
    lines = text.split(header)[1].splitlines()[2:]
    return lines[: lines.index("")]


def rows(mutants: tuple[Mutant, ...]) -> list[str]:
    return [f"| {' | '.join((mutant.label, *mutant.cells))} |" for mutant in mutants]
