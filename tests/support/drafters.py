"""Targets with drafters of every quality, and one workload that they all run.

The workload has arrivals while others run, finishes, preemption (too few blocks), chunked prompts,
prefix cache hits, requests with their own number of drafts, requests that end at max_model_len, and
greedy and seeded sampling.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from stoop import LLM, SamplingParams
from stoop.bench import toy
from stoop.core.outputs import RequestOutput
from stoop.core.step import StepPlan
from stoop.worker.output import LaunchedStep
from support.checkpoints import CheckpointStore
from support.engines import make_llm

MODES = ("none", "piecewise", "full", "full_decode_only", "full_and_piecewise", "step")
BACKENDS = ("reference", "hostplan")
KS = (1, 2, 3, 5, 8)

MAX_LEN = 72
SETTINGS: dict[str, Any] = {
    "max_model_len": MAX_LEN,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 40,
    "block_size": 8,
    "num_kv_blocks": 16,  # too few for four long ones: some are preempted
    "capture_sizes": "1,2,4,40",
}

RANDOM_HEAD: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float64",
}


@dataclass(frozen=True)
class Drafter:
    """A target's folder and what drafts for it."""

    target: Path
    method: str
    head: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def config(self, num_tokens: int, **more: Any) -> dict[str, Any]:
        model = {} if self.head is None else {"model": str(self.head)}
        options = {"method": self.method, "num_speculative_tokens": num_tokens, **self.options}
        return options | model | more


DRAFTERS = (
    "eagle-random",  # all its drafts depend on its KV and are wrong
    "eagle3-random",
    "eagle3-variant",  # norms, coinciding taps, an own embedding, two layers, probabilistic off
    "eagle-right",
    "eagle3-right",
    "eagle3-some",  # right for some tokens only
    "eagle-noisy",  # right or wrong depending on its KV
    "eagle3-noisy",
    "ngram",
    "ngram-right",
)


NOISE = {"eagle": 0.15, "eagle3": 0.0008}


class DrafterStore:
    """Made on first use, once a session."""

    def __init__(self, root: Path, checkpoints: CheckpointStore) -> None:
        self.root = root
        self.checkpoints = checkpoints

    def get(self, name: str) -> Drafter:
        method, _, quality = name.partition("-")
        if method == "ngram":
            options = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
            target = self._toy() if quality else self._random()
            return Drafter(target, "ngram", None, options)
        if quality in ("random", "variant"):
            return Drafter(self._random(), method, self._random_head(name, method, quality))
        return Drafter(self._toy(), method, self._toy_head(name, method, quality))

    def _random(self) -> Path:
        return self.checkpoints.get("llama3", dtype="float64")

    def _toy(self) -> Path:
        folder = self.root / "toy"
        return folder if folder.exists() else toy.write_target(folder)

    def _toy_head(self, name: str, method: str, quality: str) -> Path:
        knows = frozenset(t for t in range(toy.SIZE) if t % 7) if quality == "some" else None
        noise = NOISE[method] if quality == "noisy" else 0.0
        return toy.write_head(self.root / name, method, knows, noise)

    def _random_head(self, name: str, method: str, quality: str) -> Path:
        folder = self.root / name
        if folder.exists():
            return folder
        if method == "eagle":
            return write_random_head(folder, "eagle", {})
        if quality == "random":
            return write_random_head(folder, "eagle3", {"draft_vocab_size": 96})
        variant = {
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 1, 1]},
            "num_hidden_layers": 2,
            "fc_norm": True,
            "norm_output": True,
            "norm_before_residual": True,
        }
        return write_random_head(folder, "eagle3", variant, own_embedding=True)


def write_random_head(
    folder: Path, method: str, changes: dict[str, Any], own_embedding: bool = False, seed: int = 5
) -> Path:
    """In the HF-EAGLE layout, every tensor random."""
    config = RANDOM_HEAD | changes
    name = "LlamaForCausalLMEagle" + ("3" if method == "eagle3" else "")
    config |= {"architectures": [name]}
    tensors = random_head_tensors(config, method, own_embedding, seed)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_head_tensors(
    config: dict[str, Any], method: str, own_embedding: bool, seed: int
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size, mlp = config["hidden_size"], config["intermediate_size"]
    kv_size = size * config["num_key_value_heads"] // config["num_attention_heads"]

    def matrix(rows: int, columns: int, scale: float = 0.15) -> Tensor:
        return scale * torch.randn(rows, columns, generator=generator, dtype=torch.float64)

    def norm(width: int = size) -> Tensor:
        return 0.5 + torch.rand(width, generator=generator, dtype=torch.float64)

    eagle3 = method == "eagle3"
    drafts = config.get("draft_vocab_size", config["vocab_size"])
    tensors = {"fc.weight": matrix(size, 3 * size if eagle3 else 2 * size)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}" if layer or not eagle3 else "midlayer"
        width = 2 * size if eagle3 and not layer else size
        for part, rows in (("q", size), ("k", kv_size), ("v", kv_size)):
            tensors[f"{prefix}.self_attn.{part}_proj.weight"] = matrix(rows, width)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = matrix(size, size)
        tensors[f"{prefix}.mlp.gate_proj.weight"] = matrix(mlp, size)
        tensors[f"{prefix}.mlp.up_proj.weight"] = matrix(mlp, size)
        tensors[f"{prefix}.mlp.down_proj.weight"] = matrix(size, mlp)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = norm()
        if eagle3 or layer:
            tensors[f"{prefix}.input_layernorm.weight"] = norm()
        if eagle3 and not layer:
            tensors[f"{prefix}.hidden_norm.weight"] = norm()
    if eagle3:
        tensors |= {"norm.weight": norm(), "lm_head.weight": matrix(drafts, size, 0.5)}
    if drafts < config["vocab_size"]:
        chosen = torch.randperm(config["vocab_size"], generator=generator)[:drafts].sort().values
        tensors["d2t"] = chosen - torch.arange(drafts)
    if own_embedding:
        tensors["embed_tokens.weight"] = matrix(config["vocab_size"], size, 1.0)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{index}.weight": norm() for index in range(3)}
    return tensors


# ---- the workload ----

GREEDY = SamplingParams(temperature=0, max_tokens=23, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=11, max_tokens=23, ignore_eos=True)
PENALISED = SEEDED.replace(
    top_p=0.95, frequency_penalty=0.3, repetition_penalty=1.1, seed=12, logit_bias={3: 1.0}
)


@dataclass
class Trace:
    """What an engine did: answers, and the drafts after each number of known tokens."""

    answers: list[list[int]] = field(default_factory=list)
    finish_reasons: list[str | None] = field(default_factory=list)
    drafts: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    per_position: list[int] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)


def make_spec_llm(
    drafter: Drafter, num_tokens: int, spec: dict[str, Any] | None = None, **options: Any
) -> LLM:
    """num_tokens: 0 for plain decoding; spec: more of the speculative config"""
    if num_tokens:
        options["speculative_config"] = drafter.config(num_tokens, **spec or {})
    return make_llm(drafter.target, **SETTINGS | options)


def watch_drafts(llm: LLM, trace: Trace) -> None:
    """Record the drafts after the known tokens of every request, after each step."""
    runner = llm.engine.runner
    launch = runner.launch

    def spy(plan: StepPlan) -> LaunchedStep:
        launched = launch(plan)
        slots = runner.target.state.tensors
        for row in plan.rows:
            known, count = int(slots.num_tokens[row.slot]), int(slots.num_drafts[row.slot])
            drafts = slots.token_ids[row.slot, known : known + count].tolist()
            if row.samples:
                trace.drafts[row.request_id, known] = drafts
            else:
                assert drafts == [], "a chunk drafts nothing"
        return launched

    runner.launch = spy  # type: ignore[method-assign]


def prompts(vocab_size: int) -> list[list[int]]:
    source = random.Random(7)
    lengths = (1, 7, 8, 9, 45, 16, 33)
    return [[source.randrange(vocab_size) for _ in range(length)] for length in lengths]


def requests(num_tokens: int, vocab_size: int) -> list[tuple[list[int], SamplingParams]]:
    """Every kind of request; `num_tokens` 0 for an engine that does not draft."""
    every = prompts(vocab_size)
    shared = every[5] + every[6][:8]  # two blocks that others start with
    lower = {"num_speculative_tokens": num_tokens // 2} if num_tokens else {}
    none = {"num_speculative_tokens": 0} if num_tokens else {}
    return [
        (every[0], GREEDY),
        (every[4], GREEDY.replace(max_tokens=None)),  # to max_model_len
        (every[1], SEEDED),
        (every[2], PENALISED),
        (every[3], GREEDY.replace(**lower)),
        (shared, SEEDED.replace(seed=5, **none)),
        ([*shared, 9], GREEDY.replace(max_tokens=5)),
        (every[6], SEEDED.replace(seed=6, max_tokens=None)),
        ([*shared[:16], 1, 2], PENALISED.replace(seed=9, max_tokens=2)),
        (shared, GREEDY.replace(max_tokens=1)),
    ]


def run(llm: LLM, num_tokens: int) -> Trace:
    """Requests arrive while others run; then some of them once more, for the prefix cache."""
    trace = Trace()
    watch_drafts(llm, trace)
    every = requests(num_tokens, min(llm.config.model.vocab_size, toy.SIZE))
    outputs: dict[str, RequestOutput] = {}
    pending = list(enumerate(every))
    step = 0
    while pending or llm.engine.has_work:
        while pending and (step % 3 == 0 or not llm.engine.has_work):
            number, (prompt, params) = pending.pop(0)
            llm.engine.add_request(f"r{number}", prompt, params)
            if number >= 2:
                break
        for output in llm.engine.step():
            if output.finished:
                outputs[output.request_id] = output
        step += 1
    again = (4, 5, 7)
    answers = llm.generate([every[n][0] for n in again], [every[n][1] for n in again])
    outputs |= {f"again{n}": answer for n, answer in zip(again, answers, strict=True)}
    for name in sorted(outputs):
        trace.answers.append(list(outputs[name].outputs[0].token_ids))
        trace.finish_reasons.append(outputs[name].outputs[0].finish_reason)
    trace.metrics = llm.metrics()
    trace.per_position = trace.metrics["spec_decode_num_accepted_tokens_per_pos"]
    return trace


def pairwise(*dimensions: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """A few combinations that cover every pair of values of two dimensions, always the same."""
    source = random.Random(3)
    count = len(dimensions)
    missing = {
        (i, a, j, b)
        for i in range(count)
        for j in range(i + 1, count)
        for a in dimensions[i]
        for b in dimensions[j]
    }

    def covered(row: tuple[Any, ...]) -> set[tuple[int, Any, int, Any]]:
        return {(i, row[i], j, row[j]) for i in range(count) for j in range(i + 1, count)}

    while missing:
        tries = []
        for i, a, j, b in source.sample(sorted(missing, key=str), min(20, len(missing))):
            row = [source.choice(values) for values in dimensions]
            row[i], row[j] = a, b
            tries.append(tuple(row))
        best = max(tries, key=lambda row: len(covered(row) & missing))
        missing -= covered(best)
        yield best
