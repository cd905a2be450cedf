"""`stoop train-draft`: an EAGLE-3 head for any target, from prompts to a folder to serve."""

import dataclasses
import inspect
import sys
import typing
from pathlib import Path
from typing import Annotated, Any

import typer

from stoop.cli.options import Model
from stoop.config.errors import ConfigError
from stoop.train.settings import DataSettings, HeadSettings, Settings, TrainSettings

STAGES = ("data", "train", "export")
GROUPS = {"data": DataSettings, "head": HeadSettings, "train": TrainSettings}


def _settings_flags(command: Any) -> Any:
    """Add a flag for every setting; the command gets them in their groups."""
    shown, places = [], {}
    for panel, group in GROUPS.items():
        hints = typing.get_type_hints(group)
        for each in dataclasses.fields(group):
            flag = "--" + each.name.replace("_", "-")
            names = f"{flag}/--no-{flag[2:]}" if each.type in (bool, "bool") else flag
            option = typer.Option(names, help=each.metadata["help"], rich_help_panel=panel)
            shown.append(
                inspect.Parameter(
                    each.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=each.default,
                    annotation=Annotated[hints[each.name], option],
                )
            )
            places[each.name] = panel
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "groups"]

    def wrapped(**values: Any) -> None:
        chosen: dict[str, dict[str, Any]] = {panel: {} for panel in GROUPS}
        for name, panel in places.items():
            chosen[panel][name] = values.pop(name)
        made = {panel: group(**chosen[panel]) for panel, group in GROUPS.items()}
        command(**values, groups=made)

    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + shown
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped


@_settings_flags
def train_draft(
    target: Model,
    out: Annotated[Path, typer.Option(help="folder for data, checkpoints and the head")],
    prompts: Annotated[
        list[Path],
        typer.Option(
            help="prompts to answer: .jsonl with prompt, text, instruction, turns or messages, or "
            "a text file with one a line; may be repeated"
        ),
    ] = [],  # noqa: B006
    stage: Annotated[str, typer.Option(help="all, or one of data, train, export")] = "all",
    time_budget: Annotated[
        float | None,
        typer.Option(help="seconds for each stage; it stops cleanly, and goes on when run again"),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="train anew, not from the checkpoint in --out")
    ] = False,
    layout: Annotated[str, typer.Option(help="of the head: eagle, speculators or both")] = "both",
    export_dtype: Annotated[
        str, typer.Option(help="of the exported weights: bfloat16, float32 or float64")
    ] = "bfloat16",
    seed: Annotated[int, typer.Option(help="of draws, order and first weights")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto (bfloat16 on a GPU, else the target's), bfloat16, float32 ...")
    ] = "auto",
    groups: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Train an EAGLE-3 draft head: answer prompts, learn to foresee the answers, export.

    Each stage keeps what it has in --out; the same command, run again, goes on from there.
    """
    from stoop.train.job import Job
    from stoop.train.stages import run_export, run_train
    from stoop.train.workers import run_data

    if stage not in ("all", *STAGES):
        raise ConfigError(f"--stage {stage}: use all, {', '.join(STAGES)}")
    if layout not in ("eagle", "speculators", "both"):
        raise ConfigError(f"--layout {layout}: use eagle, speculators or both")
    if export_dtype not in ("bfloat16", "float32", "float64"):
        raise ConfigError(f"--export-dtype {export_dtype}: use bfloat16, float32 or float64")
    settings = Settings(**groups, seed=seed, device=device, dtype=dtype, time_budget=time_budget)
    job = Job(target, out, settings, _say)
    command = ["stoop", *sys.argv[1:]]
    if stage in ("all", "data"):
        try:
            run_data(job, prompts)
        finally:  # some answers may be there
            if job.data.exists():
                job.note(command)
    if stage in ("all", "train"):
        run_train(job, fresh)
        job.note(command)
    if stage in ("all", "export"):
        for folder in run_export(job, layout, export_dtype):
            print(folder)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")  # in one piece: workers write at the same time
    sys.stderr.flush()
