"""How kernels are launched so that they overlap.

Programmatic dependent launch: a kernel starts while the one before it still runs.

What it may do before `wait_for_inputs` is what no earlier kernel can spoil: find its place, and ask
for weights. A kernel so launched has to wait in every program, before it reads what kernels make
or writes anything at all: then all kernels before it have ended, since each waited for its own.

Positions, lengths and pages may be read before the wait all the same, by the kernels of a layer:
between them and whoever prepares a step, or a draft decode, stands a kernel that lets the next one
start only when it has itself waited. That is the lookup of embeddings, in both. Such reads go to
the second-level cache (`load_early`), where whoever wrote has left what he wrote.
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

# Shared memory and first-level cache of a processor are one memory, which a kernel asks to have
# divided: so many percent for shared memory. What is loaded straight into registers needs a cache
# to be under way in. A processor divides anew only when nothing runs on it, so neighbours that ask
# for different divisions overlap less. Products and attention ask; docs/performance.md has what
# each gains. The percentages are of an H200, which has 228 KB that may be shared.
CACHE_FIRST = 14
BALANCED = 57
SHARED_FIRST = 100
_CARVEOUT_ATTRIBUTE = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_divided: set[int] = set()


def divide_memory(kernel: Any, percent: int) -> None:
    """How a kernel wants a processor's memory divided from now on; `kernel`: what a launch gave.

    A hint: nothing that it computes depends on it, and the driver may do otherwise.
    """
    function = getattr(kernel, "function", None)
    if function is None or function in _divided:  # interpreted, or done before
        return
    _divided.add(function)
    if has_large_tiles(torch.device("cuda")):
        ask_division(function, percent)


def ask_division(function: int, percent: int) -> None:
    """function: a kernel, as the driver knows it; percent: -1 leaves it to the driver"""
    error = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), _CARVEOUT_ATTRIBUTE, percent)
    if error:
        log.debug("memory is not divided as a kernel wants it: error %d of the driver", error)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")  # triton has loaded it


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """The kernel behind this one is launched once all programs of this one have come here."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def let_next_start_if(condition, PDL: tl.constexpr):
    """As above, in a loop that branches would keep from being pipelined."""
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
    if PDL:
        gdc_wait()


@triton.jit
def load_early(ptr, mask=None, other=None):
    """What was there before this kernel could start, past the first-level cache."""
    return tl.load(ptr, mask=mask, other=other, cache_modifier=".cg")


@triton.jit
def prefetch(ptr, size):
    """Ask the second-level cache for `size` bytes at each pointer, a multiple of 16; 0: nothing.

    It is where all kernels meet: what is written later is seen all the same.
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
    """For kernels that can do nothing before their inputs are there, but be launched."""
    let_next_start(PDL)
    wait_for_inputs(PDL)


def overlapping(tensor: Tensor) -> dict[str, Any]:
    """Options of a launch on the tensor's device, for kernels with a constant PDL that wait."""
    if INTERPRETED or not starts_early(tensor.device):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
