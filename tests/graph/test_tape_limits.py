"""What a capture refuses, threads, host calls, captures within captures."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stoop.graph.refusals import CaptureError
from stoop.graph.tape import TapeBackend
from support.tapes import ORIGINAL_READS, poison, same

# ---- refusals ----

VALUE = torch.arange(12.0).reshape(3, 4) % 5
MASK = VALUE > 2
REFUSED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "item": lambda x, m: x[0, 0].item(),
    "tolist": lambda x, m: x.tolist(),
    "tolist of a parameter": lambda x, m: torch.nn.Parameter(x).tolist(),
    "tolist of data": lambda x, m: x.data.tolist(),
    "numpy": lambda x, m: x.numpy(),
    "numpy forced": lambda x, m: x.numpy(force=True),
    "asarray": lambda x, m: np.asarray(x),
    "np.array": lambda x, m: np.array(x),
    "ufunc": lambda x, m: np.add(x, 1),
    "bool": lambda x, m: bool(m.all()),
    "int": lambda x, m: int(x[0, 0]),
    "float": lambda x, m: float(x[0, 0]),
    "complex": lambda x, m: complex(x[0, 0]),
    "if": lambda x, m: 1 if m[0, 0] else 2,
    "index": lambda x, m: range(x[0, 0].long()),
    "slice bound": lambda x, m: x[: x[0, 1].long()],
    "in": lambda x, m: 3.0 in x,
    "max": lambda x, m: max(x[0]),
    "sorted": lambda x, m: sorted(x[0]),
    "format": lambda x, m: f"{x[0, 0]:.2f}",
    "repr": lambda x, m: repr(x),
    "nonzero": lambda x, m: x.nonzero(),
    "nonzero as tuple": lambda x, m: x.nonzero(as_tuple=True),
    "where of one": lambda x, m: torch.where(m),
    "argwhere": lambda x, m: torch.argwhere(m),
    "mask": lambda x, m: x[m],
    "mask of rows": lambda x, m: x[m[:, 0]],
    "mask of columns": lambda x, m: x[:, m[0]],
    "uint8 mask": lambda x, m: x[m.to(torch.uint8)],
    "masked_select": lambda x, m: x.masked_select(m),
    "unique": lambda x, m: x.unique(),
    "unique inverse": lambda x, m: x.unique(return_inverse=True, dim=0),
    "unique_consecutive": lambda x, m: x.unique_consecutive(),
    "repeat_interleave": lambda x, m: x.repeat_interleave(torch.tensor([1, 2, 3]), 0),
    "bincount": lambda x, m: torch.bincount(x[0].long()),
    "one_hot of unknown size": lambda x, m: F.one_hot(x.long()),
    "narrow": lambda x, m: x.narrow(0, torch.tensor(1), 1),
    "arange of a tensor": lambda x, m: torch.arange(x[0, 3].long()),
    "tensor_split": lambda x, m: x.tensor_split(torch.tensor([1, 2])),
    "equal": lambda x, m: torch.equal(x, x),
    "allclose": lambda x, m: torch.allclose(x, x),
    "is_nonzero": lambda x, m: x[0, 0].is_nonzero(),
    "randn": lambda x, m: torch.randn(3),
    "randn_like": lambda x, m: torch.randn_like(x),
    "rand": lambda x, m: torch.rand(3),
    "rand of a generator": lambda x, m: torch.rand(3, generator=torch.Generator()),
    "randint": lambda x, m: torch.randint(3, (3,)),
    "randperm": lambda x, m: torch.randperm(4),
    "bernoulli": lambda x, m: torch.bernoulli(x / 5),
    "bernoulli_": lambda x, m: x.bernoulli_(0.5),
    "normal": lambda x, m: torch.normal(0.0, 1.0, (3,)),
    "normal_": lambda x, m: x.normal_(),
    "uniform_": lambda x, m: x.uniform_(),
    "exponential_": lambda x, m: x.exponential_(),
    "random_": lambda x, m: x.random_(),
    "poisson": lambda x, m: torch.poisson(x),
    "multinomial": lambda x, m: (x + 1).multinomial(1),
    "gumbel_softmax": lambda x, m: F.gumbel_softmax(x),
    "dropout": lambda x, m: F.dropout(x, 0.5, training=True),
    "dropout_": lambda x, m: F.dropout(x, 0.5, training=True, inplace=True),
}
RARE = {
    "mask written by a tensor": lambda x, m: x.__setitem__(m, x[0, 0:1].expand(6)),
    "dlpack": lambda x, m: np.from_dlpack(x),
    "resize_": lambda x, m: (x * 2).resize_(20, 20),
    "resize_ outside": lambda x, m: x.resize_(20, 20),
    "set_": lambda x, m: x.set_(torch.zeros(3)),
}


@pytest.mark.parametrize("intermediate", [False, True], ids=["outside", "intermediate"])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(backend: TapeBackend, name: str, intermediate: bool) -> None:
    check_refused(backend, REFUSED[name], intermediate)


@pytest.mark.parametrize("name", RARE)
def test_rare_things_are_refused(backend: TapeBackend, name: str) -> None:
    check_refused(backend, RARE[name], False)


@pytest.mark.xfail(strict=True, reason="torch.tensor reads the values without dispatching")
def test_a_tensor_made_of_tensors_is_refused(backend: TapeBackend) -> None:
    check_refused(backend, lambda x, m: torch.tensor([x[0, 0], x[0, 1]]), False)


def check_refused(
    backend: TapeBackend, function: Callable[[Tensor, Tensor], Any], intermediate: bool
) -> None:
    x, m, random_state = VALUE.clone(), MASK.clone(), torch.get_rng_state()

    def program() -> None:
        if intermediate:
            function(x * 2, m & (x > 0))
        else:
            function(x, m)

    with pytest.raises(CaptureError) as refusal:
        backend.capture(program)
    assert str(refusal.value)
    assert same(x, VALUE) and same(m, MASK)
    assert torch.equal(torch.get_rng_state(), random_state)
    check_still_works(backend)


def check_still_works(backend: TapeBackend) -> None:
    for name, original in ORIGINAL_READS.items():
        assert getattr(Tensor, name) is original
    x, out = torch.arange(3.0), torch.zeros(3)
    assert (x.tolist(), list(x.numpy()), list(np.asarray(x))) == ([0, 1, 2],) * 3
    tape = backend.capture(lambda: out.copy_((x * 2) + (x * 3)))
    assert not out.any()
    tape.replay()
    assert out.tolist() == [0, 5, 10]
    with pytest.raises((AssertionError, CaptureError)):
        backend.host_call(lambda context: None)


def test_error_of_the_program_passes_through(backend: TapeBackend) -> None:
    x = torch.ones(3)

    def program() -> None:
        x.add_(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        backend.capture(program)
    assert x.tolist() == [1, 1, 1]
    check_still_works(backend)


def test_refusal_says_what_to_change(backend: TapeBackend) -> None:
    x = torch.ones(3)
    with pytest.raises(CaptureError, match=r"tolist.*host"):
        backend.capture(lambda: x.tolist())
    with pytest.raises(CaptureError, match=r"nonzero.*shape"):
        backend.capture(lambda: x.nonzero())
    with pytest.raises(CaptureError, match=r"random"):
        backend.capture(lambda: torch.rand(2))


def test_replay_may_read_on_the_host_afterwards(backend: TapeBackend) -> None:
    x = torch.ones(3)
    tape = backend.capture(lambda: x.add_(1))
    tape.replay()
    assert (x.tolist(), x[0].item(), x.numpy().sum()) == ([2, 2, 2], 2.0, 6.0)


# ---- threads ----


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    return results[0]


def test_another_thread_reads_during_a_capture(backend: TapeBackend) -> None:
    x, read = torch.arange(3.0), []

    def program() -> None:
        read.append(in_thread(lambda: (x.tolist(), list(x.numpy()), list(np.asarray(x)))))
        read.append(in_thread(lambda: (x * 2).sum().item()))
        x.add_(1)

    tape = backend.capture(program)
    assert read == [([0, 1, 2],) * 3, 6.0]
    assert (len(tape), x.tolist()) == (1, [0, 1, 2])


def test_replay_in_another_thread(backend: TapeBackend) -> None:
    x = torch.ones(3)
    tape = backend.capture(lambda: x.add_(x * 2))
    assert in_thread(tape.replay) is None
    assert x.tolist() == [3, 3, 3]


def test_overlapping_captures_in_two_threads_restore_the_reads() -> None:
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def first() -> None:
        def program() -> None:
            first_is_in.set()
            second_is_in.wait(0.5)  # in vain, unless captures may overlap

        TapeBackend().capture(program)
        first_is_out.set()

    def second() -> None:
        def program() -> None:
            second_is_in.set()
            first_is_out.wait(10)

        first_is_in.wait(10)
        TapeBackend().capture(program)

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert all(getattr(Tensor, name) is original for name, original in ORIGINAL_READS.items())


# ---- host calls ----


def test_host_calls_run_in_order_with_context_and_values(backend: TapeBackend) -> None:
    x, out = torch.ones(4), torch.zeros(4)
    events: list[Any] = []

    def call(name: str) -> Callable[..., None]:
        def function(context: Any, *tensors: Tensor) -> None:
            events.append((name, context, [t.tolist() for t in tensors]))

        return function

    def program() -> None:
        events.append("captured")
        y = x * 2
        backend.host_call(call("a"), y, x)
        z = y + 1
        backend.host_call(call("b"), z[1:3])
        backend.host_call(call("c"))
        out.copy_(z)

    tape = backend.capture(program)
    assert events == ["captured"]
    events.clear()
    tape.replay("first")
    assert events == [
        ("a", "first", [[2] * 4, [1] * 4]),
        ("b", "first", [[3, 3]]),
        ("c", "first", []),
    ]
    x.fill_(5)
    events.clear()
    context = object()
    poison(backend)
    tape.replay(context)
    assert events[0] == ("a", context, [[10] * 4, [5] * 4])
    assert events[1] == ("b", context, [[11, 11]])
    assert out.tolist() == [11] * 4
    tape.replay()
    assert events[-1] == ("c", None, [])


def test_host_call_writes_what_later_pieces_read(backend: TapeBackend) -> None:
    """Attention in a piecewise graph: between the pieces, on their tensors."""
    x, w, out = torch.randn(4, 8), torch.randn(8, 8), torch.zeros(4, 8)
    scale = SimpleNamespace(value=0.0)

    def attend(context: SimpleNamespace, q: Tensor, result: Tensor) -> None:
        result.copy_(q.softmax(-1) * context.value)

    def layer(h: Tensor, call: Callable[..., None]) -> Tensor:
        q = h @ w
        result = q.new_empty(q.shape)
        call(attend, q, result)
        return h + result @ w

    def program(call: Callable[..., None]) -> None:
        h = x
        for _ in range(3):
            h = layer(h, call)
        out.copy_(h)

    tape = backend.capture(lambda: program(backend.host_call))
    assert not out.any()
    for value in (1.0, 2.5):
        scale.value = value
        poison(backend)
        tape.replay(scale)
        replayed = out.clone()
        program(lambda function, *tensors: function(scale, *tensors))
        assert same(replayed, out)


def test_host_call_writes_outside_tensors(backend: TapeBackend) -> None:
    counter, out = torch.zeros(2), torch.zeros(2)

    def program() -> None:
        backend.host_call(lambda context, t: t.add_(1), counter)
        out.copy_(counter * 10)
        backend.host_call(lambda context, t: t.add_(1), counter[:1])

    tape = backend.capture(program)
    assert not counter.any()
    tape.replay()
    tape.replay()
    assert (counter.tolist(), out.tolist()) == ([4, 2], [30, 20])


def test_host_call_keeps_the_address_of_its_tensors(backend: TapeBackend) -> None:
    x, seen = torch.ones(2), []
    tape = backend.capture(lambda: backend.host_call(lambda c, t: seen.append(t.tolist()), x))
    x.data = torch.zeros(2)
    tape.replay()
    assert seen == [[1, 1]]


def test_error_in_a_host_call_reaches_the_caller(backend: TapeBackend) -> None:
    x = torch.zeros(1)

    def fail(context: Any) -> None:
        if context:
            raise ValueError(context)

    def program() -> None:
        backend.host_call(fail)
        x.add_(1)

    tape = backend.capture(program)
    with pytest.raises(ValueError, match="bad"):
        tape.replay("bad")
    assert x.item() == 0
    tape.replay()
    assert x.item() == 1


def test_host_call_outside_a_capture_fails(backend: TapeBackend) -> None:
    with pytest.raises((AssertionError, CaptureError)):
        backend.host_call(lambda context: None)
    backend.capture(lambda: None)
    with pytest.raises((AssertionError, CaptureError)):
        backend.host_call(lambda context: None)


# ---- captures within captures, and what outlives one ----


def test_nested_capture_fails_clearly(backend: TapeBackend) -> None:
    x, out = torch.ones(3), torch.zeros(3)

    def program() -> None:
        y = x * 2
        backend.capture(lambda: out.add_(x * 3))
        out.copy_(y)

    with pytest.raises((AssertionError, CaptureError)):
        backend.capture(program)
    check_still_works(backend)


def test_nested_capture_by_another_backend_fails_clearly(backend: TapeBackend) -> None:
    x = torch.ones(3)
    with pytest.raises((AssertionError, CaptureError)):
        backend.capture(lambda: TapeBackend().capture(lambda: x.add_(x * 2)))


def test_replay_within_a_capture_is_refused(backend: TapeBackend) -> None:
    x, out, total = torch.ones(3), torch.zeros(3), torch.zeros(3)
    inner = backend.capture(lambda: total.add_(x * 3))

    def program() -> None:
        y = x * 7
        inner.replay()
        out.copy_(y)

    try:
        tape = backend.capture(program)
    except (AssertionError, CaptureError):
        return
    tape.replay()
    assert out.tolist() == [7, 7, 7]


def test_intermediate_that_outlives_its_capture_is_refused(backend: TapeBackend) -> None:
    x, kept = torch.ones(3), []
    with pytest.raises(CaptureError):
        backend.capture(lambda: kept.append(x * 2))


def test_intermediate_of_another_capture_is_refused(backend: TapeBackend) -> None:
    x, out, kept = torch.ones(3), torch.zeros(3), []
    try:
        first = backend.capture(lambda: kept.append(x * 2))

        def program() -> None:
            y = x * 100
            out.copy_(kept[0] + y)

        second = backend.capture(program)
    except CaptureError:
        return
    first.replay()
    second.replay()
    assert out.tolist() == [102, 102, 102]


def test_what_a_program_returns_is_not_kept(backend: TapeBackend) -> None:
    x = torch.ones(1 << 18)
    backend.capture(lambda: x * 2)
    assert backend.num_bytes <= 2 << 20
