"""Recurrences of delta nets and Mamba-2 in C++, compared with torch's and with themselves."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from stoop.ops import delta_net as delta
from stoop.ops import mamba
from stoop.ops.native import recurrent
from stoop.ops.recurrent import RecurrentRows
from support.checkpoints import make_model
from support.engines import generate_ids, make_llm
from support.huggingface import greedy_params, make_prompt
from support.hybrid_gguf_files import write_hybrid_gguf

pytestmark = pytest.mark.usefixtures("native")

LOG = 4  # tokens of a log: three drafts
SLOT = 1


@dataclass(frozen=True)
class Kind:
    """A layer with random weights. run: (inputs of tokens, rows, state, native) -> outputs"""

    make_inputs: Callable[[int], list[Tensor]]
    make_state: Callable[[], Any]
    run: Callable[[list[Tensor], RecurrentRows, Any, bool], Tensor]


def delta_kind(heads: int, groups: int, key_dim: int, value_dim: int) -> Kind:
    a_log, dt_bias = torch.randn(heads), torch.randn(heads)
    norm = 1 + 0.1 * torch.randn(value_dim)
    widths = (2 * groups * key_dim + heads * value_dim, heads * value_dim, heads, heads)

    def make_state() -> delta.DeltaState:
        return delta.DeltaState(
            torch.full((3, heads, key_dim, value_dim), torch.nan),
            torch.full((3, LOG, groups, key_dim), torch.nan),
            torch.full((3, LOG, heads, value_dim), torch.nan),
            torch.full((3, LOG, heads), torch.nan),
        )

    def run(inputs: list[Tensor], rows: RecurrentRows, state: Any, native: bool) -> Tensor:
        qkv, *gates = inputs
        weights = delta.DeltaWeights(a_log, dt_bias, norm, 1e-6, native)
        return delta.delta_net(qkv, delta.DeltaGates(*gates), weights, rows, state)

    return Kind(lambda count: [torch.randn(count, each) for each in widths], make_state, run)


def mamba_kind(heads: int, groups: int, size: int, head_dim: int) -> Kind:
    a_log, dt_bias, d = torch.randn(heads), torch.randn(heads), torch.randn(heads)
    widths = (heads * head_dim + 2 * groups * size, heads)

    def make_state() -> mamba.MambaState:
        return mamba.MambaState(
            torch.full((3, heads, head_dim, size), torch.nan),
            torch.full((3, LOG, heads, head_dim), torch.nan),
            torch.full((3, LOG, 2, groups, size), torch.nan),
            torch.full((3, LOG, 2, heads), torch.nan),
        )

    def run(inputs: list[Tensor], rows: RecurrentRows, state: Any, native: bool) -> Tensor:
        weights = mamba.MambaWeights(a_log, dt_bias, d, native=native)
        return mamba.mamba(*inputs, weights, rows, state)

    return Kind(lambda count: [torch.randn(count, each) for each in widths], make_state, run)


SHAPES = {
    "delta": (delta_kind, (4, 2, 32, 48)),
    "delta, wide keys": (delta_kind, (2, 2, 256, 16)),
    "mamba": (mamba_kind, (6, 2, 32, 48)),
    "mamba, wide": (mamba_kind, (2, 1, 256, 16)),
}


@pytest.fixture(params=SHAPES)
def kind(request: pytest.FixtureRequest) -> Kind:
    torch.manual_seed(0)
    make, sizes = SHAPES[request.param]
    return make(*sizes)


class Request:
    """A text that moves through one slot's state."""

    def __init__(self, kind: Kind, native: bool = True) -> None:
        self.kind, self.native = kind, native
        self.state = kind.make_state()
        self.context = self.pending = 0

    def step(self, inputs: list[Tensor], accepted: int | None = None) -> Tensor:
        """Compute tokens, of which so many count: all by default."""
        count = len(inputs[0])
        pending = torch.zeros(3, dtype=torch.int64)
        pending[SLOT] = self.pending
        ends = [torch.tensor(each, dtype=torch.int32) for each in ([0, count], [self.context])]
        lengths = torch.tensor([self.context + count], dtype=torch.int32)
        rows = RecurrentRows(*ends, lengths, torch.tensor([SLOT]), pending, count <= LOG)
        out = self.kind.run(inputs, rows, self.state, self.native)
        kept = count if accepted is None else accepted
        self.pending = kept if count <= LOG else 0
        self.context += kept
        return out

    def folded(self) -> Tensor:
        """The state after all tokens that count: a step of one more token stores it."""
        self.step([torch.zeros_like(each) for each in self.kind.make_inputs(1)])
        return self.state.matrix[SLOT].clone()


def cut(inputs: list[Tensor], begin: int, end: int) -> list[Tensor]:
    return [each[begin:end] for each in inputs]


@pytest.mark.parametrize("lengths", [[1], [LOG], [20], [20, 1, 1], [3, 17, 4, 2], [40, 6]])
def test_it_computes_what_torch_computes(kind: Kind, lengths: list[int]) -> None:
    ours, theirs = Request(kind), Request(kind, native=False)
    for length in lengths:
        inputs = kind.make_inputs(length)
        torch.testing.assert_close(ours.step(inputs), theirs.step(inputs), rtol=2e-4, atol=2e-5)
    for a, b in zip(vars(ours.state).values(), vars(theirs.state).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(ours.folded(), theirs.folded(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("accepted", range(1, LOG + 1))
def test_rejected_drafts_leave_no_trace(kind: Kind, accepted: int) -> None:
    """The bits of the state are those of decoding one token after the other."""
    prompt, drafts = kind.make_inputs(10), kind.make_inputs(LOG)
    drafted, plain = Request(kind), Request(kind)
    for each in (drafted, plain):
        each.step(prompt)
    outputs = drafted.step(drafts, accepted)
    alone = [plain.step(cut(drafts, at, at + 1)) for at in range(accepted)]
    assert torch.equal(outputs[:accepted], torch.cat(alone))
    assert torch.equal(drafted.folded(), plain.folded())


def test_chunks_give_the_bits_of_the_whole(kind: Kind) -> None:
    prompt = kind.make_inputs(37)
    whole, chunked = Request(kind), Request(kind)
    out = whole.step(prompt)
    parts = [chunked.step(cut(prompt, a, b)) for a, b in ((0, 9), (9, 12), (12, 13), (13, 37))]
    assert torch.equal(out, torch.cat(parts))
    assert torch.equal(whole.folded(), chunked.folded())


def test_the_number_of_threads_changes_nothing(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, found = kind.make_inputs(12), []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        request = Request(kind)
        found.append((request.step(prompt), request.folded()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("dtype", "width", "lanes"),
    [(torch.float64, 32, 32), (torch.float32, 24, 32), (torch.float32, 32, 8), (None, 512, 16)],
)
def test_other_sizes_are_left_to_torch(dtype: Any, width: int, lanes: int) -> None:
    assert recurrent.fits(torch.empty(1), 256, 16)
    assert not recurrent.fits(torch.empty(1, dtype=dtype), width, lanes)


Q8 = gguf.GGMLQuantizationType.Q8_0


@pytest.fixture
def hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STOOP_CACHE", str(tmp_path / "cache"))
    model = make_model("granite-hybrid", 0).float()
    return write_hybrid_gguf(tmp_path / "m.gguf", model, kind_of=lambda name: Q8)


def test_packed_models_use_it_and_dense_ones_do_not(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def noted(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return recurrent.run_tokens(*args, **options)

    monkeypatch.setattr(mamba, "run_tokens", noted)
    settings = {"dtype": "float32", "max_model_len": 128}
    prompts = [make_prompt(length) for length in (1, 30)]
    dense = make_llm(hybrid, weights="dense", **settings)
    expected = generate_ids(dense, prompts, greedy_params(8))
    assert not calls
    packed = make_llm(hybrid, weights="packed", **settings)
    found = generate_ids(packed, prompts, greedy_params(8))
    assert {each["logs"] for each in calls} == {True, False}
    assert found == expected
