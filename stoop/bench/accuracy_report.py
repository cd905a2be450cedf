"""Accuracy results as a table and a JSON line."""

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from stoop.bench.accuracy import AccuracyReport, Comparison, Row
from stoop.bench.report import print_json
from stoop.bench.step import device_name

COLUMNS = ("right", "equal", "first", "gap", "logp", "t/step", "s")


def print_accuracy(
    report: AccuracyReport, model: str, questions: str, num_shots: int, out: Path | None
) -> None:
    config = report.config
    setting = f"{config.device.dtype} on {config.device.device}, {config.attention_backend}"
    table = Table(title=f"{model}: {Path(questions).stem}, {setting}", box=box.SIMPLE_HEAD)
    table.add_column("mode", overflow="fold")
    table.add_column("drafter")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for row in report.rows:
        table.add_row(*_cells(row))
    console = Console()
    console.print(table)
    for row in report.rows:
        if row.result.counts.num_drafts:
            rates = " ".join(f"{rate * 100:.0f}" for rate in row.result.counts.acceptance_rates)
            console.print(
                f"{row.result.mode}, {row.result.drafter}: accepted by position, %: {rates}"
            )
    console.print(
        "[dim]equal, first, gap: answers compared with the first row, token by token; logp: mean "
        "log probability of a reference token; t/step: tokens per step[/dim]"
    )
    print_json(
        {
            "bench": "accuracy",
            "model": model,
            "questions": questions,
            "shots": num_shots,
            "max_tokens": report.max_tokens,
            "attention_backend": config.attention_backend,
            "dtype": config.device.dtype,
            "device": device_name(config.device.device),
            "same": report.same,
            "rows": [row.as_record() for row in report.rows],
        },
        out,
    )


def _cells(row: Row) -> list[str]:
    result, comparison = row.result, row.comparison
    total, first = len(result.answers), comparison.first_position
    return [
        result.mode,
        result.drafter or "-",
        f"{result.num_correct}/{total}",
        f"{comparison.num_equal}/{total}",
        "-" if first is None else str(first),
        _gap(comparison),
        f"{result.loglikelihood_per_token:.4f}",
        f"{result.tokens_per_step:.2f}",
        f"{result.seconds:.1f}",
    ]


def _gap(comparison: Comparison) -> str:
    gap = comparison.largest_gap
    if gap is None:
        return "-"
    bound = any(each.gap_is_bound and each.gap == gap for each in comparison.differences)
    return f"{'>' if bound else ''}{gap:.3g}"
