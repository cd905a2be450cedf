"""`stoop check`: compare graph replay with eager execution."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Annotated, Any

import typer

from stoop.cli.options import engine_flags
from stoop.cli.progress import StageProgress
from stoop.config.backends import backend_names
from stoop.config.errors import ConfigError
from stoop.config.resolve import GRAPH_MODES

FIXED = (
    "graph_mode",
    "attention_backend",
    "sanitize",
    "skip_tokenizer_init",
    "tokenizer",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "capture_sizes",
    "max_capture_size",
    "num_kv_blocks",
    "kv_cache_memory",
)


def _check_flags(command: Any) -> Any:
    return engine_flags(command, without=FIXED)


@_check_flags
def check(
    model: Annotated[
        str,
        typer.Argument(
            help="tiny (random weights), smollm2-135m, a folder, a GGUF file or a model id"
        ),
    ] = "tiny",
    modes: Annotated[
        str,
        typer.Option(help="graph modes to check, separated by commas", show_default="all"),
    ] = ",".join(GRAPH_MODES[1:]),
    backends: Annotated[
        str,
        typer.Option(
            help="attention backends to check, separated by commas; default: all that run here"
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print only JSON, no table")] = False,
    engine: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Check that every graph replay equals eager execution, bit for bit.

    Runs with the sanitizer on. With a drafter (-sc), its phases are checked too; for the tiny
    model, its head may be "tiny" as well. The last line is JSON; the exit code is 1 if anything
    differs.
    """
    chosen_modes = _chosen("--modes", modes.lower(), GRAPH_MODES[1:])
    chosen_backends = _chosen("--backends", backends, backend_names()) if backends else None
    from stoop.check.graphs import TINY, run_checks, tiny_model

    place = tiny_model(engine) if model == TINY else nullcontext((model, engine))
    with place as (folder, options), StageProgress() as report:
        cases = list(run_checks(folder, chosen_modes, chosen_backends, options, report))
    if not as_json:
        _print_table(model, cases)
    failures = [failure for case in cases for failure in case.failures]
    num_cases = sum(case.num_workloads for case in cases)
    print(json.dumps({"cases": num_cases, "failed": len(failures), "failures": failures}))
    if failures:
        raise typer.Exit(1)


def _chosen(flag: str, text: str, known: Sequence[str]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise ConfigError(f"{flag} has {name!r}: use {', '.join(known)}")
    return names


def _print_table(model: str, cases: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{model}: graph replay vs. eager, bit for bit")
    for column in ("backend", "mode", "runs", "graphs", "used", "s", "result"):
        table.add_column(column, no_wrap=True)
    for case in cases:
        table.add_row(
            case.backend,
            case.mode,
            str(case.num_workloads),
            str(case.num_graphs),
            str(case.num_used),
            f"{case.seconds:.1f}",
            "[red]FAILED[/red]" if case.failures else "[green]equal[/green]",
        )
    console = Console()
    console.print(table)
    for case in cases:
        for failure in case.failures:
            console.print(f"[red]{failure}[/red]")
