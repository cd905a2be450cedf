"""The table of `stoop bench overhead`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from stoop.bench.json_line import print_json
from stoop.bench.overhead import Figures


def print_overhead(
    found: Mapping[str, Figures],
    setting: Mapping[str, Any],
    say: Callable[[str], None],
    out: Path | None,
) -> None:
    offline = found["offline"]
    table = Table(title=f"{setting['clients']} streams of {setting['model']}")
    for column in ("", "tok/s", "of offline", "first token, ms", "more, ms"):
        table.add_column(column, justify="left" if not column else "right")
    rows = []
    for name, figures in found.items():
        share, more = figures.tokens_per_s / offline.tokens_per_s, figures.ttft - offline.ttft
        table.add_row(
            name,
            f"{figures.tokens_per_s:,.0f}",
            f"{share:.0%}",
            f"{figures.ttft:.2f}",
            f"{more:+.2f}" if name != "offline" else "",
        )
        rows.append(
            {
                "side": name,
                "tokens_per_s": figures.tokens_per_s,
                "share": share,
                "ttft_ms": figures.ttft,
                "ttft_more_ms": more,
                **figures.client,
            }
        )
    Console(stderr=True).print(table)
    say("tok/s: all clients streaming; first token: one request at a time, median")
    print_json({"bench": "overhead", **setting, "sides": rows}, out)
