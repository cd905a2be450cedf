"""Norm, rotation and KV write in one kernel against the three torch operations."""

import pytest
import torch
from torch import Tensor

from stoop.ops.kv_store import store_kv
from stoop.ops.rope import HeadNorms, Rotation, rotate
from support.kernel_compiling import MAX_SHARED, compile_launches

SHAPES = ((4, 2, 16), (9, 3, 64), (3, 1, 80), (2, 2, 6))  # heads, KV heads, head size
BLOCKS, BLOCK_SIZE, POSITIONS = 6, 4, 40


def make(
    shape: tuple[int, int, int], dtype: torch.dtype, with_norms: bool
) -> tuple[Tensor, Rotation, HeadNorms | None, Tensor, Tensor]:
    num_heads, num_kv_heads, size = shape
    torch.manual_seed(size)
    qkv = torch.randn(7, num_heads + 2 * num_kv_heads, size).to(dtype)
    angles = torch.randn(POSITIONS, size // 2)
    table = torch.stack((angles.cos(), angles.sin())).to(dtype)
    positions = torch.randint(POSITIONS, (7,))
    norms = HeadNorms(torch.rand(size).to(dtype), torch.rand(size).to(dtype), 1e-5)
    cache = torch.randn(2, BLOCKS, BLOCK_SIZE, num_kv_heads, size).to(dtype)
    slots = torch.tensor([5, -1, 23, 4, -1, 8, 0])
    return qkv, Rotation(table, positions), norms if with_norms else None, cache, slots


@pytest.mark.interpreted
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_rotation_and_store_equal_torch(
    shape: tuple[int, int, int], dtype: torch.dtype, with_norms: bool
) -> None:
    from stoop.ops.kernels.rope import rotate_and_store

    qkv, rotation, norms, cache, slots = make(shape, dtype, with_norms)
    wide = [x.double() for x in (qkv, rotation.table, cache)]
    wide_norms = norms and HeadNorms(norms.q.double(), norms.k.double(), norms.eps)
    q, k, v = rotate(wide[0], shape[1], Rotation(wide[1], rotation.positions), wide_norms)
    store_kv(k, v, wide[2], slots)
    ours = rotate_and_store(qkv, shape[1], rotation, norms, cache, slots)
    limits = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    )
    torch.testing.assert_close(ours.double(), q, **limits)
    torch.testing.assert_close(cache.double(), wide[2], **limits)


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cache_of_fewer_bits_gets_rounded_values(dtype: torch.dtype) -> None:
    from stoop.ops.kernels.rope import rotate_and_store

    shape = SHAPES[1]
    qkv, rotation, norms, cache, slots = make(shape, torch.float32, with_norms=True)
    narrow, reference = cache.to(dtype), cache.to(dtype)
    _, k, v = rotate(qkv, shape[1], rotation, norms)
    store_kv(k, v, reference, slots)
    ours = rotate_and_store(qkv, shape[1], rotation, norms, narrow, slots)
    theirs = rotate_and_store(qkv, shape[1], rotation, norms, cache, slots)
    assert torch.equal(ours, theirs)
    if dtype == torch.float16:  # the interpreter cuts bfloat16 off instead of rounding it
        assert torch.equal(narrow, cache.to(dtype))
    torch.testing.assert_close(narrow.float(), reference.float(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(9, 3, 64), (32, 8, 128), (16, 8, 80)])
def test_rotation_compiles_for_an_h200(
    shape: tuple[int, int, int], dtype: torch.dtype, with_norms: bool
) -> None:
    from stoop.ops.kernels.rope import rotate_and_store

    qkv, rotation, norms, cache, slots = make(shape, dtype, with_norms)
    with compile_launches() as found:
        rotate_and_store(qkv, shape[1], rotation, norms, cache, slots)
    (compiled,) = found
    print(compiled)
    assert compiled.shared <= MAX_SHARED and compiled.spilled == 0
