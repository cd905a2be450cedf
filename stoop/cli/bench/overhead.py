"""`stoop bench overhead`: what serving costs beside offline generation."""

import dataclasses
import random
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoop.cli.bench.common import OutputLen, check_file, say
from stoop.cli.bench.questions import Out, load_tokenizer
from stoop.cli.options import Command, Model, check_engine, engine_flags, flag_name
from stoop.cli.progress import StageProgress
from stoop.config.schema import DEFAULT_MODEL, EngineOptions

if TYPE_CHECKING:
    from stoop.bench.overhead import Work

_FIXED = ("skip_tokenizer_init", "max_num_seqs", "enable_prefix_caching")
Questions = Annotated[
    Path | None,
    typer.Option(help=".jsonl file as for bench acceptance; default: random token ids"),
]
Alone = Annotated[
    int, typer.Option("--alone", min=2, help="requests one at a time, for the first token")
]
Processes = Annotated[int, typer.Option(min=1, help="processes that send the load")]


def _overhead_flags(command: Command) -> Command:
    return engine_flags(command, without=_FIXED)


@_overhead_flags
def overhead(
    model: Model = DEFAULT_MODEL,
    clients: Annotated[int, typer.Option(min=1, help="streams at a time")] = 16,
    num_requests: Annotated[
        int | None, typer.Option(min=1, help="requests; default: 4 per client")
    ] = None,
    questions: Questions = None,
    input_len: Annotated[int, typer.Option(min=1, help="tokens of a random prompt")] = 32,
    output_len: OutputLen = 128,
    alone: Alone = 20,
    processes: Processes = 1,
    out: Out = None,
    engine: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Measure what serving costs: the same requests offline, through AsyncLLM and through a server.

    All sides get the same prompts as token ids and generate the same number of tokens, greedily,
    with as many requests at a time as there are clients. async: streams from the engine core in its
    own process, without HTTP. server: stoop serve and a client that streams, on this machine. The
    time to the first token is that of one request at a time (median).
    """
    from stoop.bench.overhead import Engine, measure_overhead
    from stoop.bench.overhead_report import print_overhead

    check_engine(model, engine)
    check_file("--out", out)
    work = _make_work(
        model,
        engine,
        (clients, num_requests or 4 * clients, alone),
        questions,
        (input_len, output_len),
    )
    # Questions may repeat, and every side must compute every prompt.
    options = {**engine, "max_num_seqs": clients, "enable_prefix_caching": False}
    args = _as_args(options)
    with StageProgress() as report:
        found = measure_overhead(Engine(model, options, args, processes), work, report)
    print_overhead(found, {"model": model, **_setting(work)}, say, out)


def _make_work(
    model: str,
    engine: dict[str, Any],
    counts: tuple[int, int, int],
    questions: Path | None,
    lengths: tuple[int, int],
) -> "Work":
    from stoop.bench.overhead import Work

    clients, num_requests, num_alone = counts
    input_len, output_len = lengths
    draw = random.Random(0)
    total = num_requests + num_alone
    tokenizer = load_tokenizer(model, engine)
    if questions is None:
        size = tokenizer.vocab_size
        prompts = [[draw.randrange(size) for _ in range(input_len)] for _ in range(total)]
    else:
        from stoop.text.prompts import read_prompts

        asked = read_prompts(questions, "--questions")
        texts = [tokenizer.render_chat(asked[i % len(asked)]) for i in range(total)]
        prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return Work(prompts[num_alone:], prompts[:num_alone], output_len, clients)


def _setting(work: "Work") -> dict[str, Any]:
    return {
        "clients": work.clients,
        "num_requests": len(work.prompts),
        "output_len": work.output_len,
        "mean_input_len": round(sum(map(len, work.prompts)) / len(work.prompts), 1),
    }


def _as_args(options: dict[str, Any]) -> list[str]:
    """The flags of `stoop serve` for engine options that differ from their defaults."""
    defaults = {each.name: each.default for each in dataclasses.fields(EngineOptions)}
    found: list[str] = []
    for name, value in options.items():
        if value == defaults.get(name):
            continue
        if isinstance(value, bool):
            found.append(flag_name(name) if value else "--no-" + flag_name(name)[2:])
        else:
            found += [flag_name(name), str(value)]
    return found
