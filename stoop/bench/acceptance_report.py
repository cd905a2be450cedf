"""Acceptance results as a table, a plot and a JSON line."""

from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from stoop.bench.acceptance import AcceptanceReport, Row, Say
from stoop.bench.report import print_json
from stoop.bench.step import device_name
from stoop.plotting import find_pyplot

MOST = 0.95  # share of steps with drafts from which on their length says enough


def print_acceptance(
    report: AcceptanceReport, model: str, drafter: dict[str, Any], out: Path | None
) -> None:
    settings, config = report.settings, report.config
    assert config.spec is not None
    drafter = {**drafter, "draft_sample_method": config.spec.draft_sample_method}
    table = Table(title=f"accepted drafts of {model}")
    table.add_column("questions")
    for column in ("T", "K", "by position, %", "length", "tok/s", "plain", "gain"):
        table.add_column(column, justify="right", no_wrap=True)
    for _, group in groupby(report.rows, key=_place):
        for row in group:
            table.add_row(*_cells(row))
        table.add_section()
    console = Console()
    console.print(table)
    for note in filter(None, map(_note, report.rows)):
        console.print(note, markup=False)
    console.print(
        "[dim]by position: share of drafts accepted; length: tokens per step with drafts; "
        f"tok/s: batch {settings.batch_size}, including prompts; plain: tok/s without drafts[/dim]"
    )
    print_json(
        {
            "bench": "acceptance",
            "model": model,
            "speculative_config": drafter,
            "batch_size": settings.batch_size,
            "acceptance_batch": settings.acceptance_batch,
            "max_tokens": settings.max_tokens,
            "graph_mode": config.graph.mode,
            "dtype": config.device.dtype,
            "device": device_name(config.device.device),
            "rows": [row.as_record() for row in report.rows],
        },
        out,
    )


def draw_acceptance(report: AcceptanceReport, image: Path, say: Say) -> None:
    """Plot tokens per step with drafts by K, and acceptance by position at the largest K."""
    pyplot = find_pyplot("plot", say)
    if pyplot is None:
        return
    figure, (lengths, rates) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for (name, temperature), group in groupby(report.rows, key=_place):
        rows = list(group)
        label = f"{Path(name).stem}, T = {temperature:g}"
        lengths.plot(
            [row.num_drafts for row in rows],
            [row.run.counts.mean_acceptance_length for row in rows],
            "o-",
            label=label,
        )
        positions = rows[-1].run.counts.acceptance_rates
        rates.plot(range(1, len(positions) + 1), positions, "o-", label=label)
    for axes in (lengths, rates):
        axes.xaxis.get_major_locator().set_params(integer=True)
    lengths.set(xlabel="K", ylabel="tokens per step with drafts")
    rates.set(
        xlabel=f"draft, K = {report.rows[-1].num_drafts}", ylabel="share accepted", ylim=(0, 1)
    )
    lengths.legend()
    rates.legend()
    figure.savefig(image, dpi=120, format="png")
    pyplot.close(figure)
    say(f"plot: {image}")


def _place(row: Row) -> tuple[str, float]:
    return row.questions, row.temperature


def _note(row: Row) -> str:
    """Lookups find drafts for some steps only, and the others make one token each."""
    share, mean = row.run.steps.share_with_drafts, row.run.steps.tokens_per_step
    if share is None or mean is None or share >= MOST:
        return ""
    return (
        f"{Path(row.questions).stem}, T = {row.temperature:g}, K = {row.num_drafts}: {mean:.2f} "
        f"tokens per step; {share:.0%} of the steps had drafts"
    )


def _cells(row: Row) -> list[str]:
    record = row.as_record()
    speed, gain = record["tokens_per_s"], record["speedup"]
    drafted = row.run.counts.num_drafts > 0
    return [
        Path(row.questions).stem,
        f"{row.temperature:g}",
        str(row.num_drafts),
        " ".join(f"{rate * 100:.0f}" for rate in record["acceptance_rates"]) if drafted else "-",
        f"{record['mean_acceptance_length']:.2f}" if drafted else "-",
        f"{speed:.1f}" if speed else "-",
        f"{record['plain_tokens_per_s']:.1f}" if record["plain_tokens_per_s"] else "-",
        f"{gain:.2f}x" if gain else "-",
    ]
