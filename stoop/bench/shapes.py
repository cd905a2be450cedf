"""Models of a given shape: dummy weights that need no download, or a local checkpoint.

With drafts, the model gets an EAGLE-3 head with random weights, or uses its own MTP head, and none
of the drafts is accepted: a step yields one token per request at the full cost of drafting and
verification.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
}
QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000.0,
    "vocab_size": 248320,
    "mtp_num_hidden_layers": 1,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "llama-1b": LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 16,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    # As many parameters as qwen3.5-0.8b has, in its layers and in all.
    "llama-0.8b": LLAMA
    | {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 248320,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "smollm2-135m": LLAMA
    | {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 30,
        "vocab_size": 49152,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "lfm2-1.2b": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "hidden_size": 2048,
        "block_ff_dim": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 16,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "conv_L_cache": 3,
        "norm_eps": 1e-5,
        "vocab_size": 65536,
        "rope_theta": 1000000.0,
        "tie_embedding": True,
    },
    "qwen3.5-0.8b": QWEN3_5
    | {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 24,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3.5-9b": QWEN3_5
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_hidden_layers": 32,
        "linear_num_value_heads": 32,
        "tie_word_embeddings": False,
    },
    "granite-4-h-micro": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_size": 2048,
        "shared_intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 40,
        "layer_types": ["attention" if n % 10 == 5 else "mamba" for n in range(40)],
        "mamba_n_heads": 64,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "num_local_experts": 0,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625,
        "logits_scaling": 8.0,
        "rms_norm_eps": 1e-5,
        "vocab_size": 100352,
        "tie_word_embeddings": True,
    },
}
MIN_POSITIONS = 8192
DRAFT_VOCAB = 32000
HEADS = ("eagle3", "mtp")


@dataclass(frozen=True)
class ShapeHead:
    """What drafts for a shape."""

    kind: str = HEADS[0]  # one of HEADS
    draft_vocab_size: int | None = None  # as in speculative_config

    def __post_init__(self) -> None:
        if self.kind not in HEADS:
            raise ConfigError(f"--head {self.kind}: use {' or '.join(HEADS)}")
        if self.draft_vocab_size is not None and self.kind == "eagle3":
            raise ConfigError(
                f"--draft-vocab-size {self.draft_vocab_size} is for heads that use the target's LM "
                "head, and that of --head eagle3 has its own: use --head mtp"
            )

    def options(self) -> dict[str, Any]:
        size = self.draft_vocab_size
        return {"method": self.kind} | ({} if size is None else {"draft_vocab_size": size})


EAGLE3 = ShapeHead()


@contextmanager
def open_shape(
    shape: str, num_drafts: int | str, num_positions: int, head: ShapeHead = EAGLE3
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a model folder and its engine options; the files exist until the block ends.

    A path keeps its own weights and its config's maximum number of positions.
    num_drafts: a text goes to the engine as it is
    """
    if not isinstance(num_drafts, str) and not 0 <= num_drafts <= MAX_DRAFTS:
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
            drafter = head.options()
            if head.kind == "eagle3":
                place = _write_head(Path(root, "head"), folder, with_weights=not dummy)
                drafter["model"] = str(place)
            options["speculative_config"] = drafter | _never_accepted(num_drafts)
        yield str(folder), options


def target_config(shape: str, num_positions: int) -> dict[str, Any]:
    return SHAPES[shape] | {
        "max_position_embeddings": max(MIN_POSITIONS, num_positions),
        "torch_dtype": SHAPES[shape].get("torch_dtype", "bfloat16"),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def head_config(target: dict[str, Any]) -> dict[str, Any]:
    """Return the config of an EAGLE-3 head with one Llama layer of the target's width."""
    text = target.get("text_config")
    config = target | text if isinstance(text, dict) else target
    heads = config["num_attention_heads"]
    sizes = ("block_ff_dim", "shared_intermediate_size", "intermediate_size")
    return LLAMA | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": next(config[name] for name in sizes if config.get(name)),
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "num_hidden_layers": 1,
        "rope_theta": config.get("rope_theta") or 10000.0,
        "max_position_embeddings": config["max_position_embeddings"],
        "torch_dtype": config.get("torch_dtype") or config.get("dtype") or "float32",
        "vocab_size": config["vocab_size"],
        "tie_word_embeddings": False,
        "draft_vocab_size": min(DRAFT_VOCAB, config["vocab_size"]),
    }


def _never_accepted(num_drafts: int | str) -> dict[str, Any]:
    return {
        "num_speculative_tokens": num_drafts,
        "adaptive": isinstance(num_drafts, str),  # a number of drafts is made in every step
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 1,  # tokens per step
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
