"""`stoop train-draft`: train and export an EAGLE-3 draft head."""

import dataclasses
import inspect
import sys
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoop.cli.options import Model, make_flag, show_flags
from stoop.cli.train_display import Display
from stoop.config.errors import ConfigError
from stoop.train.settings import DataSettings, HeadSettings, Settings, TrainSettings

if TYPE_CHECKING:
    from stoop.train.job import Job

PromptFiles = Annotated[
    list[Path],
    typer.Option(
        help="prompts for the target to answer: a .jsonl file with a prompt, text, question, "
        "instruction, turns or messages field, or a text file with one prompt per line; may be "
        "repeated"
    ),
]
FreshData = Annotated[
    bool,
    typer.Option(
        "--fresh-data",
        help="delete the data and the checkpoint in --out and start over; without this flag, "
        "options that do not match the existing data are refused",
    ),
]
STAGES = ("data", "train", "export")
GROUPS = {"data": DataSettings, "head": HeadSettings, "train": TrainSettings}


def _settings_flags(command: Any) -> Any:
    """Add a flag for every setting; the command gets the groups and the names of given flags."""
    flags, panels = [], {}
    for panel, group in GROUPS.items():
        hints = typing.get_type_hints(group)
        for each in dataclasses.fields(group):
            kind, text = hints[each.name], each.metadata["help"]
            flags.append(make_flag(each.name, kind, each.default, text, panel=panel))
            panels[each.name] = panel
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

    def call(context: typer.Context, **values: Any) -> None:
        sources = {name: context.get_parameter_source(name) for name in panels}
        given = frozenset(n for n, source in sources.items() if source and source.name != "DEFAULT")
        chosen: dict[str, dict[str, Any]] = {panel: {} for panel in GROUPS}
        for name, panel in panels.items():
            chosen[panel][name] = values.pop(name)
        made = {panel: group(**chosen[panel]) for panel, group in GROUPS.items()}
        command(**values, groups=made, given=given)

    return show_flags(command, call, ("groups", "given"), [*flags, context])


@_settings_flags
def train_draft(
    target: Model,
    out: Annotated[Path, typer.Option(help="folder for data, checkpoints and the trained head")],
    prompts: PromptFiles = [],  # noqa: B006
    stage: Annotated[str, typer.Option(help="stage to run: all, data, train or export")] = "all",
    time_budget: Annotated[
        float | None,
        typer.Option(
            help="time limit per stage, in seconds; run the same command again to continue"
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="ignore the checkpoint in --out and train from the start"),
    ] = False,
    fresh_data: FreshData = False,
    layout: Annotated[
        str, typer.Option(help="format of the exported head: eagle, speculators or both")
    ] = "both",
    export_dtype: Annotated[
        str, typer.Option(help="dtype of the exported weights: bfloat16, float32 or float64")
    ] = "bfloat16",
    seed: Annotated[
        int, typer.Option(help="random seed for sampling, data order and initial weights")
    ] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            help="dtype to compute in: auto (bfloat16 on a GPU, else the target's), bfloat16, "
            "float32 or float64"
        ),
    ] = "auto",
    groups: dict[str, Any] = {},  # noqa: B006
    given: frozenset[str] = frozenset(),
) -> None:
    """Train an EAGLE-3 draft head for a target model and export it.

    Three stages: data (the target answers prompts), train (a head learns to predict the answers)
    and export. Each stage keeps its results in --out. To continue a stopped run, even after
    Ctrl-C, run the same command again.
    """
    _check_choices(stage, layout, export_dtype, fresh_data)
    settings = Settings(**groups, seed=seed, device=device, dtype=dtype, time_budget=time_budget)
    flags = {"given": given, "fresh": fresh or fresh_data, "fresh_data": fresh_data}
    with Display() as display:
        try:
            job = _make_job(target, out, settings, display, flags)
            written = _run(job, prompts, stage, layout, export_dtype)
        except KeyboardInterrupt as stop:
            display.show(None)
            display.say(str(stop) or "interrupted")
            raise typer.Exit(130) from None
    for folder in written:
        print(folder)


def _check_choices(stage: str, layout: str, export_dtype: str, fresh_data: bool) -> None:
    if stage not in ("all", *STAGES):
        raise ConfigError(f"--stage {stage}: use all, {', '.join(STAGES)}")
    if layout not in ("eagle", "speculators", "both"):
        raise ConfigError(f"--layout {layout}: use eagle, speculators or both")
    if export_dtype not in ("bfloat16", "float32", "float64"):
        raise ConfigError(f"--export-dtype {export_dtype}: use bfloat16, float32 or float64")
    if fresh_data and stage not in ("all", "data"):
        raise ConfigError(f"--fresh-data makes data: use --stage all or data, not {stage}")


def _make_job(
    target: str, out: Path, settings: Settings, display: Display, flags: dict[str, Any]
) -> "Job":
    from stoop.train.job import Job

    command = ("stoop", *sys.argv[1:])
    return Job(target, out, settings, display.say, display.show, command=command, **flags)


def _run(job: "Job", prompts: list[Path], stage: str, layout: str, export_dtype: str) -> list[Path]:
    """Run the chosen stages and return the exported folders."""
    from stoop.train.origin import check_given
    from stoop.train.stages import run_export, run_train
    from stoop.train.workers import run_data

    if stage in ("all", "data"):
        run_data(job, prompts)
    else:
        check_given(job, prompts)
    if stage in ("all", "train"):
        run_train(job)
    return run_export(job, layout, export_dtype) if stage in ("all", "export") else []
