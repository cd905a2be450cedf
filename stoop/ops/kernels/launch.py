"""How kernels are launched so that they overlap.

Programmatic dependent launch (PDL): a kernel starts while its predecessor still runs.

Before `wait_for_inputs` a kernel may only do what no earlier kernel can affect: compute its indices
and prefetch weights. Every program of a kernel launched this way must wait before it reads what
kernels produce and before it writes anything. After the wait all earlier kernels have ended, since
each of them waited for its own predecessor.

There is one exception: the kernels of a layer may read positions, lengths and page numbers before
they wait. The embedding lookup runs between them and the kernel that prepares a step or a draft
decode, and it lets its successor start only after it has waited itself. Such reads bypass the L1
cache (`load_early`) and go to L2, where the producer's writes are visible.
"""

import ctypes
import functools
import logging
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stoop.ops.kernels.choice import has_large_tiles, starts_early

log = logging.getLogger(__name__)
INTERPRETED = triton.knobs.runtime.interpret

# Shared memory and L1 cache of an SM are one memory. A kernel can ask for a split ("carveout"): so
# many percent for shared memory. Loads straight into registers need L1 while they are in flight. An
# SM changes its split only when it is idle, so neighbouring kernels that ask for different splits
# overlap less. GEMMs and attention ask; docs/performance.md has what each gains. The percentages
# are for an H200, whose SMs have 228 KB to share.
CACHE_FIRST = 14
BALANCED = 57
SHARED_FIRST = 100
_CARVEOUT_ATTRIBUTE = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_divided: set[int] = set()


def divide_memory(kernel: Any, percent: int) -> None:
    """Ask for a split of the SM's memory for all further launches of a kernel.

    kernel: what a launch returned. This is a hint: no result depends on it, and the driver may
    ignore it.
    """
    function = getattr(kernel, "function", None)
    if function is None or function in _divided:  # interpreted, or done before
        return
    _divided.add(function)
    if has_large_tiles(torch.device("cuda")):
        ask_division(function, percent)


def ask_division(function: int, percent: int) -> None:
    """Set the carveout of a driver function handle; percent -1 leaves it to the driver."""
    error = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), _CARVEOUT_ATTRIBUTE, percent)
    if error:
        log.debug("the driver refused a shared memory carveout: error %d", error)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")  # triton has loaded it


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Allow the next kernel to start once all programs of this one have reached this line."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def let_next_start_if(condition, PDL: tl.constexpr):
    """Do the same in a loop, without a branch, which would prevent pipelining."""
    if PDL:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p griddepcontrol.launch_dependents;"
            " mov.u32 $0, 0; }",
            "=r,r",
            [condition.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until all earlier kernels have ended and their writes are visible."""
    if PDL:
        gdc_wait()


@triton.jit
def load_early(ptr, mask=None, other=None):
    """Load what was written before this kernel could start, bypassing L1."""
    return tl.load(ptr, mask=mask, other=other, cache_modifier=".cg")


@triton.jit
def prefetch(ptr, size):
    """Prefetch `size` bytes at each pointer into L2, a multiple of 16; 0 prefetches nothing.

    All SMs share L2, so later writes to these bytes are still seen.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [ptr.to(tl.int64), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def start_in_turn(PDL: tl.constexpr):
    """For kernels with nothing to do before their inputs are there: only the launch overlaps."""
    let_next_start(PDL)
    wait_for_inputs(PDL)


def overlapping(tensor: Tensor) -> dict[str, Any]:
    """Launch options on the tensor's device, for kernels that take the constant PDL and wait."""
    if INTERPRETED or not starts_early(tensor.device):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
