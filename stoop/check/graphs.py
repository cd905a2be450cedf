"""Checks that graph replays of a model equal its eager steps.

Every graph mode of every backend runs small workloads under the sanitizer, which compares each
replay bit for bit with the same phases run eagerly. In float64, tokens must also equal those of
steps that are neither captured nor padded; with a drafter, answers must equal those of plain
decoding, and drafts at every position those of eager steps.
"""

import dataclasses
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

from stoop.config.backends import serving_backends
from stoop.config.resolve import make_options
from stoop.config.schema import DeviceConfig, EngineOptions
from stoop.config.speculation import AUTO, MAX_DRAFTS, fixed_drafts, parse_speculation
from stoop.core.report import Report
from stoop.core.sampling_params import SamplingParams
from stoop.core.step import StepPlan
from stoop.engine.choose_drafter import expand_auto
from stoop.engine.draft_policy import HeldDrafts
from stoop.graph.descriptor import BatchExecutionDescriptor
from stoop.layers.attention import Attention
from stoop.llm import LLM
from stoop.ops.native.library import find_native
from stoop.worker.device import find_device
from stoop.worker.output import LaunchedStep

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
_HYBRID = TINY_CONFIG | {"num_hidden_layers": 4}
# One for each kind of recurrent layer.
TINY_CONFIGS: dict[str, dict[str, Any]] = {
    TINY: TINY_CONFIG,
    "tiny-lfm2": _HYBRID
    | {"architectures": ["Lfm2ForCausalLM"], "full_attn_idxs": [2], "block_multiple_of": 32},
    "tiny-qwen3.5": _HYBRID
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "mtp_num_hidden_layers": 1,
    },
    "tiny-granite-h": _HYBRID
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "shared_intermediate_size": 96,
        "num_local_experts": 0,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
    },
}
_TINY_HEAD = TINY_CONFIG | {"num_hidden_layers": 1}
TINY_HEADS = {
    "eagle": _TINY_HEAD | {"architectures": ["LlamaForCausalLMEagle"]},
    "eagle3": _TINY_HEAD | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 192},
}
MAX_REQS = 6
MAX_LEN = 192
CAPTURE_SIZES = (1, 2, 4, 6, 16, 64)


@dataclass(frozen=True)
class Workload:
    """A batch of random prompts."""

    name: str
    lengths: tuple[int, ...]  # of the prompts
    params: SamplingParams


@dataclass
class Case:
    """One mode of one backend over all workloads."""

    backend: str
    mode: str
    num_workloads: int = 0
    num_graphs: int = 0
    num_used: int = 0
    seconds: float = 0.0
    failures: tuple[str, ...] = ()


@dataclass
class Recorded:
    """A workload's answers, and its drafts by request and number of known tokens."""

    answers: list[list[int]]
    drafts: dict[tuple[str, int], list[int]]

    def drafts_as(self, other: "Recorded", all_of_them: bool) -> bool:
        """Whether the same drafts follow the same tokens: all of them, or the first ones."""
        if all_of_them:
            return self.drafts == other.drafts
        common = self.drafts.keys() & other.drafts.keys()
        return all(self.drafts[key] == other.drafts[key][: len(self.drafts[key])] for key in common)


@contextmanager
def tiny_model(name: str, engine: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a folder with a tiny model, and options with the path of the tiny head."""
    torch.set_num_threads(1)  # more threads only slow down such a small model
    spec = parse_speculation(engine.get("speculative_config"))
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        (folder / "config.json").write_text(json.dumps(TINY_CONFIGS[name]))
        engine = {**engine, "load_format": "dummy"}
        if (
            engine.get("dtype", "auto") == "auto"
            and find_device(engine.get("device", "auto")) != "cpu"
        ):
            engine["dtype"] = "float32"  # kernels have no float64
        if spec is not None and spec.model == TINY:
            (folder / "head").mkdir()
            head = TINY_HEADS[spec.method or "eagle3"]
            (folder / "head" / "config.json").write_text(json.dumps(head))
            given = dataclasses.asdict(dataclasses.replace(spec, model=str(folder / "head")))
            engine["speculative_config"] = {k: v for k, v in given.items() if v is not None}
        yield str(folder), engine


def make_workloads(block_size: int, num_drafts: int) -> list[Workload]:
    """Cover every batch size, lengths around block boundaries, and small batches after a long one.

    Prefill takes up to three steps; answers are long enough that no request ends before that, even
    if all drafts are accepted.
    """
    greedy = SamplingParams(temperature=0, max_tokens=block_size + 3, ignore_eos=True)
    lasting = 4 + 3 * num_drafts
    drawn = SamplingParams(temperature=0.9, seed=1, max_tokens=lasting, ignore_eos=True)
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
    backends: Sequence[str] | None,
    engine: dict[str, Any],
    report: Report,
) -> Iterator[Case]:
    """Yield cases one after another, each with a new engine. backends: None means all usable"""
    given, asked = {name: value for name, value in engine.items() if value is not None}, None
    if "speculative_config" in given:
        where = find_device(given.get("device", "auto"))
        asked = expand_auto(make_options(folder, given), where, report)
    engine = {**engine, "speculative_config": fixed_drafts(asked)}
    options = {
        "max_model_len": MAX_LEN,
        "max_num_seqs": MAX_REQS,
        "max_num_batched_tokens": max(64, MAX_REQS * (1 + _num_drafts(engine))),
        "skip_tokenizer_init": True,
        "capture_sizes": CAPTURE_SIZES,
        **{name: value for name, value in engine.items() if value is not None},
        "speculative_config": engine["speculative_config"],
    }
    block_size = options.get("block_size") or EngineOptions.block_size
    options["num_kv_blocks"] = 3 * -(-MAX_LEN // block_size)
    workloads = make_workloads(block_size, _num_drafts(engine))
    report("checking eager steps", 0, None)
    uncaptured = {name: value for name, value in options.items() if name != "capture_sizes"}
    eager = LLM(folder, graph_mode="none", **uncaptured)
    device = eager.config.device
    expected = _record_eager(eager, workloads) if device.dtype == "float64" else None
    layers = eager.engine.runner.layers
    head_sizes = [layer.shape.head_dim for layer in layers if isinstance(layer, Attention)]
    backends = backends or _usable_backends(device, head_sizes)
    del eager
    total = len(backends) * len(modes)
    for done, (backend, mode) in enumerate((b, m) for b in backends for m in modes):
        report(f"checking {backend} {mode}", done, total)
        given = {**options, "graph_mode": mode, "attention_backend": backend, "sanitize": True}
        if mode != "piecewise":
            given["speculative_config"] = _as_engines_do(asked)
        llm = LLM(folder, **given)
        yield _check(llm, Case(backend, mode), workloads, expected)


def _usable_backends(device: DeviceConfig, head_sizes: Sequence[int]) -> list[str]:
    found = serving_backends(device.device, device.dtype, head_sizes, device.kv_dtype)
    compiles = "native" not in found or find_native() is not None
    return [name for name in found if compiles or name != "native"]


def _as_engines_do(asked: Any) -> dict[str, Any] | None:
    """The same number of drafts at most; whether it varies is left to the engine or the user."""
    spec, given = parse_speculation(asked), fixed_drafts(asked)
    if spec is None or given is None:
        return None
    adaptive = True if spec.num_speculative_tokens == AUTO else spec.adaptive
    del given["adaptive"]
    return given if adaptive is None else {**given, "adaptive": adaptive}


def _num_drafts(engine: dict[str, Any]) -> int:
    spec = parse_speculation(engine.get("speculative_config"))
    given = spec.num_speculative_tokens if spec else 0
    return given if isinstance(given, int) else MAX_DRAFTS


def _record_eager(eager: LLM, workloads: list[Workload]) -> dict[str, Recorded]:
    """Run the workloads in steps that are neither captured nor padded.

    This needs float64: in lower precision, a logit's last bits depend on the batch.
    """
    found = {w.name: _run(eager, w) for w in workloads}
    if eager.config.spec is not None and eager.config.spec.synthetic_rates is None:
        options = dataclasses.asdict(dataclasses.replace(eager.options, speculative_config=None))
        plain = LLM(**options)
        drawn_drafts = eager.config.spec.draft_sample_method == "probabilistic"
        for workload in workloads:
            # With sampled drafts, sampled answers keep their distribution but not their text.
            if workload.params.greedy or not drawn_drafts:
                found[workload.name].answers = _run(plain, workload).answers
    return found


def _check(
    llm: LLM, case: Case, workloads: list[Workload], expected: dict[str, Recorded] | None
) -> Case:
    started = time.perf_counter()
    executor = llm.engine.runner.executor
    used: set[tuple[str, BatchExecutionDescriptor]] = set()
    executor.on_replay.append(lambda name, descriptor: used.add((name, descriptor)))
    failures = []
    counts = llm.config.schedule.draft_counts
    for num_drafts, workload in ((count, each) for count in counts for each in workloads):
        case.num_workloads += 1
        where = f"{case.backend} {case.mode}, {workload.name}"
        if len(counts) > 1:
            llm.engine.core.drafts = HeldDrafts(num_drafts)
            where += f", {num_drafts} drafts"
        try:
            recorded = _run(llm, workload)
        except Exception as error:  # a stale graph may fail in any way
            failures.append(f"{where}: {error}")
            continue
        if expected is None:
            continue
        if recorded.answers != expected[workload.name].answers:
            failures.append(f"{where}: tokens differ from eager")
        if not recorded.drafts_as(expected[workload.name], all_of_them=num_drafts == counts[-1]):
            failures.append(f"{where}: drafts differ from eager")
    managers = executor.managers.items()
    captured = [(name, each) for name, manager in managers for each in manager.descriptors]
    for name, descriptor in captured:
        if (name, descriptor) not in used:
            which = f"{name} {descriptor}"
            failures.append(f"{case.backend} {case.mode}: no workload replayed {which}")
    case.num_graphs = len(captured)
    case.num_used = len(used)
    case.failures = tuple(failures)
    case.seconds = time.perf_counter() - started
    return case


def _run(llm: LLM, workload: Workload) -> Recorded:
    source = random.Random(workload.name)
    vocab_size = llm.config.model.vocab_size
    prompts = [[source.randrange(vocab_size) for _ in range(n)] for n in workload.lengths]
    recorded = Recorded([], {})
    with _watch_drafts(llm, recorded):
        outputs = llm.generate(prompts, workload.params, use_tqdm=False)
    recorded.answers = [list(output.outputs[0].token_ids) for output in outputs]
    return recorded


@contextmanager
def _watch_drafts(llm: LLM, recorded: Recorded) -> Iterator[None]:
    """Record, after each step, the drafts that follow the known tokens of its rows."""
    runner = llm.engine.runner
    slots, launch = runner.target.state.tensors, runner.launch
    first: int | None = None  # number of the workload's first request, part of its first step

    def spy(plan: StepPlan) -> LaunchedStep:
        nonlocal first
        launched = launch(plan)
        numbers = [int(row.request_id.split("/")[0]) for row in plan.rows]
        first = min(numbers) if first is None else first
        for number, row in zip(numbers, plan.rows, strict=True):
            known, count = int(slots.num_tokens[row.slot]), int(slots.num_drafts[row.slot])
            drafts = slots.token_ids[row.slot, known : known + count].tolist()
            recorded.drafts[f"{number - first}", known] = drafts
        return launched

    runner.launch = spy  # type: ignore[method-assign]
    try:
        yield
    finally:
        del runner.launch
