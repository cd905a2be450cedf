"""Tiny GGUF files, written as llama.cpp writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, FEED_FORWARD, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS = 64, 96, 4, 2, 2
HEAD_DIM = HIDDEN // NUM_HEADS
BYTE_LETTERS = [chr(code) for code in range(ord("!"), ord("~") + 1)]
TOKENS = ["<|bos|>", "<|eos|>", *BYTE_LETTERS, "Ġ", "ab", "<user>", "Ċ"]
TYPES = [3, 3, *[1] * len(BYTE_LETTERS), 1, 1, 4, 1]
LLAMA_CPP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

Tensors = dict[str, np.ndarray]


def random_tensors(bias: bool = False, head_norms: bool = False, head: bool = False) -> Tensors:
    """A tiny model under Hugging Face names."""
    generator = np.random.default_rng(0)
    kv_size = NUM_KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(TOKENS), HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if head:
        shapes["lm_head.weight"] = (len(TOKENS), HIDDEN)
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
            prefix + "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            prefix + "self_attn.k_proj.weight": (kv_size, HIDDEN),
            prefix + "self_attn.v_proj.weight": (kv_size, HIDDEN),
            prefix + "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            prefix + "mlp.gate_proj.weight": (FEED_FORWARD, HIDDEN),
            prefix + "mlp.up_proj.weight": (FEED_FORWARD, HIDDEN),
            prefix + "mlp.down_proj.weight": (HIDDEN, FEED_FORWARD),
        }
        if bias:
            shapes[prefix + "self_attn.q_proj.bias"] = (HIDDEN,)
            shapes[prefix + "self_attn.k_proj.bias"] = (kv_size,)
            shapes[prefix + "self_attn.v_proj.bias"] = (kv_size,)
        if head_norms:
            shapes[prefix + "self_attn.q_norm.weight"] = (HEAD_DIM,)
            shapes[prefix + "self_attn.k_norm.weight"] = (HEAD_DIM,)
    return {
        name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }


def llama_cpp_name(name: str) -> str:
    if name in LLAMA_CPP_NAMES:
        return LLAMA_CPP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{LLAMA_CPP_NAMES[part]}.{kind}"


def llama_cpp_rotation(name: str, tensor: np.ndarray) -> np.ndarray:
    """llama.cpp stores the two halves of each rotary head interleaved."""
    if ".q_proj." in name:
        num_heads = NUM_HEADS
    elif ".k_proj." in name:
        num_heads = NUM_KV_HEADS
    else:
        return tensor
    halves = tensor.reshape(num_heads, 2, HEAD_DIM // 2, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages[0].content }}")


def write_gguf(
    path: Path,
    tensors: Tensors,
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    add_tokenizer(writer)
    more(writer)
    for name, tensor in tensors.items():
        stored = llama_cpp_rotation(name, tensor) if architecture == "llama" else tensor
        new_name = llama_cpp_name(name) if name in tensors and "." in name else name
        if tensor.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(new_name, gguf.quants.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(new_name, stored)
    return _finish(writer, path)


def write_tiny_gguf(path: Path) -> Path:
    """One layer of four dimensions and two tokens."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(4)
    writer.add_feed_forward_length(4)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b"])
    square, vector = np.eye(4, dtype=np.float32), np.ones(4, dtype=np.float32)
    writer.add_tensor("token_embd.weight", square)
    writer.add_tensor("output_norm.weight", vector)
    for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{part}.weight", square)
    for part in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{part}.weight", vector)
    return _finish(writer, path)


def _finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ---- fields of a SentencePiece tokenizer ----

SPM_TOKENS = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
SPM_PIECES = {
    "▁": -9.0, "h": -9.1, "e": -9.2, "l": -9.3, "o": -9.4, "w": -9.5, "r": -9.6, "d": -9.7,
    "lo": -1.0, "▁h": -2.0, "el": -2.5, "he": -3.0, "▁he": -3.5, "llo": -4.0, "▁hello": -5.0,
    "hel": -5.5, "or": -6.0, "wor": -6.5, "▁wor": -7.0, "ld": -7.5,
}  # fmt: skip


def spm_fields(**more: Any) -> dict[str, Any]:
    fields = {
        "model": "llama",
        "tokens": [*SPM_TOKENS, *SPM_PIECES],
        "scores": [0.0] * len(SPM_TOKENS) + list(SPM_PIECES.values()),
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(SPM_PIECES)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
