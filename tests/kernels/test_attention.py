"""Paged attention against dense attention, row by row, and the backend against the reference."""

import dataclasses
import itertools
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from support.attention_cases import (
    CPU,
    Case,
    Heads,
    Row,
    assert_right,
    attend,
    make_case,
)
from support.kernel_compiling import MAX_SHARED, compile_launches

EVERY = bool(os.environ.get("STOOP_TEST_ALL"))
# Around the edges of blocks (8), of tiles (16 keys in float32, 64 else) and of splits.
LENGTHS = (0, 1, 7, 8, 15, 16, 17, 63, 64, 65, 130)


@pytest.mark.interpreted
@pytest.mark.parametrize("splits", [None, 2, 5])
@pytest.mark.parametrize("window", [0, 1, 20])
def test_decodes_of_one_token(window: int, splits: int | None) -> None:
    case = make_case([Row(length, 1) for length in LENGTHS], padded_rows=2, padded_tokens=2)
    assert_right(case, window=window, max_query_len=1, splits=splits)


@pytest.mark.interpreted
@pytest.mark.parametrize("window", [0, 2, 20])
def test_verified_drafts_with_dead_tokens(window: int) -> None:
    rows = [Row(length, 4, dead) for length, dead in zip(LENGTHS, (0, 1, 2, 3) * 3, strict=False)]
    case = make_case(rows[:6], Heads(1, 4, 16), 16, padded_rows=1, padded_tokens=4)
    for num_sms in (1, 8):
        assert_right(case, window=window, max_query_len=4, num_sms=num_sms)
    assert_right(case, window=window)  # by both kernels


@pytest.mark.interpreted
def test_rows_of_fewer_tokens_than_the_bound() -> None:
    rows = [Row(9, 3), Row(40, 1), Row(0, 2), Row(17, 5, 1)]
    assert_right(make_case(rows, padded_tokens=7), max_query_len=5)


@pytest.mark.interpreted
def test_more_padded_tokens_than_rows_have_places() -> None:
    """As between the pieces of a graph, which pads tokens but not rows."""
    rows = [Row(9, 2), Row(40, 2, 1), Row(3, 1)]
    assert_right(make_case(rows, padded_tokens=25), max_query_len=2)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("block_size", "window"),
    itertools.product([1, 8, 16], [0, 5, 30]) if EVERY else [(1, 5), (8, 30), (16, 0)],
)
def test_prompts_and_decodes_in_one_batch(block_size: int, window: int) -> None:
    rows = [Row(33, 1), Row(64, 1), Row(5, 4, 2), Row(0, 70), Row(0, 1), Row(31, 40), Row(0, 33)]
    case = make_case(rows, Heads(1, 4, 16), block_size, padded_rows=3, padded_tokens=45)
    assert_right(case, window=window)


@pytest.mark.interpreted
@pytest.mark.parametrize(("context", "query_len"), [(0, 1), (0, 31), (16, 32), (100, 3), (7, 65)])
def test_a_prompt_alone(context: int, query_len: int) -> None:
    assert_right(make_case([Row(context, query_len)], padded_tokens=3))


@pytest.mark.interpreted
@pytest.mark.parametrize("heads", [Heads(3, 1, 64), Heads(3, 3, 64), Heads(1, 4, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shapes_of_heads(heads: Heads, dtype: torch.dtype) -> None:
    rows = [Row(70, 2, 1), Row(3, 2), Row(126, 2)]
    case = make_case(rows, heads, 16, dtype, padded_rows=1, padded_tokens=2)
    assert_right(case, max_query_len=2)
    assert_right(make_case([*rows, Row(20, 64 // heads.group + 9)], heads, 16, dtype))


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cache_of_fewer_bits_is_read_as_its_values(dtype: torch.dtype) -> None:
    """To the bit what a cache of the queries' dtype with the same values gives."""
    rows = [Row(70, 2, 1), Row(3, 2), Row(9, 40)]
    case = make_case(rows, Heads(1, 3, 64), 16, padded_rows=1, padded_tokens=2)
    narrow = dataclasses.replace(case, cache=case.cache.to(dtype))
    rounded = dataclasses.replace(case, cache=narrow.cache.to(case.cache.dtype))
    found = attend(narrow)
    assert torch.equal(found, attend(rounded))
    assert not torch.equal(found, attend(case))


@pytest.mark.interpreted
@pytest.mark.parametrize("size", [2, 18, 32, 96])
def test_head_sizes_are_padded(size: int) -> None:
    assert_right(make_case([Row(20, 1), Row(3, 30)], Heads(2, 2, size)))


@pytest.mark.interpreted
def test_long_bounds_go_to_the_kernel_of_prompts() -> None:
    case = make_case([Row(20, 40), Row(3, 40, 5)], Heads(1, 4, 16), padded_rows=1, padded_tokens=40)
    assert_right(case, max_query_len=40)


@pytest.mark.interpreted
def test_rows_without_keys_come_out_finite() -> None:
    case = make_case([Row(0, 2), Row(5, 2)], padded_rows=1, padded_tokens=2)
    case.seq_lens[0] = 0
    for bound in (0, 2):
        assert attend(case, max_query_len=bound).isfinite().all()


@pytest.mark.interpreted
def test_all_padding() -> None:
    case = make_case([], padded_rows=3, padded_tokens=6)
    for bound in (0, 2):
        assert not attend(case, max_query_len=bound).any()


@pytest.mark.interpreted
def test_many_rows_are_searched_in_parts() -> None:
    case = make_case([Row(n % 5, 1 + n % 2) for n in range(260)], Heads(1, 1, 16))
    from stoop.ops.kernels import attention as kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "SHORT_ROWS", 1)  # rows of two tokens go by tiles
        patch.setattr(kernels, "MIN_MIXED_SPLITS", 1)
        assert_right(case)


# ---- the backend ----


def backends_and_batch(case: Case) -> tuple[Any, Any, Any]:
    from stoop.attention.base import AttentionSetup
    from stoop.attention.reference import ReferenceBackend
    from stoop.attention.triton import TritonBackend
    from stoop.batch.input_batch import InputBuffers
    from stoop.batch.request_state import RequestState

    num_slots, max_blocks = case.block_table.shape
    num_reqs, num_tokens, page = case.row_slots.shape[0], case.q.shape[0], case.cache.shape[2]
    slots = RequestState(num_slots - 1, max_blocks * page, page, CPU).tensors
    slots.block_table.copy_(case.block_table)
    setup = AttentionSetup(CPU, page, num_reqs, max_blocks * page, slots, case.q.dtype)
    buffers = InputBuffers(num_reqs, num_tokens, CPU)
    batch = buffers.load_rows([], num_reqs, num_tokens)
    batch.rows.query_start_loc.copy_(case.query_start_loc)
    for name in ("context_lens", "seq_lens", "row_slots"):
        getattr(batch.step, name).copy_(getattr(case, name))
    return ReferenceBackend(setup), TritonBackend(setup), batch


@pytest.mark.interpreted
@pytest.mark.parametrize("window", [None, 12])
def test_backend_equals_the_reference(window: int | None) -> None:
    from stoop.attention.base import AttentionShape

    rows = [Row(30, 4, 1), Row(8, 4), Row(64, 4, 3)]
    case = make_case(rows, Heads(2, 4, 32), 16, padded_rows=1, padded_tokens=4)
    reference, backend, batch = backends_and_batch(case)
    case.cache.nan_to_num_(0.0)  # the reference multiplies by 0
    case.q[12:] = 0
    shape = AttentionShape(8, 2, 32, 32**-0.5, window)
    theirs = reference.forward(shape, case.q, case.cache, reference.build(batch))
    backend.num_sms = 4
    for query_len in (None, 4):
        metadata = backend.build(dataclasses.replace(batch, query_len=query_len))
        ours = backend.forward(shape, case.q, case.cache, metadata)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert ours.is_contiguous() and backend.buffers() == {}
    # Lengths that change on the device need no other metadata.
    batch.step.context_lens[1] -= 1
    batch.step.seq_lens[1] -= 1
    backend.advance(metadata)
    theirs = reference.forward(shape, case.q, case.cache, reference.build(batch))
    ours = backend.forward(shape, case.q, case.cache, metadata)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreted
def test_backend_refuses_float64() -> None:
    from stoop.config.errors import ConfigError

    with pytest.raises(ConfigError, match="float64: use attention_backend=reference"):
        backends_and_batch(make_case([Row(1, 1)], dtype=torch.float64))


def test_backend_refuses_a_cpu() -> None:
    from stoop.config.errors import ConfigError
    from stoop.ops.kernels import attention as kernels

    if kernels.INTERPRETED:
        pytest.skip("the interpreter runs on a CPU")
    with pytest.raises(ConfigError, match="does not run on cpu: use attention_backend=reference"):
        backends_and_batch(make_case([Row(1, 1)]))


# ---- plans, and compiled for an H200 ----


def test_splits_fill_the_processors_and_no_more() -> None:
    from stoop.ops.kernels.attention import plan_attention

    def plan(num_reqs: int, query_len: int, bound: int) -> Any:
        q = torch.empty(num_reqs * query_len, 32, 128, dtype=torch.bfloat16, device="meta")
        return plan_attention(q, 8, num_reqs, bound, 132)

    assert [plan(n, 4, 4).num_splits for n in (1, 2, 8, 16, 32, 256)] == [33, 16, 4, 2, 1, 1]
    assert plan(8, 4, 4).num_parts == 8 * 4 * 32 * 4 and plan(32, 4, 4).num_parts == 0
    assert (plan(1, 512, 0).max_query_len, plan(8, 64, 0).max_query_len) == (0, 16)
    for each in (plan(256, 2, 0), plan(4, 2048, 0), plan(64, 128, 0)):
        assert each.mixed and each.num_splits > 1
        assert each.partial_size(128) * 4 <= 128 * 2**20
    assert plan(2, 40, 40).mixed


def blank_case(heads: Heads, query_len: int, dtype: torch.dtype, num_reqs: int = 4) -> Case:
    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)

    return Case(
        rows=[],
        q=zeros(num_reqs * query_len, heads.num_kv * heads.group, heads.size, dtype=dtype),
        cache=zeros(2, 4, 16, heads.num_kv, heads.size, dtype=dtype),
        query_start_loc=zeros(num_reqs + 1),
        context_lens=zeros(num_reqs),
        seq_lens=zeros(num_reqs),
        row_slots=zeros(num_reqs, dtype=torch.int64),
        block_table=zeros(num_reqs + 1, 64),
    )


SHAPES = [
    *((size, group, 0, torch.bfloat16) for size in (64, 128) for group in (3, 4, 8)),
    (128, 4, 100, torch.bfloat16),
    (64, 3, 100, torch.bfloat16),
    (64, 3, 0, torch.float32),
    (128, 4, 0, torch.float32),
    (128, 8, 100, torch.float32),
]


@pytest.mark.parametrize(("head_dim", "group", "window", "dtype"), SHAPES)
def test_kernels_compile_for_an_h200(
    head_dim: int, group: int, window: int, dtype: torch.dtype
) -> None:
    heads = Heads(2, group, head_dim)
    # All for the shapes of SmolLM2 and Llama-8B, the shortest and the longest for others.
    query_lens = (1, 4, 6, 9) if EVERY or (head_dim, group) in ((64, 3), (128, 4)) else (1, 9)
    with compile_launches() as found:
        for query_len in query_lens:
            case = blank_case(heads, query_len, dtype)
            attend(case, window, max_query_len=query_len, num_sms=132)
        many = blank_case(heads, 4, dtype, num_reqs=300)
        attend(many, window, max_query_len=4, num_sms=132)  # one split: nothing to sum up
        attend(blank_case(heads, 100, dtype), window, num_sms=132)
    assert {compiled.kernel for compiled in found} == {
        "_split_kernel",
        "_reduce_kernel",
        "_tile_kernel",
    }
    for compiled in found:
        print(compiled)
        assert compiled.shared <= MAX_SHARED and compiled.spilled == 0, compiled


def test_kernels_compile_for_a_cache_of_fewer_bits() -> None:
    with compile_launches() as found:
        for query_len in (4, 100):
            case = blank_case(Heads(2, 4, 128), query_len, torch.float32)
            narrow = dataclasses.replace(case, cache=case.cache.to(torch.bfloat16))
            attend(narrow, max_query_len=query_len if query_len < 9 else 0, num_sms=132)
    assert {"_split_kernel", "_tile_kernel"} <= {compiled.kernel for compiled in found}
    assert all(compiled.shared <= MAX_SHARED for compiled in found)


def test_batches_of_any_size_share_their_kernels() -> None:
    """What a step of another size had to wait for a compiler for would keep a user waiting."""
    heads, dtype = Heads(2, 4, 64), torch.bfloat16
    with compile_launches() as found:
        for num_reqs, query_len in ((1, 100), (4, 100), (3, 33), (16, 7)):  # prompts
            attend(blank_case(heads, query_len, dtype, num_reqs), num_sms=132)
        for num_reqs in (300, 304, 333):
            attend(blank_case(heads, 4, dtype, num_reqs), max_query_len=4, num_sms=132)
    prompts = [compiled for compiled in found if compiled.kernel == "_tile_kernel"]
    decodes = found[-3:]
    assert {compiled.kernel for compiled in decodes} == {"_split_kernel"} and len(prompts) == 4
    for launches in (prompts, decodes):
        assert len({(str(each.constants), each.aligned) for each in launches}) == 1, launches


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(128, torch.bfloat16), (256, torch.bfloat16), (256, torch.float32)],
)
def test_kernels_fit_a_consumer_gpu(
    head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 99 KB of shared memory, and before Hopper nothing starts early."""
    from stoop.ops.kernels import attention as kernels

    monkeypatch.setattr(kernels, "has_large_tiles", lambda device: False)
    monkeypatch.setattr(kernels, "overlapping", lambda tensor: {"PDL": False})
    heads = Heads(2, 4, head_dim)
    with compile_launches(("cuda", 89, 32)) as found:
        for query_len in (1, 4, 16):
            attend(blank_case(heads, query_len, dtype), max_query_len=query_len, num_sms=128)
        attend(blank_case(heads, 100, dtype), num_sms=128)
    for compiled in found:
        assert compiled.shared <= 99 * 1024, compiled
