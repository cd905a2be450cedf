"""`stoop bench step`, `profile` and `peer`: one decode step, of any shape."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoop.bench.shape_configs import EAGLE3, SHAPES
from stoop.cli.bench.common import check_file, make_head, parse_sizes
from stoop.cli.options import Command, check_engine, engine_flags, engine_help
from stoop.cli.start import start_llm

if TYPE_CHECKING:
    from stoop.bench.step import StepLoad

Shape = Annotated[
    str,
    typer.Option(
        help=f"a shape with random weights ({', '.join(SHAPES)}), or the path of a model folder or "
        "GGUF file"
    ),
]
Drafts = Annotated[
    int,
    typer.Option(
        "--k",
        help="draft tokens per step, all of which are rejected; 0 disables speculation",
    ),
]
Head = Annotated[
    str | None,
    typer.Option(
        help="head that drafts: eagle3 (random), or mtp, the model's own (Qwen3.5 shapes have "
        f"one); default: {EAGLE3.kind}"
    ),
]
DraftVocabSize = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="how many tokens the mtp head can draft: the first in draft_vocab.json of a model "
        "folder, without that file those with the lowest ids; 0 means all; default: as many as "
        "that file lists, else all",
    ),
]
PromptLen = Annotated[int, typer.Option(min=1, help="prompt tokens per request")]
Context = Annotated[
    int | None,
    typer.Option(min=1, help="context tokens per request with random KV, instead of a prompt"),
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
    "state_cache_memory",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "sanitize",
)


def _shape_flags(command: Command) -> Command:
    return engine_flags(command, without=_SET_BY_LOAD)


@_shape_flags
def step(
    shape: Shape = "llama-8b",
    k: Drafts = 3,
    head: Head = None,
    draft_vocab_size: DraftVocabSize = None,
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
    sizes, engine = parse_sizes(batch), {**engine, "graph_mode": graph_mode}
    drafter = make_head(head, draft_vocab_size, [k])
    check_engine(shape, {**engine, "max_num_seqs": 1})
    from stoop.bench.report import print_steps
    from stoop.bench.step import measure_steps

    loads = [_step_load(size, prompt_len, context, steps) for size in sizes]
    print_steps(measure_steps(shape, k, loads, repeat, engine, start_llm, drafter))


@_shape_flags
def profile(
    shape: Shape = "llama-8b",
    k: Drafts = 3,
    head: Head = None,
    draft_vocab_size: DraftVocabSize = None,
    batch: Annotated[int, typer.Option(min=1, help="concurrent requests")] = 1,
    prompt_len: PromptLen = 512,
    context: Context = None,
    graph_mode: StepGraphMode = "step",
    out: Annotated[str, typer.Option(help="file for the Chrome trace")] = "trace.json",
    engine: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Profile a decode step by kernel and write a Chrome trace."""
    check_file("--out", Path(out))
    engine = {**engine, "graph_mode": graph_mode}
    drafter = make_head(head, draft_vocab_size, [k])
    check_engine(shape, {**engine, "max_num_seqs": 1})
    from stoop.bench.profile import kernel_rows
    from stoop.bench.report import print_profile
    from stoop.bench.step import record_steps, start_shaped

    load = _step_load(batch, prompt_len, context, steps=1)
    llm = start_shaped(shape, k, [load], engine, start_llm, drafter)
    trace, span = record_steps(llm, load, Path(out))
    print_profile(shape, llm.config, load, kernel_rows(trace, span.steps), out)


def peer(
    shape: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "llama-8b",
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

    lengths = parse_sizes(first_token) if first_token else []
    load = PeerLoad(shape, k, parse_sizes(batch), prompt_len, lengths, steps, repeat)
    print_peer(load, measure_vllm(load, python or sys.executable))


def _step_load(batch: int, prompt_len: int, context: int | None, steps: int) -> "StepLoad":
    from stoop.bench.step import StepLoad

    return StepLoad(batch, context or prompt_len, context is not None, steps)
