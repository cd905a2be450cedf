"""Proof by trial that graphs of a model are what its eager steps are.

Every graph mode of every backend runs small workloads under the sanitizer, which compares each
replay with the same phases run eagerly, to the bit. In float64, tokens are compared with steps
that are neither captured nor padded, too.
"""

import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stoop.checkpoint.report import Report
from stoop.config.schema import EngineOptions
from stoop.core.sampling_params import SamplingParams
from stoop.graph.descriptor import BatchExecutionDescriptor
from stoop.llm import LLM

TINY = "tiny"
TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float64",
}
MAX_REQS = 6
MAX_LEN = 192
CAPTURE_SIZES = (1, 2, 4, 6, 16, 64)


@dataclass(frozen=True)
class Workload:
    name: str
    lengths: tuple[int, ...]  # of prompts
    params: SamplingParams


@dataclass
class Case:
    """One mode of one backend over all workloads."""

    backend: str
    mode: str
    num_workloads: int = 0
    num_graphs: int = 0
    used: frozenset[BatchExecutionDescriptor] = frozenset()
    seconds: float = 0.0
    failures: tuple[str, ...] = ()


@contextmanager
def model_folder(model: str) -> Iterator[str]:
    """The model as it is, or a folder for the tiny one."""
    if model != TINY:
        yield model
        return
    torch.set_num_threads(1)  # threads of so small a model only wait for each other
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY_CONFIG))
        yield folder


def make_workloads(block_size: int) -> list[Workload]:
    """Every live size, lengths around block boundaries, a long prompt before small batches."""
    greedy = SamplingParams(temperature=0, max_tokens=block_size + 3, ignore_eos=True)
    drawn = SamplingParams(temperature=0.9, seed=1, max_tokens=4, ignore_eos=True)
    filtered = drawn.replace(top_p=0.9, top_k=20, frequency_penalty=0.5, logit_bias={3: 1.0})
    edges = (block_size - 1, block_size, block_size + 1, 1, 2 * block_size, 2 * block_size + 1)
    found = [Workload("a long prompt", (MAX_LEN - block_size - 8, 3), greedy)]
    for kind, params in (("greedy", greedy), ("drawn", drawn), ("filtered", filtered)):
        for count in range(MAX_REQS, 0, -1):
            found.append(Workload(f"{count} at block boundaries, {kind}", edges[:count], params))
    once = greedy.replace(max_tokens=1)
    found += [Workload(f"a prompt of {size}", (size,), once) for size in reversed(CAPTURE_SIZES)]
    return found


def run_checks(
    folder: str,
    modes: Sequence[str],
    backends: Sequence[str],
    engine: dict[str, Any],
    report: Report,
) -> Iterator[Case]:
    """One case after another, each on an engine of its own."""
    options = {
        "max_model_len": MAX_LEN,
        "max_num_seqs": MAX_REQS,
        "max_num_batched_tokens": 64,
        "skip_tokenizer_init": True,
        "capture_sizes": CAPTURE_SIZES,
        **{name: value for name, value in engine.items() if value is not None},
    }
    block_size = options.get("block_size") or EngineOptions.block_size
    options["num_kv_blocks"] = 3 * -(-MAX_LEN // block_size)
    workloads = make_workloads(block_size)
    plain = LLM(folder, **{k: v for k, v in options.items() if k != "capture_sizes"})
    expected = None
    if plain.config.device.dtype == "float64":
        expected = {w.name: _answers(plain, w) for w in workloads}
    del plain
    total = len(backends) * len(modes)
    for done, (backend, mode) in enumerate((b, m) for b in backends for m in modes):
        report(f"checking {backend} {mode}", done, total)
        llm = LLM(folder, graph_mode=mode, attention_backend=backend, sanitize=True, **options)
        yield _check(llm, Case(backend, mode), workloads, expected)


def _check(
    llm: LLM, case: Case, workloads: list[Workload], expected: dict[str, list[list[int]]] | None
) -> Case:
    started = time.perf_counter()
    graphs = llm.engine.runner.graphs
    used: set[BatchExecutionDescriptor] = set()
    dispatch = graphs.dispatch

    def spy(shape: Any) -> BatchExecutionDescriptor:
        descriptor = dispatch(shape)
        used.add(descriptor)
        return descriptor

    graphs.dispatch = spy  # type: ignore[method-assign]
    failures = []
    for workload in workloads:
        case.num_workloads += 1
        try:
            answers = _answers(llm, workload)
        except Exception as error:  # whatever a stale graph may do
            failures.append(f"{case.backend} {case.mode}, {workload.name}: {error}")
            continue
        if expected is not None and answers != expected[workload.name]:
            failures.append(f"{case.backend} {case.mode}, {workload.name}: other tokens than eager")
    captured = graphs.manager.descriptors
    for descriptor in captured:
        if descriptor not in used:
            failures.append(f"{case.backend} {case.mode}: no workload took {descriptor}")
    case.num_graphs = len(captured)
    case.used = frozenset(used)
    case.failures = tuple(failures)
    case.seconds = time.perf_counter() - started
    return case


def _answers(llm: LLM, workload: Workload) -> list[list[int]]:
    source = random.Random(workload.name)
    vocab_size = llm.config.model.vocab_size
    prompts = [[source.randrange(vocab_size) for _ in range(n)] for n in workload.lengths]
    outputs = llm.generate(prompts, workload.params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
