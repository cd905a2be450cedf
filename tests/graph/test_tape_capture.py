"""Nothing runs in a capture; host values and addresses are those of the capture."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stoop.graph.tape import TapeBackend
from stoop.ops.library import register
from support.tapes import poison, same

# ---- nothing executes in a capture ----

RAN: list[Any] = []


@register("test_tape_store(Tensor x, Tensor(a!) cache, Tensor slots) -> ()")
def store(x: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Opaque, as a Triton launch is: it reads values on the host."""
    RAN.append(slots.tolist())
    for row, slot in zip(x, slots.tolist(), strict=True):
        if slot >= 0:
            cache[slot] = row


@register("test_tape_two(Tensor x, Tensor(a!) total, Tensor(b!)? largest=None) -> ()")
def reduce_two(x: Tensor, total: Tensor, largest: Tensor | None = None) -> None:
    RAN.append("two")
    total.fill_(x.sum().item())
    if largest is not None:
        largest.fill_(x.max().item())


@register("test_tape_sum(Tensor[] xs, Tensor(a!) out) -> ()")
def sum_list(xs: list[Tensor], out: Tensor) -> None:
    RAN.append("sum")
    out.copy_(sum(xs))


@register("test_tape_probe(Tensor x) -> ()")
def probe(x: Tensor) -> None:
    RAN.append(x.tolist())


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    RAN.clear()


def test_registered_op_is_one_call_and_runs_in_every_replay(backend: TapeBackend) -> None:
    x, cache = torch.ones(3, 4), torch.zeros(1000, 4)
    slots = torch.tensor([5, -1, 7])
    tape = backend.capture(lambda: store(x, cache, slots))
    assert len(tape) == 1
    assert RAN == []
    assert not cache.any()
    tape.replay()
    assert RAN == [[5, -1, 7]]
    assert cache.sum(1).nonzero().flatten().tolist() == [5, 7]
    slots.copy_(torch.tensor([1, 2, -1]))
    x.mul_(2)
    tape.replay()
    assert RAN[1:] == [[1, 2, -1]]
    assert cache[[1, 2, 5, 7], 0].tolist() == [2, 2, 1, 1]


def test_registered_op_on_intermediates(backend: TapeBackend) -> None:
    x, out = torch.arange(12.0).reshape(3, 4), torch.zeros(3, 4)

    def program() -> None:
        cache = torch.zeros(8, 4)
        store(x * 2, cache[1:], torch.arange(3) + 1)
        out.copy_(cache[2:5] + 1)

    tape = backend.capture(program)
    assert RAN == []
    for _ in range(2):
        poison(backend)
        tape.replay()
        assert same(out, x * 2 + 1)
    assert RAN == [[1, 2, 3]] * 2


def test_registered_op_writes_several_and_optional_arguments(backend: TapeBackend) -> None:
    x, total, largest = torch.arange(4.0), torch.zeros(1), torch.zeros(2)

    def program() -> None:
        reduce_two(x * 2, total, largest=largest[1:])
        reduce_two(x, total[:0])
        sum_list([x + 1, x], x)

    tape = backend.capture(program)
    assert RAN == [] and not total.any() and not largest.any()
    tape.replay()
    assert RAN == ["two", "two", "sum"]
    assert (total.tolist(), largest.tolist(), x.tolist()) == ([12], [0, 6], [1, 3, 5, 7])


def test_registered_op_that_only_reads(backend: TapeBackend) -> None:
    x = torch.ones(2)
    tape = backend.capture(lambda: probe(x * 3))
    assert RAN == []
    tape.replay()
    assert RAN == [[3, 3]]


@pytest.mark.parametrize("returned", ["Tensor", "int", "Tensor(a!)"])
def test_registering_an_op_that_returns_something_is_refused(returned: str) -> None:
    """What a capture allocates must not depend on running the operation."""
    with pytest.raises(AssertionError, match="return nothing"):
        register(f"test_tape_returning(Tensor(a!) x) -> {returned}")


def test_capture_leaves_everything_as_it_was(backend: TapeBackend) -> None:
    kv = torch.randn(2, 4096, 64)
    x, y = torch.randn(8, 64), torch.randn(64, 8)
    slots = torch.arange(8) * 3
    before = [t.clone() for t in (kv, x, y, slots)]
    random_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()

    def program() -> None:
        kv[0].index_copy_(0, slots, x)
        kv[1, slots] = x * 2
        store(x, kv[0], slots)
        torch.mm(x, y, out=torch.empty(8, 8))
        torch.add(x, 1, out=x)
        y.t().copy_(x)
        y[::2, 1:3].zero_()
        kv.view(-1)[5:500].fill_(3)
        kv.transpose(1, 2).mul_(2)
        x.clamp_(0, 1).masked_fill_(x > 0, 5)
        slots.add_(1)
        torch.topk(x, 8, out=(y.t()[:, :8], slots[:0].new_empty(8, 8)))

    backend.capture(program)
    for tensor, want in zip((kv, x, y, slots), before, strict=True):
        assert same(tensor, want)
    assert RAN == []
    assert torch.equal(torch.get_rng_state(), random_state)
    assert (np.random.get_state()[1] == numpy_state).all()


def test_gradients_and_parameters(backend: TapeBackend) -> None:
    layer = torch.nn.Linear(4, 4)
    x, out = torch.randn(3, 4), torch.zeros(3, 4)
    tape = backend.capture(lambda: out.copy_(layer(x)))
    x.copy_(torch.randn(3, 4))
    tape.replay()
    assert same(out, layer(x))
    assert not out.requires_grad and out._is_view() is False
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def test_empty_program(backend: TapeBackend) -> None:
    tape = backend.capture(lambda: None)
    tape.replay()
    assert (len(tape), backend.num_bytes) == (0, 0)


def test_views_and_empties_are_not_calls(backend: TapeBackend) -> None:
    x = torch.zeros(4, 6)

    def program() -> None:
        torch.empty(3)
        x.new_empty(3)
        torch.empty_like(x)
        x.view(-1)[2:].reshape(2, 11).t().unsqueeze(0).expand(3, 11, 2).split(1)
        x.add_(1)

    assert len(backend.capture(program)) == 1


# ---- host values are baked in, Python is not run again ----


def test_host_values_are_those_of_the_capture(backend: TapeBackend) -> None:
    host = SimpleNamespace(factor=2, bound=3, values=[1, 2, 3, 4], dim=0, scale=0.5)
    x, out = torch.ones(4), torch.zeros(4)
    runs = []

    def program() -> None:
        runs.append(1)
        y = (x * host.factor + torch.tensor(host.values)) * host.scale
        out[: host.bound] = y.cumsum(host.dim)[: host.bound]

    tape = backend.capture(program)
    host.__dict__.update(factor=7, bound=1, values=[9, 9, 9, 9], dim=5, scale=100.0)
    for _ in range(3):
        out.zero_()
        tape.replay()
        assert out.tolist() == [1.5, 3.5, 6.0, 0.0]
    assert runs == [1]


def test_mutated_list_does_not_reach_the_replay(backend: TapeBackend) -> None:
    shape, parts = [2, 3], [1, 2]
    x, out = torch.arange(6.0), torch.zeros(2, 3)

    def program() -> None:
        y = x.reshape(shape).repeat(parts)[:, :3]
        out.copy_(torch.cat([y[:1], y[1:]]))

    tape = backend.capture(program)
    shape[:], parts[:] = [3, 2], [5, 5]
    tape.replay()
    assert out.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_branches_are_those_of_the_capture(backend: TapeBackend) -> None:
    host, x = SimpleNamespace(negate=True), torch.ones(2)
    tape = backend.capture(lambda: x.neg_() if host.negate else x.zero_())
    host.negate = False
    tape.replay()
    assert x.tolist() == [-1, -1]


def test_zero_dim_tensors_are_read_in_every_replay(backend: TapeBackend) -> None:
    length, x = torch.tensor(2), torch.zeros(5)
    tape = backend.capture(lambda: x.copy_(torch.arange(5) < length))
    tape.replay()
    assert x.tolist() == [1, 1, 0, 0, 0]
    length.fill_(4)
    tape.replay()
    assert x.tolist() == [1, 1, 1, 1, 0]


def test_tensor_made_from_a_tensor_is_read_in_every_replay(backend: TapeBackend) -> None:
    x, out = torch.tensor([1.0, 2.0]), torch.zeros(2)
    tape = backend.capture(lambda: out.copy_(torch.as_tensor(x) + x.clone().detach()))
    x.fill_(4)
    tape.replay()
    assert out.tolist() == [8, 8]


# ---- addresses ----


def test_rebinding_an_attribute_changes_nothing(backend: TapeBackend) -> None:
    state = SimpleNamespace(buffer=torch.ones(3), out=torch.zeros(3))
    old = state.buffer, state.out
    tape = backend.capture(lambda: state.out.copy_(state.buffer * 2))
    state.buffer, state.out = torch.full((3,), 9.0), torch.full((3,), 9.0)
    tape.replay()
    assert old[1].tolist() == [2, 2, 2]
    assert state.out.tolist() == [9, 9, 9]


def test_assigning_data_changes_nothing(backend: TapeBackend) -> None:
    buffer, out = torch.ones(3), torch.zeros(3)
    old_buffer, old_out = buffer.detach(), out.detach()
    tape = backend.capture(lambda: out.copy_(buffer * 2))
    buffer.data, out.data = torch.full((3,), 9.0), torch.full((3,), 9.0)
    tape.replay()
    assert old_out.tolist() == [2, 2, 2]
    assert out.tolist() == [9, 9, 9]
    old_buffer.fill_(5)
    tape.replay()
    assert old_out.tolist() == [10, 10, 10]


def test_assigning_the_data_of_a_parameter_changes_nothing(backend: TapeBackend) -> None:
    layer = torch.nn.Linear(3, 3, bias=False)
    x, out = torch.randn(2, 3), torch.zeros(2, 3)
    want = layer(x).detach()
    tape = backend.capture(lambda: out.copy_(layer(x)))
    layer.weight.data = torch.zeros(3, 3)
    tape.replay()
    assert same(out, want)


@pytest.mark.parametrize("through_a_view", [False, True])
def test_outside_tensors_live_as_long_as_the_tape(
    backend: TapeBackend, through_a_view: bool
) -> None:
    array, out = np.full(1000, 3.0), torch.zeros(10, dtype=torch.float64)
    alive = weakref.ref(array)
    outside = torch.from_numpy(array)
    view = outside[100:110] if through_a_view else outside
    tape = backend.capture(lambda kept=[view]: out.copy_(kept.pop()[:10]))
    del array, outside, view
    gc.collect()
    assert alive() is not None
    tape.replay()
    assert out.tolist() == [3.0] * 10
    del tape
    gc.collect()
    assert alive() is None


def test_constants_live_as_long_as_the_tape(backend: TapeBackend) -> None:
    out = torch.zeros(1000)
    tape = backend.capture(lambda: out.copy_(torch.tensor([float(i) for i in range(1000)])))
    gc.collect()
    _scribble = [torch.full((1000,), -1.0) for _ in range(20)]
    tape.replay()
    assert same(out, torch.arange(1000.0))


def test_tape_outlives_its_backend() -> None:
    x, out = torch.ones(1 << 18), torch.zeros(1 << 18)
    backend = TapeBackend()
    tape = backend.capture(lambda: out.copy_((x * 2 + 1).exp().log()))
    del backend
    gc.collect()
    tape.replay()
    assert same(out, (x * 2 + 1).exp().log())
