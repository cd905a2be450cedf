"""Times a layer by how SMs divide their memory into shared memory and L1 cache, to choose the
constants in ops/kernels/launch.py.

On a CUDA device: PYTHONPATH=. python tools/tune_memory.py [--context 600]
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from stoop.attention.base import PagedMetadata
from stoop.attention.triton import TritonBackend, TritonMetadata
from stoop.bench.shapes import target_config, write_config
from stoop.core.state import PagedState
from stoop.layers.stateful import StateContext, number_layers, stateful_layers
from stoop.models.decoder import DecoderModel
from stoop.models.registry import read_model_spec
from stoop.ops.kernels import attention
from stoop.ops.kernels.launch import ask_division
from stoop.ops.kernels.linear_tuning import time_graph

DEVICE = torch.device("cuda")
BLOCK_SIZE = 16
DRIVERS_CHOICE = -1
PERCENTS = (DRIVERS_CHOICE, 0, 14, 28, 43, 57, 71, 100)
LAYERS = {"llama-8b": 8, "llama-1b": 16, "smollm2-135m": 30}
LOADS = ((1, 1), (1, 4), (4, 4), (8, 1), (8, 4), (32, 4))  # requests, query tokens of each

loaded: list[int] = []  # kernels, as the driver knows them


def remember(module: Any, function: int, *names: Any) -> None:
    loaded.append(function)


def ask_all(percent: int) -> None:
    for function in loaded:
        ask_division(function, percent)


def build(shape: str, max_len: int) -> DecoderModel:
    with tempfile.TemporaryDirectory() as folder:
        config = target_config(shape, max_len) | {"num_hidden_layers": LAYERS[shape]}
        spec = read_model_spec(write_config(Path(folder, shape), config))
    torch.set_default_dtype(torch.bfloat16)
    with DEVICE:
        model = DecoderModel(spec)
    torch.set_default_dtype(torch.float32)
    for name, parameter in model.named_parameters():
        parameter.data.fill_(1.0) if "norm" in name else parameter.data.normal_(std=0.02)
    model.prepare(max_len)
    number_layers(stateful_layers(model))
    return model


class Step:
    """A forward pass of some requests with a context, whose KV blocks are in random order."""

    def __init__(self, model: DecoderModel, batch: int, query_len: int, context: int) -> None:
        self.model, spec = model, model.spec
        num_blocks = -(-(context + query_len) // BLOCK_SIZE)
        table = torch.randperm(batch * num_blocks).view(batch, -1)
        positions = (context + torch.arange(query_len)).expand(batch, -1)
        blocks = table.gather(1, positions // BLOCK_SIZE)
        shape = (2, table.numel(), BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
        caches = [torch.randn(shape, device=DEVICE).bfloat16() for _ in model.layers]
        backend = TritonBackend.__new__(TritonBackend)
        backend.kernels, backend.num_sms = attention, attention.count_sms(DEVICE)
        lengths = torch.full((batch,), context)
        metadata = TritonMetadata(
            query_start_loc=_numbers(torch.arange(batch + 1) * query_len),
            context_lens=_numbers(lengths),
            seq_lens=_numbers(lengths + query_len),
            row_slots=torch.arange(batch, device=DEVICE),
            block_table=_numbers(table),
            max_query_len=query_len,
        )
        slots = (blocks * BLOCK_SIZE + positions % BLOCK_SIZE).flatten().to(DEVICE)
        paged = PagedMetadata(backend, metadata, slots)
        self.context = StateContext(caches, {PagedState: paged})
        self.positions = positions.flatten().to(DEVICE)
        self.ids = torch.zeros_like(self.positions)

    @torch.inference_mode()
    def microseconds(self) -> float:
        """Return the time per layer."""
        time = time_graph(lambda: self.model(self.ids, self.positions, self.context), 15)
        return 1e3 * time / len(self.model.layers)


def _numbers(values: Tensor) -> Tensor:
    return values.to(DEVICE, torch.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=600, help="context tokens per request")
    context = parser.parse_args().context
    steps = [
        (f"{shape}, {batch} x {query_len}", Step(model, batch, query_len, context))
        for shape in LAYERS
        for model in (build(shape, context + 64),)
        for batch, query_len in LOADS
    ]
    triton.knobs.runtime.kernel_load_end_hook.add(remember)
    print("microseconds of a layer, as decided, then:", *(f"{p} %" for p in PERCENTS))
    decided = [step.microseconds() for _, step in steps]  # kernels ask once, at their first launch
    for (name, step), time in zip(steps, decided, strict=True):
        row = []
        for percent in PERCENTS:
            ask_all(percent)
            row.append(step.microseconds())
        print(name, *(f"{each:.1f}" for each in (time, *row)), flush=True)


if __name__ == "__main__":
    main()
