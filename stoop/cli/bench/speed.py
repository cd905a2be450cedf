"""`stoop bench latency`, `graphs` and `spec`: the speed of whole answers."""

import importlib.util
from typing import Annotated, Any

import typer

from stoop.cli.bench.common import OutputLen, parse_sizes
from stoop.cli.options import Model, check_engine, engine_flags, engine_help
from stoop.cli.start import start_llm
from stoop.config.errors import ConfigError
from stoop.config.schema import DEFAULT_MODEL
from stoop.config.speculation import asks_for_auto


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
    sizes, lengths = parse_sizes(batch_size, "--batch-size"), parse_sizes(input_len, "--input-len")
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
    lengths = parse_sizes(contexts)
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
    are always wrong; where the number of drafts can vary, also with one that the engine chooses
    for each step, up to the largest K.
    """
    counts, input_len = parse_sizes(k), 8
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
