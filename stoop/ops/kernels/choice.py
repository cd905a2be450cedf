"""Who serves a tensor: a kernel or the torch reference."""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def interpreted() -> bool:
    """Whether Triton's interpreter runs kernels on a CPU, as its tests do."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" or (device.type == "cpu" and interpreted())


def uses_kernels(tensor: Tensor) -> bool:
    """Kernels compute in float32, so float64 is left to torch; integers are served."""
    known = tensor.dtype in KERNEL_DTYPES or not tensor.dtype.is_floating_point
    return known and not _off and has_kernels(tensor.device)


_off = 0  # how many of the blocks below are open


@contextmanager
def without_kernels() -> Iterator[None]:
    """Leave all to torch, as training has to: kernels have no gradients."""
    global _off
    _off += 1
    try:
        yield
    finally:
        _off -= 1


# Where kernels are only compiled, they are for an H200.


@functools.cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel can be launched before the one before it has ended: from Hopper on."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def has_large_tiles(device: torch.device) -> bool:
    """Whether a program can have as much shared memory as on an H200, 227 KB; consumer GPUs have
    99."""
    if device.type != "cuda":
        return True
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return bool(driver.active.utils.get_device_properties(index)["max_shared_mem"] >= 227 * 1024)
