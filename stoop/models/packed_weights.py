"""Loading matrices that stay quantised, and keeping them as the kernels want them.

The first start repacks a checkpoint's blocks and writes the result beside it. Later starts map that
file: nothing is copied, and only what is used is read.
"""

import json
import logging
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from stoop.checkpoint.cache import read_manifest
from stoop.checkpoint.weights import WeightReader
from stoop.layers.norm import RMSNorm
from stoop.layers.weights import MatrixLayer, WeightView
from stoop.models.base import Module
from stoop.ops.packed import Q8_0, common_format, with_input_bits

log = logging.getLogger(__name__)

FILE = "packed.safetensors"
KEY = "stoop.packed"  # of the file's metadata
VERSION = 2  # of the layout of packed matrices


def store_quantized(module: Module, reader: WeightReader, activation_bits: int) -> None:
    """Give each matrix the packed format of its parts in the checkpoint. Call before allocation.

    A matrix with a part that has no packed format, or odd sizes, stays dense.
    """
    use_kernels_for_norms(module)
    parts: dict[MatrixLayer, list[WeightView]] = defaultdict(list)
    for view in module.weight_views():
        if view.layer is not None:
            parts[view.layer].append(view)
    for layer, views in parts.items():
        found = [reader.quantized(view.name) for view in views]
        scheme = common_format([rows.kind if rows else "" for rows in found])
        if scheme is not None and scheme.fits([view.shape[0] for view in views], layer.num_inputs):
            layer.store_as(torch.float32, with_input_bits(scheme, activation_bits))


def store_in_8_bits(module: Module, activation_bits: int) -> None:
    """Round the matrices of a draft head, which can only change what it drafts."""
    use_kernels_for_norms(module)
    for layer in cast(nn.Module, module).modules():
        if not isinstance(layer, MatrixLayer) or not layer.num_outputs:
            continue
        if Q8_0.fits([layer.num_outputs], layer.num_inputs):
            layer.store_as(torch.float32, with_input_bits(Q8_0, activation_bits))


def use_kernels_for_norms(module: Module) -> None:
    """Compute the norms of a model with packed matrices by the kernels that serve those."""
    for layer in cast(nn.Module, module).modules():
        if isinstance(layer, RMSNorm):
            layer.packed = True


def map_saved(module: Module, folder: Path, origin: dict[str, Any]) -> bool:
    """Fill a module on the meta device from the file of an earlier start, if there is one.

    origin: of the weights in the folder, from `find_origin`
    """
    from safetensors import SafetensorError, safe_open

    path = folder / FILE
    if not path.is_file():
        return False
    wanted = dict(cast(nn.Module, module).named_parameters())
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            if json.loads((file.metadata() or {}).get(KEY, "null")) != origin:
                return False
            found = {name: file.get_tensor(name) for name in wanted}
    except (SafetensorError, OSError, ValueError) as error:
        log.warning("%s cannot be used (%s) and is written again", path, error)
        return False
    for name, tensor in found.items():
        if tensor.shape != wanted[name].shape or tensor.dtype != wanted[name].dtype:
            return False
    for name, tensor in found.items():
        owner, _, attribute = name.rpartition(".")
        parameter = nn.Parameter(tensor, requires_grad=False)
        setattr(cast(nn.Module, module).get_submodule(owner), attribute, parameter)
    return True


def save(module: Module, folder: Path, origin: dict[str, Any]) -> None:
    """Write the file for later starts. A folder that cannot be written is left alone.

    origin: of the weights that were packed, taken before they were read
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = folder / FILE
    tensors = {name: each.data for name, each in cast(nn.Module, module).named_parameters()}
    try:
        with tempfile.TemporaryDirectory(prefix=f".{FILE}-", dir=folder) as workshop:
            fresh = Path(workshop) / FILE
            save_file(tensors, fresh, metadata={KEY: json.dumps(origin)})
            os.replace(fresh, path)  # other processes see it complete or not at all
    except (SafetensorError, OSError) as error:
        log.info("%s cannot be written (%s): the next start packs weights again", path, error)


def find_origin(folder: Path) -> dict[str, Any]:
    """What a file of packed weights is made from: it is stale if this changes."""
    manifest = read_manifest(folder) or {}
    states = {file.name: file.stat() for file in sorted(folder.glob("model*.safetensors"))}
    files = [[name, state.st_size] for name, state in states.items()]
    return {"version": VERSION, "source": manifest.get("source"), "files": files}
