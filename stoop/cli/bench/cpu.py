"""`stoop bench cpu`: stoop beside llama.cpp and transformers, without a GPU."""

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoop.cli.bench.common import check_file, parse_sizes, say
from stoop.cli.bench.questions import Out
from stoop.cli.options import choose_names
from stoop.cli.progress import StageProgress
from stoop.config.errors import ConfigError
from stoop.config.schema import DEFAULT_MODEL

if TYPE_CHECKING:
    from stoop.bench.cpu import CpuReport, Plan, Work
    from stoop.bench.cpu_process import EngineSpec
    from stoop.core.report import Report

SLOW_QUESTIONS = 2  # for transformers in a round
LLAMA_PYTHON = "--llama-python"

GGUFModel = Annotated[str, typer.Argument(help="smollm2-135m or a GGUF file")]
Questions = Annotated[
    Path | None,
    typer.Option(help=".jsonl file as for bench acceptance; default: a few short questions"),
]
Limit = Annotated[int, typer.Option(min=1, help="use at most this many questions, evenly spaced")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="threads of every engine; default: stoop's choice")
]
Peers = Annotated[
    str,
    typer.Option(
        help="engines to compare with, separated by commas: llama.cpp, transformers; auto: those "
        "that are installed; none"
    ),
]
LlamaPython = Annotated[
    str | None,
    typer.Option(
        LLAMA_PYTHON,
        help="Python interpreter with llama-cpp-python; default: the one running stoop",
    ),
]
GGUF = Annotated[
    Path | None,
    typer.Option(help="the GGUF file of smollm2-135m, for llama.cpp; default: download it"),
]
Concurrency = Annotated[
    str | None,
    typer.Option(help="also measure stoop with so many requests at once, such as 1,4,16"),
]
Retries = Annotated[
    int,
    typer.Option(min=0, help="repeat a round that other processes disturb at most this many times"),
]


def cpu(
    model: GGUFModel = DEFAULT_MODEL,
    questions: Questions = None,
    limit: Limit = 8,
    rounds: Annotated[int, typer.Option(min=1, help="rounds after one that warms up")] = 3,
    max_tokens: Annotated[int, typer.Option(min=2, help="tokens of every answer")] = 128,
    prompt_len: Annotated[
        int, typer.Option(min=1, help="prompt tokens for the time to first token")
    ] = 512,
    threads: Threads = None,
    dense: Annotated[
        bool, typer.Option("--dense", help="also measure stoop with dequantised weights")
    ] = False,
    coarse: Annotated[
        bool,
        typer.Option("--coarse", help="also measure stoop with activations of 8 bits"),
    ] = False,
    peers: Peers = "auto",
    llama_python: LlamaPython = None,
    gguf: GGUF = None,
    concurrency: Concurrency = None,
    retries: Retries = 3,
    out: Out = None,
) -> None:
    """Compare engines on one GGUF file without a GPU: stoop, llama.cpp and transformers.

    stoop keeps the weights quantised, and runs plain and with the draft head that ships with the
    model. llama.cpp runs through llama-cpp-python, on the same file. transformers has the weights
    dequantised to float32, and answers 2 questions a round.

    Each engine has a process of its own that stays up; rounds alternate, and one computes at a
    time. All get the same token ids (the chat template is applied once), one request at a time,
    and generate --max-tokens tokens greedily, past the end of the text.

    decode: tokens/s after the first token of an answer. first token: of a prompt of --prompt-len
    tokens. import and load: from the start of the process, the second time. resident: memory after
    an answer. A round in which other processes used more than 0.15 cores is repeated, and marked if
    that does not help; ratios to llama.cpp leave it out. The exit code is 1 if drafts change an
    answer.
    """
    sizes = parse_sizes(concurrency, "--concurrency") if concurrency else []
    check_file("--out", out)
    _check_model(model, gguf)
    names, asked = _choose_peers(peers, llama_python)
    present, missing = _find_peers(names, asked, llama_python)
    from stoop.bench.cpu import Plan, measure_cpu, measure_together

    with StageProgress() as report:
        work = _make_work(model, questions, limit, (prompt_len, max_tokens), report)
        plan = Plan(work, rounds, threads, retries)
        theirs = [_peer(name, model, gguf, llama_python, asked, report) for name in present]
        ours = _our_engines(model, work, dense=dense, coarse=coarse)
        result = measure_cpu([*ours, *theirs], plan, report)
        result.missing |= missing
        if sizes:
            packed = _our_engines(model, work, coarse=coarse, max_num_seqs=max(sizes))
            packed = [each for each in packed if result.find(each.name)]
            result.together = measure_together(packed, sizes, plan, report)
    _print(result, plan, {"model": model, "questions": str(questions) if questions else None}, out)


def _print(result: "CpuReport", plan: "Plan", setting: Mapping[str, Any], out: Path | None) -> None:
    from stoop.bench.cpu import DRAFTED
    from stoop.bench.cpu_report import print_cpu

    sizes = {
        "num_questions": len(plan.work.questions),
        "max_tokens": plan.work.num_tokens,
        "prompt_len": len(plan.work.prompt),
        "rounds": plan.rounds,
    }
    print_cpu(result, {**setting, **sizes}, say, out)
    share = result.equal_share(DRAFTED)
    if share is not None and share < 1:
        say(f"error: drafts changed {1 - share:.0%} of the answers, which they must never do")
        raise typer.Exit(1)


def _check_model(model: str, gguf: Path | None) -> None:
    from stoop.checkpoint.fetch import EMBEDDED, can_pack

    embedded = model in EMBEDDED
    if not embedded and not model.lower().endswith(".gguf"):
        raise ConfigError(
            f"{model!r} is no GGUF file, which all engines must be able to read: give a .gguf file "
            f"or {', '.join(EMBEDDED)}"
        )
    for file in [None if embedded else Path(model), gguf]:
        if file is not None and not file.expanduser().is_file():
            raise ConfigError(f"{file} does not exist: check the path of the GGUF file")
    if not embedded and gguf is not None:
        raise ConfigError(f"--gguf {gguf} is for {', '.join(EMBEDDED)}: leave it out")
    if not can_pack(model):
        raise ConfigError(
            f"the weights of {model} cannot stay quantised in stoop: give a file whose matrices "
            "are of the types Q4_0, Q4_1, Q8_0, Q4_K or Q6_K"
        )


def _choose_peers(text: str, llama_python: str | None) -> tuple[list[str], Collection[str]]:
    """The peers to look for, and those that must be there."""
    from stoop.bench.cpu_process import LLAMA_CPP, TRANSFORMERS

    every = [LLAMA_CPP, TRANSFORMERS]
    names = list(dict.fromkeys(choose_names("--peers", text, ("auto", "none", *every))))
    if len(names) > 1 and not set(names) <= set(every):
        raise ConfigError(f"--peers {text}: use auto or none alone")
    must = [] if names in (["auto"], ["none"]) else list(names)
    chosen = {"auto": every, "none": []}.get(names[0], names)
    if llama_python is not None:
        if LLAMA_CPP not in chosen:
            raise ConfigError(f"{LLAMA_PYTHON} needs {LLAMA_CPP} in --peers: add it")
        must.append(LLAMA_CPP)
    return chosen, must


def _find_peers(
    names: Sequence[str], asked: Collection[str], llama_python: str | None
) -> tuple[list[str], dict[str, str]]:
    """Those that are installed, and a note for each that is not."""
    from stoop.bench.cpu_process import LLAMA_CPP, MODULES, PACKAGES, has_module

    present, missing = [], {}
    for name in names:
        is_llama = name == LLAMA_CPP
        python = (llama_python if is_llama else None) or sys.executable
        if has_module(python, MODULES[name], LLAMA_PYTHON):
            present.append(name)
            continue
        where = f"{LLAMA_PYTHON} {python}" if is_llama and llama_python else "this Python"
        other = f", or name one that has it with {LLAMA_PYTHON}" if is_llama else ""
        advice = f"{where} has no {PACKAGES[name]}: pip install {PACKAGES[name]} there{other}"
        if name in asked:
            raise ConfigError(advice)
        missing[name] = f"not measured: {advice}"
    return present, missing


def _make_work(
    model: str, questions: Path | None, limit: int, lengths: tuple[int, int], report: "Report"
) -> "Work":
    from stoop.bench.cpu import QUESTIONS, Work
    from stoop.bench.questions import read_questions
    from stoop.checkpoint.fetch import resolve_model
    from stoop.text.tokenizer import Tokenizer

    if questions is None:
        asked = [[{"role": "user", "content": text}] for text in QUESTIONS[:limit]]
    else:
        (asked,) = read_questions([questions], limit).values()
    tokenizer = Tokenizer.from_folder(resolve_model(model, report=report, packed=True))
    if tokenizer.has_chat_template:
        prompts = [tokenizer.encode_chat(each) for each in asked]
    else:
        prompts = [tokenizer.encode(each[-1]["content"]) for each in asked]
    return Work.of(prompts, *lengths)


def _our_engines(
    model: str,
    work: "Work",
    *,
    dense: bool = False,
    coarse: bool = False,
    max_num_seqs: int | None = None,
) -> "list[EngineSpec]":
    from stoop.bench.cpu import COARSE, DENSE, DRAFTED, PLAIN
    from stoop.bench.cpu_process import STOOP, EngineSpec

    def spec(name: str, **more: Any) -> "EngineSpec":
        # Rounds repeat their questions, and every one is computed.
        options = {"device": "cpu", "enable_prefix_caching": False, "max_model_len": work.context}
        if max_num_seqs is not None:
            options["max_num_seqs"] = max_num_seqs
        return EngineSpec(name, STOOP, model, {**options, **more})

    found = [
        spec(PLAIN, weights="packed", speculative_config=None),
        spec(DRAFTED, weights="packed"),
    ]
    if coarse:
        found.append(spec(COARSE, weights="packed", activation_bits=8, speculative_config=None))
    if dense:
        found.append(spec(DENSE, weights="dense", speculative_config=None))
    return found


def _peer(
    name: str,
    model: str,
    gguf: Path | None,
    llama_python: str | None,
    asked: Collection[str],
    report: "Report",
) -> "EngineSpec":
    from stoop.bench.cpu_process import LLAMA_CPP, EngineSpec
    from stoop.checkpoint.embedded import check_gguf
    from stoop.checkpoint.fetch import EMBEDDED, embedded_gguf, resolve_model

    if name != LLAMA_CPP:
        folder = resolve_model(model, report=report)  # dequantised
        return EngineSpec(
            name, name, str(folder), asked=name in asked, max_questions=SLOW_QUESTIONS
        )
    if gguf is not None:
        check_gguf(model, gguf.expanduser(), report)
        file = gguf.expanduser()
    else:
        file = embedded_gguf(model, report) if model in EMBEDDED else Path(model).expanduser()
    python = llama_python or sys.executable
    return EngineSpec(name, name, str(file), python=python, asked=name in asked)
