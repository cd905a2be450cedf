"""Targets with drafters of every quality, and one workload that they all run."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from stoop import LLM
from stoop.check.mutants.harness import HEAD_NOISE
from stoop.check.workloads import DRAFT_LENGTHS, Trace, answer_arrivals, random_prompts
from stoop.check.workloads import DRAFT_SETTINGS as SETTINGS
from stoop.checkpoint import toy
from support.checkpoints import CheckpointStore
from support.engines import make_llm

MODES = ("none", "piecewise", "full", "full_decode_only", "full_and_piecewise", "step")
BACKENDS = ("reference", "hostplan")
KS = (1, 2, 3, 5, 8)

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
        options["adaptive"] = False
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
        noise = HEAD_NOISE[method] if quality == "noisy" else 0.0
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


def make_spec_llm(
    drafter: Drafter, num_tokens: int, spec: dict[str, Any] | None = None, **options: Any
) -> LLM:
    """num_tokens: 0 for plain decoding; spec: more of the speculative config"""
    if num_tokens:
        options["speculative_config"] = drafter.config(num_tokens, **spec or {})
    return make_llm(drafter.target, **SETTINGS | options)


def prompts(vocab_size: int) -> list[list[int]]:
    return random_prompts(DRAFT_LENGTHS, vocab_size)


def run(llm: LLM, num_tokens: int) -> Trace:
    """Requests arrive while others run; then some of them once more, for the prefix cache."""
    return answer_arrivals(llm, num_tokens, min(llm.config.model.vocab_size, toy.SIZE))


def assert_same_drafts(found: Trace, expected: Trace) -> None:
    """Drafts after the same text are the same, as many as were made, and there are enough of them.

    The number varied only in `found`, so steps end at other places: 79 % or more of the places of
    `expected` were reached, and 37 % or more of those with drafts there have drafts in both.
    """
    common = found.drafts.keys() & expected.drafts.keys()
    for key in common:
        made = found.drafts[key]
        assert made == expected.drafts[key][: len(made)], key
    num_compared = sum(bool(found.drafts[key]) for key in common)
    num_possible = sum(bool(expected.drafts[key]) for key in common)
    assert len(common) > 0.7 * len(expected.drafts), "hardly any text is the same"
    assert num_compared > 0.3 * num_possible > 0, "hardly any drafts were compared"


def pairwise(*dimensions: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """A few combinations that cover every pair of values of two dimensions, always the same."""
    source, num_tries = random.Random(2), 20
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
        for i, a, j, b in source.sample(sorted(missing, key=str), min(num_tries, len(missing))):
            for _ in range(num_tries):
                row = [source.choice(values) for values in dimensions]
                row[i], row[j] = a, b
                tries.append(tuple(row))
        best = max(tries, key=lambda row: len(covered(row) & missing))
        missing -= covered(best)
        yield best
