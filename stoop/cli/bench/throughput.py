"""`stoop bench throughput`: tokens per second, of one load or of several with several K."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoop.bench.shape_configs import EAGLE3, SHAPES, ShapeHead
from stoop.cli.bench.common import OutputLen, make_head, parse_sizes, say
from stoop.cli.bench.questions import Raw, find_drafter, load_tokenizer
from stoop.cli.bench.steps import DraftVocabSize
from stoop.cli.options import Model, check_engine, engine_flags, flag_name, given_options
from stoop.cli.start import settle_engine, start_llm
from stoop.config.errors import ConfigError, MemoryShortage
from stoop.config.schema import DEFAULT_MODEL
from stoop.config.speculation import AUTO, MAX_DRAFTS, asks_for_auto

if TYPE_CHECKING:
    from stoop.bench.throughput import Drafts, PeerSpeeds, StartWith, Traffic
    from stoop.llm import LLM

    # What to start for each K: a model and all options.
    Engines = dict[Drafts, tuple[str, dict[str, Any]]]

NUM_PROMPTS, INPUT_LEN, LOADS, REPEAT = 16, 64, "1,8", 3
SHAPE_DRAFTS = 3  # where a head is chosen and no K

# The shape determines these options; it has no tokenizer.
_SET_BY_SHAPE = ("tokenizer", "revision", "skip_tokenizer_init", "load_format")
_DTYPES = ("dtype", "weight_dtype", "kv_cache_dtype")

NumPrompts = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"number of requests; default: {NUM_PROMPTS}, or for a table 4 times each load, at "
        "most 256 but no fewer than the load",
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
        "engine choose; with --shape, no draft is ever accepted; default: 0 and that of -sc, or "
        f"{SHAPE_DRAFTS} with --head",
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
    typer.Option(
        help="vllm: also measure vLLM, on the same shape and in its dtype, as many requests at once"
    ),
]
Python = Annotated[
    str | None,
    typer.Option(help="Python interpreter with vLLM installed; default: the one running stoop"),
]


@engine_flags
def throughput(
    context: typer.Context,
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
    own engine, without prefix caching; engines take turns, or run one after another on a CPU or if
    they do not fit into memory together.
    """
    given = (shape, k, load, questions, repeat, head, draft_vocab_size, peer, python, raw or None)
    check_engine(model, engine)
    lengths, repeat = (input_len or INPUT_LEN, output_len), repeat or REPEAT
    if all(option is None for option in given):
        _measure_once(model, num_prompts or NUM_PROMPTS, lengths, engine)
        return
    wants_head = head is not None or draft_vocab_size is not None
    _check_together(model, shape, questions, raw, input_len, wants_head, engine)
    _check_named(given_options(context), shape, peer, engine)
    _check_peer(peer, python, shape)
    drafter = None if shape else find_drafter(engine, model)
    drafts = _choose_drafts(k, shape, drafter, wants_head)
    shape_head = make_head(head, draft_vocab_size, drafts)
    _check_peer_drafts(peer, shape_head, drafts)
    asked = _read_questions(model, questions, raw, engine) if questions else []
    limits = {"--num-prompts": num_prompts, "--max-num-seqs": engine["max_num_seqs"]}
    traffic = _make_traffic(load or LOADS, lengths, limits, asked, questions)
    opened: AbstractContextManager[Engines]
    if shape:
        opened = _open_shape(shape, traffic, drafts, shape_head, engine)
    else:
        opened = nullcontext(_model_engines(model, traffic, drafts, drafter, engine))
    from stoop.bench.throughput import measure_loads
    from stoop.bench.throughput_report import print_loads

    with opened as engines:
        for each in engines.values():  # before the first is measured
            traffic.check_room(settle_engine(*each))
        peers = _measure_peer(peer, shape, traffic, drafts, repeat, python)
        report = measure_loads(_starter(shape, engines), traffic, drafts, repeat, say)
    if drafter:
        drafter.pop("num_speculative_tokens", None)  # rows have their K
    names = {"shape": shape, "model": None if shape else model, "questions": traffic.file or None}
    setting = {**names, "speculative_config": drafter, "repeat": repeat}
    print_loads(replace(report, peer=peers), shape or model, setting)


def _measure_once(
    model: str, num_prompts: int, lengths: tuple[int, int], engine: dict[str, Any]
) -> None:
    from stoop.bench.offline import Load, measure_throughput
    from stoop.bench.report import print_throughput

    llm = start_llm(model, engine)
    print_throughput(measure_throughput(llm, Load(num_prompts, *lengths)))


def _make_traffic(
    load: str,
    lengths: tuple[int, int],
    limits: dict[str, int | None],
    asked: list[list[int]],
    questions: Path | None,
) -> "Traffic":
    """lengths: of prompts and answers; limits: numbers of requests, by flag; asked: the questions'
    token ids"""
    from stoop.bench.throughput import Traffic

    loads = tuple(dict.fromkeys(parse_sizes(load, "--load")))
    for flag, limit in limits.items():
        if limit is not None and limit < max(loads):
            raise ConfigError(
                f"{flag} {limit} is less than --load {max(loads)}: use at least as many"
            )
    return Traffic(loads, *lengths, limits["--num-prompts"], asked, str(questions or ""))


# ---- checks ----


def _check_together(
    model: str,
    shape: str | None,
    questions: Path | None,
    raw: bool,
    input_len: int | None,
    wants_head: bool,
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
    if wants_head and not shape:
        raise ConfigError(
            "--head and --draft-vocab-size are for --shape: set a model's drafter with -sc, which "
            "also takes draft_vocab_size"
        )


def _check_named(
    named: set[str], shape: str | None, peer: str | None, engine: dict[str, Any]
) -> None:
    """Refuse engine options that a table does not leave to the user. named: those given"""
    if "enable_prefix_caching" in named and engine["enable_prefix_caching"]:
        raise ConfigError(
            "a table is measured without prefix caching, since runs repeat questions: leave out "
            "--enable-prefix-caching"
        )
    for chosen, names, why in (
        (shape, _SET_BY_SHAPE, "--shape sets the weights and has no tokenizer"),
        (peer, _DTYPES, f"--peer {peer} computes in the shape's own dtype, and so must stoop"),
    ):
        found = [flag_name(name) for name in names if name in named]
        if chosen and found:
            raise ConfigError(f"{why}: leave out {' and '.join(found)}")


def _check_peer(peer: str | None, python: str | None, shape: str | None) -> None:
    if peer not in (None, "vllm"):
        raise ConfigError(f"--peer {peer}: use vllm, the only choice")
    if python and not peer:
        raise ConfigError("--python is for --peer vllm: add it")
    if peer and shape not in SHAPES:
        raise ConfigError(
            f"--peer {peer} measures random weights: add --shape with one of {', '.join(SHAPES)}"
        )


def _check_peer_drafts(peer: str | None, head: ShapeHead, drafts: "Sequence[Drafts]") -> None:
    if peer and head != EAGLE3:
        raise ConfigError(f"--peer {peer} drafts with the head of eagle3: leave out --head")
    if peer and not any(isinstance(each, int) for each in drafts):
        raise ConfigError(f"--peer {peer} needs a fixed K: add one, such as --k 0,auto")


# ---- drafts and questions ----


def _choose_drafts(
    k: str | None, shape: str | None, drafter: dict[str, Any] | None, wants_head: bool
) -> "list[Drafts]":
    """wants_head: one was chosen for the shape"""
    if k is None:
        if wants_head:
            return [0, SHAPE_DRAFTS]
        if drafter is None:
            return [0]
        if "num_speculative_tokens" not in drafter:
            raise ConfigError("-sc lacks num_speculative_tokens: add it, or give --k 0,3")
        return [0, drafter["num_speculative_tokens"]]
    found = _parse_drafts(k)
    if any(found) and shape is None and drafter is None:
        raise ConfigError(f"--k {k} needs a drafter, and this model has none: give one with -sc")
    adaptive = (drafter or {}).get("adaptive")
    if adaptive is not None and any(isinstance(each, str) != adaptive for each in found if each):
        raise ConfigError(
            f"-sc has adaptive={str(adaptive).lower()}, but --k {k} decides that (a number is made "
            "in every step, auto varies): leave out adaptive"
        )
    return found


def _parse_drafts(text: str) -> "list[Drafts]":
    found: list[Drafts] = []
    for part in text.split(","):
        word = part.strip()
        if word != AUTO and not (word.isdecimal() and int(word) <= MAX_DRAFTS):
            raise ConfigError(
                f"--k {text}: use numbers from 0 to {MAX_DRAFTS} or auto, separated by commas"
            )
        found.append(word if word == AUTO else int(word))
    return list(dict.fromkeys(found))


def _read_questions(model: str, path: Path, raw: bool, engine: dict[str, Any]) -> list[list[int]]:
    from stoop.bench.questions import encode_questions, read_questions

    found = encode_questions(read_questions([path], None), load_tokenizer(model, engine), raw)
    (prompts,) = found.values()
    return prompts


# ---- engines ----


def _measure_peer(
    peer: str | None,
    shape: str | None,
    traffic: "Traffic",
    drafts: "Sequence[Drafts]",
    repeat: int,
    python: str | None,
) -> "PeerSpeeds | None":
    """Before our own engines take memory. Without --python, a missing peer is left out."""
    if peer is None or shape is None:
        return None
    from stoop.bench.peer import measure_vllm_loads, vllm_problem

    problem = vllm_problem(python or sys.executable)
    if problem is not None and python:
        raise ConfigError(problem)
    if problem is not None:
        say(f"note: vllm is not measured: {problem}")
        return None
    fixed = [each for each in drafts if isinstance(each, int)]
    return measure_vllm_loads(shape, traffic, fixed, repeat, python or sys.executable)


@contextmanager
def _open_shape(
    shape: str,
    traffic: "Traffic",
    drafts: "Sequence[Drafts]",
    head: ShapeHead,
    engine: dict[str, Any],
) -> "Iterator[Engines]":
    """Engines that share a folder and a head, whose files exist until the block ends."""
    from stoop.bench.shapes import never_accepted, open_shape
    from stoop.bench.throughput import shaped_sizes

    sizes = shaped_sizes(traffic, engine)
    some = next((each for each in drafts if each), 0)
    with open_shape(shape, some, sizes["max_model_len"], head) as (folder, options):
        drafter = options.get("speculative_config", {})
        engines: Engines = {}
        for each in drafts:
            chosen = {**drafter, **never_accepted(each)} if each else None
            fixed = {"speculative_config": chosen, "enable_prefix_caching": False}
            engines[each] = (folder, {**engine, **options, **fixed, **sizes})
        yield engines


def _model_engines(
    model: str,
    traffic: "Traffic",
    drafts: "Sequence[Drafts]",
    drafter: dict[str, Any] | None,
    engine: dict[str, Any],
) -> "Engines":
    from stoop.bench.throughput import sized_cache

    # Runs repeat questions, and every one is computed.
    plain = {**engine, "enable_prefix_caching": False, "speculative_config": None}
    plain["max_num_seqs"] = engine["max_num_seqs"] or max(traffic.loads)
    settled = settle_engine(model, plain)
    if settled.device.device != "cpu":
        plain |= sized_cache(traffic, engine, settled.schedule.max_model_len)
    engines: Engines = {}
    for each in drafts:
        given = drafter or {}
        adaptive = isinstance(each, str) or given.get("adaptive", False)
        number = {"num_speculative_tokens": each, "adaptive": adaptive}
        chosen = {**given, **number} if each else None
        engines[each] = (model, {**plain, "speculative_config": chosen})
    return engines


def _starter(shape: str | None, engines: "Engines") -> "StartWith":
    def start(drafts: "Drafts") -> "LLM":
        try:
            return start_llm(*engines[drafts])
        except MemoryShortage as error:
            if shape is not None:
                problem = f"--shape {shape}: {error.problem}"
                advice = "choose a smaller shape, or lower --load, --input-len or --output-len"
                raise MemoryShortage(problem, advice) from None
            if "KV cache" not in error.problem:
                raise
            advice = "lower --load or --output-len, or set --kv-cache-memory"
            raise MemoryShortage(error.problem, advice) from None

    return start
