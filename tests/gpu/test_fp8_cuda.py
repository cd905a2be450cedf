"""A KV cache in fp8 on a CUDA device: what is written, what is read, in graphs, and how fast."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from stoop import SamplingParams
from stoop.ops.kv_store import FP8, NO_SCALES, KVScales, to_fp8
from stoop.ops.rope import Rotation, rotate_and_store
from support.attention_cases import (
    CUDA,
    LLAMA_8B,
    NUM_SMS,
    Heads,
    Row,
    assert_right,
    attend,
    attend_densely,
    in_fp8,
    make_case,
    make_load,
)
from support.checkpoints import write_cuda_llama
from support.drafters import MODES, DrafterStore, make_spec_llm, run
from support.engines import generate_ids, make_llm
from support.fp8_values import BYTES, decode, values_to_round

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("triton")
SCALED = KVScales(0.37, 2.3)
CONTEXTS = (0, 1, 15, 16, 63, 64, 65, 127, 128, 129, 511, 1000, 4097)


@pytest.fixture(autouse=True)
def _exact() -> None:
    torch.manual_seed(0)


# ---- writing ----


@pytest.mark.parametrize("scales", [NO_SCALES, SCALED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_are_those_of_the_cpu(dtype: torch.dtype, scales: KVScales) -> None:
    """Values are stored as they are given: all numbers, ties, what is too large, NaN."""
    size = 128
    values = values_to_round().to(dtype)
    padded = torch.zeros(-(-len(values) // size) * size, dtype=dtype)
    padded[: len(values)] = values
    tokens = padded.view(-1, 1, size).expand(-1, 3, -1).contiguous().to(CUDA)
    table = torch.stack((torch.ones(1, size // 2), torch.zeros(1, size // 2))).to(dtype).to(CUDA)
    places = torch.zeros(len(tokens), dtype=torch.int64, device=CUDA)
    cache = torch.zeros(2, len(tokens), 1, 1, size, device=CUDA).to(FP8)
    slots = torch.arange(len(tokens), device=CUDA)
    rotate_and_store(tokens, 1, Rotation(table, places), None, cache, slots, scales)
    expected = to_fp8(padded, scales.v).view(torch.uint8)
    ours = cache[1].view(torch.uint8).flatten().cpu()
    theirs = to_fp8(padded.to(CUDA), scales.v).view(torch.uint8).cpu()
    live = ~padded.isnan()
    assert torch.equal(ours[live], expected[live])
    assert torch.equal(theirs[live], expected[live])  # the reference on this device
    # A division gives NaN without its sign on a GPU.
    assert ((ours[~live] & 0x7F) == 0x7F).all() and not live.all()


def test_keys_are_rounded_after_the_rotation() -> None:
    qkv = torch.randn(9, 8 + 2 * 2, 128, device=CUDA, dtype=torch.bfloat16)
    angles = torch.randn(40, 64, device=CUDA)
    table = torch.stack((angles.cos(), angles.sin())).bfloat16()
    rotation = Rotation(table, torch.arange(3, 12, device=CUDA))
    slots = torch.tensor([5, -1, 23, 4, -1, 8, 0, 40, 41], device=CUDA)
    cache = torch.zeros(2, 4, 16, 2, 128, device=CUDA).to(FP8)
    wide = torch.zeros(2, 4, 16, 2, 128, device=CUDA, dtype=torch.bfloat16)
    rotate_and_store(qkv, 2, rotation, None, cache, slots, SCALED)
    rotate_and_store(qkv, 2, rotation, None, wide, slots)
    for part, scale, kept in zip(wide, SCALED, cache, strict=True):
        assert torch.equal(kept.view(torch.uint8), to_fp8(part, scale).view(torch.uint8))


# ---- reading ----


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_byte_is_read_as_its_value(head_dim: int) -> None:
    """One key a row, so that attention returns its value: by words, by bytes and by tiles."""
    rows = 256 // head_dim
    case = make_case([Row(0, 1)] * rows, Heads(1, 1, head_dim), 1, device=CUDA)
    table = case.block_table[case.row_slots, 0].long()
    case.cache[1, table, 0, 0] = decode(BYTES).nan_to_num(0.0).float().view(rows, -1).to(CUDA)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        narrow = dataclasses.replace(in_fp8(case), q=case.q.to(dtype))
        for bound in (1, 0):
            out = attend(narrow, max_query_len=bound, num_sms=NUM_SMS)
            assert torch.equal(out.double().flatten().cpu(), decode(BYTES).nan_to_num(0.0))


# Query tokens, heads of a group and head size: words, words with masked columns, bytes.
DECODES = [
    (1, 4, 128), (4, 4, 128), (4, 8, 128), (9, 8, 128), (4, 3, 64), (4, 4, 80), (4, 4, 256),
    (1, 1, 16),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("query_len", "group", "head_dim"), DECODES)
def test_decodes(query_len: int, group: int, head_dim: int, dtype: torch.dtype) -> None:
    """NaN is wherever no live key is."""
    rows = [Row(n, query_len, n % query_len) for n in CONTEXTS]
    padding = {"padded_rows": 3, "padded_tokens": 3 * query_len, "device": CUDA}
    case = in_fp8(make_case(rows, Heads(2, group, head_dim), 16, dtype, **padding), SCALED)
    for window in (0, 100):
        assert_right(case, window=window, max_query_len=query_len, num_sms=NUM_SMS)
    assert_right(case, max_query_len=query_len, num_sms=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("group", "head_dim"), [(4, 128), (3, 64), (2, 80)])
def test_prompts_and_decodes(group: int, head_dim: int, dtype: torch.dtype) -> None:
    rows = [Row(n, 1) for n in CONTEXTS] + [Row(200, 4, 3), Row(0, 300), Row(77, 129)]
    padding = {"padded_rows": 5, "padded_tokens": 100, "device": CUDA}
    case = in_fp8(make_case(rows, Heads(2, group, head_dim), 16, dtype, **padding), SCALED)
    for window in (0, 50):
        assert_right(case, window=window, num_sms=NUM_SMS)


def test_large_and_small_queries_keep_their_precision() -> None:
    case = in_fp8(
        make_case([Row(n, 4) for n in CONTEXTS], LLAMA_8B, 16, torch.bfloat16, device=CUDA)
    )
    expected = attend_densely(case)
    for factor in (2.0**-60, 2.0**60):
        scaled = dataclasses.replace(case, q=case.q * factor, scales=KVScales(1 / factor, 1.0))
        out = attend(scaled, max_query_len=4, num_sms=NUM_SMS)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("bound", [0, 4])
def test_a_graph_follows_lengths(bound: int) -> None:
    rows = [Row(n, 4) for n in CONTEXTS]
    case = in_fp8(make_case(rows, LLAMA_8B, 16, torch.bfloat16, device=CUDA), SCALED)
    options = {"max_query_len": bound, "num_sms": NUM_SMS}
    attend(case, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(case, **options)
    for shorter in (0, 1, 3):
        rows = [Row(max(n - 50 * shorter, 0), 4, shorter) for n in CONTEXTS]
        case.rows[:] = rows
        case.context_lens.copy_(torch.tensor([row.context for row in rows]))
        case.seq_lens.copy_(torch.tensor([row.seq_len for row in rows]))
        graph.replay()
        assert torch.equal(out, attend(case, **options))
        torch.testing.assert_close(out, attend_densely(case), rtol=2e-2, atol=2e-2)


# ---- engines ----

KERNELS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "attention_backend": "triton",
    "kv_cache_dtype": "fp8",
}


@pytest.mark.parametrize(
    ("name", "mode", "num_tokens"),
    [(("eagle-noisy", "eagle3-some")[n % 2], mode, (1, 3)[n // 3]) for n, mode in enumerate(MODES)],
)
def test_every_mode_answers_as_plain_decoding(
    drafters: DrafterStore, name: str, mode: str, num_tokens: int
) -> None:
    """Each replay is compared with its eager twin to the bit by the sanitizer."""
    drafter = drafters.get(name)
    plain = run(make_spec_llm(drafter, 0, **KERNELS), 0)
    sanitize = mode != "none"
    llm = make_spec_llm(drafter, num_tokens, graph_mode=mode, sanitize=sanitize, **KERNELS)
    assert {cache.dtype for cache in llm.engine.runner.kv_caches} == {FP8}
    trace = run(llm, num_tokens)
    assert trace.answers == plain.answers and sum(trace.per_position) > 0


@pytest.mark.parametrize("mode", ["full", "step"])
def test_half_precision_in_graphs(tmp_path: Path, mode: str) -> None:
    """Replays equal their eager twins to the bit, and NaN in every free block does no harm."""
    folder = write_cuda_llama(tmp_path / "model", "bfloat16")
    prompts = [[n % 250 for n in range(length)] for length in (3, 40, 130)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    options = KERNELS | {"dtype": "bfloat16", "max_model_len": 256, "max_num_seqs": 4}
    llm = make_llm(folder, graph_mode=mode, sanitize=True, **options)
    for cache in llm.engine.runner.kv_caches:
        cache.view(torch.uint8)[:, 1:] = 0x7F
    answers = generate_ids(llm, prompts, params)
    assert [len(answer) for answer in answers] == [20] * 3
    assert llm.engine.runner.target.hidden[:3].isfinite().all()


# ---- how fast ----


@pytest.mark.parametrize("query_len", [1, 4])
def test_long_contexts_take_little_more_than_half_the_time(
    query_len: int, capsys: pytest.CaptureFixture[str]
) -> None:
    load = make_load(8, 32768, query_len, LLAMA_8B, query_len)
    narrow = dataclasses.replace(load, caches=[cache.to(FP8) for cache in load.caches])
    times = [each.milliseconds() for each in (load, narrow)]
    with capsys.disabled():
        shown = f"bfloat16 {1e3 * times[0]:.1f} us, fp8 {1e3 * times[1]:.1f} us"
        print(f"\n{query_len} query tokens, 8 x 32768: {shown}, {times[1] / times[0]:.2f}")
    if "H200" not in torch.cuda.get_device_name():
        pytest.skip("what to expect was measured on an H200")
    assert times[1] < 0.6 * times[0]
