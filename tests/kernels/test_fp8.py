"""Kernels on a KV cache in fp8: the bytes that they write, what they read, and how they compile."""

import dataclasses

import pytest
import torch
from torch import Tensor

from stoop.ops.kv_store import FP8, NO_SCALES, KVScales, to_fp8
from stoop.ops.rope import Rotation
from stoop.ops.rope import rotate_and_store as operation
from support.attention_cases import Case, Heads, Row, assert_right, attend, in_fp8, make_case
from support.fp8_values import BYTES, decode, nearest_fp8, values_to_round
from support.kernel_compiling import MAX_SHARED, compile_launches

SCALED = KVScales(0.37, 2.3)
ROWS = [Row(70, 2, 1), Row(3, 2), Row(130, 2), Row(15, 2)]
WORDS, MASKED_WORDS, ELEMENTS, ODD = (
    Heads(1, 4, 128),
    Heads(1, 3, 80),
    Heads(2, 3, 16),
    Heads(1, 2, 18),
)
CASES = [
    (WORDS, torch.bfloat16, NO_SCALES, 0),
    (WORDS, torch.float16, SCALED, 20),
    (MASKED_WORDS, torch.bfloat16, SCALED, 0),
    (ELEMENTS, torch.bfloat16, SCALED, 20),
    (ELEMENTS, torch.float32, NO_SCALES, 0),
    (ODD, torch.float16, SCALED, 20),
]


# ---- writing ----


def store_plain(values: Tensor, scales: KVScales, dtype: torch.dtype = torch.float32) -> Tensor:
    """Store values as keys and as values, without a rotation; returns the bytes of both."""
    from stoop.ops.kernels.rope import rotate_and_store

    size = 512
    padded = torch.zeros(-(-len(values) // size), size)
    padded.view(-1)[: len(values)] = values
    heads = padded[:, None].expand(-1, 3, -1).to(dtype).contiguous()  # one query, key and value
    table = torch.stack((torch.ones(1, size // 2), torch.zeros(1, size // 2))).to(dtype)
    positions = torch.zeros(len(heads), dtype=torch.int64)
    cache = torch.zeros(2, len(heads), 1, 1, size).to(FP8)
    slots = torch.arange(len(heads))
    rotate_and_store(heads, 1, Rotation(table, positions), None, cache, slots, scales)
    return cache.view(torch.uint8).view(2, -1)[:, : len(values)]


@pytest.mark.interpreted
@pytest.mark.parametrize("scales", [NO_SCALES, SCALED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bytes_are_those_of_the_twin(dtype: torch.dtype, scales: KVScales) -> None:
    """All numbers, ties and their neighbours, what is too large, infinities and NaN."""
    values = values_to_round().to(dtype)
    expected = [to_fp8(values, scale).view(torch.uint8) for scale in scales]
    assert torch.equal(store_plain(values.float(), scales, dtype)[1], expected[1])
    # Even a rotation by nothing makes NaN of a neighbour of infinity, and 0 of -0.
    finite = values.isfinite()
    keys = store_plain(values.where(finite, 0.0).float(), scales, dtype)[0]
    assert torch.equal(keys[finite & (values != 0)], expected[0][finite & (values != 0)])


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["FP8_MAX", "NAN"])
def test_bytes_of_a_store_without_its_clamp_differ(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken on purpose: without the clamp, and without the rule for NaN."""
    import triton.language as tl

    from stoop.ops.kernels import fp8

    values = values_to_round()
    values = values[values.isfinite() if name == "FP8_MAX" else values.isnan()]
    broken = {"FP8_MAX": 0x7F800000, "NAN": 0}[name]
    expected = nearest_fp8(values)
    assert torch.equal(store_plain(values, NO_SCALES)[1], expected)
    monkeypatch.setattr(fp8, f"{name}_BITS", tl.constexpr(broken))
    assert not torch.equal(store_plain(values, NO_SCALES)[1], expected)


@pytest.mark.interpreted
def test_rotated_keys_are_rounded_after_the_rotation() -> None:
    torch.manual_seed(0)
    qkv, cache = torch.randn(7, 9 + 2 * 3, 64), torch.randn(2, 6, 4, 3, 64).to(FP8)
    rotation = Rotation(torch.randn(2, 40, 32), torch.randint(40, (7,)))
    slots = torch.tensor([5, -1, 23, 4, -1, 8, 0])
    arguments = (qkv, 3, rotation, None)
    caches = [cache.clone() for _ in range(2)]
    ours = operation.kernel(*arguments, caches[0], slots, SCALED)
    theirs = operation.reference(*arguments, caches[1], slots, SCALED)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert torch.equal(caches[0][1].view(torch.uint8), caches[1][1].view(torch.uint8))
    # The last bit of a rotated key may fall to the other side of a tie.
    differs = caches[0].view(torch.uint8) != caches[1].view(torch.uint8)
    assert differs.float().mean() < 0.01
    assert torch.equal(caches[0].view(torch.uint8)[:, 0, 1], cache.view(torch.uint8)[:, 0, 1])


# ---- reading ----


@pytest.mark.interpreted
def test_every_byte_is_read_as_its_value() -> None:
    """One key a row, so that attention returns its value."""
    case = make_case([Row(0, 1)] * 2, Heads(1, 1, 128), 1, torch.float32)
    table = case.block_table[case.row_slots.long(), 0].long()
    case.cache[1, table, 0, 0] = decode(BYTES).nan_to_num(0.0).float().view(2, 128)
    for dtype in (torch.float32, torch.bfloat16):  # as elements, and as words
        out = attend(dataclasses.replace(in_fp8(case), q=case.q.to(dtype)), max_query_len=1)
        assert torch.equal(out.double().flatten(), decode(BYTES).nan_to_num(0.0))
    case.cache[1, table[0], 0, 0, 5] = torch.nan
    live = dataclasses.replace(in_fp8(case), q=case.q.bfloat16())
    assert attend(live, max_query_len=1).isnan().nonzero().tolist() == [[0, 0, 5]]


@pytest.mark.interpreted
@pytest.mark.parametrize(("heads", "dtype", "scales", "window"), CASES)
def test_attention_over_rounded_keys(
    heads: Heads, dtype: torch.dtype, scales: KVScales, window: int
) -> None:
    """Decodes, then decodes and a prompt. NaN is wherever no live key is."""
    case = in_fp8(make_case(ROWS, heads, 16, dtype, padded_rows=1, padded_tokens=2), scales)
    assert_right(case, max_query_len=2, window=window, splits=None if window else 3)
    mixed = [ROWS[0], ROWS[3], Row(20, 64 // heads.group + 9)]
    assert_right(in_fp8(make_case(mixed, heads, 8, dtype), scales), window=window)


@pytest.mark.interpreted
def test_fp8_is_read_as_its_values() -> None:
    """To the bit what a cache of the queries' dtype with the same values gives."""
    case = in_fp8(make_case([Row(70, 2, 1), Row(9, 40)], ELEMENTS, 16))
    wide = dataclasses.replace(case, cache=case.cache.float())
    assert torch.equal(attend(case), attend(wide))


@pytest.mark.interpreted
@pytest.mark.parametrize("factor", [2.0**-60, 2.0**60])
def test_queries_of_any_size_keep_their_precision(factor: float) -> None:
    """bfloat16 queries become float16, whose range is smaller."""
    case = in_fp8(make_case(ROWS[:1], WORDS, 16, torch.bfloat16))
    case.q[:, :, 1::2] *= 2.0**-12  # far apart within a row
    wide = dataclasses.replace(case, q=case.q.float())
    scaled = dataclasses.replace(case, q=case.q * factor, scales=KVScales(1 / factor, 1.0))
    ours, expected = (attend(each, max_query_len=2).float() for each in (scaled, wide))
    torch.testing.assert_close(ours, expected, rtol=0.01, atol=2e-3)


# ---- compiled ----


def blank(heads: Heads, query_len: int, dtype: torch.dtype, num_reqs: int = 4) -> Case:
    rows = [Row(0, query_len)] * num_reqs
    case = make_case(rows, heads, 16, dtype)
    return dataclasses.replace(in_fp8(case), q=case.q.contiguous())


@pytest.mark.parametrize(
    ("head_dim", "group", "window", "dtype"),
    [
        (128, 4, 0, torch.bfloat16),
        (128, 8, 100, torch.bfloat16),
        (64, 3, 0, torch.bfloat16),
        (80, 4, 0, torch.float16),
    ],
)
def test_attention_compiles_for_an_h200(
    head_dim: int, group: int, window: int, dtype: torch.dtype
) -> None:
    heads = Heads(2, group, head_dim)
    with compile_launches() as found:
        attend(blank(heads, 4, dtype), window, max_query_len=4, num_sms=132)
        attend(blank(heads, 100, dtype), window, num_sms=132)
    kinds = {compiled.kernel for compiled in found}
    assert kinds == {"_split_kernel", "_reduce_kernel", "_tile_kernel"}
    for compiled in found:
        print(compiled)
        assert compiled.shared <= MAX_SHARED and compiled.spilled == 0, compiled


def test_attention_fits_a_consumer_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from stoop.ops.kernels import attention as kernels

    monkeypatch.setattr(kernels, "has_large_tiles", lambda device: False)
    monkeypatch.setattr(kernels, "overlapping", lambda tensor: {"PDL": False})
    heads = Heads(2, 4, 128)
    with compile_launches(("cuda", 89, 32)) as found:
        for query_len in (4, 16):
            case = blank(heads, query_len, torch.bfloat16)
            attend(case, max_query_len=query_len, num_sms=128)
        attend(blank(heads, 100, torch.bfloat16), num_sms=128)
    assert all(compiled.shared <= 99 * 1024 for compiled in found), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_store_compiles_for_an_h200(dtype: torch.dtype) -> None:
    from stoop.ops.kernels.rope import rotate_and_store

    qkv = torch.zeros(3, 32 + 16, 128, dtype=dtype)
    rotation = Rotation(torch.zeros(2, 8, 64, dtype=dtype), torch.arange(3))
    cache = torch.zeros(2, 2, 16, 8, 128).to(FP8)
    with compile_launches() as found:
        rotate_and_store(qkv, 8, rotation, None, cache, torch.arange(3), SCALED)
    (compiled,) = found
    assert compiled.shared <= MAX_SHARED and compiled.spilled == 0


def test_other_caches_take_no_scales() -> None:
    """Their kernels are the same as without fp8: what is None is no argument of a kernel."""
    with compile_launches() as found:
        case = make_case([Row(0, 4)] * 2, Heads(2, 4, 64), 16, torch.bfloat16)
        attend(case, max_query_len=4, num_sms=132)
        attend(make_case([Row(0, 100)] * 2, Heads(2, 4, 64), 16, torch.bfloat16), num_sms=132)
    seen = [each.constants for each in found if each.kernel != "_reduce_kernel"]
    assert seen and all(constants["value_scale"] is None for constants in seen)
