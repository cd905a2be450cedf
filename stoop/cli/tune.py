"""`stoop tune`: find the fastest GEMM for small batches on this GPU."""

import json
import sys
from typing import Annotated, Any

import typer

from stoop.cli.options import Model, engine_flags
from stoop.cli.start import start_llm
from stoop.config.errors import ConfigError
from stoop.config.schema import DEFAULT_MODEL
from stoop.config.speculation import asks_for_auto, fixed_drafts

FIXED = (
    "graph_mode",
    "capture_sizes",
    "max_capture_size",
    "sanitize",
    "run_ahead",
    "tokenizer",
    "skip_tokenizer_init",
)


def _tune_flags(command: Any) -> Any:
    return engine_flags(command, without=FIXED)


@_tune_flags
def tune(
    model: Model = DEFAULT_MODEL,
    tokens: Annotated[
        str, typer.Option(help="tokens per step to measure, up to 128, separated by commas")
    ] = "1,4,8,16,32,64,128",
    engine: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Find the fastest kernel for each GEMM of a model at small batches: cuBLAS or stoop's own.

    Includes the GEMMs of the drafter (-sc). Results go to the cache folder (STOOP_CACHE), where
    later engines on this GPU find them; known results are not measured again. The last line is
    JSON.
    """
    from stoop.ops.kernels.linear_choice import MAX_TOKENS
    from stoop.worker.device import find_device
    from stoop.worker.profiling import find_products

    counts = [int(part) if part.strip().isdigit() else 0 for part in tokens.split(",")]
    if not all(1 <= count <= MAX_TOKENS for count in counts):
        raise ConfigError(f"--tokens {tokens}: use numbers from 1 to {MAX_TOKENS}")
    if find_device(engine["device"] or "auto") == "cpu":
        raise ConfigError("tune measures a GPU: run it on a machine with one, without --device cpu")
    if not asks_for_auto(engine["speculative_config"]):
        engine = {**engine, "speculative_config": fixed_drafts(engine["speculative_config"])}
    llm = start_llm(model, {**engine, "graph_mode": "none", "skip_tokenizer_init": True})
    runner = llm.engine.runner
    products = find_products(runner.target, runner.executor, runner.config)
    if not products:
        dtype = llm.config.device.dtype
        raise ConfigError(f"stoop's kernels are for bfloat16 and float16, not {dtype}: set --dtype")
    from stoop.ops.kernels.linear_tuning import tune as measure

    rows = []
    for found in measure(products, counts, runner.device):
        shape, best = found.shape, "cuBLAS" if found.decision is None else "ours"
        print(
            f"{shape.kind:7} {shape.num_outputs:6} x {shape.num_inputs:<6} up to {found.bucket:3} "
            f"tokens: {found.time:7.2f} us, {best} (cuBLAS {found.cublas_time:.2f})",
            file=sys.stderr,
        )
        rows.append([shape.kind, shape.num_outputs, shape.num_inputs, found.bucket, best])
    print(json.dumps({"products": len(products), "measured": rows}))
