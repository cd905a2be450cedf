"""Configs of the shapes that benchmarks know, and what may draft for them.

Commands name them in --help, so that nothing here imports torch.
"""

from dataclasses import dataclass
from typing import Any

from stoop.config.errors import ConfigError

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
