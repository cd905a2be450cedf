"""The harm of bugs as a table, as Markdown and as a JSON line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from stoop.bench.harm import HarmRow, Outcome, Setting
from stoop.bench.report import print_json
from stoop.bench.step import device_name

HEADER = ("report", "bug", "engine", "accepted, %", "t/step", "equal", "first", "right", "logp")
NOTE = "harm"
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
    if markdown:
        print(markdown_table(rows))
    else:
        console.print(_rich_table(rows, setting, questions))
    for row in rows:
        for problem in row.problems():
            console.print(f"{row.bug.report} {row.bug.label}: {problem}", style="red", markup=False)
    console.print(
        "[dim]accepted: drafts by position; t/step: tokens per step; equal: answers as eager's; "
        "first: first token that differs; right: correct answers; logp: mean log probability of a "
        "reference token; ms: best of several runs, with and without the bug in turn[/dim]"
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


def _rich_table(rows: Sequence[HarmRow], setting: Setting, questions: str) -> Table:
    title = f"{setting.model}: {Path(questions).stem}, {setting.engine['dtype']}, {setting.device}"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for column in HEADER[:3]:
        table.add_column(column, overflow="fold")
    for column in HEADER[3:]:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column(NOTE, overflow="fold")
    for row in rows:
        for cells in row_cells(row):
            table.add_row(*cells)
        table.add_section()
    return table


def markdown_table(rows: Sequence[HarmRow]) -> str:
    """Two lines a bug, ready for a document."""
    lines = [f"| {' | '.join((*HEADER, NOTE))} |", "| --- " * (len(HEADER) + 1) + "|"]
    lines += [
        f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
        for row in rows
        for cells in row_cells(row)
    ]
    return "\n".join(lines)


def row_cells(row: HarmRow) -> list[list[str]]:
    """The healthy engine's cells, then the broken one's."""
    mutant = row.bug.mutant
    place = f"{mutant.mode}, {mutant.backend}"
    return [
        [f"{row.bug.report}", row.bug.name, f"healthy ({place})", *_cells(row.healthy)],
        ["", "", "broken", *_cells(row.broken, row.bug.measure.value)],
    ]


def _cells(outcome: Outcome, harm: str | None = None) -> list[str]:
    scored = outcome.num_correct is not None
    return [
        " ".join(f"{rate * 100:.0f}" for rate in outcome.acceptance) or "-",
        "-" if outcome.tokens_per_step is None else f"{outcome.tokens_per_step:.2f}",
        _share(outcome.num_equal, outcome.num_answers),
        "-" if outcome.first_position is None else str(outcome.first_position),
        _share(outcome.num_correct, outcome.num_answers if scored else None),
        "-" if outcome.loglikelihood is None else f"{outcome.loglikelihood:.3f}",
        _note(outcome, harm),
    ]


def _share(count: int | None, total: int | None) -> str:
    return "-" if count is None or total is None else f"{count}/{total}"


def _note(outcome: Outcome, harm: str | None) -> str:
    parts = [] if harm is None else [harm]
    parts += [f"{_number(value)} {name}" for name, value in outcome.figures.items()]
    if outcome.error is not None:
        parts.append(_shorten(outcome.error))
    return "; ".join(parts) or "-"


def _number(value: Any) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3g}"


def _shorten(text: str) -> str:
    return text if len(text) <= ERROR_LENGTH else text[: ERROR_LENGTH - 3] + "..."
