"""Kernels that start early: who may rely on whom, seen in what they are compiled to."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from stoop.ops.kernels.launch import let_next_start, start_in_turn, wait_for_inputs
from support.kernel_compiling import compile_launches

OPTIONS = {"PDL": True, "launch_pdl": True}


@triton.jit
def _hasty_kernel(out_ptr, PDL: tl.constexpr):
    tl.store(out_ptr, 1.0)
    wait_for_inputs(PDL)


@triton.jit
def _careless_kernel(out_ptr, PDL: tl.constexpr):
    let_next_start(PDL)
    tl.store(out_ptr, 1.0)


@triton.jit
def _good_kernel(out_ptr, PDL: tl.constexpr):
    start_in_turn(PDL)
    tl.store(out_ptr, 1.0)


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [(_hasty_kernel, "writes before it waits"), (_careless_kernel, "never waits")],
)
def test_a_kernel_that_does_not_wait_is_noticed(kernel: Any, problem: str) -> None:
    """So every compiled kernel is held to it: these are what the check must see."""
    with compile_launches() as found:
        _good_kernel[(1,)](torch.zeros(1), **OPTIONS)
        with pytest.raises(AssertionError, match=problem):
            kernel[(1,)](torch.zeros(1), **OPTIONS)
    assert [each.kernel for each in found] == ["_good_kernel"]


def test_lookups_of_embeddings_wait_before_others_start() -> None:
    """Kernels of a layer read lengths and positions before they wait, and rely on this."""
    from stoop.ops.kernels.embedding import embed
    from stoop.ops.kernels.norm import join_embedded, rms_norm

    x, token_ids = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
    with compile_launches() as found:
        embed(token_ids, x)
        join_embedded(token_ids, x, x[0], x, x[0], 1e-5)
        rms_norm(x, x[0], 1e-5)
    late = {each.kernel: each.signals_late for each in found}
    assert late == {
        "_embed_kernel": True,
        "_join_embedded_kernel": True,
        "_rms_norm_kernel": False,  # as most: the next one starts while it waits itself
    }
