"""Recurrent layers on a CUDA device: real sizes, replays of other lengths, and rejected drafts."""

import random
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stoop.ops import causal_conv as conv_reference
from stoop.ops import delta_net as delta_reference
from stoop.ops.recurrent import RecurrentRows
from support.recurrent_cases import (
    DeltaShape,
    Row,
    bits,
    check_state,
    copied,
    make_conv,
    make_delta,
    make_rows,
)
from support.recurrent_decoding import check_decoding, make_text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("triton")

SMALL, LARGE = DeltaShape(16, 16, 128, 128), DeltaShape(16, 32, 128, 128)
OUT = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 4e-2}
KEPT = {torch.float32: 5e-5, torch.float16: 3e-3, torch.bfloat16: 3e-3}
# Decodes, chunks, fresh ones of both, dead tokens, padding.
MIXED = [
    Row(4, 4, 9, 3),
    Row(200, 200),
    Row(3, 2, 30, 4),
    Row(64, 64, 5, 2),
    Row(2, 2),
    Row(4, 0),
    Row(300, 129, 700, 1),
    Row(1, 1, 8, 0),
    Row(0, 0),
]
SHORT = [row for row in MIXED if row.query_len <= 4]
LOG_LEN = 4


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("given", [MIXED, SHORT, SHORT[1:2], MIXED * 12], ids=len)
@pytest.mark.parametrize("dtype", OUT, ids=str)
@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["0.8b", "9b"])
def test_delta_nets_equal_torch(shape: DeltaShape, dtype: torch.dtype, given: list[Row]) -> None:
    from stoop.ops.kernels import delta_net as kernels

    rows, num_tokens = make_rows(given, LOG_LEN, random.Random(1), extra_tokens=70, device="cuda")
    case = make_delta(rows, num_tokens, shape, LOG_LEN, dtype)
    theirs, before = copied(case), copied(case)
    expected = delta_reference.delta_net.reference(*theirs.arguments)
    out = kernels.delta_net(*case.arguments)
    torch.testing.assert_close(out, expected, rtol=OUT[dtype], atol=OUT[dtype])
    limit = KEPT[dtype] if given is not SHORT else 5e-5
    check_state(case.state, theirs.state, before.state, rows, rtol=limit, atol=limit)


@pytest.mark.parametrize("given", [MIXED, SHORT, MIXED * 12], ids=len)
@pytest.mark.parametrize("dtype", OUT, ids=str)
@pytest.mark.parametrize(
    ("name", "channels", "width"),
    [("causal_conv", 6144, 4), ("causal_conv", 8192, 4), ("gated_conv", 2048, 3)],
)
def test_convolutions_equal_torch(
    name: str, channels: int, width: int, dtype: torch.dtype, given: list[Row]
) -> None:
    from stoop.ops.kernels import causal_conv as kernels

    rows, num_tokens = make_rows(given, LOG_LEN, random.Random(1), extra_tokens=70, device="cuda")
    gated = name == "gated_conv"
    case = make_conv(rows, num_tokens, channels, width, LOG_LEN, dtype, gated=gated, bias=gated)
    theirs, before = copied(case.state), copied(case.state)
    arguments = (case.x, case.weight, case.bias, rows)
    expected = getattr(conv_reference, name).reference(*arguments, theirs)
    out = getattr(kernels, name)(*arguments, case.state)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, expected, rtol=limit, atol=limit)
    check_state(case.state, theirs, before, rows, rtol=0, atol=0)


@pytest.mark.parametrize("log_len", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["0.8b", "9b"])
def test_rejected_drafts_leave_the_bits_of_plain_decoding(
    shape: DeltaShape, dtype: torch.dtype, log_len: int
) -> None:
    text = make_text(shape, 5, 60, dtype, device="cuda")
    # The norm of the outputs is summed up in an order that depends on the tokens of a tile.
    check_decoding(text, log_len, random.Random(log_len), out_limit=OUT[dtype])


def test_bits_do_not_depend_on_the_batch() -> None:
    """A request's state is the same alone and beside others."""
    from stoop.ops.kernels import delta_net as kernels

    rows, num_tokens = make_rows(SHORT * 20, LOG_LEN, random.Random(2), device="cuda")
    case = make_delta(rows, num_tokens, SMALL, LOG_LEN, torch.bfloat16)
    alone = copied(case)
    out = kernels.delta_net(*case.arguments)
    for index in range(0, len(rows.slots), 7):
        start, stop = rows.query_start_loc[index : index + 2].tolist()
        taken = slice(start, max(stop, start + 1))
        one = RecurrentRows(
            query_start_loc=rows.query_start_loc[index : index + 2] - start,
            context_lens=rows.context_lens[index : index + 1],
            seq_lens=rows.seq_lens[index : index + 1],
            slots=rows.slots[index : index + 1],
            pending=rows.pending,
            short=True,
        )
        gates = replace(
            alone.gates,
            **{f.name: getattr(alone.gates, f.name)[taken] for f in fields(alone.gates)},
        )
        given = (alone.qkv[taken].contiguous(), gates, alone.weights, one, alone.state)
        found = kernels.delta_net(*given)
        assert torch.equal(found[: stop - start], out[start:stop])
    slots = rows.slots[::7]
    assert torch.equal(bits(case.state.matrix[slots]), bits(alone.state.matrix[slots]))


def _fill(target: Any, source: Any) -> None:
    for field in fields(target):
        if isinstance(value := getattr(target, field.name), Tensor):
            value.copy_(getattr(source, field.name))


@pytest.mark.parametrize("short", [False, True], ids=["any", "short"])
def test_a_graph_replays_other_lengths(short: bool) -> None:
    """Captured with padding alone; every replay equals eager steps, bit for bit."""
    from stoop.ops.kernels import causal_conv, delta_net

    rng = random.Random(3)
    shape, size = SMALL, len(MIXED)
    num_tokens = size * LOG_LEN if short else 1024
    empty, _ = make_rows([Row(0, 0)] * size, LOG_LEN, rng, device="cuda")
    empty = replace(empty, short=short)
    delta = make_delta(empty, num_tokens, shape, LOG_LEN, torch.bfloat16)
    conv = make_conv(empty, num_tokens, shape.channels, 4, LOG_LEN, torch.bfloat16, gated=False)

    def run(conv_case: Any, delta_case: Any) -> Tensor:
        rows = delta_case.rows
        qkv = causal_conv.causal_conv(conv_case.x, conv_case.weight, None, rows, conv_case.state)
        given = (delta_case.gates, delta_case.weights, rows, delta_case.state)
        return delta_net.delta_net(qkv, *given)

    run(conv, delta)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(conv, delta)
    for _ in range(12):
        given = rng.sample(SHORT * 2 if short else MIXED, rng.randint(1, len(SHORT)))
        given += [Row(0, 0)] * (size - len(given))
        rows, _ = make_rows(given, LOG_LEN, rng, device="cuda")
        rows = replace(rows, short=short)
        other_conv = make_conv(
            rows, num_tokens, shape.channels, 4, LOG_LEN, torch.bfloat16, gated=False
        )
        other = make_delta(rows, num_tokens, shape, LOG_LEN, torch.bfloat16)
        _fill(delta.rows, rows)
        for target, source in ((conv, other_conv), (delta, other)):
            _fill(target.state, source.state)
        conv.x.copy_(other_conv.x)
        conv.weight.copy_(other_conv.weight)
        _fill(delta.gates, other.gates)
        _fill(delta.weights, other.weights)
        out.fill_(torch.nan)
        graph.replay()
        expected = run(other_conv, other)
        assert torch.equal(out, expected)
        for ours, theirs in ((conv, other_conv), (delta, other)):
            for field in fields(ours.state):
                found, wanted = getattr(ours.state, field.name), getattr(theirs.state, field.name)
                assert torch.equal(bits(found), bits(wanted)), field.name
