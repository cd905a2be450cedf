"""Prints and plots what a load against a server measured."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoop.bench.json_line import print_json
from stoop.bench.serve_summary import Summary
from stoop.plotting import find_pyplot

Say = Callable[[str], None]

ROWS = {
    "ttft_ms": "time to first token",
    "itl_ms": "inter-token",
    "chunk_gap_ms": "between chunks",
    "tpot_ms": "per output token",
    "e2e_ms": "end to end",
}
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
MAX_ERRORS = 3  # of each load, shown with the server's message


def print_loads(
    summaries: Sequence[Summary], setting: Mapping[str, Any], say: Say, out: Path | None
) -> None:
    """setting: what all loads share, for the title and the JSON line"""
    console = Console()
    for summary in summaries:
        _print_times(console, summary, setting)
    if len(summaries) > 1:
        _print_comparison(console, summaries)
    console.print(
        "[dim]ms; inter-token: a chunk's gap divided among its tokens; between chunks: the gap "
        "itself; per output token: by request, after the first chunk[/dim]"
    )
    for summary in summaries:
        for line in summary.warnings:
            say(f"note: {line}")
    rows = [summary.record for summary in summaries]
    print_json({"bench": "serve", **setting, "rows": rows}, out)


def _print_times(console: Console, summary: Summary, setting: Mapping[str, Any]) -> None:
    record = summary.record
    table = Table(title=Text(f"{setting['model']}, {summary.load.name}"))
    table.add_column("ms")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for key, name in ROWS.items():
        times = record[key]
        cells = ["-"] * len(COLUMNS) if times is None else [_short(times[c]) for c in COLUMNS]
        table.add_row(name, *cells)
    console.print(table)
    console.print(
        f"{record['num_complete']} of {record['num_requests']} requests complete in "
        f"{record['seconds']:.2f} s, at most {record['max_open']} at once: "
        f"{record['requests_per_s']:.2f} requests/s, "
        f"[bold]{record['tokens_per_s']:.1f} tokens/s[/bold] "
        f"({record['total_tokens_per_s']:.1f} including prompts)"
    )
    if summary.goodput:
        limits = ", ".join(f"{name} {value:g} ms" for name, value in summary.goodput.items())
        console.print(
            f"goodput: [bold]{record['goodput_per_s']:.2f} requests/s[/bold], "
            f"{record['goodput_share']:.1%} of requests within {limits}"
        )
    drafted = record["num_accepted_drafts"] + record["num_rejected_drafts"]
    if drafted:
        console.print(f"{record['num_accepted_drafts'] / drafted:.1%} of drafts accepted")
    for error, count in list(record["errors"].items())[:MAX_ERRORS]:
        details = (a.detail for a in summary.outcome.answers if a.error == error and a.detail)
        console.print(Text(f"error {error}: {count} requests ({next(details, 'no message')})"))


def _print_comparison(console: Console, summaries: Sequence[Summary]) -> None:
    table = Table(title="all loads")
    table.add_column("load", no_wrap=True)
    columns = ("req/s", "tok/s", "TTFT p50", "p99", "ITL p50", "p99", "goodput")
    for column in columns[: None if summaries[0].goodput else -1]:
        table.add_column(column, justify="right", no_wrap=True)
    for summary in summaries:
        record = summary.record
        cells = [f"{record[name]:.1f}" for name in ("requests_per_s", "tokens_per_s")]
        for key in ("ttft_ms", "itl_ms"):
            times = record[key]
            cells += [_short(times[p]) if times else "-" for p in ("p50", "p99")]
        if summary.goodput:
            cells.append(f"{record['goodput_per_s']:.2f}")
        table.add_row(summary.load.name, *cells)
    console.print(table)


def _short(ms: float) -> str:
    return f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"


def draw_loads(summaries: Sequence[Summary], image: Path, say: Say) -> None:
    """Plot the distributions of latencies, and for several loads the throughput of each."""
    pyplot = find_pyplot("plot", say)
    if pyplot is None:
        return
    several = len(summaries) > 1
    figure, axes = pyplot.subplots(1, 4 if several else 3, figsize=(15, 4), layout="constrained")
    for summary in summaries:
        complete = summary.complete
        kinds = (
            [a.ttft for a in complete],
            [gap for a in complete for gap in a.token_gaps],
            [a.e2e for a in complete],
        )
        for place, seconds in zip(axes, kinds, strict=False):
            if seconds:
                shares = np.arange(1, len(seconds) + 1) / len(seconds)
                place.step(np.sort(seconds) * 1000, shares, where="post", label=summary.load.name)
    titles = ("time to first token, ms", "inter-token latency, ms", "end to end, ms")
    for place, title in zip(axes, titles, strict=False):
        place.set(xlabel=title, ylabel="share of values at most this", ylim=(0, 1))
        place.grid(alpha=0.3)
    axes[0].legend()
    if several:
        names = [summary.load.name for summary in summaries]
        speeds = [summary.record["tokens_per_s"] for summary in summaries]
        axes[3].bar(names, speeds)
        axes[3].set(ylabel="tokens/s")
        axes[3].tick_params(axis="x", rotation=30)
    figure.savefig(image, dpi=120, format="png")
    pyplot.close(figure)
    say(f"plot: {image}")
