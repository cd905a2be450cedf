"""GGUF files of Qwen3.5: tensor names, and a config.json from the metadata.

llama.cpp stores norms with their 1 added, and the value heads of delta nets in turns: the first one
of every key head, then the second ones. An MTP head is the layer after the model's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoop.checkpoint.gguf_layout import (
    Change,
    GGUFContents,
    GGUFLayout,
    HeadOrder,
    ModelFields,
    depthwise,
    flat,
    same,
)
from stoop.config.errors import CheckpointError
from stoop.models.decoder_gguf import LAYER_NAMES, OUTER_NAMES, decoder_config, refuse_experts
from stoop.models.hybrid_gguf import ATTENTION_PARTS, to_a_log

if TYPE_CHECKING:
    import numpy as np

DEFAULT_INTERVAL = 4  # llama.cpp's, for files that do not say which layers have attention

DELTA_NAMES = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
DELTA_VECTORS = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
PART_NAMES = {part: name for part, name in LAYER_NAMES.items() if part != "ffn_norm"} | {
    "post_attention_norm": "post_attention_layernorm"
}
MTP_NAMES = {
    "nextn.eh_proj.weight": "mtp.fc.weight",
    "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "mtp.norm.weight",
}
# Those of delta nets multiply by the weight alone, in both formats.
NORMS = (
    *("output_norm.weight", "attn_norm.weight", "post_attention_norm.weight"),
    *("attn_q_norm.weight", "attn_k_norm.weight"),
    *(name for name in MTP_NAMES if name.endswith("norm.weight")),
)


def _less_one(weight: np.ndarray) -> np.ndarray:
    """Exact from 0.5 on. Smaller numbers come back to 3e-8, half of float32's spacing below 1."""
    return weight - 1.0


# ---- layers ----


def _num_mtp_layers(fields: ModelFields) -> int:
    return fields.number("nextn_predict_layers") if fields.get("nextn_predict_layers") else 0


def _num_layers(fields: ModelFields) -> int:
    """Without the MTP head's."""
    total, drafting = fields.number("block_count"), _num_mtp_layers(fields)
    if drafting >= total:
        raise CheckpointError(
            f"this GGUF file has {drafting} MTP layers among {total}: use one of the whole model"
        )
    return total - drafting


def _is_linear(layer: int, fields: ModelFields) -> bool:
    if layer >= _num_layers(fields):
        return False
    given = fields.get("attention.recurrent_layers")
    if given is None:
        key = "full_attention_interval"
        interval = DEFAULT_INTERVAL if fields.get(key) is None else fields.number(key)
        return (layer + 1) % interval != 0
    if not isinstance(given, list) or layer >= len(given):
        raise CheckpointError(
            "this GGUF file does not say of every layer whether it is recurrent: download it again"
        )
    return bool(given[layer])


def _parts(layer: int, fields: ModelFields) -> tuple[str, ...]:
    if _is_linear(layer, fields):
        return (*DELTA_NAMES, *DELTA_VECTORS)
    parts = (*ATTENTION_PARTS, "attn_q_norm", "attn_k_norm")
    return (*parts, *MTP_NAMES) if layer == _num_layers(fields) else parts


def _mtp_name(layer: int, name: str, fields: ModelFields) -> str | None:
    place = layer - _num_layers(fields)
    if place < 0:
        return None
    if place == 0 and name in MTP_NAMES:
        return MTP_NAMES[name]
    part, _, kind = name.rpartition(".")
    return f"mtp.layers.{place}.{PART_NAMES[part]}.{kind}" if part in PART_NAMES else None


# ---- delta nets ----


def _delta_sizes(fields: ModelFields) -> dict[str, int]:
    """By the names of config.json."""
    keys, values = fields.number("ssm.group_count"), fields.number("ssm.time_step_rank")
    inner_size = fields.number("ssm.inner_size")
    if values % keys or inner_size % values:
        raise CheckpointError(
            f"this GGUF file has {values} value heads for {keys} key heads and {inner_size} "
            "values, which cannot be shared out: use another file of this model"
        )
    return {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": fields.number("ssm.state_size"),
        "linear_value_head_dim": inner_size // values,
        "linear_conv_kernel_dim": fields.number("ssm.conv_kernel"),
    }


def _head_order(name: str, fields: ModelFields) -> HeadOrder | None:
    sizes = _delta_sizes(fields)
    groups, heads = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
    if groups == heads:
        return None
    size = sizes["linear_value_head_dim"]
    if name in ("attn_qkv.weight", "ssm_conv1d.weight"):
        num_before = 2 * groups * sizes["linear_key_head_dim"]  # queries and keys
        return HeadOrder(groups, heads, size, num_before)
    if name == "attn_gate.weight":
        return HeadOrder(groups, heads, size)
    if name == "ssm_out.weight":
        return HeadOrder(groups, heads, size, columns=True)
    if name in ("ssm_alpha.weight", "ssm_beta.weight", *DELTA_VECTORS):
        return HeadOrder(groups, heads, 1)
    return None


def _config(file: GGUFContents) -> dict[str, Any]:
    fields = file.fields
    base = decoder_config(file, "Qwen3_5ForCausalLM", "qwen3_5_text", partial_rotary=True)
    layers = range(_num_layers(fields))
    kinds = ["linear_attention" if _is_linear(n, fields) else "full_attention" for n in layers]
    return (
        base
        | _delta_sizes(fields)
        | {
            "num_hidden_layers": len(layers),
            "mtp_num_hidden_layers": _num_mtp_layers(fields),
            "layer_types": kinds,
            "partial_rotary_factor": fields.number("rope.dimension_count") / base["head_dim"],
        }
    )


QWEN3_5_LAYOUT = GGUFLayout(
    "qwen35",
    OUTER_NAMES,
    PART_NAMES | DELTA_NAMES,
    (
        *("token_embd.weight", "output_norm.weight", "attn_norm", "post_attention_norm"),
        *("ffn_gate", "ffn_up", "ffn_down"),
    ),
    _config,
    check=refuse_experts,
    whole_names=DELTA_VECTORS,
    changes={name: Change(same, _less_one) for name in NORMS}
    | {"ssm_conv1d.weight": Change(depthwise), "ssm_a": Change(flat, to_a_log)},
    head_order=_head_order,
    own_name=_mtp_name,
    needed_in_layer=_parts,
)
