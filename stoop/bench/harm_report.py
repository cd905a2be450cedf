"""The harm of bugs as a table, as Markdown and as a JSON line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from stoop.bench.harm import Setting
from stoop.bench.harm_rows import HarmRow, Outcome
from stoop.bench.report import print_json
from stoop.bench.step import device_name

COLUMNS = ("accepted, %", "t/step", "equal", "first", "right", "logp")
WIDTHS = (20, 7, 7, 7, 7, 9)
HEADER = ("report", "bug", "engine", *COLUMNS, "harm")
ERROR_LENGTH = 160


def print_harm(
    rows: Sequence[HarmRow],
    setting: Setting,
    questions: str,
    *,
    markdown: bool = False,
    out: Path | None = None,
) -> None:
    """Print the table, then what is wrong, then a JSON line."""
    console = Console()
    print(markdown_table(rows) if markdown else plain_table(rows))
    for row in rows:
        for problem in row.problems():
            console.print(f"{row.bug.report} {row.bug.label}: {problem}", style="red", markup=False)
    console.print(
        "[dim]accepted: drafts by position; t/step: tokens per step with drafts; equal: as "
        "eager's; first: first token that differs; right: correct answers; logp: mean log "
        "probability of a reference token; ms: best of several runs, with and without the bug "
        "in turn[/dim]"
    )
    print_json(
        {
            "bench": "harm",
            "model": setting.model,
            "questions": questions,
            "num_questions": len(setting.tasks),
            "max_tokens": setting.max_tokens,
            "num_drafts": setting.num_drafts,
            "limits": list(setting.limits),
            "dtype": setting.engine["dtype"],
            "device": device_name(setting.device),
            "ok": not any(row.problems() for row in rows),
            "rows": [row.as_record() for row in rows],
        },
        out,
    )


def plain_table(rows: Sequence[HarmRow]) -> str:
    """A heading for each bug, then its two engines; figures and errors under each."""
    lines = [" " * 9 + _align(COLUMNS)]
    for row in rows:
        lines += ["", f"{row.bug.report} {row.bug.label}: {_harm(row)}"]
        for name, outcome in (("healthy", row.healthy), ("broken", row.broken)):
            lines.append(f"{name:9}{_align(_cells(outcome))}")
            lines += [f"{'':9}{note}" for note in _notes(outcome)]
    return "\n".join(lines)


def _align(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))


def markdown_table(rows: Sequence[HarmRow]) -> str:
    """Two lines a bug, ready for a document."""
    lines = [f"| {' | '.join(HEADER)} |", "| --- " * len(HEADER) + "|"]
    lines += [
        f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
        for row in rows
        for cells in _markdown_cells(row)
    ]
    return "\n".join(lines)


def _markdown_cells(row: HarmRow) -> list[list[str]]:
    """The healthy engine's cells, then the broken one's."""
    mutant, measure = row.bug.mutant, _harm(row)
    name = f"{row.bug.name} ({mutant.mode}, {mutant.backend})"
    healthy = "; ".join(_notes(row.healthy)) or "-"
    broken = "; ".join((measure, *_notes(row.broken)))
    return [
        [f"{row.bug.report}", name, "healthy", *_cells(row.healthy), healthy],
        ["", "", "broken", *_cells(row.broken), broken],
    ]


def _harm(row: HarmRow) -> str:
    measure = row.bug.measure.value
    return measure if row.harmful else f"{measure}: not found"


def _cells(outcome: Outcome) -> list[str]:
    return [
        " ".join(f"{rate * 100:.0f}" for rate in outcome.acceptance) or "-",
        "-" if outcome.tokens_per_step is None else f"{outcome.tokens_per_step:.2f}",
        _share(outcome.num_equal, outcome.num_answers),
        "-" if outcome.first_position is None else str(outcome.first_position),
        _share(outcome.num_correct, outcome.num_answers),
        "-" if outcome.loglikelihood is None else f"{outcome.loglikelihood:.3f}",
    ]


def _share(count: int | None, total: int | None) -> str:
    return "-" if count is None or total is None else f"{count}/{total}"


def _notes(outcome: Outcome) -> list[str]:
    notes = []
    if outcome.figures:
        notes.append("; ".join(f"{name}: {_number(v)}" for name, v in outcome.figures.items()))
    if outcome.error is not None:
        notes.append(_shorten(outcome.error))
    return notes


def _number(value: Any) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _shorten(text: str) -> str:
    return text if len(text) <= ERROR_LENGTH else text[: ERROR_LENGTH - 3] + "..."
