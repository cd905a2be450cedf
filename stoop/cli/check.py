"""`stoop check`: compare graph replay with eager execution."""

import dataclasses
import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

import typer

from stoop.cli.options import choose_names, engine_flags, flag_name
from stoop.cli.progress import StageProgress
from stoop.config.backends import backend_names
from stoop.config.errors import ConfigError
from stoop.config.resolve import GRAPH_MODES
from stoop.config.schema import EngineOptions

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
    "state_cache_memory",
)


ALL_MODES = ",".join(GRAPH_MODES[1:])


def _check_flags(command: Any) -> Any:
    return engine_flags(command, without=FIXED)


@_check_flags
def check(
    model: Annotated[
        str,
        typer.Argument(
            help="tiny, tiny-lfm2, tiny-qwen3.5, tiny-granite-h (random weights), smollm2-135m, a "
            "folder, a GGUF file or a model id"
        ),
    ] = "tiny",
    modes: Annotated[
        str,
        typer.Option(help="graph modes to check, separated by commas", show_default="all"),
    ] = ALL_MODES,
    backends: Annotated[
        str,
        typer.Option(
            help="attention backends to check, separated by commas; default: all that run here"
        ),
    ] = "",
    mutants: Annotated[
        bool,
        typer.Option(
            "--mutants", help="put past bugs back, one at a time, and see that each is caught"
        ),
    ] = False,
    only: Annotated[
        str,
        typer.Option(
            help="with --mutants: only those with this in name, mode, backend, model or report"
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print only JSON, no table")] = False,
    engine: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Check that every graph replay equals eager execution, bit for bit.

    Runs with the sanitizer on. With a drafter (-sc), its phases are checked too; for a tiny model,
    its EAGLE head may be "tiny" as well, and tiny-qwen3.5 has an MTP head. With --mutants, past
    bugs are put back into tiny engines instead, and each must be caught. The last line is JSON; the
    exit code is 1 if anything differs or a bug is missed.
    """
    if mutants:
        _refuse_with_mutants(model, modes, backends, engine)
        _check_mutants(only, engine["device"], as_json)
        return
    if only:
        raise ConfigError(f"--only {only!r} chooses among mutants: add --mutants")
    chosen_modes = choose_names("--modes", modes, GRAPH_MODES[1:])
    chosen_backends = choose_names("--backends", backends, backend_names()) if backends else None
    from stoop.check.graphs import run_checks

    with _place(model, engine) as (folder, options), StageProgress() as report:
        cases = list(run_checks(folder, chosen_modes, chosen_backends, options, report))
    if not as_json:
        _print_table(model, cases)
    failures = [failure for case in cases for failure in case.failures]
    num_cases = sum(case.num_workloads for case in cases)
    print(json.dumps({"cases": num_cases, "failed": len(failures), "failures": failures}))
    if failures:
        raise typer.Exit(1)


def _place(model: str, engine: dict[str, Any]) -> AbstractContextManager[Any]:
    """The model's folder and the engine's options; of a tiny model, while the context is open."""
    from stoop.check.graphs import TINY_CONFIGS, tiny_model

    if model in TINY_CONFIGS:
        return tiny_model(model, engine)
    if model.startswith("tiny") and not os.path.exists(model):
        known = ", ".join(TINY_CONFIGS)
        raise ConfigError(f"no tiny model is called {model!r}: give one of {known}")
    return nullcontext((model, engine))


def _refuse_with_mutants(model: str, modes: str, backends: str, engine: dict[str, Any]) -> None:
    """Mutants have models, modes and backends of their own."""
    pairs = {"MODEL": (model, "tiny"), "--modes": (modes, ALL_MODES), "--backends": (backends, "")}
    changed = [name for name, (value, default) in pairs.items() if value != default]
    for field in dataclasses.fields(EngineOptions):
        if field.name != "device" and engine.get(field.name, field.default) != field.default:
            changed.append(flag_name(field.name))
    if changed:
        raise ConfigError(f"--mutants has engines of its own: leave {', '.join(changed)} out")


def _check_mutants(only: str, device: str, as_json: bool) -> None:
    from stoop.check.mutants.harness import choose_mutants, run_mutants
    from stoop.worker.device import find_device

    where = find_device(device)
    chosen, left_out = choose_mutants(only, where)
    if left_out:
        print(left_out, file=sys.stderr)
    with StageProgress() as report:
        findings = list(run_mutants(chosen, where, report))
    if not as_json:
        _print_mutants(findings)
    failures = [f"{each.mutant.label}: {text}" for each in findings for text in each.problems()]
    summary: dict[str, Any] = {"mutants": len(chosen), "failed": len(failures)}
    summary["failures"] = failures
    if as_json:
        summary["findings"] = [each.record() for each in findings]
    print(json.dumps(summary))
    if failures:
        raise typer.Exit(1)


def _print_mutants(findings: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="bugs put back, and what caught them")
    for column in ("in", "mutant", "report", "equality", "sanitizer", "result"):
        table.add_column(column, no_wrap=column not in ("mutant", "sanitizer"))
    for finding in findings:
        mutant = finding.mutant
        table.add_row(
            mutant.part,
            mutant.label,
            str(mutant.report or ""),
            *finding.cells,
            "[red]FAILED[/red]" if finding.problems() else "[green]ok[/green]",
        )
    console = Console()
    console.print(table)
    for finding in findings:
        for problem in finding.problems():
            console.print(f"{finding.mutant.label}: {problem}", style="red", markup=False)


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
