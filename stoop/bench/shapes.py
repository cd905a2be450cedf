"""Models of a given shape: dummy weights that need no download, or a local checkpoint.

With drafts, the model gets an EAGLE-3 head with random weights, and none of its drafts is accepted:
a step yields one token per request at the full cost of drafting and verification.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from stoop.checkpoint.fetch import resolve_model
from stoop.config.errors import ConfigError
from stoop.config.schema import DeviceConfig
from stoop.config.speculation import MAX_DRAFTS
from stoop.models.head_config import read_head_spec
from stoop.models.head_loader import build_head
from stoop.models.loader import fill_dummy
from stoop.models.registry import read_model_spec

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "llama-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 16,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 30,
        "vocab_size": 49152,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
}
MIN_POSITIONS = 8192
DRAFT_VOCAB = 32000


@contextmanager
def open_shape(
    shape: str, num_drafts: int, num_positions: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a model folder and its engine options; the files exist until the block ends.

    A path keeps its own weights and its config's maximum number of positions.
    """
    if not 0 <= num_drafts <= MAX_DRAFTS:
        raise ConfigError(f"--k {num_drafts}: use 1 to {MAX_DRAFTS} drafts per step, or 0 for none")
    dummy = shape in SHAPES
    if not dummy and not Path(shape).expanduser().exists():
        raise ConfigError(
            f"--shape {shape}: use {', '.join(SHAPES)}, or the path of a model folder or GGUF file"
        )
    options: dict[str, Any] = {"load_format": "dummy" if dummy else "auto"}
    options["skip_tokenizer_init"] = True
    with tempfile.TemporaryDirectory(prefix="stoop-shape-") as root:
        if dummy:
            folder = write_config(Path(root, shape), target_config(shape, num_positions))
        else:
            folder = resolve_model(shape)
        if num_drafts:
            head = _write_head(Path(root, "head"), folder, with_weights=not dummy)
            options["speculative_config"] = _never_accepted(head, num_drafts)
        yield str(folder), options


def target_config(shape: str, num_positions: int) -> dict[str, Any]:
    sizes = SHAPES[shape]
    return sizes | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
        "hidden_act": "silu",
        "max_position_embeddings": max(MIN_POSITIONS, num_positions),
        "rms_norm_eps": 1e-5,
        "torch_dtype": sizes.get("torch_dtype", "bfloat16"),
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def head_config(target: dict[str, Any]) -> dict[str, Any]:
    """Return the config of an EAGLE-3 head with one layer of the target's width."""
    return target | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "draft_vocab_size": min(DRAFT_VOCAB, target["vocab_size"]),
    }


def _never_accepted(head: Path, num_drafts: int) -> dict[str, Any]:
    return {
        "method": "eagle3",
        "model": str(head),
        "num_speculative_tokens": num_drafts,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.0] * num_drafts,
    }


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _write_head(folder: Path, target: Path, with_weights: bool) -> Path:
    """Write a head; if the target has real weights, the head needs a weights file, too."""
    config = json.loads((target / "config.json").read_text())
    write_config(folder, head_config(config))
    if with_weights:
        _write_random_weights(folder, target)
    return folder


def _write_random_weights(folder: Path, target: Path) -> None:
    spec = read_head_spec(folder, read_model_spec(target), "eagle3", dummy=True)
    head = build_head(spec, DeviceConfig.of("cpu", "bfloat16"))
    fill_dummy(head, torch.device("cpu"), seed=0)
    tensors = {view.name: view.data.clone() for view in head.weight_views()}
    save_file(tensors, folder / "model.safetensors")
