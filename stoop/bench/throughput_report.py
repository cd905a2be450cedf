"""Prints throughput by load and K as a table and a JSON line."""

from typing import Any

from rich.console import Console
from rich.table import Table

from stoop.bench.json_line import print_json
from stoop.bench.step import device_name
from stoop.bench.step_drafts import shown_shares
from stoop.bench.throughput import LoadReport


def print_loads(report: LoadReport, name: str, setting: dict[str, Any]) -> None:
    """name: of the model or shape; setting: what else the JSON line says"""
    config, traffic = report.config, report.traffic
    head = report.spec.head if report.spec else None
    lengths = f"{traffic.input_len} prompt and {traffic.output_len} answer tokens"
    if traffic.questions:
        lengths = f"questions, up to {traffic.output_len} answer tokens"
    where = f"{config.device.dtype} on {config.device.device}"
    table = Table(title=f"throughput of {name}: {lengths}, {where}")
    columns = ["at once", "K", "tok/s", "of plain", "of best K"]
    columns += ["tokens per step", "with drafts", "steps by drafts"]
    if report.peer is not None:
        columns += [f"{report.peer.engine} tok/s", "ratio"]
    for column in columns:
        table.add_column(column, justify="right")
    records = report.records()
    for record in records:
        cells = [
            str(record["load"]),
            _drafts(record["k"], record["adaptive"]),
            f"{record['tokens_per_s']:.1f}",
            _times(record["of_plain"]),
            _times(record["of_best_fixed"], 3),
            _figure(record["tokens_per_step"]),
            "-" if record["share_with_drafts"] is None else f"{record['share_with_drafts']:.0%}",
            shown_shares(record["steps_by_drafts"] or {}),
        ]
        if report.peer is not None:
            cells += [_figure(record["peer_tokens_per_s"], 1), _times(record["of_peer"])]
        table.add_row(*cells)
    console = Console()
    console.print(table)
    console.print(
        "[dim]of plain, of best K: tokens/s relative to plain decoding and to the best fixed "
        "number of drafts at the same load; tokens per step: of a request, after its prompt; with "
        "drafts: share of these steps that had drafts to verify; steps by drafts: share of the "
        "engine's steps, prompts included, by how many drafts were chosen[/dim]"
    )
    print_json(
        {
            "bench": "throughput",
            **setting,
            "head": report.spec.method if report.spec else None,
            "draft_vocab_size": head.vocab_size if head else None,
            "input_len": None if traffic.questions else traffic.input_len,
            "output_len": traffic.output_len,
            "graph_mode": config.graph.mode,
            "dtype": config.device.dtype,
            "device": device_name(config.device.device),
            "peer": report.peer.engine if report.peer else None,
            "rows": records,
        }
    )


def _drafts(k: int | str, adaptive: bool) -> str:
    if not k:
        return "plain"
    return f"up to {k}" if adaptive and isinstance(k, int) else str(k)


def _times(ratio: float | None, digits: int = 2) -> str:
    return "-" if ratio is None else f"{ratio:.{digits}f}x"


def _figure(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
