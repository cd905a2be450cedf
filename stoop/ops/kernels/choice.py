"""Whether a tensor is served by a kernel or by the torch reference, and what the device can do."""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CONV_WIDTHS = range(2, 9)  # of causal convolutions
LEAST_DELTA_DIM = 16  # of a delta net's keys and values by head
DELTA_CHUNK = 64  # tokens of a prompt that a delta net's scan takes at once


@functools.cache
def interpreted() -> bool:
    """Whether Triton's interpreter runs kernels on a CPU, as in tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def has_kernels(device: torch.device) -> bool:
    """Whether kernels can run on a device."""
    return device.type == "cuda" or (device.type == "cpu" and interpreted())


def uses_kernels(tensor: Tensor) -> bool:
    """Whether a kernel serves an operation on this tensor.

    Kernels compute in float32, so float64 is left to torch; integers are served.
    """
    if _off or not (tensor.is_cuda or interpreted()):  # the cheap way to leave on a CPU
        return False
    if not has_kernels(tensor.device):
        return False
    return tensor.dtype in KERNEL_DTYPES or not tensor.dtype.is_floating_point


def serves_delta_dim(size: int) -> bool:
    return size >= LEAST_DELTA_DIM and size & (size - 1) == 0


_off = 0  # how many `without_kernels` blocks are open


@contextmanager
def without_kernels() -> Iterator[None]:
    """Use references only, as training must: kernels have no gradients."""
    global _off
    _off += 1
    try:
        yield
    finally:
        _off -= 1


# Without a GPU, kernels are only compiled, and the target is an H200.


@functools.cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel can start before its predecessor has ended: from Hopper on."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def has_large_tiles(device: torch.device) -> bool:
    """Whether a program can have as much shared memory as on an H200, 227 KB. Consumer GPUs have
    99 KB."""
    if device.type != "cuda":
        return True
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return bool(driver.active.utils.get_device_properties(index)["max_shared_mem"] >= 227 * 1024)
