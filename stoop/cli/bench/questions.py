"""`stoop bench acceptance` and `accuracy`: what an engine makes of questions from files."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoop.cli.bench.common import check_file, parse_sizes, say
from stoop.cli.options import Command, Model, check_engine, choose_names, engine_flags
from stoop.cli.progress import StageProgress
from stoop.cli.start import start_llm
from stoop.config.errors import ConfigError
from stoop.config.resolve import GRAPH_MODES, default_graph_mode, make_options
from stoop.config.schema import DEFAULT_MODEL
from stoop.config.speculation import AUTO, MAX_DRAFTS, fixed_drafts, parse_speculation

if TYPE_CHECKING:
    from stoop.bench.questions import Prompts
    from stoop.llm import LLM
    from stoop.text.tokenizer import Tokenizer

QuestionFiles = Annotated[
    list[Path],
    typer.Option(
        help=".jsonl file with a turns (the first is used), prompt, text or question field; may be "
        "repeated"
    ),
]
AnsweredQuestions = Annotated[
    Path | None,
    typer.Option(
        help=".jsonl file with question and answer fields (GSM8K's) or turns and reference fields; "
        "required"
    ),
]
Modes = Annotated[
    str,
    typer.Option(help=f"graph modes, separated by commas: auto, {', '.join(GRAPH_MODES)}"),
]
NumQuestions = Annotated[
    int | None, typer.Option(min=1, help="use at most this many questions, the first ones")
]
Shots = Annotated[
    int,
    typer.Option(
        min=0,
        help="worked examples before each question: the first of the file, which are then not "
        "asked",
    ),
]
ShotsFile = Annotated[
    Path | None, typer.Option(help="take the worked examples from this file instead")
]
Plain = Annotated[
    bool,
    typer.Option("--plain/--no-plain", help="with a drafter, also run each mode without drafts"),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="exit with code 1 if an engine differs from the first row")
]
TimedDrafts = Annotated[
    str | None,
    typer.Option(
        "--speed-k", help="values of K to measure speed for, or none; default: the K of -sc"
    ),
]
MaxTokens = Annotated[int, typer.Option(min=1, help="maximum tokens per answer")]
Raw = Annotated[bool, typer.Option("--raw", help="do not apply the chat template")]
Out = Annotated[Path | None, typer.Option(help="also write the JSON line to this file")]
NO_QUESTIONS = "no questions were given: add --questions FILE"

# Runs repeat the same questions, so nothing is taken from the prefix cache.
_FIXED = ("skip_tokenizer_init", "enable_prefix_caching")


def _acceptance_flags(command: Command) -> Command:
    return engine_flags(command, without=(*_FIXED, "max_num_seqs"))


def _accuracy_flags(command: Command) -> Command:
    return engine_flags(command, without=(*_FIXED, "graph_mode"))


@_acceptance_flags
def acceptance(
    model: Model = DEFAULT_MODEL,
    questions: QuestionFiles = [],  # noqa: B006
    k: Annotated[
        str, typer.Option("--k", help="draft tokens per step, separated by commas")
    ] = "1,2,3,4,5,6,7,8",
    speed_k: TimedDrafts = None,
    temperature: Annotated[
        str, typer.Option(help="sampling temperatures, separated by commas; 0 is greedy")
    ] = "0,1",
    max_tokens: MaxTokens = 256,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="use at most this many questions per file, evenly spaced"),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="concurrent requests when measuring speed")
    ] = 1,
    acceptance_batch: Annotated[
        int, typer.Option(min=1, help="concurrent requests when measuring acceptance only")
    ] = 16,
    raw: Raw = False,
    plot: Annotated[
        Path | None, typer.Option(help="write a plot to this PNG file; needs matplotlib")
    ] = None,
    out: Out = None,
    engine: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Measure draft acceptance and speedup while a model answers questions.

    Answers end at the end-of-text token, and seeds are fixed. Engines run one after another.
    """
    check_engine(model, {**engine, "max_num_seqs": 1})
    from stoop.bench.acceptance import AcceptanceSettings, measure_acceptance
    from stoop.bench.acceptance_report import draw_acceptance, print_acceptance

    drafter = find_drafter(engine, model)
    if drafter is None:
        raise ConfigError("acceptance needs a drafter: give one with -sc")
    proposed = str(drafter.pop("num_speculative_tokens", ""))
    counts, timed = _drafts(k), _timed_drafts(speed_k, proposed)
    temperatures = _temperatures(temperature)
    check_file("--plot", plot, needs="matplotlib")
    check_file("--out", out)
    asked = _read_questions(model, questions, limit, raw, engine)

    def start(k: int, batch: int) -> "LLM":
        fixed = {"num_speculative_tokens": k, "adaptive": False}
        chosen = {**drafter, **fixed} if k else None
        options = {"speculative_config": chosen, "max_num_seqs": batch}
        return start_llm(model, {**engine, **options, "enable_prefix_caching": False})

    settings = AcceptanceSettings(
        counts, timed, temperatures, max_tokens, batch_size, acceptance_batch
    )
    report = measure_acceptance(start, asked, settings, say)
    print_acceptance(report, model, drafter, out)
    if plot is not None:
        draw_acceptance(report, plot, say)


def find_drafter(engine: dict[str, Any], model: str) -> dict[str, Any] | None:
    """Parse and check -sc."""
    from stoop.engine.choose_drafter import expand_auto
    from stoop.worker.device import find_device

    device = find_device(engine["device"])
    with StageProgress() as report:
        given = parse_speculation(expand_auto(make_options(model, engine), device, report))
    if given is None:
        return None
    return {name: value for name, value in asdict(given).items() if value is not None}


def _drafts(text: str) -> tuple[int, ...]:
    if not text:
        raise ConfigError("-sc lacks num_speculative_tokens: add it, or give --speed-k 3")
    counts = sorted(set(parse_sizes(text)))
    if counts[-1] > MAX_DRAFTS:
        raise ConfigError(f"K = {counts[-1]}: use 1 to {MAX_DRAFTS} drafts per step")
    return tuple(counts)


def _timed_drafts(asked: str | None, proposed: str) -> tuple[int, ...]:
    if asked == "none":
        return ()
    if asked is None and proposed == AUTO:
        raise ConfigError(
            "-sc has num_speculative_tokens=auto, and engines with a fixed number are timed: give "
            "--speed-k, such as 3 or none"
        )
    return _drafts(asked or proposed)


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or not all(0 <= value <= 100 for value in found):
        raise ConfigError(f"--temperature {text}: use numbers from 0 to 100, such as 0,1")
    return found


def _read_questions(
    model: str, paths: list[Path], limit: int | None, raw: bool, engine: dict[str, Any]
) -> "Prompts":
    from stoop.bench.questions import encode_questions, read_questions

    if not paths:
        raise ConfigError(NO_QUESTIONS)
    found = read_questions(paths, limit)
    return encode_questions(found, load_tokenizer(model, engine), raw)


def load_tokenizer(model: str, engine: dict[str, Any]) -> "Tokenizer":
    from stoop.checkpoint.fetch import resolve_model
    from stoop.text.tokenizer import Tokenizer

    with StageProgress() as report:
        folder = resolve_model(model, revision=engine["revision"], report=report)
    return Tokenizer.from_folder(engine["tokenizer"] or folder)


@_accuracy_flags
def accuracy(
    model: Model = DEFAULT_MODEL,
    questions: AnsweredQuestions = None,
    modes: Modes = "auto",
    num_questions: NumQuestions = None,
    max_tokens: MaxTokens = 256,
    shots: Shots = 0,
    shots_file: ShotsFile = None,
    plain: Plain = True,
    raw: Raw = False,
    strict: Strict = False,
    out: Out = None,
    engine: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Measure exact-match accuracy on questions whose answers are numbers, such as GSM8K's.

    The first row is an eager engine without drafts. Every other engine is compared with it: the
    answers must be equal token for token (in bfloat16, but for rounding), and so must the score.
    Decoding is greedy. An answer is the number after the last ####, or else the last number of
    the text.

    right: correct answers. equal: answers with the same tokens as in the first row. first: the
    first position, of any answer, whose token differs. gap: where answers differ, the largest lead
    in log probability that the first row's token has there; near 0, rounding explains it. logp:
    mean log probability of the tokens of the reference solutions.
    """
    if questions is None:
        raise ConfigError(NO_QUESTIONS)
    asked = _choose_modes(model, modes, engine)
    check_file("--out", out)
    from stoop.bench.accuracy import EngineChoice, measure_accuracy
    from stoop.bench.accuracy_report import describe_difference, print_accuracy
    from stoop.bench.questions import encode_tasks, read_exam
    from stoop.engine.choose_drafter import may_vary
    from stoop.worker.device import find_device

    exam, worked = read_exam(questions, num_questions, shots, shots_file)
    drafter = find_drafter(engine, model)
    if drafter is not None and drafter.get("rejection_sample_method") == "synthetic":
        raise ConfigError("-sc: synthetic acceptance gives wrong answers, choose another method")
    tasks = encode_tasks(exam, load_tokenizer(model, engine), worked, raw)
    device, fixed = find_device(engine["device"]), fixed_drafts(drafter)

    def start(choice: EngineChoice) -> "LLM":
        fits = drafter if may_vary(choice.mode, device, engine["run_ahead"]) else fixed
        drafting = {"speculative_config": fits if choice.drafted else None}
        return start_llm(model, {**_of_mode(choice.mode, engine), **drafting})

    kinds = [False] * (plain or drafter is None) + [True] * (drafter is not None)
    choices = [EngineChoice(mode, drafted) for mode in asked for drafted in kinds]
    report = measure_accuracy(start, choices, str(questions), tasks, max_tokens, say)
    print_accuracy(report, model, str(questions), shots, out)
    if strict and not report.same:
        for row in report.rows:
            if not row.comparison.same:
                say(f"--strict: {describe_difference(row)}")
        raise typer.Exit(1)


def _choose_modes(model: str, text: str, engine: dict[str, Any]) -> list[str]:
    """Check the graph modes, with the other options of the engines; auto is replaced."""
    chosen = choose_names("--modes", text, ("auto", *GRAPH_MODES))
    for mode in chosen:
        check_engine(model, _of_mode(mode, engine))
    from stoop.worker.device import find_device

    default = default_graph_mode(find_device(engine["device"]))
    modes = [default if mode == "auto" else mode for mode in chosen]
    if set(modes) == {"none"}:  # options of graphs are refused if no engine has any
        check_engine(model, {**engine, "graph_mode": "none"})
    return modes


def _of_mode(mode: str, engine: dict[str, Any]) -> dict[str, Any]:
    """The options of an engine; those of graphs do not apply to an eager one."""
    eager = {"capture_sizes": None, "sanitize": False} if mode == "none" else {}
    return {**engine, "graph_mode": mode, "enable_prefix_caching": False, **eager}
