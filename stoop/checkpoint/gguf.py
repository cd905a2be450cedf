"""Converts a GGUF file to a folder in Hugging Face layout, the only kind that the engine loads.

Weights pass through memory one slice at a time: one safetensors file is written from front to back,
and no whole tensor is held.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from stoop.checkpoint.gguf_config import build_generation_config, token_ids
from stoop.checkpoint.gguf_file import GGUFFile, GGUFTensor
from stoop.checkpoint.gguf_layout import (
    Change,
    GGUFContents,
    GGUFLayout,
    HeadOrder,
    ModelFields,
    find_layout,
)
from stoop.checkpoint.gguf_tokenizer import build_tokenizer, build_tokenizer_config
from stoop.checkpoint.weights import QUANTIZED
from stoop.config.errors import CheckpointError
from stoop.config.values import MAX_SHOWN
from stoop.core.quantized import BLOCKS
from stoop.core.report import Report, quiet

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

# A model above this size in float32 is stored in bfloat16.
MAX_FLOAT32_BYTES = 4 << 30
# Values dequantised at once: enough to be fast, few enough to use little memory.
SLICE_ELEMENTS = 4 << 20

ROPE_FACTORS = "rope_freqs.weight"
MAX_ROPE_FACTORS = 4096  # one for every two dimensions of a head
LAYER_PATTERN = re.compile(r"blk\.(\d+)\.([\w.]+)")
ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
BYTES = "U8"  # a quantised tensor, as rows of blocks
TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the new file."""

    name: str
    sources: tuple[GGUFTensor, ...]  # stacked, if there are several
    type_name: str  # as safetensors writes it: F32, F16, BF16, or U8 if it stays quantised
    num_rotated_heads: int  # heads whose rows llama.cpp reordered; 0 for none
    change: Change | None
    head_order: HeadOrder | None

    @property
    def num_elements(self) -> int:
        return sum(source.num_elements for source in self.sources)

    @property
    def num_bytes(self) -> int:
        if self.type_name == BYTES:
            return sum(source.num_bytes for source in self.sources)
        return self.num_elements * ELEMENT_BYTES[self.type_name]

    @property
    def shape(self) -> list[int]:
        """In the new file."""
        first = self.sources[0]
        num_rows = sum(source.shape[0] for source in self.sources)
        if self.type_name == BYTES:
            return [num_rows, first.num_bytes // first.shape[0]]
        shape = (num_rows, *first.shape[1:])
        return list(shape if self.change is None else self.change.shape(shape))


def convert_gguf(
    source: Path,
    target: Path,
    report: Report | None = None,
    stage: str = "converting",
    packed: bool = False,
) -> None:
    """Write config, tokenizer and weights of a GGUF file into the folder `target`.

    packed: matrices of the types in `BLOCKS` stay quantised
    """
    with GGUFFile(source) as file:
        with _sound_metadata(source):
            plan = _plan_tensors(file, packed)
            texts = _describe_model(file, plan)
        target.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (target / name).write_text(text, encoding="utf-8")
        _write_weights(target / "model.safetensors", file, plan, partial(report or quiet, stage))


def converted_bytes(source: Path, packed: bool = False) -> int:
    """The size of a GGUF file's weights after conversion."""
    with GGUFFile(source) as file, _sound_metadata(source):
        return sum(tensor.num_bytes for tensor in _plan_tensors(file, packed))


def can_pack(source: Path) -> bool:
    """Whether most of a GGUF file's weights can stay quantised."""
    with GGUFFile(source) as file:
        kept = sum(tensor.num_elements for tensor in file.tensors if _stays(tensor))
        return 2 * kept > sum(tensor.num_elements for tensor in file.tensors)


def _describe_model(file: GGUFFile, plan: Sequence[PlannedTensor]) -> dict[str, str]:
    """The text files of the folder, by name."""
    metadata, fields = file.metadata, ModelFields(file.metadata)
    shapes = {tensor.name: tensor.shape for tensor in file.tensors}
    contents = GGUFContents(fields, shapes, _rope_factors(file))
    config = find_layout(fields).config(contents) | {"torch_dtype": _main_type(plan)}
    config |= token_ids(metadata)
    return {
        "config.json": _json_text(config),
        "generation_config.json": _json_text(build_generation_config(metadata)),
        "tokenizer_config.json": _json_text(build_tokenizer_config(metadata)),
        "tokenizer.json": build_tokenizer(metadata).to_str(),
    }


@contextmanager
def _sound_metadata(source: Path) -> Iterator[None]:
    """Turn the errors that fields of a wrong type cause into one sentence."""
    try:
        yield
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(
            f"{source} has unusable metadata ({type(error).__name__}: "
            f"{str(error)[:MAX_SHOWN]}): download it again"
        ) from error


def _plan_tensors(file: GGUFFile, packed: bool) -> list[PlannedTensor]:
    fields = ModelFields(file.metadata)
    layout = find_layout(fields)
    layout.check(fields)
    quantized_type = _quantized_type(file.tensors)
    sources: dict[str, list[GGUFTensor]] = {}
    for tensor in file.tensors:
        if tensor.name != ROPE_FACTORS:
            sources.setdefault(_new_name(tensor.name, layout, fields), []).append(tensor)
    plan = []
    for name, found in sources.items():
        parts = _in_order(name, found, layout)
        rest = _in_layer(parts[0].name)[1]
        change = layout.changes.get(rest or parts[0].name)
        order = _head_order(parts[0], layout.head_order(rest, fields))
        plan.append(
            PlannedTensor(
                name=name,
                sources=parts,
                type_name=_new_type(parts, change, order, packed) or quantized_type,
                num_rotated_heads=layout.num_rotated_heads(_part(parts[0].name), fields),
                change=change,
                head_order=order,
            )
        )
    _check_complete(file, layout, fields)
    # Wider elements first, so that every tensor in the file is aligned.
    return sorted(plan, key=lambda tensor: -ELEMENT_BYTES.get(tensor.type_name, 1))


def _new_name(name: str, layout: GGUFLayout, fields: ModelFields) -> str:
    if name in layout.outer_names:
        return layout.outer_names[name]
    layer, rest = _in_layer(name)
    own = layout.own_name(int(layer), rest, fields) if layer else None
    if own is not None:
        return own
    if rest in layout.whole_names:
        return f"{layout.layer_prefix}{layer}.{layout.whole_names[rest]}"
    part, _, kind = rest.rpartition(".")
    if part in layout.layer_names and kind in ("weight", "bias"):
        return f"{layout.layer_prefix}{layer}.{layout.layer_names[part]}.{kind}"
    raise CheckpointError(
        f"this GGUF file has a tensor {name[:MAX_SHOWN]!r} that no known model of its "
        "architecture has: use another file of this model"
    )


def _in_layer(name: str) -> tuple[str, str]:
    """A layer's number, and the name of one of its tensors; both empty outside layers."""
    match = LAYER_PATTERN.fullmatch(name)
    return (match[1], match[2]) if match else ("", "")


def _part(name: str) -> str:
    """The part of a layer that a tensor is; empty for tensors outside layers."""
    return _in_layer(name)[1].rpartition(".")[0]


def _in_order(
    name: str, tensors: Sequence[GGUFTensor], layout: GGUFLayout
) -> tuple[GGUFTensor, ...]:
    """The tensors that are stacked into one, as the layout orders them."""
    if len(tensors) == 1:
        return tuple(tensors)
    if len({tensor.shape[1:] for tensor in tensors}) > 1:
        raise CheckpointError(
            f"the parts of {name} have different shapes in this GGUF file: use another file of "
            "this model"
        )
    order = list(layout.layer_names)
    return tuple(sorted(tensors, key=lambda tensor: order.index(_part(tensor.name))))


def _head_order(tensor: GGUFTensor, order: HeadOrder | None) -> HeadOrder | None:
    if order is not None and not order.fits(tensor.shape):
        raise CheckpointError(
            f"tensor {tensor.name!r} of this GGUF file has shape {tensor.shape}, which does not "
            f"fit {order.num_heads} heads of {order.head_size}: use another file of this model"
        )
    if order is not None and len(tensor.shape) == 1 and _block_size(tensor) > 1:
        raise CheckpointError(
            f"tensor {tensor.name!r} of this GGUF file is a quantised vector, which no known model "
            "has: use another file of this model"
        )
    return order


def _new_type(
    sources: Sequence[GGUFTensor], change: Change | None, order: HeadOrder | None, packed: bool
) -> str | None:
    """None for the type that dequantised tensors get"""
    if change is not None and change.values is not None:
        return "F32"
    if len({source.type_code for source in sources}) > 1:
        return None
    moves_blocks = order is None or order.keeps_blocks(_block_size(sources[0]))
    if packed and change is None and moves_blocks and _stays(sources[0]):
        return BYTES
    return _kept_type(sources[0])


def _check_complete(file: GGUFFile, layout: GGUFLayout, fields: ModelFields) -> None:
    present = {tensor.name for tensor in file.tensors}
    # Stop at the first missing one: the number of layers is only what the file claims.
    missing = next((name for name in _needed(layout, fields) if name not in present), None)
    if missing is not None:
        raise CheckpointError(
            f"{file.path} lacks the tensor {missing!r}: if the model is split over several "
            "GGUF files, merge them with llama-gguf-split --merge"
        )


def _needed(layout: GGUFLayout, fields: ModelFields) -> Iterator[str]:
    yield from (name for name in layout.needed if name in layout.outer_names)
    for layer in range(fields.number("block_count")):
        for part in (*layout.needed, *layout.needed_in_layer(layer, fields)):
            if part in layout.layer_names:
                yield f"blk.{layer}.{part}.weight"
            elif part not in layout.outer_names:
                yield f"blk.{layer}.{part}"


def _kept_type(tensor: GGUFTensor) -> str | None:
    """The type of an unquantised tensor, which is kept; None if it is quantised."""
    import gguf

    kind = gguf.GGMLQuantizationType(tensor.type_code).name
    return kind if kind in ELEMENT_BYTES else None


def _block_size(tensor: GGUFTensor) -> int:
    """Values of a block; 1 if the tensor is not quantised."""
    import gguf

    size, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type_code)]
    return int(size)


def _stays(tensor: GGUFTensor) -> bool:
    """Whether it can stay quantised."""
    import gguf

    kind = gguf.GGMLQuantizationType(tensor.type_code).name
    return kind in BLOCKS and len(tensor.shape) == 2


def _quantized_type(tensors: Sequence[GGUFTensor]) -> str:
    float32_bytes = 4 * sum(tensor.num_elements for tensor in tensors)
    if float32_bytes <= MAX_FLOAT32_BYTES:
        return "F32"
    logger.info(
        "the model would take %.1f GiB in float32, so it is stored in bfloat16",
        float32_bytes / (1 << 30),
    )
    return "BF16"


def _main_type(plan: Sequence[PlannedTensor]) -> str:
    """The type of most elements."""
    counts = dict.fromkeys(ELEMENT_BYTES, 0)
    for tensor in plan:
        type_name = "F32" if tensor.type_name == BYTES else tensor.type_name
        counts[type_name] += tensor.num_elements
    return TORCH_NAMES[max(counts, key=lambda type_name: counts[type_name])]


def _rope_factors(file: GGUFFile) -> list[float] | None:
    for tensor in file.tensors:
        if tensor.name == ROPE_FACTORS:
            if tensor.num_elements > MAX_ROPE_FACTORS:
                raise CheckpointError(
                    f"{file.path} has {tensor.num_elements} rotary factors, more than a head has "
                    "dimensions: download it again"
                )
            return [float(value) for value in _dequantize(file.rows(tensor), tensor).ravel()]
    return None


def _write_weights(
    path: Path, file: GGUFFile, plan: Sequence[PlannedTensor], report: Callable[[int, int], None]
) -> None:
    """Write the safetensors file. report: called with the bytes done and the total"""
    total = sum(tensor.num_bytes for tensor in plan)
    done = 0
    report(done, total)
    with path.open("wb") as output:
        output.write(_header(plan))
        for tensor in plan:
            for piece in _pieces(file, tensor):
                _write_array(output, piece)
                done += piece.nbytes
                report(done, total)
    assert done == total, (done, total)


def _header(plan: Sequence[PlannedTensor]) -> bytes:
    """A safetensors header: its length, then JSON, padded to align the data."""
    import gguf

    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    kinds = {
        tensor.name: gguf.GGMLQuantizationType(tensor.sources[0].type_code).name
        for tensor in plan
        if tensor.type_name == BYTES
    }
    if kinds:
        entries["__metadata__"][QUANTIZED] = json.dumps(kinds)
    start = 0
    for tensor in plan:
        end = start + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": tensor.type_name,
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(file: GGUFFile, tensor: PlannedTensor) -> Iterator[np.ndarray]:
    """The tensor's values from front to back, one slice of rows at a time."""
    convert = None if tensor.change is None else tensor.change.values
    for source in tensor.sources:
        rows = file.rows(source)  # [rows, bytes of a row] uint8
        if tensor.num_rotated_heads:
            rows = _undo_rotation(rows, source, tensor.num_rotated_heads)
        order = tensor.head_order
        if order is not None and order.keeps_blocks(_block_size(source)):
            # A vector is one row in the file.
            rows = order.undo(rows.reshape(source.shape[0], -1)).reshape(rows.shape)
            order = None
        if convert is None and tensor.type_name in (BYTES, _kept_type(source)):
            yield rows
            continue
        rows_at_once = max(1, SLICE_ELEMENTS // source.shape[-1])
        for start in range(0, len(rows), rows_at_once):
            values = _dequantize(rows[start : start + rows_at_once], source)
            values = values if order is None else order.undo(values)
            values = values if convert is None else convert(values)
            yield values if tensor.type_name == "F32" else _to_bfloat16(values)


def _undo_rotation(rows: np.ndarray, source: GGUFTensor, num_heads: int) -> np.ndarray:
    """Reorder the rows of each head from llama.cpp's interleaved pairs to two halves.

    Quantised blocks lie within rows, so rows can be moved before they are dequantised.
    """
    shape = rows.shape
    # A bias is one row in the file, with one value per row of its matrix.
    rows = rows.reshape(source.shape[0], -1)
    if len(rows) % (2 * num_heads):
        raise CheckpointError(
            f"tensor {source.name!r} of this GGUF file has {len(rows)} rows for "
            f"{num_heads} heads: use another file of this model"
        )
    pairs = rows.reshape(num_heads, len(rows) // num_heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(shape)


def _dequantize(rows: np.ndarray, tensor: GGUFTensor) -> np.ndarray:
    """Turn rows of bytes into float32 [rows, row length]."""
    import gguf

    kind = gguf.GGMLQuantizationType(tensor.type_code)
    try:
        values: np.ndarray = gguf.quants.dequantize(rows, kind)
    except NotImplementedError as error:
        raise CheckpointError(
            f"tensor {tensor.name!r} of this GGUF file is quantised as {kind.name}, which cannot "
            "be loaded: use a file with another quantisation, such as Q8_0"
        ) from error
    return values


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    import gguf

    rounded: np.ndarray = gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16)
    return rounded


def _write_array(output: BinaryIO, array: np.ndarray) -> None:
    import numpy as np

    output.write(np.ascontiguousarray(array).data)


def _json_text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
