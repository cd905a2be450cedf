"""GGUF files of hybrid families: tensor names, and a config.json from the metadata.

A layer is recurrent if its number of KV heads is 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoop.checkpoint.gguf_layout import (
    Change,
    GGUFContents,
    GGUFLayout,
    ModelFields,
    depthwise,
    flat,
)
from stoop.config.errors import CheckpointError
from stoop.models.decoder_gguf import (
    LAYER_NAMES,
    OUTER_NAMES,
    decoder_config,
    is_recurrent,
    paired_heads,
    refuse_experts,
)

if TYPE_CHECKING:
    import numpy as np

ATTENTION_PARTS = ("attn_q", "attn_k", "attn_v", "attn_output")
COMMON_PARTS = ("attn_norm", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


def _layer_types(fields: ModelFields, recurrent: str) -> list[str]:
    layers = range(fields.number("block_count"))
    return [recurrent if is_recurrent(layer, fields) else "full_attention" for layer in layers]


# ---- LFM2 ----

CONV_PARTS = ("shortconv.conv", "shortconv.in_proj", "shortconv.out_proj")


def _lfm2_parts(layer: int, fields: ModelFields) -> tuple[str, ...]:
    if is_recurrent(layer, fields):
        return CONV_PARTS
    return (*ATTENTION_PARTS, "attn_q_norm", "attn_k_norm")


def _lfm2_config(file: GGUFContents) -> dict[str, Any]:
    base = decoder_config(file, "Lfm2ForCausalLM", "lfm2")
    return base | {
        "norm_eps": base["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,  # the file has the size as adjusted
        "conv_L_cache": file.fields.number("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in file.shapes),
        "layer_types": _layer_types(file.fields, "conv"),
    }


LFM2_LAYOUT = GGUFLayout(
    "lfm2",
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "token_embd_norm.weight": "model.embedding_norm.weight",  # llama.cpp's name; it is the last
        "output.weight": "lm_head.weight",
    },
    {
        "attn_norm": "operator_norm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
    },
    ("token_embd.weight", "token_embd_norm.weight", *COMMON_PARTS),
    _lfm2_config,
    check=refuse_experts,
    changes={"shortconv.conv.weight": Change(depthwise)},
    needed_in_layer=_lfm2_parts,
)


# ---- Granite 4.0 H ----

MAMBA_NAMES = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
MLP_NAMES = {
    "ffn_gate": "shared_mlp.input_linear",
    "ffn_up": "shared_mlp.input_linear",
    "ffn_down": "shared_mlp.output_linear",
}
MAMBA_VECTORS = {"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"}


# llama.cpp's converter writes this length for models without rotary embeddings, whatever their
# config says; those that IBM released were trained on the other.
CONTEXT_WRITTEN, CONTEXT_TRAINED = 2**20, 131_072


def to_a_log(a: np.ndarray) -> np.ndarray:
    """Files have A = -exp(A_log)."""
    import numpy as np

    if not np.all(a < 0):
        raise CheckpointError(
            "this GGUF file has a tensor ssm_a that is not negative: download it again"
        )
    logs: np.ndarray = np.log(-a.astype(np.float64)).astype(np.float32)
    return logs


def _granite_parts(layer: int, fields: ModelFields) -> tuple[str, ...]:
    if is_recurrent(layer, fields):
        return (*MAMBA_NAMES, *MAMBA_VECTORS)
    return ATTENTION_PARTS


def _granite_config(file: GGUFContents) -> dict[str, Any]:
    fields, shapes = file.fields, file.shapes
    base = decoder_config(file, "GraniteMoeHybridForCausalLM", "granitemoehybrid")
    # llama.cpp has no field of its own for this.
    rotates = fields.get("rope.scaling.finetuned", True)
    context = base["max_position_embeddings"]
    if not rotates and context == CONTEXT_WRITTEN:
        context = CONTEXT_TRAINED
    inner_size, hidden_size = fields.number("ssm.inner_size"), base["hidden_size"]
    if inner_size % hidden_size:
        raise CheckpointError(
            f"this GGUF file has mamba layers of {inner_size} values, not a multiple of "
            f"{hidden_size}: use another file of this model"
        )
    return base | {
        "max_position_embeddings": context,
        "shared_intermediate_size": shapes["blk.0.ffn_up.weight"][0],
        "num_local_experts": 0,
        "layer_types": _layer_types(fields, "linear_attention"),
        "position_embedding_type": "rope" if rotates else "nope",
        "embedding_multiplier": _scale(fields, "embedding_scale"),
        "residual_multiplier": _scale(fields, "residual_scale"),
        "attention_multiplier": _scale(fields, "attention.scale", base["head_dim"] ** -0.5),
        "logits_scaling": _scale(fields, "logit_scale"),
        "mamba_n_heads": fields.number("ssm.time_step_rank"),
        "mamba_d_state": fields.number("ssm.state_size"),
        "mamba_d_conv": fields.number("ssm.conv_kernel"),
        "mamba_n_groups": fields.number("ssm.group_count"),
        "mamba_expand": inner_size // hidden_size,
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in shapes),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in shapes),
    }


def _scale(fields: ModelFields, key: str, default: float = 1.0) -> float:
    """0 stands for no scale."""
    return fields.real(key, default) or default


GRANITE_HYBRID_LAYOUT = GGUFLayout(
    "granitehybrid",
    OUTER_NAMES,
    LAYER_NAMES | MAMBA_NAMES | MLP_NAMES,
    ("token_embd.weight", "output_norm.weight", *COMMON_PARTS),
    _granite_config,
    check=refuse_experts,
    num_rotated_heads=paired_heads,
    whole_names=MAMBA_VECTORS,
    changes={
        "ssm_conv1d.weight": Change(depthwise),
        "ssm_norm.weight": Change(flat),
        "ssm_a": Change(flat, to_a_log),
        "ssm_d": Change(flat),
    },
    needed_in_layer=_granite_parts,
)
