"""Tiny targets and heads on disk, small enough to enumerate all their answers, and what runs them.

A target's next token depends mostly on its newest token, and a little on earlier ones. So a head
that looks up the newest token in the target's LM head is mostly right; noise on all its tensors
makes it as wrong as a test needs.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stoop import LLM
from stoop.graph.descriptor import BatchExecutionDescriptor, RunMode

HIDDEN, HEADS, MLP = 16, 2, 24
MAX_POSITION = 128


def write_target(
    folder: Path, vocab_size: int, seed: int = 0, sureness: float = 1.0, num_layers: int = 2
) -> Path:
    """A Llama in float64. sureness: 0 is uniform"""
    draw = _Draw(seed, 0.2)
    tensors = {
        "model.embed_tokens.weight": draw.matrix(vocab_size, HIDDEN, scale=1.0),
        "model.norm.weight": draw.norm(HIDDEN),
        "lm_head.weight": draw.matrix(vocab_size, HIDDEN, scale=0.4 * sureness),
    }
    for index in range(num_layers):
        tensors |= draw.layer(f"model.layers.{index}", HIDDEN)
        tensors[f"model.layers.{index}.input_layernorm.weight"] = draw.norm(HIDDEN)
    config = _config(vocab_size) | {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": num_layers,
        "eos_token_id": None,
    }
    return _write(folder, tensors, config)


def write_head(
    folder: Path,
    method: str,
    target: Path,
    noise: float,
    seed: int = 0,
    sureness: float = 1.0,
    drafted: tuple[int, ...] | None = None,
) -> Path:
    """A head for a target of `write_target`.

    noise: of its every matrix; at 0.1 it is mostly right, at 0.5 hardly ever
    sureness: relative to the target's
    drafted: the target's ids that EAGLE-3 may draft, in rising order; None: all
    """
    known = load_file(target / "model.safetensors")
    vocab_size = known["lm_head.weight"].shape[0]
    draw, config = _Draw(seed, noise), _config(vocab_size) | {"num_hidden_layers": 1}
    eye, zeros = torch.eye(HIDDEN, dtype=torch.float64), torch.zeros(HIDDEN, HIDDEN)
    if method == "eagle":
        tensors = draw.layer("layers.0", HIDDEN)
        tensors["fc.weight"] = draw.matrix(HIDDEN, 2 * HIDDEN) + torch.cat((eye, zeros), 1)
        tensors["fc.weight"] *= sureness
        return _write(folder, tensors, config | {"architectures": ["LlamaForCausalLMEagle"]})
    tensors = draw.layer("midlayer", 2 * HIDDEN)
    # Attention finds the newest token by its embedding, and passes that on.
    for name, strength in (("q", 2.0), ("k", 2.0), ("v", 1.0)):
        tensors[f"midlayer.self_attn.{name}_proj.weight"] += torch.cat((strength * eye, zeros), 1)
    tensors["midlayer.self_attn.o_proj.weight"] += eye
    ids = torch.arange(vocab_size) if drafted is None else torch.tensor(drafted)
    output = known["lm_head.weight"][ids]
    tensors |= {
        "midlayer.input_layernorm.weight": draw.norm(HIDDEN),
        "midlayer.hidden_norm.weight": draw.norm(HIDDEN),
        "fc.weight": draw.matrix(HIDDEN, 3 * HIDDEN),
        "norm.weight": known["model.norm.weight"],
        "lm_head.weight": sureness * (output + draw.matrix(*output.shape)),
        "d2t": ids - torch.arange(len(ids)),
    }
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(ids)}
    return _write(folder, tensors, config | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})


def count_replays(llm: LLM) -> Counter[RunMode]:
    """Of the target's graphs from now on: a test in a graph mode should not run eagerly."""
    found: Counter[RunMode] = Counter()

    def note(segment: str, descriptor: BatchExecutionDescriptor) -> None:
        if "C" in segment:
            found[descriptor.mode] += 1

    llm.engine.runner.executor.on_replay.append(note)
    return found


class _Draw:
    def __init__(self, seed: int, scale: float) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.scale = scale

    def matrix(self, *shape: int, scale: float | None = None) -> Tensor:
        drawn = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return (self.scale if scale is None else scale) * drawn

    def norm(self, size: int) -> Tensor:
        return 0.8 + 0.4 * torch.rand(size, generator=self.generator, dtype=torch.float64)

    def layer(self, prefix: str, attention_in: int) -> dict[str, Tensor]:
        """Without the norms before its attention, of which heads have none, one or two."""
        shapes = {
            **{f"self_attn.{name}_proj": (HIDDEN, attention_in) for name in "qkv"},
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (MLP, HIDDEN),
            "mlp.up_proj": (MLP, HIDDEN),
            "mlp.down_proj": (HIDDEN, MLP),
        }
        tensors = {f"{prefix}.{name}.weight": self.matrix(*shape) for name, shape in shapes.items()}
        tensors[f"{prefix}.post_attention_layernorm.weight"] = self.norm(HIDDEN)
        return tensors


def _config(vocab_size: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float64",
    }


def _write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder
