"""GGUF files of hybrid models, written as llama.cpp's converter writes them.

Names come from the gguf package's own table, so that they are not ours twice.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import PreTrainedModel

from support.gguf_files import BYTE_LETTERS

ARCHS = {
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
}
SPLIT_RULES = {"lfm2": "lfm2", "granitehybrid": "dbrx", "qwen35": "qwen35"}
MTP_TENSORS = {
    "mtp.fc": gguf.MODEL_TENSOR.NEXTN_EH_PROJ,
    "mtp.pre_fc_norm_embedding": gguf.MODEL_TENSOR.NEXTN_ENORM,
    "mtp.pre_fc_norm_hidden": gguf.MODEL_TENSOR.NEXTN_HNORM,
    "mtp.norm": gguf.MODEL_TENSOR.NEXTN_SHARED_HEAD_NORM,
}
GRANITE_CONTEXT = 1 << 20  # what llama.cpp writes for models without rotary embeddings
F32 = gguf.GGMLQuantizationType.F32
Named = Iterator[tuple[str, np.ndarray]]
Edit = Callable[[dict[str, np.ndarray]], None]


def write_hybrid_gguf(
    path: Path,
    model: PreTrainedModel,
    kind_of: Callable[[str], gguf.GGMLQuantizationType] = lambda name: F32,
    edit: Edit = lambda tensors: None,
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    mtp: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """kind_of: the type of a matrix by llama.cpp's name; edit: changes the tensors of the file

    mtp: the tensors of an MTP head, by the checkpoint's names
    """
    config = model.config
    arch = ARCHS[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    kinds = config.layer_types
    writer.add_block_count(len(kinds) + bool(mtp))
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    attends = [kind == "full_attention" for kind in kinds]
    if arch != gguf.MODEL_ARCH.QWEN35:
        writer.add_head_count_kv([config.num_key_value_heads * int(each) for each in attends])
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if arch == gguf.MODEL_ARCH.QWEN35:
        _add_qwen3_5(writer, config)
        if mtp:
            writer.add_nextn_predict_layers(1)
    elif arch == gguf.MODEL_ARCH.LFM2:
        writer.add_context_length(config.max_position_embeddings)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_shortconv_l_cache(config.conv_L_cache)
    else:
        _add_granite(writer, config)
    _add_tokens(writer, config.vocab_size)
    more(writer)
    parameters = {key: each.detach().float().numpy() for key, each in model.named_parameters()}
    tensors = dict(_tensors({**parameters, **(mtp or {})}, config, arch))
    edit(tensors)
    for name, values in tensors.items():
        kind = kind_of(name) if values.ndim == 2 and values.shape[1] % 32 == 0 else F32
        if kind == F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_granite(writer: gguf.GGUFWriter, config: Any) -> None:
    rotates = config.position_embedding_type == "rope"
    writer.add_context_length(config.max_position_embeddings if rotates else GRANITE_CONTEXT)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_rope_scaling_finetuned(rotates)


def _add_qwen3_5(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    rotated = config.rope_parameters["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(config.head_dim * rotated))
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)


def _add_tokens(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    tokens = ["<|bos|>", "<|eos|>", *BYTE_LETTERS, "Ġ", "Ċ"]
    count = len(tokens)
    tokens += [f"<extra{n}>" for n in range(vocab_size - count)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(SPLIT_RULES[writer.arch])
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (count - 2), *[4] * (vocab_size - count)])
    writer.add_token_merges([])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def _tensors(parameters: Mapping[str, np.ndarray], config: Any, arch: gguf.MODEL_ARCH) -> Named:
    num_layers = config.num_hidden_layers
    names = gguf.get_tensor_name_map(arch, num_layers + 1)
    for key, values in parameters.items():
        if config.tie_word_embeddings and key == "lm_head.weight":
            continue
        module, _, kind = key.rpartition(".")
        if module in MTP_TENSORS:
            name = gguf.TENSOR_NAMES[MTP_TENSORS[module]].format(bid=num_layers)
            yield f"{name}.{kind}", values + 1 if "norm" in module else values
            continue
        key = key.replace("mtp.layers.0.", f"model.layers.{num_layers}.")
        convert = _converted_qwen3_5 if arch == gguf.MODEL_ARCH.QWEN35 else _converted
        for name, part in convert(key, values, config):
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            yield found or name, np.ascontiguousarray(part)


def _converted_qwen3_5(key: str, values: np.ndarray, config: Any) -> Named:
    module, _, kind = key.rpartition(".")
    last = key.split(".")[-2] if kind in ("weight", "bias") else kind
    if "linear_attn" not in key:
        yield key, values + 1 if last.endswith("norm") else values
        return
    # The heads of the values in the file: 0, r, 2r ..., 1, r + 1, ... with r to a key head.
    num_heads = config.linear_num_value_heads
    apart = num_heads // config.linear_num_key_heads
    turns = [head for first in range(apart) for head in range(first, num_heads, apart)]

    def in_turns(heads: np.ndarray) -> np.ndarray:
        return np.concatenate([np.split(heads, num_heads)[head] for head in turns])

    if last in ("in_proj_qkv", "conv1d"):
        num_keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        rows = values.squeeze(1) if last == "conv1d" else values
        yield key, np.concatenate((rows[:num_keys], in_turns(rows[num_keys:])))
    elif last in ("in_proj_z", "in_proj_a", "in_proj_b"):
        yield key, in_turns(values)
    elif last == "out_proj":
        yield key, in_turns(values.T).T
    elif last == "A_log":
        yield key, in_turns(-np.exp(values))
    elif last == "dt_bias":
        yield f"{module}.dt_proj.bias", in_turns(values)
    else:
        assert last == "norm", key
        yield key, values


def _converted(key: str, values: np.ndarray, config: Any) -> Named:
    """What llama.cpp's converter does to a tensor, under a name of its table or the last one."""
    block = f"blk.{key.split('.')[2]}" if ".layers." in key else ""
    if key.endswith(("conv.conv.weight", "conv1d.weight")):
        yield key, values.squeeze(1)
    elif key.endswith(".A_log"):
        yield key, -np.exp(values)[:, None]
    elif key.endswith(".mamba.D"):
        yield key, values[:, None]
    elif key.endswith("mamba.norm.weight"):
        yield key, values.reshape(config.mamba_n_groups, -1)
    elif key.endswith(".dt_bias"):
        yield key.replace(".dt_bias", ".dt_proj.bias"), values
    elif key.endswith("shared_mlp.input_linear.weight"):
        gate, up = np.split(values, 2)
        yield f"{block}.ffn_gate.weight", gate
        yield f"{block}.ffn_up.weight", up
    elif key.endswith("shared_mlp.output_linear.weight"):
        yield f"{block}.ffn_down.weight", values
    elif key.split(".")[-2] in ("q_proj", "k_proj") and config.model_type != "lfm2":
        is_query = ".q_proj." in key
        num_heads = config.num_attention_heads if is_query else config.num_key_value_heads
        halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
        yield key, halves.swapaxes(1, 2).reshape(values.shape)
    else:
        yield key, values
