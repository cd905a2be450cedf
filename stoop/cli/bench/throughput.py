"""`stoop bench throughput`: tokens per second, of one load or of several with several K."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoop.cli.bench.common import OutputLen, parse_sizes, say
from stoop.cli.bench.questions import Raw, find_drafter, load_tokenizer
from stoop.cli.bench.steps import DraftVocabSize
from stoop.cli.options import Model, check_engine, engine_flags
from stoop.cli.start import start_llm
from stoop.config.errors import ConfigError, MemoryShortage
from stoop.config.schema import DEFAULT_MODEL
from stoop.config.speculation import MAX_DRAFTS, asks_for_auto

if TYPE_CHECKING:
    from stoop.bench.shapes import ShapeHead
    from stoop.bench.throughput import Drafts, LoadReport, PeerSpeeds, StartWith, Traffic
    from stoop.llm import LLM

NUM_PROMPTS, INPUT_LEN, LOADS, REPEAT = 16, 64, "1,8", 3

NumPrompts = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"number of requests; default: {NUM_PROMPTS}, or with several loads 4 times each load "
        "but at most 256",
    ),
]
InputLen = Annotated[
    int | None, typer.Option(min=1, help=f"prompt tokens per request; default: {INPUT_LEN}")
]
Shape = Annotated[
    str | None,
    typer.Option(help="measure this shape instead of a model; see `stoop bench step --help`"),
]
DraftCounts = Annotated[
    str | None,
    typer.Option(
        "--k",
        help="draft tokens per step, one or more such as 0,3; 0 is plain decoding, auto lets the "
        "engine choose; with --shape, no draft is ever accepted; default: 0 and that of -sc",
    ),
]
Loads = Annotated[
    str | None,
    typer.Option("--load", help=f"requests at once, one or more such as 1,8,32; default: {LOADS}"),
]
Questions = Annotated[
    Path | None,
    typer.Option(
        help="measure on these questions, until each answer ends, instead of random prompts: a "
        ".jsonl file as for bench acceptance"
    ),
]
Repeat = Annotated[
    int | None,
    typer.Option(min=1, help=f"runs of each load and K; the median counts; default: {REPEAT}"),
]
Head = Annotated[
    str | None,
    typer.Option(help="head of --shape; see `stoop bench step --help`; default: eagle3"),
]
Peer = Annotated[
    str | None,
    typer.Option(help="vllm: also measure vLLM, on the same shape, as many requests at once"),
]
Python = Annotated[
    str | None,
    typer.Option(help="Python interpreter with vLLM installed; default: the one running stoop"),
]


@engine_flags
def throughput(
    model: Model = DEFAULT_MODEL,
    num_prompts: NumPrompts = None,
    input_len: InputLen = None,
    output_len: OutputLen = 64,
    shape: Shape = None,
    k: DraftCounts = None,
    load: Loads = None,
    questions: Questions = None,
    raw: Raw = False,
    repeat: Repeat = None,
    head: Head = None,
    draft_vocab_size: DraftVocabSize = None,
    peer: Peer = None,
    python: Python = None,
    engine: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Measure throughput: all requests arrive at once and up to --max-num-seqs run together.

    With --load, --k, --shape or --questions: a table of tokens/s by requests at once and drafts per
    step, with the ratio to plain decoding and to the best fixed number of drafts. Each K gets its
    own engine; engines run one after another.
    """
    given = (shape, k, load, questions, repeat, head, draft_vocab_size, peer, python, raw or None)
    check_engine(model, engine)
    if all(option is None for option in given):
        from stoop.bench.offline import Load, measure_throughput
        from stoop.bench.report import print_throughput

        llm = start_llm(model, engine)
        one = Load(num_prompts or NUM_PROMPTS, input_len or INPUT_LEN, output_len)
        print_throughput(measure_throughput(llm, one))
        return
    _check_together(model, shape, questions, raw, input_len, engine)
    random_head = _parse_head(head, draft_vocab_size, shape)
    _check_peer(peer, python, shape, random_head)
    asked = _read_questions(model, questions, raw, engine) if questions else []
    lengths = (input_len or INPUT_LEN, output_len)
    traffic = _make_traffic(load or LOADS, lengths, num_prompts, asked, questions)
    repeat = repeat or REPEAT
    drafter = None if shape else find_drafter(engine, model)
    drafts = _parse_drafts(k, shape, drafter)
    peers = _measure_peer(peer, shape, traffic, drafts, repeat, python)
    if shape:
        start = _shape_starter(shape, traffic, random_head, engine)
    else:
        start = _model_starter(model, max(traffic.loads), drafter, engine)
    setting = {"shape": shape, "model": None if shape else model, "repeat": repeat}
    _measure(start, traffic, drafts, peers, {**setting, "questions": traffic.file or None})


def _make_traffic(
    load: str,
    lengths: tuple[int, int],
    num_prompts: int | None,
    asked: list[list[int]],
    questions: Path | None,
) -> "Traffic":
    """lengths: of prompts and answers; asked: the questions' token ids"""
    from stoop.bench.throughput import Traffic

    loads = tuple(dict.fromkeys(parse_sizes(load)))
    if num_prompts is not None and num_prompts < max(loads):
        raise ConfigError(
            f"--num-prompts {num_prompts} is less than --load {max(loads)}: use at least as many"
        )
    return Traffic(loads, *lengths, num_prompts, asked, str(questions or ""))


def _parse_head(kind: str | None, draft_vocab_size: int | None, shape: str | None) -> "ShapeHead":
    from stoop.bench.shapes import EAGLE3, ShapeHead

    if shape is None and (kind is not None or draft_vocab_size is not None):
        raise ConfigError("--head and --draft-vocab-size are for --shape: set a drafter with -sc")
    return ShapeHead(kind or EAGLE3.kind, draft_vocab_size)


def _measure(
    start: "StartWith",
    traffic: "Traffic",
    drafts: "list[Drafts]",
    peers: "PeerSpeeds | None",
    setting: dict[str, Any],
) -> None:
    from stoop.bench.throughput import measure_loads
    from stoop.bench.throughput_report import print_loads

    report: LoadReport = measure_loads(start, traffic, drafts, setting["repeat"], say)
    print_loads(replace(report, peer=peers), setting["shape"] or setting["model"], setting)


def _check_together(
    model: str,
    shape: str | None,
    questions: Path | None,
    raw: bool,
    input_len: int | None,
    engine: dict[str, Any],
) -> None:
    """Refuse options that exclude each other."""
    if shape and (model != DEFAULT_MODEL or not asks_for_auto(engine["speculative_config"])):
        raise ConfigError("--shape sets the model and --k its head: leave out the model and -sc")
    if shape and questions:
        raise ConfigError("--questions needs a model with a tokenizer: leave out --shape")
    if questions and input_len is not None:
        raise ConfigError("--questions sets the prompts: leave out --input-len")
    if raw and not questions:
        raise ConfigError("--raw is for --questions: add a file")


def _check_peer(peer: str | None, python: str | None, shape: str | None, head: "ShapeHead") -> None:
    if peer not in (None, "vllm"):
        raise ConfigError(f"--peer {peer}: use vllm, the only choice")
    if python and not peer:
        raise ConfigError("--python is for --peer vllm: add it")
    if peer:
        from stoop.bench.shapes import EAGLE3, SHAPES

        if head != EAGLE3:
            raise ConfigError(f"--peer {peer} drafts with the head of eagle3: leave out --head")
        if shape not in SHAPES:
            raise ConfigError(
                f"--peer {peer} measures random weights: add --shape with one of "
                f"{', '.join(SHAPES)}"
            )


def _parse_drafts(
    text: str | None, shape: str | None, drafter: dict[str, Any] | None
) -> "list[Drafts]":
    from stoop.bench.throughput import AUTO

    proposed = (drafter or {}).get("num_speculative_tokens")
    if text is None:
        if drafter is not None and proposed is None:
            raise ConfigError("-sc lacks num_speculative_tokens: add it, or give --k 0,3")
        return [0] if proposed is None else [0, proposed]
    found: list[Drafts] = []
    for part in text.split(","):
        word = part.strip()
        if word != AUTO and not (word.isdecimal() and int(word) <= MAX_DRAFTS):
            raise ConfigError(
                f"--k {text}: use numbers from 0 to {MAX_DRAFTS} or auto, separated by commas"
            )
        found.append(word if word == AUTO else int(word))
    if any(found) and shape is None and drafter is None:
        raise ConfigError(f"--k {text} needs a drafter, and this model has none: give one with -sc")
    return list(dict.fromkeys(found))


def _read_questions(model: str, path: Path, raw: bool, engine: dict[str, Any]) -> list[list[int]]:
    from stoop.bench.questions import encode_questions, read_questions

    found = encode_questions(read_questions([path], None), load_tokenizer(model, engine), raw)
    (prompts,) = found.values()
    return prompts


def _measure_peer(
    peer: str | None,
    shape: str | None,
    traffic: "Traffic",
    drafts: "list[Drafts]",
    repeat: int,
    python: str | None,
) -> "PeerSpeeds | None":
    """Before our own engines take memory. A peer that is not installed is left out."""
    if peer is None or shape is None:
        return None
    from stoop.bench.peer import measure_vllm_loads, vllm_problem

    python = python or sys.executable
    problem = vllm_problem(python)
    if problem is not None:
        say(f"note: vllm is not measured: {problem}")
        return None
    fixed = [each for each in drafts if isinstance(each, int)]
    return measure_vllm_loads(shape, traffic, fixed, repeat, python)


def _shape_starter(
    shape: str, traffic: "Traffic", head: "ShapeHead", engine: dict[str, Any]
) -> "StartWith":
    def start(drafts: "Drafts") -> "LLM":
        from stoop.bench.shapes import open_shape
        from stoop.bench.throughput import shaped_sizes

        sizes = shaped_sizes(traffic, drafts, engine)
        plain = {"speculative_config": None, "enable_prefix_caching": False}
        with open_shape(shape, drafts, sizes["max_model_len"], head) as (folder, options):
            try:
                return start_llm(folder, {**engine, **plain, **options, **sizes})
            except MemoryShortage as error:
                raise ConfigError(
                    f"--shape {shape}: {error.problem}; choose a smaller shape, or lower --load, "
                    "--input-len or --output-len"
                ) from None

    return start


def _model_starter(
    model: str, load: int, drafter: dict[str, Any] | None, engine: dict[str, Any]
) -> "StartWith":
    def start(drafts: "Drafts") -> "LLM":
        number = {"num_speculative_tokens": drafts, "adaptive": isinstance(drafts, str)}
        chosen = {**(drafter or {}), **number} if drafts else None
        # Runs repeat questions, and every one is computed.
        settings = {"speculative_config": chosen, "enable_prefix_caching": False}
        size = {"max_num_seqs": engine["max_num_seqs"] or load}
        return start_llm(model, {**engine, **settings, **size})

    return start
