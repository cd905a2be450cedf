"""A toy target whose next token is a fixed function of the last one, and heads that predict it.

For tests and benchmarks that need a known acceptance. Embeddings are unit vectors, the target's
attention and MLP add nothing, and its output matrix maps the vector of token t to that of
`successor(t)`.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SIZE = 64  # of the vocabulary and of the hidden states
HEADS = 4
STRIDE = 8
# The logit margin: sampling at temperature 1 almost never picks another token.
SHARPNESS = 40.0


def successor(token: int) -> int:
    """Return the next token; the sequence repeats after eight tokens."""
    return (token + STRIDE) % SIZE


def write_target(folder: Path, num_layers: int = 3, max_position: int = 4096) -> Path:
    tensors: dict[str, Tensor] = {
        "model.embed_tokens.weight": torch.eye(SIZE),
        "model.norm.weight": torch.ones(SIZE),
        "lm_head.weight": _successor_matrix() * SHARPNESS / SIZE**0.5,
    }
    for index in range(num_layers):
        tensors |= _idle_layer(f"model.layers.{index}", SIZE)
    config = _decoder_config(max_position) | {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": num_layers,
        "eos_token_id": None,
    }
    return _write(folder, tensors, config)


def write_head(
    folder: Path,
    method: str,
    knows: frozenset[int] | None = None,
    noise: float = 0.0,
    max_position: int = 4096,
) -> Path:
    """Write a head that is right if the token to draft is in `knows`, or always if it is None.

    An EAGLE-1 head reads the newest token and shares the target's output matrix and vocabulary, so
    it is always right. An EAGLE-3 head keeps the token in its feature. With `noise`, attention
    perturbs the head, so that its drafts depend on its whole KV.
    """
    config = _decoder_config(max_position) | {"num_hidden_layers": 1}
    if method == "eagle":
        assert knows is None, "an EAGLE-1 head has no vocabulary of its own"
        tensors = {"fc.weight": torch.cat((torch.eye(SIZE), torch.zeros(SIZE, SIZE)), dim=1)}
        tensors |= _idle_layer("layers.0", SIZE, noise)
        del tensors["layers.0.input_layernorm.weight"]
        return _write(folder, tensors, config | {"architectures": ["LlamaForCausalLMEagle"]})
    known = sorted(range(SIZE) if knows is None else knows)
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(known)}
    return _write(folder, _eagle3_tensors(known, noise), config)


def _eagle3_tensors(known: list[int], noise: float) -> dict[str, Tensor]:
    """Return tensors that draft from the feature, the vector of the token before the newest."""
    zeros = torch.zeros(SIZE, SIZE)
    twice = torch.linalg.matrix_power(_successor_matrix(), 2)  # [token that follows, token]
    tensors = {
        "fc.weight": torch.cat((torch.eye(SIZE), zeros, zeros), dim=1),
        "norm.weight": torch.ones(SIZE),
        # The output is already the vector of the feature's successor.
        "lm_head.weight": (twice @ _successor_matrix().T)[known] * SHARPNESS / SIZE**0.5,
        "d2t": torch.tensor(known) - torch.arange(len(known)),
    }
    layer = _idle_layer("midlayer", 2 * SIZE, noise)
    layer["midlayer.hidden_norm.weight"] = torch.ones(SIZE)
    # The MLP replaces the token's vector in the residual stream with its successor's.
    scale = SIZE**0.5
    layer["midlayer.mlp.gate_proj.weight"] = torch.eye(SIZE)
    layer["midlayer.mlp.up_proj.weight"] = torch.eye(SIZE)
    lit = scale * torch.nn.functional.silu(torch.tensor(scale))
    layer["midlayer.mlp.down_proj.weight"] = (_successor_matrix() - torch.eye(SIZE)) / lit
    return tensors | layer


def _successor_matrix() -> Tensor:
    matrix = torch.zeros(SIZE, SIZE)
    for token in range(SIZE):
        matrix[successor(token), token] = 1.0
    return matrix


def _idle_layer(prefix: str, attention_in: int, noise: float = 0.0) -> dict[str, Tensor]:
    """Return a layer with random attention whose output is zero, or noise."""
    generator = torch.Generator().manual_seed(len(prefix))
    tensors = {
        f"{prefix}.self_attn.{name}_proj.weight": torch.randn(
            SIZE, attention_in, generator=generator
        )
        for name in "qkv"
    }
    mixed = torch.randn(SIZE, SIZE, generator=generator)
    tensors[f"{prefix}.self_attn.o_proj.weight"] = noise * mixed
    for name in ("gate", "up", "down"):
        tensors[f"{prefix}.mlp.{name}_proj.weight"] = torch.zeros(SIZE, SIZE)
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}.{name}.weight"] = torch.ones(SIZE)
    return tensors


def _decoder_config(max_position: int) -> dict[str, Any]:
    return {
        "vocab_size": SIZE,
        "hidden_size": SIZE,
        "intermediate_size": SIZE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-8,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def _write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder
