"""`stoop bench`: benchmarks that print a table and a JSON line."""

import importlib.util
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoop.cli.options import (
    Command,
    Model,
    check_engine,
    engine_flags,
    engine_help,
)
from stoop.cli.progress import StageProgress
from stoop.cli.start import start_llm
from stoop.config.errors import ConfigError
from stoop.config.schema import DEFAULT_MODEL
from stoop.config.speculation import MAX_DRAFTS, asks_for_auto, parse_speculation

if TYPE_CHECKING:
    from stoop.bench.acceptance import Questions
    from stoop.bench.step import StepLoad
    from stoop.llm import LLM

bench = typer.Typer(
    help="Run a benchmark. The last line of its output is JSON.", no_args_is_help=True
)

InputLen = Annotated[int, typer.Option("--input-len", min=1, help="prompt tokens per request")]
OutputLen = Annotated[int, typer.Option("--output-len", min=2, help="answer tokens per request")]
Shape = Annotated[
    str,
    typer.Option(
        help="llama-8b, llama-1b or smollm2-135m with random weights, or the path of a model "
        "folder or GGUF file"
    ),
]
Drafts = Annotated[
    int,
    typer.Option(
        "--k",
        help="draft tokens per step, from a random EAGLE-3 head whose drafts are all rejected; 0 "
        "disables speculation",
    ),
]
PromptLen = Annotated[int, typer.Option(min=1, help="prompt tokens per request")]
Context = Annotated[
    int | None,
    typer.Option(min=1, help="context tokens per request with random KV, instead of a prompt"),
]
QuestionFiles = Annotated[
    list[Path],
    typer.Option(
        help=".jsonl file with a turns (the first is used), prompt or text field; may be repeated"
    ),
]
TimedDrafts = Annotated[
    str | None,
    typer.Option(
        "--speed-k", help="values of K to measure speed for, or none; default: the K of -sc"
    ),
]
StepGraphMode = Annotated[str, typer.Option(help=engine_help("graph_mode"))]

# The shape and the load determine these options.
_SET_BY_LOAD = (
    "tokenizer",
    "revision",
    "skip_tokenizer_init",
    "load_format",
    "speculative_config",
    "graph_mode",
    "max_model_len",
    "max_num_seqs",
    "num_kv_blocks",
    "kv_cache_memory",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "sanitize",
)


def _shape_flags(command: Command) -> Command:
    return engine_flags(command, without=_SET_BY_LOAD)


def _question_flags(command: Command) -> Command:
    """Engine flags without prefix caching: runs repeat the same questions."""
    without = ("skip_tokenizer_init", "max_num_seqs", "enable_prefix_caching")
    return engine_flags(command, without=without)


@bench.command()
@engine_flags
def throughput(
    model: Model = DEFAULT_MODEL,
    num_prompts: Annotated[int, typer.Option(min=1, help="number of requests")] = 16,
    input_len: InputLen = 64,
    output_len: OutputLen = 64,
    engine: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Measure throughput: all requests arrive at once and up to --max-num-seqs run together."""
    check_engine(model, engine)
    from stoop.bench.offline import Load, measure_throughput
    from stoop.bench.report import print_throughput

    llm = start_llm(model, engine)
    print_throughput(measure_throughput(llm, Load(num_prompts, input_len, output_len)))


@bench.command()
@engine_flags
def latency(
    model: Model = DEFAULT_MODEL,
    batch_size: Annotated[
        str, typer.Option(help="concurrent requests; one or more sizes, such as 1,8")
    ] = "1,8",
    input_len: Annotated[
        str, typer.Option(help="prompt tokens per request; one or more lengths, such as 512,4096")
    ] = "40",
    output_len: OutputLen = 64,
    repeat: Annotated[int, typer.Option(min=1, help="runs per size")] = 3,
    shape: Annotated[
        str | None,
        typer.Option(help="measure this shape instead of a model; see `stoop bench step --help`"),
    ] = None,
    k: Annotated[
        int,
        typer.Option(
            "--k", help="draft tokens per step, with --shape; see `stoop bench step --help`"
        ),
    ] = 0,
    peer: Annotated[
        str | None,
        typer.Option(
            help="transformers: also measure its generate(), alternating runs, in the same dtype"
        ),
    ] = None,
    engine: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Measure time to first token, time between tokens and tokens/s for fixed batch sizes."""
    sizes, lengths = _sizes(batch_size), _sizes(input_len)
    if peer not in (None, "transformers"):
        raise ConfigError(f"--peer {peer}: use transformers, the only choice")
    if peer and importlib.util.find_spec(peer) is None:
        raise ConfigError(f"--peer {peer}: it is not installed; pip install {peer}")
    if k and shape is None:
        raise ConfigError(f"--k {k} needs --shape: add one, or set a drafter with -sc")
    drafted = not asks_for_auto(engine["speculative_config"])
    if shape is not None and (model != DEFAULT_MODEL or (k and drafted)):
        raise ConfigError("--shape sets the model and --k its head: leave out the model and -sc")
    if engine["max_num_seqs"] is None:
        engine = {**engine, "max_num_seqs": max(sizes)}
    check_engine(model, engine)
    from stoop.bench.offline import Load, measure_latency
    from stoop.bench.report import print_latency
    from stoop.bench.shapes import open_shape

    if shape is None:
        llm = start_llm(model, engine)
    else:
        longest = engine["max_model_len"] or max(lengths) + output_len + k
        with open_shape(shape, k, longest) as (folder, options):
            llm = start_llm(folder, {**engine, "max_model_len": longest, **options})
    loads = [Load(size, length, output_len) for length in lengths for size in sizes]
    results = measure_latency(llm, loads, repeat, with_transformers=peer is not None)
    print_latency(results)


@bench.command()
@_shape_flags
def step(
    shape: Shape = "llama-8b",
    k: Drafts = 3,
    batch: Annotated[
        str, typer.Option(help="concurrent requests; one or more sizes, such as 1,8")
    ] = "1,8,32,64",
    prompt_len: PromptLen = 512,
    context: Context = None,
    graph_mode: StepGraphMode = "step",
    steps: Annotated[int, typer.Option(min=1, help="timed steps per run")] = 256,
    repeat: Annotated[
        int, typer.Option(min=1, help="runs per batch size; the median is reported")
    ] = 3,
    engine: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Measure the time of a decode step and compare it with the memory-bandwidth floor.

    floor: time to read the weights and live KV once, and the draft head's K times, at the
    measured memory bandwidth. host: the part of a step in which the host does not wait for the
    device.

    On CUDA, another run under torch.profiler measures kernels (launches per step, including
    copies and fills), busy (the time in which at least one runs) and idle (the rest of the step).
    """
    sizes, engine = _sizes(batch), {**engine, "graph_mode": graph_mode}
    check_engine(shape, {**engine, "max_num_seqs": 1})
    from stoop.bench.report import print_steps
    from stoop.bench.step import measure_steps

    loads = [_step_load(size, prompt_len, context, steps) for size in sizes]
    print_steps(measure_steps(shape, k, loads, repeat, engine, start_llm))


@bench.command()
@_shape_flags
def profile(
    shape: Shape = "llama-8b",
    k: Drafts = 3,
    batch: Annotated[int, typer.Option(min=1, help="concurrent requests")] = 1,
    prompt_len: PromptLen = 512,
    context: Context = None,
    graph_mode: StepGraphMode = "step",
    out: Annotated[str, typer.Option(help="file for the Chrome trace")] = "trace.json",
    engine: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Profile a decode step by kernel and write a Chrome trace."""
    _check_file("--out", Path(out))
    engine = {**engine, "graph_mode": graph_mode}
    check_engine(shape, {**engine, "max_num_seqs": 1})
    from stoop.bench.profile import kernel_rows
    from stoop.bench.report import print_profile
    from stoop.bench.step import record_steps, start_shaped

    load = _step_load(batch, prompt_len, context, steps=1)
    llm = start_shaped(shape, k, [load], engine, start_llm)
    trace, span = record_steps(llm, load, Path(out))
    print_profile(shape, llm.config, load, kernel_rows(trace, span.steps), out)


@bench.command()
def peer(
    shape: Annotated[str, typer.Option(help="llama-8b, llama-1b or smollm2-135m")] = "llama-8b",
    k: Drafts = 3,
    batch: Annotated[
        str, typer.Option(help="concurrent requests; one or more sizes, such as 1,8")
    ] = "1,8,32",
    prompt_len: Annotated[int, typer.Option(min=1, help="prompt tokens per request")] = 512,
    first_token: Annotated[
        str, typer.Option(help="prompt lengths for time to first token, such as 512,4096")
    ] = "",
    steps: Annotated[int, typer.Option(min=1, help="timed steps per run")] = 128,
    repeat: Annotated[int, typer.Option(min=1, help="runs of each; the median is reported")] = 3,
    python: Annotated[
        str | None,
        typer.Option(help="Python interpreter with vLLM installed; default: the one running stoop"),
    ] = None,
) -> None:
    """Measure vLLM on the same shape and with the same method as `bench step`.

    Uses random weights, greedy decoding, no prefix caching, and a CUDA graph of each batch's exact
    size.
    """
    from stoop.bench.peer import PeerLoad, measure_vllm
    from stoop.bench.report import print_peer

    lengths = _sizes(first_token) if first_token else []
    load = PeerLoad(shape, k, _sizes(batch), prompt_len, lengths, steps, repeat)
    print_peer(load, measure_vllm(load, python or sys.executable))


def _step_load(batch: int, prompt_len: int, context: int | None, steps: int) -> "StepLoad":
    from stoop.bench.step import StepLoad

    return StepLoad(batch, context or prompt_len, context is not None, steps)


@bench.command()
def graphs(
    model: Model = DEFAULT_MODEL,
    modes: Annotated[
        str, typer.Option(help="graph modes, separated by commas")
    ] = "none,piecewise,full,step",
    contexts: Annotated[
        str, typer.Option(help="prompt lengths in tokens, separated by commas")
    ] = "32,256,1024",
    batch_size: Annotated[int, typer.Option(min=1, help="concurrent requests")] = 1,
    output_len: OutputLen = 24,
    repeat: Annotated[int, typer.Option(min=1, help="rounds; every round runs every mode")] = 3,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto, float64, float32, bfloat16 or float16")
    ] = "auto",
) -> None:
    """Measure a decode step in each graph mode as the context grows."""
    lengths = _sizes(contexts)
    longest = max(lengths) + output_len
    options = {
        "device": device,
        "dtype": dtype,
        "max_num_seqs": batch_size,
        "max_model_len": longest,
        "num_kv_blocks": 2 * batch_size * (longest // 16 + 1) + 1,  # several engines share memory
        "speculative_config": None,
    }
    chosen = {mode: {**options, "graph_mode": mode} for mode in modes.split(",")}
    for each in chosen.values():
        check_engine(model, each)
    from stoop.bench.offline import Load, measure_modes
    from stoop.bench.report import print_modes

    loads = [Load(batch_size, length, output_len) for length in lengths]
    llms = {mode: start_llm(model, each) for mode, each in chosen.items()}
    print_modes(loads, measure_modes(llms, loads, repeat))


@bench.command()
def spec(
    k: Annotated[
        str, typer.Option("--k", help="draft tokens per step, separated by commas")
    ] = "1,2,4,8",
    batch_size: Annotated[int, typer.Option(min=1, help="concurrent requests")] = 1,
    output_len: OutputLen = 64,
    layers: Annotated[
        int,
        typer.Option(
            min=1,
            help="layers of the toy model; its head has one, so more layers make drafts cheaper",
        ),
    ] = 24,
    repeat: Annotated[int, typer.Option(min=1, help="rounds; every round runs every engine")] = 3,
    graph_mode: Annotated[str, typer.Option(help=engine_help("graph_mode"))] = "step",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
) -> None:
    """Measure the best-case gain and the worst-case cost of speculation on a toy model.

    Prints tokens/s for each K with a head whose drafts are always right and with one whose drafts
    are always wrong.
    """
    counts, input_len = _sizes(k), 8
    options = {
        "device": device,
        "graph_mode": graph_mode,
        "max_num_seqs": batch_size,
        "max_model_len": input_len + output_len,
        "max_num_batched_tokens": max(64, batch_size * (max(counts) + 1)),
        "skip_tokenizer_init": True,
        "capture_sizes": None if graph_mode.lower() == "none" else str(batch_size),
    }
    check_engine("toy", options)
    from stoop.bench.offline import Load
    from stoop.bench.report import print_drafts
    from stoop.bench.spec import measure_drafts

    load = Load(batch_size, input_len, output_len)
    print_drafts(load, measure_drafts(counts, load, layers, options, repeat, start_llm))


@bench.command()
@_question_flags
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
    max_tokens: Annotated[int, typer.Option(min=1, help="maximum tokens per answer")] = 256,
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
    raw: Annotated[bool, typer.Option("--raw", help="do not apply the chat template")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="write a plot to this PNG file; needs matplotlib")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="also write the JSON line to this file")] = None,
    engine: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Measure draft acceptance and speedup while a model answers questions.

    Answers end at the end-of-text token, and seeds are fixed. Engines run one after another.
    """
    check_engine(model, {**engine, "max_num_seqs": 1})
    from stoop.bench.acceptance import AcceptanceSettings, measure_acceptance
    from stoop.bench.acceptance_report import draw_acceptance, print_acceptance

    drafter = _drafter(engine, model)
    proposed = str(drafter.pop("num_speculative_tokens", ""))
    counts, timed = _drafts(k), () if speed_k == "none" else _drafts(speed_k or proposed)
    temperatures = _temperatures(temperature)
    _check_file("--plot", plot, needs="matplotlib")
    _check_file("--out", out)
    asked = _read_questions(model, questions, limit, raw, engine)

    def start(k: int, batch: int) -> "LLM":
        chosen = {**drafter, "num_speculative_tokens": k} if k else None
        options = {"speculative_config": chosen, "max_num_seqs": batch}
        return start_llm(model, {**engine, **options, "enable_prefix_caching": False})

    settings = AcceptanceSettings(
        counts, timed, temperatures, max_tokens, batch_size, acceptance_batch
    )
    report = measure_acceptance(start, asked, settings, _say)
    print_acceptance(report, model, drafter, out)
    if plot is not None:
        draw_acceptance(report, plot, _say)


def _drafter(engine: dict[str, Any], model: str) -> dict[str, Any]:
    """Parse and check -sc."""
    from stoop.engine.choose_drafter import expand_auto
    from stoop.worker.device import find_device

    device = find_device(engine["device"])
    given = parse_speculation(expand_auto(engine["speculative_config"], model, device))
    if given is None:
        raise ConfigError("acceptance needs a drafter: give one with -sc")
    return {name: value for name, value in asdict(given).items() if value is not None}


def _drafts(text: str) -> tuple[int, ...]:
    if not text:
        raise ConfigError("-sc lacks num_speculative_tokens: add it, or give --speed-k 3")
    counts = sorted(set(_sizes(text)))
    if counts[-1] > MAX_DRAFTS:
        raise ConfigError(f"K = {counts[-1]}: use 1 to {MAX_DRAFTS} drafts per step")
    return tuple(counts)


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
) -> "Questions":
    from stoop.bench.acceptance import encode_questions, read_questions
    from stoop.checkpoint.fetch import resolve_model
    from stoop.text.tokenizer import Tokenizer

    if not paths:
        raise ConfigError("no questions were given: add --questions FILE")
    found = read_questions(paths, limit)
    with StageProgress() as report:
        folder = resolve_model(model, revision=engine["revision"], report=report)
    tokenizer = Tokenizer.from_folder(engine["tokenizer"] or folder)
    return encode_questions(found, tokenizer, raw)


def _check_file(flag: str, path: Path | None, needs: str | None = None) -> None:
    """Refuse early a file that cannot be written. needs: a library that writing requires"""
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: its folder does not exist, create it first")
    if path is not None and path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder: give a file")
    if path is not None and needs is not None and importlib.util.find_spec(needs) is None:
        raise ConfigError(f"{flag} needs {needs}: pip install 'stoop[train]', or leave it out")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"{text!r}: use numbers of at least 1 separated by commas, such as 1,8")
    return sizes
