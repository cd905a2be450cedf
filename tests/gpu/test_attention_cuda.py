"""Paged attention on a CUDA device: right for many shapes, right in a graph, and how fast."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from stoop.ops.rope import Rotation, rotate_and_store
from support.attention_cases import (
    CUDA,
    LLAMA_8B,
    NUM_SMS,
    Heads,
    Load,
    Row,
    assert_right,
    attend,
    attend_densely,
    make_case,
    make_load,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("triton")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CONTEXTS = (0, 1, 15, 16, 63, 64, 65, 511, 512, 1000, 4097)


@pytest.fixture(autouse=True)
def _exact() -> None:
    torch.manual_seed(0)


# Query tokens, heads of a group and head size; each case is compiled.
DECODES = [
    (1, 4, 128), (4, 4, 128), (6, 4, 128), (9, 8, 128), (1, 8, 64), (4, 3, 64), (9, 3, 64),
    (1, 1, 16), (5, 1, 32), (4, 2, 80), (2, 3, 96), (4, 4, 256),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("query_len", "group", "head_dim"), DECODES)
def test_decodes(query_len: int, group: int, head_dim: int, dtype: torch.dtype) -> None:
    rows = [Row(n, query_len, n % query_len) for n in CONTEXTS]
    heads = Heads(2, group, head_dim)
    padding = {"padded_rows": 3, "padded_tokens": 3 * query_len, "device": CUDA}
    case = make_case(rows, heads, 16, dtype, **padding)
    for window in (0, 3, 100):
        assert_right(case, window=window, max_query_len=query_len, num_sms=NUM_SMS)
    assert_right(case, max_query_len=query_len, num_sms=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("query_len", [1, 4, 40])
def test_a_cache_of_fewer_bits(query_len: int, dtype: torch.dtype) -> None:
    rows = [Row(n, query_len, n % query_len) for n in CONTEXTS]
    case = make_case(rows, Heads(2, 4, 128), 16, device=CUDA)
    narrow = replace(case, cache=case.cache.to(dtype))
    rounded = replace(case, cache=narrow.cache.float())
    bound = query_len if query_len < 9 else 0
    ours, theirs = (attend(c, max_query_len=bound, num_sms=NUM_SMS) for c in (narrow, rounded))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cache_of_fewer_bits_gets_rounded_values(dtype: torch.dtype) -> None:
    qkv = torch.randn(9, 8 + 2 * 2, 128, device=CUDA)
    rotation = Rotation(torch.randn(2, 40, 64, device=CUDA), torch.arange(3, 12, device=CUDA))
    slots = torch.tensor([5, -1, 23, 4, -1, 8, 0, 40, 41], device=CUDA)
    wide = torch.randn(2, 4, 16, 2, 128, device=CUDA)
    narrow = wide.to(dtype)
    ours = rotate_and_store(qkv, 2, rotation, None, narrow, slots)
    theirs = rotate_and_store(qkv, 2, rotation, None, wide, slots)
    assert torch.equal(ours, theirs) and torch.equal(narrow, wide.to(dtype))


# Block size, heads of a group and head size.
PROMPTS = [(16, 4, 128), (16, 3, 64), (1, 8, 128), (32, 1, 64), (16, 2, 80), (16, 4, 256)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_size", "group", "head_dim"), PROMPTS)
def test_prompts_and_decodes(
    block_size: int, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    rows = [Row(n, 1) for n in CONTEXTS] + [Row(200, 4, 3), Row(0, 300), Row(77, 129), Row(64, 64)]
    heads = Heads(2, group, head_dim)
    padding = {"padded_rows": 5, "padded_tokens": 100, "device": CUDA}
    case = make_case(rows, heads, block_size, dtype, **padding)
    for window in (0, 50):
        assert_right(case, window=window, num_sms=NUM_SMS)
    assert_right(make_case([Row(33, 500)], heads, block_size, dtype, device=CUDA))


def test_many_rows() -> None:
    rows = [Row(n * 7 % 900, 1 + n % 5 * (n % 3) * 20) for n in range(300)]
    case = make_case(rows, Heads(1, 4, 64), 16, torch.bfloat16, 20, 99, CUDA)
    assert_right(case, num_sms=NUM_SMS)


@pytest.mark.parametrize("bound", [0, 4])
def test_a_graph_follows_lengths(bound: int) -> None:
    """Captured on one mix of lengths, replayed on others; not a bit from what eager gives."""
    case = make_case([Row(n, 4) for n in CONTEXTS], LLAMA_8B, 16, torch.bfloat16, device=CUDA)
    options = {"max_query_len": bound, "num_sms": NUM_SMS}
    attend(case, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(case, **options)
    for shorter in (0, 1, 2, 3):
        rows = [Row(max(n - 50 * shorter, 0), 4, shorter) for n in CONTEXTS]
        case.rows[:] = rows
        case.context_lens.copy_(torch.tensor([row.context for row in rows]))
        case.seq_lens.copy_(torch.tensor([row.seq_len for row in rows]))
        graph.replay()
        assert torch.equal(out, attend(case, **options))
        torch.testing.assert_close(out, attend_densely(case), rtol=2e-2, atol=2e-2)


def test_a_cache_of_more_than_two_to_the_31_elements() -> None:
    case = make_case([Row(100, 1), Row(40, 60)], LLAMA_8B, 16, torch.bfloat16, device=CUDA)
    dense = attend_densely(case)
    num_blocks = 2**31 // case.cache[0, 0].numel() + case.cache.shape[1]
    large = torch.empty(2, num_blocks, *case.cache.shape[2:], dtype=torch.bfloat16, device=CUDA)
    shift = num_blocks - case.cache.shape[1]
    large[:, shift:] = case.cache
    case.block_table[case.block_table < 2**30] += shift
    object.__setattr__(case, "cache", large)
    torch.testing.assert_close(attend(case), dense, rtol=2e-2, atol=2e-2)  # by both kernels


# ---- how fast ----


def skip_unless_h200() -> None:
    if "H200" not in torch.cuda.get_device_name():
        pytest.skip("what to expect was measured on an H200")


def decode_loads(query_len: int, heads: Heads) -> Iterator[tuple[str, Load, int]]:
    for batch in (1, 8, 32):
        for context in (512, 8192, 32768):
            load = make_load(batch, context, query_len, heads, query_len)
            num_bytes = batch * (context + query_len) * heads.num_kv * heads.size * 4
            yield f"{batch:3} x {context:6}", load, num_bytes


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("heads", [LLAMA_8B, Heads(8, 4, 64)])
def test_decode_speed(heads: Heads, query_len: int, capsys: pytest.CaptureFixture[str]) -> None:
    """On an H200 a large load reads at 3.8 TB/s and more; half of that would be a fall."""
    lines, rates = [], []
    for name, load, num_bytes in decode_loads(query_len, heads):
        time = load.milliseconds()
        rates.append(num_bytes / time / 1e9)
        lines.append(f"{name}: {1e3 * time:7.1f} us, {rates[-1]:5.2f} TB/s")
    with capsys.disabled():
        print(f"\n{heads}, {query_len} query tokens", *lines, sep="\n")
    skip_unless_h200()
    assert max(rates) > 1.9


@pytest.mark.parametrize("heads", [LLAMA_8B, Heads(8, 4, 64)])
def test_prompt_speed(heads: Heads, capsys: pytest.CaptureFixture[str]) -> None:
    """On an H200 the largest runs at 350 TFLOP/s and more; half of that would be a fall."""
    lines, rates = [], []
    for context, query_len in ((0, 512), (0, 2048), (0, 8192), (6144, 2048), (30720, 2048)):
        load = make_load(1, context, query_len, heads, 0)
        time, pairs = load.milliseconds(), query_len * (context + query_len / 2)
        rate = 4 * pairs * heads.num_kv * heads.group * heads.size / time / 1e9
        rates.append(rate)
        lines.append(f"{query_len} behind {context}: {1e3 * time:7.1f} us, {rate:4.0f} TFLOP/s")
    with capsys.disabled():
        print(f"\n{heads}, prompts", *lines, sep="\n")
    skip_unless_h200()
    assert max(rates) > 175
