"""Tiny random checkpoints of every architecture, made with transformers.

transformers' default initialisation gives models that repeat themselves and norms and biases that
do nothing, so a lost one would go unnoticed. Here every tensor is random.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

VOCAB_SIZE = 160
WINDOW = 24
MAX_POSITION = 512

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Architecture:
    config_class: type
    model_class: type
    changes: dict[str, Any]

    def config(self) -> Any:
        return self.config_class(**{**_COMMON, **self.changes})


def _llama(**changes: Any) -> Architecture:
    return Architecture(LlamaConfig, LlamaForCausalLM, changes)


def _mistral(**changes: Any) -> Architecture:
    return Architecture(MistralConfig, MistralForCausalLM, changes)


def _qwen2(**changes: Any) -> Architecture:
    return Architecture(Qwen2Config, Qwen2ForCausalLM, changes)


def _qwen3(**changes: Any) -> Architecture:
    return Architecture(Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32, **changes})


def _lfm2(**changes: Any) -> Architecture:
    sizes = {"block_auto_adjust_ff_dim": False, "norm_eps": 1e-5, "num_hidden_layers": 4}
    kinds = {"layer_types": ["conv", "full_attention", "conv", "conv"]}
    return Architecture(Lfm2Config, Lfm2ForCausalLM, {**sizes, **kinds, **changes})


_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}


def _granite_hybrid(**changes: Any) -> Architecture:
    more = {
        "shared_intermediate_size": 96,
        "num_local_experts": 0,
        "layer_types": ["mamba", "attention", "mamba"],
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    }
    return Architecture(
        GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, {**_MAMBA, **more, **changes}
    )


def _bamba(**changes: Any) -> Architecture:
    return Architecture(
        BambaConfig, BambaForCausalLM, {**_MAMBA, "attn_layer_indices": [1], **changes}
    )


def _qwen3_5(**changes: Any) -> Architecture:
    sizes = {
        "head_dim": 32,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    return Architecture(Qwen3_5TextConfig, Qwen3_5ForCausalLM, {**sizes, **changes})


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}

ARCHITECTURES: dict[str, Architecture] = {
    "llama2": _llama(num_key_value_heads=4),
    "llama3": _llama(rope_parameters=_LLAMA3_ROPE),
    "llama-linear": _llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "llama-yarn": _llama(rope_parameters=_YARN_ROPE),
    "smollm2": _llama(
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    ),
    "llama-biases": _llama(attention_bias=True, mlp_bias=True),
    "mistral": _mistral(sliding_window=WINDOW),
    "mistral-full": _mistral(sliding_window=None, head_dim=32),
    "qwen2": _qwen2(),
    "qwen2-window": _qwen2(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": _qwen3(),
    "qwen3-window": _qwen3(
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=2,
        attention_bias=True,
    ),
    "lfm2": _lfm2(),
    "lfm2-biases": _lfm2(conv_bias=True, conv_L_cache=4, tie_word_embeddings=False),
    "granite-hybrid": _granite_hybrid(),
    "granite-groups": _granite_hybrid(
        mamba_n_groups=2, mamba_proj_bias=True, position_embedding_type="rope", attention_bias=True
    ),
    "granite-attention": _granite_hybrid(
        layer_types=["attention"] * 3,
        position_embedding_type="rope",
        tie_word_embeddings=True,
        embedding_multiplier=0.4,
    ),
    "bamba": _bamba(),
    "bamba-groups": _bamba(
        mamba_n_groups=2, mamba_conv_bias=False, mamba_d_conv=2, attention_bias=True, mlp_bias=True
    ),
    "qwen3.5": _qwen3_5(),
    "qwen3.5-tied": _qwen3_5(
        tie_word_embeddings=True,
        attention_bias=True,
        linear_num_key_heads=4,
        linear_value_head_dim=32,
        layer_types=["full_attention", *["linear_attention"] * 3],
    ),
}
WINDOWED = ("mistral", "qwen2-window", "qwen3-window")
# With recurrent layers, except for "granite-attention". They take longer, so that tests cross them
# with fewer settings (support/crossings.py); variants run in a few tests only.
HYBRIDS = ("lfm2", "granite-hybrid", "bamba", "qwen3.5")
MIXERS = ("lfm2", "qwen3.5", "granite-hybrid")  # one for each kind of recurrent layer
VARIANTS = (
    *("lfm2-biases", "granite-groups", "granite-attention", "bamba-groups", "qwen3.5-tied"),
)
RECURRENT = tuple(name for name in HYBRIDS + VARIANTS if name != "granite-attention")
PLAIN = tuple(name for name in ARCHITECTURES if name not in HYBRIDS + VARIANTS)


def make_model(name: str, seed: int) -> PreTrainedModel:
    """A float64 model whose every tensor is random and matters."""
    model = ARCHITECTURES[name].model_class(ARCHITECTURES[name].config()).double().eval()
    generator = torch.Generator().manual_seed(1000 * seed + list(ARCHITECTURES).index(name))
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            draw_parameter(key, parameter, generator, tied)
            if "Qwen3_5" in type(model).__name__ and "norm" in key and "linear_attn" not in key:
                parameter.sub_(1.0)  # these norms multiply by 1 + weight
    return model


def draw_parameter(
    key: str, parameter: torch.Tensor, generator: torch.Generator, tied: bool = False
) -> None:
    """Random values of a size that suits the parameter."""
    if key.endswith("A_log"):
        parameter.uniform_(0.0, 1.5, generator=generator)  # so that states last a few tokens
    elif "norm" in key or key.endswith(".D"):
        parameter.uniform_(0.5, 1.5, generator=generator)
    elif key.endswith("bias"):
        parameter.normal_(0.0, 0.3, generator=generator)
    elif "conv.conv" in key or "conv1d" in key:
        parameter.normal_(0.0, 0.5, generator=generator)
    elif "embed_tokens" in key:
        # A tied matrix also makes the logits: large values keep the best two apart.
        parameter.normal_(0.0, 0.35 if tied else 1.0, generator=generator)
    else:
        parameter.normal_(0.0, 0.5 if "lm_head" in key else 0.15, generator=generator)


def save_checkpoint(
    folder: Path, name: str, seed: int = 0, dtype: str = "float32", max_shard_size: str = "5GB"
) -> Path:
    make_model(name, seed).to(getattr(torch, dtype)).save_pretrained(
        folder, max_shard_size=max_shard_size
    )
    return folder


def write_llama(folder: Path, seed: int, dtype: str = "float64", **changes: Any) -> Path:
    """A Llama of two layers as transformers initialises it, with larger weights than usual, so that
    its answers do not repeat themselves; bos and eos only where `changes` name them."""
    config: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**config | changes))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def write_cuda_llama(folder: Path, dtype: str) -> Path:
    """A Llama of sizes that the GPU kernels support."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8}
    sizes |= {"num_hidden_layers": 3, "max_position_embeddings": 512}
    return write_llama(folder, seed=3, dtype=dtype, vocab_size=256, **sizes)


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; a value of None removes the key."""
    content = json.loads(path.read_text())
    for key, value in changes.items():
        content.pop(key, None) if value is None else content.update({key: value})
    path.write_text(json.dumps(content, indent=2))


def copy_with_old_config(source: Path, target: Path, rope_type_key: str = "rope_type") -> Path:
    """The same weights with a config.json as transformers 4 wrote it.

    rope_type_key: early releases wrote "type"
    """
    shutil.copytree(source, target)
    path = target / "config.json"
    config = json.loads(path.read_text())
    rope = dict(config["rope_parameters"])
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    edit_json(
        path,
        rope_parameters=None,
        dtype=None,
        layer_types=None,
        rope_theta=theta,
        torch_dtype=config["dtype"],
        transformers_version="4.40.0",
    )
    if kind != "default":
        edit_json(path, rope_scaling={rope_type_key: kind, **rope})
    return target


def copy_with_eos(source: Path, target: Path, eos_token_id: int | list[int]) -> Path:
    """The same checkpoint with other end-of-text tokens, in both configs."""
    shutil.copytree(source, target)
    edit_json(target / "config.json", eos_token_id=eos_token_id)
    if (target / "generation_config.json").exists():
        edit_json(target / "generation_config.json", eos_token_id=eos_token_id)
    return target


def as_multimodal(source: Path, folder: Path) -> Path:
    """The same Qwen3.5 as hub checkpoints have it: beside a vision tower and an MTP head."""
    folder.mkdir()
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    tensors["model.visual.patch_embed.proj.weight"] = torch.ones(2, 2)
    tensors.setdefault("mtp.layers.0.input_layernorm.weight", torch.ones(3))
    save_file(tensors, folder / "model.safetensors")
    inner = json.loads((source / "config.json").read_text())
    outer = {"dtype": inner.pop("dtype"), "eos_token_id": None, "vision_config": {"depth": 1}}
    names = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    (folder / "config.json").write_text(json.dumps(outer | names | {"text_config": inner}))
    return folder


class CheckpointStore:
    """Checkpoints made on first use, once per session."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def get(self, name: str, seed: int = 0, dtype: str = "float32") -> Path:
        folder = self.root / f"{name}-{seed}-{dtype}"
        if not folder.exists():
            save_checkpoint(folder, name, seed, dtype)
        return folder

    def scratch(self, label: str) -> Path:
        """A path that does not exist yet, for a changed copy."""
        number = len(list(self.root.iterdir()))
        return self.root / f"scratch-{number}-{label}"
