"""Prints results as a table and a JSON line."""

from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoop.bench.json_line import print_json
from stoop.bench.offline import LatencyResult, Load, RunResult, TokenTimes
from stoop.bench.peer import PeerLoad, PeerResult
from stoop.bench.profile import KernelRow, short_name
from stoop.bench.spec import SpecResult
from stoop.bench.step import StepLoad, StepReport, device_name
from stoop.bench.step_drafts import shown_shares
from stoop.config.schema import Config

PERCENTILES = (50, 90, 99)
MAX_KERNELS = 30  # rows in the table


def print_throughput(result: RunResult) -> None:
    summary = _times(result.requests)
    load = result.load
    table = Table(title=f"throughput: {load.num_requests} requests at once")
    for column in ("measure", *(f"p{p}" for p in PERCENTILES)):
        table.add_column(column, justify="right")
    _add_times(table, summary)
    console = Console()
    console.print(table)
    num_all = result.num_tokens + load.num_requests * load.input_len
    console.print(
        f"{result.num_tokens} tokens in {result.seconds:.2f} s: "
        f"[bold]{result.tokens_per_s:.1f} tokens/s[/bold] "
        f"({num_all / result.seconds:.1f} including prompts)"
    )
    print_json(
        {
            "bench": "throughput",
            "num_requests": load.num_requests,
            "input_len": load.input_len,
            "output_len": load.output_len,
            "seconds": result.seconds,
            "tokens_per_s": result.tokens_per_s,
            "total_tokens_per_s": num_all / result.seconds,
            **summary,
        }
    )


def print_latency(results: list[LatencyResult]) -> None:
    columns = ["batch", "tok/s", "scaling", "TTFT ms", "gap p50", "gap p99", "GB/s"]
    with_peer = results[0].peer is not None
    if with_peer:
        columns += ["HF tok/s", "ratio"]
    first = results[0].load
    lengths = sorted({result.load.input_len for result in results})
    title = f"latency: {', '.join(map(str, lengths))} prompt and {first.output_len} answer tokens, "
    table = Table(title=title + results[0].dtype)
    if len(lengths) > 1:
        columns = ["prompt", *columns]
    for column in columns:
        table.add_column(column, justify="right")
    records = []
    singles = {r.load.input_len: r.tokens_per_s for r in results if r.load.num_requests == 1}
    for result in results:
        record = _latency_record(result, singles.get(result.load.input_len))
        records.append(record)
        scaling = record["speedup_over_batch_1"]
        cells = [
            *([str(record["input_len"])] if len(lengths) > 1 else []),
            str(record["batch_size"]),
            f"{record['tokens_per_s']:.1f}",
            f"{scaling:.2f}x" if scaling else "",
            f"{record['ttft_ms']['p50']:.0f}",
            f"{record['itl_ms']['p50']:.2f}",
            f"{record['itl_ms']['p99']:.2f}",
            f"{record['weight_gb_per_s']:.1f}",
        ]
        if with_peer:
            cells += [f"{record['transformers_tokens_per_s']:.1f}", f"{record['ratio']:.2f}x"]
        table.add_row(*cells)
    Console().print(table)
    _warn_if_disturbed(results)
    Console().print(
        "[dim]scaling: tokens/s relative to batch 1; gap: ms between tokens; GB/s: weight bytes "
        "read, once per step[/dim]"
    )
    print_json({"bench": "latency", "dtype": results[0].dtype, "results": records})


def print_modes(loads: list[Load], gaps: dict[str, list[float]]) -> None:
    """Print milliseconds per decode step by mode and context."""
    table = Table(title=f"ms between tokens, batch {loads[0].num_requests}")
    table.add_column("mode")
    for load in loads:
        table.add_column(f"context {load.input_len}", justify="right")
    for mode, seconds in gaps.items():
        table.add_row(mode, *(f"{value * 1000:.2f}" for value in seconds))
    Console().print(table)
    print_json(
        {
            "bench": "graphs",
            "batch_size": loads[0].num_requests,
            "contexts": [load.input_len for load in loads],
            "ms": {mode: [value * 1000 for value in row] for mode, row in gaps.items()},
        }
    )


def _warn_if_disturbed(results: list[LatencyResult]) -> None:
    """Warn if runs differ much, which means that other programs used the cores."""
    for result in results:
        speeds = [run.tokens_per_s for run in result.runs]
        if max(speeds) > 1.25 * min(speeds):
            Console().print(
                f"[yellow]batch {result.load.num_requests}: runs range from {min(speeds):.1f} to "
                f"{max(speeds):.1f} tokens/s; the machine is not idle: run it again[/yellow]"
            )


def _latency_record(result: LatencyResult, single: float | None) -> dict[str, Any]:
    times = _times([request for run in result.runs for request in run.requests])
    record = {
        "batch_size": result.load.num_requests,
        "input_len": result.load.input_len,
        "output_len": result.load.output_len,
        "runs": len(result.runs),
        "tokens_per_s": result.tokens_per_s,
        "tokens_per_s_by_run": [run.tokens_per_s for run in result.runs],
        "speedup_over_batch_1": result.tokens_per_s / single if single else None,
        # The read rate of the weights alone, which every step reads once.
        "weight_gb_per_s": result.weight_bytes / times["itl_ms"]["p50"] / 1e6,
        **times,
    }
    if result.peer is not None:
        record["transformers_tokens_per_s"] = result.peer
        record["ratio"] = result.tokens_per_s / result.peer
    return record


def print_drafts(load: Load, results: list[SpecResult]) -> None:
    table = Table(title=f"speculation on a toy target, batch {load.num_requests}")
    for column in ("head", "K", "tokens per step", "steps by drafts", "tok/s", "of plain"):
        table.add_column(column, justify="right")
    for result in results:
        name, most, adaptive = result.drafting
        table.add_row(
            name,
            f"up to {most}" if adaptive else str(most),
            f"{result.steps.tokens_per_step or 1:.2f}",
            shown_shares(result.made.shares),
            f"{result.tokens_per_s:.1f}",
            f"{result.speedup:.2f}x",
        )
    Console().print(table)
    print_json({"bench": "spec", "results": [result.as_record() for result in results]})


def print_steps(report: StepReport) -> None:
    config, first = report.llm.config, report.rows[0].load
    table = Table(title=f"steps of {_setting(report.shape, config, first)}")
    columns = ("batch", "step", "floor", "ratio", "TB/s", "kernels", "busy", "idle", "host")
    for column in columns:
        table.add_column(column, justify="right")
    records = [row.as_record() for row in report.rows]
    for record in records:
        table.add_row(
            str(record["batch"]),
            f"{record['ms_per_step']:.3f}",
            f"{record['floor_ms']:.3f}",
            f"{record['ratio']:.2f}x",
            f"{record['tb_per_s']:.3f}",
            _figure(record["kernels_per_step"], 0),
            *(_figure(record[name], 3) for name in ("busy_ms", "idle_ms", "host_ms")),
        )
    console = Console()
    console.print(table)
    console.print(
        "[dim]times in ms; floor: time to read weights and live KV at the measured "
        f"{report.bandwidth / 1e12:.3f} TB/s; kernels and busy: per step, under the profiler[/dim]"
    )
    console.print(
        f"engine ready in {report.start_s:.1f} s, first token {report.first_token_s:.2f} s later"
    )
    print_json(
        {
            "bench": "step",
            **_setting_record(report.shape, config, first),
            "steps": first.steps,
            "start_s": report.start_s,
            "first_token_s": report.first_token_s,
            "bandwidth_tb_per_s": report.bandwidth / 1e12,
            "rows": records,
        }
    )


def print_peer(load: PeerLoad, result: PeerResult) -> None:
    drafts = f"K = {load.k}" if load.k else "plain"
    table = Table(title=f"{result.engine}: {load.shape}, {drafts}, prompt {load.prompt_len}")
    for column in ("", "ms"):
        table.add_column(column, justify="right")
    for batch, ms in result.ms_per_step.items():
        table.add_row(f"step, batch {batch}", f"{ms:.3f}")
    for length, ms in result.first_token_ms.items():
        table.add_row(f"first token, prompt {length}", f"{ms:.1f}")
    console = Console()
    console.print(table)
    console.print(f"engine ready in {result.start_s:.1f} s")
    print_json({"bench": "peer", **asdict(load), **asdict(result)})


def print_profile(
    shape: str, config: Config, load: StepLoad, rows: list[KernelRow], path: str
) -> None:
    table = Table(title=f"one step of {_setting(shape, config, load)}, batch {load.batch}")
    table.add_column("kernel" if config.device.device != "cpu" else "operation")
    for column in ("calls", "us", "share"):
        table.add_column(column, justify="right")
    shown, rest = rows[:MAX_KERNELS], rows[MAX_KERNELS:]
    for row in shown:
        name, share = short_name(row.name), f"{row.share:.1%}"
        table.add_row(Text(name), f"{row.calls:.1f}", f"{row.us:.1f}", share)
    if rest:
        calls, us, share = (sum(getattr(r, n) for r in rest) for n in ("calls", "us", "share"))
        table.add_row(f"{len(rest)} more", f"{calls:.1f}", f"{us:.1f}", f"{share:.1%}")
    table.add_row("all", *(f"{sum(getattr(r, n) for r in rows):.1f}" for n in ("calls", "us")))
    console = Console()
    console.print(table)
    console.print(f"[dim]trace: {path} (chrome://tracing, ui.perfetto.dev)[/dim]")
    print_json(
        {
            "bench": "profile",
            **_setting_record(shape, config, load),
            "batch": load.batch,
            "trace": path,
            "kernels": [asdict(row) for row in rows],
        }
    )


def _setting(shape: str, config: Config, load: StepLoad) -> str:
    drafts = f"K = {config.schedule.num_drafts} ({config.spec.method})" if config.spec else "plain"
    context = f"{'context' if load.planted else 'prompt'} {load.length}"
    return f"{shape}, {drafts}, {context}, {config.device.dtype} on {config.device.device}"


def _setting_record(shape: str, config: Config, load: StepLoad) -> dict[str, Any]:
    return {
        "shape": shape,
        "k": config.schedule.num_drafts,
        "head": config.spec.method if config.spec else None,
        "draft_vocab_size": config.head.vocab_size if config.head else None,
        "prompt_len": None if load.planted else load.length,
        "context": load.length if load.planted else None,
        "graph_mode": config.graph.mode,
        "dtype": config.device.dtype,
        "device": device_name(config.device.device),
    }


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _times(requests: list[TokenTimes]) -> dict[str, dict[str, float]]:
    """Return percentiles of the ms to the first token, between tokens, and to the last token."""
    return {
        "ttft_ms": _percentiles([request.ttft for request in requests]),
        "itl_ms": _percentiles([gap for request in requests for gap in request.gaps]),
        "e2e_ms": _percentiles([request.times[-1] for request in requests]),
    }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    values = np.percentile(np.array(seconds) * 1000, PERCENTILES)
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, values, strict=True)}


def _add_times(table: Table, times: dict[str, dict[str, float]]) -> None:
    names = {
        "ttft_ms": "time to first token",
        "itl_ms": "between tokens",
        "e2e_ms": "to the last token",
    }
    for key, name in names.items():
        table.add_row(name, *(f"{value:.1f} ms" for value in times[key].values()))
