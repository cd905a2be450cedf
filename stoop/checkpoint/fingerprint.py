"""Recognises weights in any number format by a small sample.

The same model comes as bfloat16, as float16, and as GGUF files of many quantisations, so hashes of
files are useless. But every format keeps the norms, up to the rounding of bfloat16, and changes a
matrix by a few percent at most. So the sample has

- the sizes in config.json, which rule out most models before any weights are read;
- values of norms, which must agree to the rounding of bfloat16. Training a model further moves
  them, so that a fine-tune, or the base model of an instruct model, differs here;
- values of matrices and embeddings, which must agree up to the error of a 4-bit quantisation. They
  differ in a model with another or a permuted vocabulary, and in any other model of the same shape.

It cannot tell weights apart whose norms were frozen or did not move by one step of bfloat16 (merged
LoRA adapters, a short training at a small learning rate) and whose matrices moved by less than the
quantisation error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stoop.checkpoint.weights import WeightReader
from stoop.config.errors import CheckpointError

FORMAT_VERSION = 1
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
NUM_LAYERS = 6
NUM_VECTOR_VALUES = 48
NUM_ROWS, NUM_COLUMNS = 4, 16
# bfloat16 has 8 significant bits: this is the largest relative error of rounding, and one step to
# the next value is larger. The absolute tolerance is for values that float16 rounds to zero.
VECTOR_TOLERANCE, LEAST_VALUE = 2.0**-8, 1e-6
# Norm of the difference over norm of the sample. A Q4_0 and a Q4_1 file of one model differ by
# 0.13, a Q8_0 file and bfloat16 by 0.006, two models by 1 or more.
MATRIX_TOLERANCE = 0.25


def take_fingerprint(folder: Path) -> dict[str, Any]:
    """A sample of the weights in a folder, to be kept as JSON."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layers = _spread(config["num_hidden_layers"], NUM_LAYERS)
    prefixes = [f"model.layers.{layer}" for layer in layers]
    norms = ("input_layernorm", "post_attention_layernorm")
    vectors = ["model.norm.weight", *(f"{p}.{norm}.weight" for p in prefixes for norm in norms)]
    projections = ("self_attn.v_proj", "mlp.down_proj")
    matrices = ["model.embed_tokens.weight"]
    matrices += [f"{p}.{projection}.weight" for p in prefixes for projection in projections]
    with WeightReader(folder) as reader:
        return {
            "format": FORMAT_VERSION,
            "sizes": {key: config[key] for key in SIZES},
            "vectors": {name: _vector(reader, name, NUM_VECTOR_VALUES) for name in vectors},
            "matrices": {
                name: [
                    # Four digits are more than the precision of a quantised value.
                    [float(f"{value:.4g}") for value in row]
                    for row in _matrix(reader, name, NUM_ROWS, NUM_COLUMNS)
                ]
                for name in matrices
            },
        }


def matches(fingerprint: dict[str, Any], folder: Path) -> bool:
    """Whether the weights in `folder` are those that the fingerprint was taken from.

    Reads a few kilobytes. A folder that cannot be read does not match; loading it reports why.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if fingerprint["format"] != FORMAT_VERSION:
            return False
        sizes = fingerprint["sizes"].items()
        if any(config.get(key) not in (size, None) for key, size in sizes):
            return False
        with WeightReader(folder) as reader:
            vectors, matrices = fingerprint["vectors"], fingerprint["matrices"]
            return all(
                _same_vector(_vector(reader, name, len(kept)), kept)
                for name, kept in vectors.items()
            ) and all(
                _same_matrix(_matrix(reader, name, len(kept), len(kept[0])), kept)
                for name, kept in matrices.items()
            )
    except (CheckpointError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return False
    except RecursionError:  # config.json is nested too deeply
        return False


def _spread(size: int, count: int) -> list[int]:
    """Evenly spaced indices from the first to the last."""
    count = min(size, count)
    return [place * (size - 1) // max(count - 1, 1) for place in range(count)]


def _vector(reader: WeightReader, name: str, count: int) -> list[float]:
    (size,) = reader.shape(name)
    values: list[float] = reader.tensor(name)[_spread(size, count)].double().tolist()
    return values


def _matrix(reader: WeightReader, name: str, rows: int, columns: int) -> list[list[float]]:
    num_rows, num_columns = reader.shape(name)
    found = reader.rows(name, _spread(num_rows, rows))
    values: list[list[float]] = found[:, _spread(num_columns, columns)].double().tolist()
    return values


def _same_vector(found: Sequence[float], kept: Sequence[float]) -> bool:
    return len(found) == len(kept) and all(
        abs(value - wanted) <= max(VECTOR_TOLERANCE * abs(wanted), LEAST_VALUE)
        for value, wanted in zip(found, kept, strict=True)
    )


def _same_matrix(found: Sequence[Sequence[float]], kept: Sequence[Sequence[float]]) -> bool:
    if [len(row) for row in found] != [len(row) for row in kept]:
        return False
    pairs = [pair for rows in zip(found, kept, strict=True) for pair in zip(*rows, strict=True)]
    error = sum((value - wanted) ** 2 for value, wanted in pairs)
    return error <= MATRIX_TOLERANCE**2 * sum(wanted**2 for _, wanted in pairs)
