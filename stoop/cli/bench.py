"""`stoop bench`: speed, as a table and as a JSON line."""

from typing import Annotated, Any

import typer

from stoop.cli.options import engine_flags
from stoop.cli.start import start_llm
from stoop.config.errors import ConfigError

bench = typer.Typer(
    help="Measure speed. The last line of the output is JSON.", no_args_is_help=True
)

Model = Annotated[str, typer.Argument(help="smollm2-135m, a folder, a GGUF file or a hub id")]
InputLen = Annotated[int, typer.Option("--input-len", min=1, help="prompt tokens of a request")]
OutputLen = Annotated[int, typer.Option("--output-len", min=2, help="answer tokens of a request")]


@bench.command()
@engine_flags
def throughput(
    model: Model = "smollm2-135m",
    num_prompts: Annotated[int, typer.Option(min=1, help="requests in all")] = 16,
    input_len: InputLen = 64,
    output_len: OutputLen = 64,
    engine: dict[str, Any] = {},  # noqa: B006
) -> None:
    """All requests at once, as many running together as max_num_seqs allows."""
    from stoop.bench.offline import Load, measure_throughput
    from stoop.bench.report import print_throughput

    llm = start_llm(model, engine)
    print_throughput(measure_throughput(llm, Load(num_prompts, input_len, output_len)))


@bench.command()
@engine_flags
def latency(
    model: Model = "smollm2-135m",
    batch_size: Annotated[
        str, typer.Option(help="requests at a time; several sizes as 1,8")
    ] = "1,8",
    input_len: InputLen = 40,
    output_len: OutputLen = 64,
    repeat: Annotated[int, typer.Option(min=1, help="runs of each size")] = 3,
    peer: Annotated[
        str | None,
        typer.Option(help="transformers: measure its generate in the same run and dtype"),
    ] = None,
    engine: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Fixed batches from prompt to last token: time to first token, between tokens, tokens/s."""
    from stoop.bench.offline import Load, measure_latency
    from stoop.bench.report import print_latency

    sizes = _sizes(batch_size)
    if peer not in (None, "transformers"):
        raise ConfigError(f"--peer {peer}: transformers is the only one")
    if engine["max_num_seqs"] is None:
        engine = {**engine, "max_num_seqs": max(sizes)}
    llm = start_llm(model, engine)
    loads = [Load(size, input_len, output_len) for size in sizes]
    results = measure_latency(llm, loads, repeat, with_transformers=peer is not None)
    print_latency(results)


@bench.command()
def graphs(
    model: Model = "smollm2-135m",
    modes: Annotated[
        str, typer.Option(help="graph modes, with commas between")
    ] = "none,piecewise,full,step",
    contexts: Annotated[
        str, typer.Option(help="prompt tokens, with commas between")
    ] = "32,256,1024",
    batch_size: Annotated[int, typer.Option(min=1, help="requests at a time")] = 1,
    output_len: OutputLen = 24,
    repeat: Annotated[int, typer.Option(min=1, help="rounds; modes take turns in each")] = 3,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto, float64, float32, bfloat16 or float16")
    ] = "auto",
) -> None:
    """Milliseconds of a decode step in each graph mode, as the context grows."""
    from stoop.bench.offline import Load, measure_modes
    from stoop.bench.report import print_modes

    loads = [Load(batch_size, context, output_len) for context in _sizes(contexts)]
    longest = max(load.input_len for load in loads) + output_len
    options = {
        "device": device,
        "dtype": dtype,
        "max_num_seqs": batch_size,
        "max_model_len": longest,
        "num_kv_blocks": 2 * batch_size * (longest // 16 + 1) + 1,  # several engines share memory
    }
    llms = {mode: start_llm(model, {**options, "graph_mode": mode}) for mode in modes.split(",")}
    print_modes(loads, measure_modes(llms, loads, repeat))


@bench.command()
def spec(
    k: Annotated[str, typer.Option("--k", help="drafts a step, with commas between")] = "1,2,4,8",
    batch_size: Annotated[int, typer.Option(min=1, help="requests at a time")] = 1,
    output_len: OutputLen = 64,
    layers: Annotated[
        int, typer.Option(min=1, help="of the toy target; its head has one: the more, the cheaper")
    ] = 24,
    repeat: Annotated[int, typer.Option(min=1, help="rounds; engines take turns in each")] = 3,
    graph_mode: Annotated[str, typer.Option(help="as for an engine")] = "step",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
) -> None:
    """Tokens/s of a toy target by number of drafts, with a head that is always right and with one
    that is useless: what speculation can gain, and what it costs."""
    from stoop.bench.offline import Load
    from stoop.bench.report import print_drafts
    from stoop.bench.spec import measure_drafts

    ks, load = _sizes(k), Load(batch_size, 8, output_len)
    options = {
        "device": device,
        "graph_mode": graph_mode,
        "max_num_seqs": batch_size,
        "max_model_len": load.input_len + output_len,
        "max_num_batched_tokens": max(64, batch_size * (max(ks) + 1)),
        "skip_tokenizer_init": True,
        "capture_sizes": None if graph_mode == "none" else str(batch_size),
    }
    print_drafts(load, measure_drafts(ks, load, layers, options, repeat, start_llm))


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"{text!r}: use numbers of at least 1 with commas between, such as 1,8")
    return sizes
