"""`stoop bench harm`: what known bugs cost, healthy engines beside broken ones."""

from typing import Annotated, Any

import typer

from stoop.cli.bench.common import check_file, parse_sizes
from stoop.cli.bench.questions import (
    NO_QUESTIONS,
    AnsweredQuestions,
    MaxTokens,
    Out,
    Raw,
    find_drafter,
    load_tokenizer,
)
from stoop.cli.options import Command, Model, check_engine, choose_names, engine_flags
from stoop.cli.progress import StageProgress
from stoop.config.errors import ConfigError
from stoop.config.resolve import GRAPH_MODES
from stoop.config.schema import DEFAULT_MODEL
from stoop.config.speculation import MAX_DRAFTS

NumQuestions = Annotated[
    int, typer.Option(min=4, help="questions to answer, the first of the file")
]
Modes = Annotated[
    str | None,
    typer.Option(help="only bugs of these graph modes, separated by commas; default: all"),
]
Only = Annotated[
    str, typer.Option(help="only bugs with this in the report's number, name or backend")
]
# Bugs of padding need graphs larger than a batch, and mixed batches in graphs.
DEFAULTS = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 1024}
CAPTURE_SIZES = "1,4,8,256"
# The bugs choose these.
_FIXED = (
    *("skip_tokenizer_init", "enable_prefix_caching", "enable_chunked_prefill", "sanitize"),
    *("graph_mode", "attention_backend"),
)


def _harm_flags(command: Command) -> Command:
    return engine_flags(command, without=_FIXED)


@_harm_flags
def harm(
    model: Model = DEFAULT_MODEL,
    questions: AnsweredQuestions = None,
    num_questions: NumQuestions = 8,
    max_tokens: MaxTokens = 48,
    k: Annotated[int, typer.Option("--k", min=2, max=MAX_DRAFTS, help="draft tokens per step")] = 3,
    modes: Modes = None,
    only: Only = "",
    limits: Annotated[
        str, typer.Option(help="values of max_model_len between which a short step is timed")
    ] = "2048,131072",
    shape: Annotated[
        str, typer.Option(help="model of these timings: a shape of bench step, or a path")
    ] = "smollm2-135m",
    raw: Raw = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="print a Markdown table")] = False,
    out: Out = None,
    engine: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Put known bugs back and measure what each costs, beside a healthy engine.

    The bugs are those of five vLLM pull requests. Every engine answers questions greedily and is
    compared with an eager one without drafts, as in bench accuracy. Each bug declares its harm:
    other answers, fewer accepted drafts, an error, a refusal, a stale read that the sanitizer
    names, metadata that is built twice, or slower steps.

    Exits with code 1 if a healthy engine differs from the eager one, or if a bug does not do the
    harm that it declares. An error that a broken engine raises is a result.
    """
    if questions is None:
        raise ConfigError(NO_QUESTIONS)
    chosen_modes, both_limits = _check_modes(modes), _parse_limits(limits)
    check_file("--out", out)
    engine = _engine_options(model, engine)
    from stoop.bench.harm import Setting, measure_harm
    from stoop.bench.harm_bugs import choose_bugs
    from stoop.bench.harm_report import print_harm
    from stoop.bench.questions import encode_tasks, read_exam

    bugs = choose_bugs(engine["device"], only, chosen_modes)
    exam, _ = read_exam(questions, num_questions)
    if len(exam) < 4:
        raise ConfigError(f"--questions {questions} has {len(exam)} questions: give at least 4")
    tasks = tuple(encode_tasks(exam, load_tokenizer(model, engine), raw=raw))
    setting = Setting(
        model=model,
        engine=engine,
        drafter=_find_head(engine, model),
        num_drafts=k,
        tasks=tasks,
        max_tokens=max_tokens,
        shape=shape,
        limits=both_limits,
    )
    with StageProgress() as report:
        rows = measure_harm(setting, bugs, report)
    print_harm(rows, setting, str(questions), markdown=markdown, out=out)
    if any(row.problems() for row in rows):
        raise typer.Exit(1)


def _engine_options(model: str, engine: dict[str, Any]) -> dict[str, Any]:
    """The options of all engines, with the defaults of this command."""
    given = {name: value for name, value in engine.items() if value is not None}
    options = {**engine, **DEFAULTS, "capture_sizes": CAPTURE_SIZES, **given}
    check_engine(model, {**options, "graph_mode": "full"})
    from stoop.worker.device import find_device

    options["device"] = find_device(options["device"])
    if options["dtype"] == "auto":
        options["dtype"] = "float32" if options["device"] == "cpu" else "bfloat16"
    return options


def _check_modes(text: str | None) -> list[str]:
    return [] if text is None else choose_names("--modes", text, GRAPH_MODES)


def _parse_limits(text: str) -> tuple[int, int]:
    found = parse_sizes(text)
    if len(found) != 2 or found[0] >= found[1] or found[0] < 64:
        raise ConfigError(
            f"--limits {text}: use two rising numbers from 64 on, such as 2048,131072"
        )
    return found[0], found[1]


def _find_head(engine: dict[str, Any], model: str) -> dict[str, Any]:
    """The draft head, without its number of drafts."""
    drafter = find_drafter(engine, model)
    if drafter is None or drafter.get("method", "eagle3") not in ("eagle", "eagle3"):
        raise ConfigError("bench harm needs an EAGLE head: use a model that has one, or give -sc")
    drafter.pop("num_speculative_tokens", None)
    return drafter
