"""Random quantised blocks, and tiny GGUF files whose matrices can stay quantised."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from stoop.core.quantized import BLOCKS, QuantizedRows
from stoop.ops.packed import FORMATS, Packed, common_format
from stoop.ops.weight import Weight

KINDS = tuple(BLOCKS)
# What scales may be: zeros, subnormal numbers, negative and large ones
EXTREMES = (0.0, -0.0, 6e-8, -6e-8, 5e-5, -0.01, 1.0, -3.0, 30000.0, -65504.0)
Random = np.random.Generator


def _halves(shape: Sequence[int], source: Random, extreme: bool, size: float) -> np.ndarray:
    """[..., 2] uint8: float16 numbers around `size`"""
    numbers = source.uniform(0.5, 1.5, shape) * size
    if extreme:
        numbers = source.choice(EXTREMES, shape)
    return numbers.astype(np.float16)[..., None].view(np.uint8)


def random_rows(
    kind: str, outputs: int, inputs: int, source: Random, extreme: bool = False
) -> np.ndarray:
    """[outputs, bytes of a row] uint8; unless `extreme`, of values around 0.15 and both signs"""
    values, num_bytes = BLOCKS[kind]
    assert inputs % values == 0, (kind, inputs)
    raw = source.integers(0, 256, (outputs, inputs // values, num_bytes), dtype=np.uint8)
    places = {"Q4_0": (0,), "Q4_1": (0,), "Q8_0": (0,), "Q4_K": (0,), "Q6_K": (208,)}[kind]
    size = {"Q4_0": 0.033, "Q4_1": 0.033, "Q8_0": 0.002, "Q4_K": 0.001, "Q6_K": 0.0001}[kind]
    for place in places:
        raw[..., place : place + 2] = _halves(raw.shape[:2], source, extreme, size)
    if kind in ("Q4_1", "Q4_K"):  # minima, which Q4_K subtracts
        size *= -7.5 if kind == "Q4_1" else 7.5
        raw[..., 2:4] = _halves(raw.shape[:2], source, extreme, size)
    return raw.reshape(outputs, -1)


def dequantized(kind: str, rows: np.ndarray) -> Tensor:
    """By the gguf package."""
    return torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]))


@dataclass(frozen=True)
class Matrix:
    """A packed matrix, and what the gguf package reads from the same blocks."""

    weight: Weight
    dense: Tensor

    @property
    def scheme(self) -> Packed:
        assert isinstance(self.weight.scheme, Packed)
        return self.weight.scheme

    def magnitude(self, x: Tensor) -> Tensor:
        """[tokens, outputs] float64: the sum of the magnitudes of what a product adds up"""
        groups = self.scheme.unpack(self.weight)
        size = self.dense.shape[1] // groups.scales.shape[1]
        weights = (groups.codes.abs() + (8 if self.scheme.bits == 4 else 0)).double()
        scales = groups.scales.double().abs().repeat_interleave(size, dim=1)
        weights = weights * scales
        if groups.minima is not None:
            weights = weights + groups.minima.double().abs().repeat_interleave(size, dim=1)
        return x.double().abs() @ weights.T


def make_matrix(
    kinds: Sequence[str], outputs: int, inputs: int, seed: int = 0, extreme: bool = False
) -> Matrix:
    """Parts of these kinds, each of so many outputs, one below the other."""
    source = np.random.default_rng(seed)
    scheme = common_format(kinds)
    assert scheme is not None
    weight = scheme.empty(outputs * len(kinds), inputs, torch.float32)
    dense = []
    for place, kind in enumerate(kinds):
        rows = random_rows(kind, outputs, inputs, source, extreme)
        part = weight.rows(place * outputs, outputs)
        scheme.store(part, QuantizedRows(kind, torch.from_numpy(rows)))
        dense.append(dequantized(kind, rows))
    return Matrix(weight, torch.cat(dense))


EVERY_FORMAT = [
    *([kind] for kind in FORMATS),
    ["Q4_0", "Q4_1"],
    ["Q8_0", "Q4_K"],
    ["Q6_K", "Q4_1", "Q4_K"],
]


# ---- whole models ----


@dataclass(frozen=True)
class Sizes:
    hidden: int = 64
    intermediate: int = 96
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    num_layers: int = 3
    vocab: int = 160


def one_kind(kind: str) -> Callable[[str], str]:
    return lambda _: kind


def mixed_kinds(name: str) -> str:
    """q, k and v of different kinds, also gate and up."""
    for part, kind in (("attn_k", "Q8_0"), ("attn_v", "Q4_1"), ("ffn_up", "Q4_1")):
        if part in name:
            return kind
    return "Q8_0" if "output" in name or "embd" in name else "Q4_0"


def write_packable_gguf(
    path: Path,
    kind_of: Callable[[str], str] = mixed_kinds,
    architecture: str = "llama",
    sizes: Sizes | None = None,
    seed: int = 0,
) -> Path:
    """A model under llama.cpp's names. kind_of: the type of a matrix by its name"""
    sizes = sizes or Sizes()
    source = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(sizes.num_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(sizes.hidden)
    writer.add_feed_forward_length(sizes.intermediate)
    writer.add_head_count(sizes.num_heads)
    writer.add_head_count_kv(sizes.num_kv_heads)
    writer.add_key_length(sizes.head_dim)
    writer.add_value_length(sizes.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    tokens = ["<|bos|>", "<|eos|>", *letters, "Ġ", "Ċ"]
    tokens += [f"<extra{n}>" for n in range(sizes.vocab - len(tokens))]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * 96, *[4] * (sizes.vocab - 98)])
    writer.add_token_merges([])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)

    def norm(name: str, width: int = sizes.hidden) -> None:
        values = source.uniform(0.5, 1.5, width).astype(np.float32)
        writer.add_tensor(f"{name}.weight", values)

    def matrix(name: str, outputs: int, inputs: int) -> None:
        kind = kind_of(name)
        if kind == "F32":
            values = (0.15 * source.standard_normal((outputs, inputs))).astype(np.float32)
            writer.add_tensor(f"{name}.weight", values)
            return
        rows = random_rows(kind, outputs, inputs, source)
        code = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=code)

    matrix("token_embd", sizes.vocab, sizes.hidden)
    matrix("output", sizes.vocab, sizes.hidden)
    norm("output_norm")
    q_size, kv_size = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    for layer in range(sizes.num_layers):
        prefix = f"blk.{layer}."
        norm(prefix + "attn_norm")
        norm(prefix + "ffn_norm")
        for part, width in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            matrix(f"{prefix}attn_{part}", width, sizes.hidden)
            if architecture == "qwen2":
                values = (0.3 * source.standard_normal(width)).astype(np.float32)
                writer.add_tensor(f"{prefix}attn_{part}.bias", values)
        if architecture == "qwen3":
            norm(prefix + "attn_q_norm", sizes.head_dim)
            norm(prefix + "attn_k_norm", sizes.head_dim)
        matrix(prefix + "attn_output", sizes.hidden, q_size)
        matrix(prefix + "ffn_gate", sizes.intermediate, sizes.hidden)
        matrix(prefix + "ffn_up", sizes.intermediate, sizes.hidden)
        matrix(prefix + "ffn_down", sizes.hidden, sizes.intermediate)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
