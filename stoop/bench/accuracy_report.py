"""Accuracy results as a table and a JSON line."""

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from stoop.bench.accuracy import LIKELIHOOD_NOISE, AccuracyReport, Comparison, Row
from stoop.bench.report import print_json
from stoop.bench.step import device_name
from stoop.config.schema import dtype_label

COLUMNS = ("right", "equal", "first", "gap", "logp", "t/step", "s")


def print_accuracy(
    report: AccuracyReport, model: str, questions: str, num_shots: int, out: Path | None
) -> None:
    config = report.config
    device, kv_dtype = config.device, dtype_label(config.device.kv_dtype)
    setting = (
        f"{device.dtype} on {device.device}, KV cache in {kv_dtype}, {config.attention_backend}"
    )
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
    if note := _cut_note(report):
        console.print(note)
    console.print(
        "[dim]equal, first, gap: answers compared with the first row, token by token; logp: mean "
        "log probability of a reference token; t/step: tokens per step with drafts[/dim]"
    )
    print_json(
        {
            "bench": "accuracy",
            "model": model,
            "questions": questions,
            "shots": num_shots,
            "max_tokens": report.max_tokens,
            "attention_backend": config.attention_backend,
            "dtype": device.dtype,
            "kv_cache_dtype": kv_dtype,
            "device": device_name(device.device),
            "same": report.same,
            "rows": [row.as_record() for row in report.rows],
        },
        out,
    )


def describe_difference(row: Row) -> str:
    """Say in one sentence how a row differs from the first one."""
    found, parts = row.comparison, []
    if found.differences:
        parts.append(
            f"{len(found.differences)} of {found.num_answers} answers, first at token "
            f"{found.first_position}, gap {_gap(found)}"
        )
    if found.correct_change:
        parts.append(f"{found.correct_change:+d} right")
    if not found.loglikelihood_change <= LIKELIHOOD_NOISE:  # true for NaN
        parts.append(f"the logp of a solution by {found.loglikelihood_change:.3g} per token")
    name = f"{row.result.mode}, {row.result.drafter or 'plain'}"
    return f"{name} differs from the first row: {'; '.join(parts)}"


def _cut_note(report: AccuracyReport) -> str:
    """Answers that a limit cut off may lack their number."""
    counts = sorted({row.result.num_cut for row in report.rows})
    if counts == [0]:
        return ""
    number = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    total = len(report.rows[0].result.answers)
    return f"{number} of {total} answers were cut at the limit of --max-tokens or --max-model-len"


def _cells(row: Row) -> list[str]:
    result, comparison = row.result, row.comparison
    total, first = len(result.answers), comparison.first_position
    logp = result.loglikelihood_per_token
    return [
        result.mode,
        result.drafter or "-",
        f"{result.num_correct}/{total}",
        f"{comparison.num_equal}/{total}",
        "-" if first is None else str(first),
        _gap(comparison),
        f"{logp:.4f}" if any(result.num_solution_tokens) else "-",
        f"{result.tokens_per_step:.2f}",
        f"{result.seconds:.1f}",
    ]


def _gap(comparison: Comparison) -> str:
    gap = comparison.largest_gap
    if gap is None:
        return "-"
    bound = any(each.gap_is_bound and each.gap == gap for each in comparison.differences)
    return f"{'>' if bound else ''}{gap:.3g}"
