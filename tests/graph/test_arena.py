"""The memory of tapes: no two live places overlap, and what is free is used again."""

import gc
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stoop.graph.arena import ALIGNMENT, CHUNK_BYTES, Arena
from stoop.graph.dispatch import default_sizes
from stoop.graph.tape import TapeBackend

MIB = 1 << 20
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def take(arena: Arena, num_bytes: int) -> Tensor:
    return arena.empty_strided((num_bytes,), (1,), torch.uint8)


def span(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def assert_disjoint(tensors: list[Tensor]) -> None:
    spans = sorted(map(span, tensors))
    for (_, end), (start, _) in pairwise(spans):
        assert end <= start


# ---- one tensor ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_has_the_shape_that_was_asked_for(dtype: torch.dtype) -> None:
    arena = Arena()
    for size, stride in [
        ((), ()),
        ((1,), (1,)),
        ((7,), (1,)),
        ((3, 5), (5, 1)),
        ((3, 5), (1, 3)),
        ((3, 5), (16, 1)),
        ((4, 5), (0, 1)),
        ((2, 3, 4), (12, 1, 3)),
    ]:
        tensor = arena.empty_strided(size, stride, dtype)
        assert (tuple(tensor.shape), tensor.stride(), tensor.dtype) == (size, stride, dtype)
        assert tensor.data_ptr() % ALIGNMENT == 0
        assert arena.owns(tensor)
        values = torch.arange(tensor.numel()).reshape(size).to(dtype)
        if 0 not in stride:
            tensor.copy_(values)
            assert torch.equal(tensor, values)


@pytest.mark.parametrize("size", [(0,), (3, 0), (0, 5), (2, 0, 4)])
def test_zero_size_tensors(size: tuple[int, ...]) -> None:
    arena = Arena()
    tensor = arena.empty_strided(size, torch.empty(size).stride(), torch.float32)
    assert tuple(tensor.shape) == size
    assert (tensor * 2 + 1).numel() == 0
    other = take(arena, 100)
    assert_disjoint([tensor, other])


def test_owns_only_its_own() -> None:
    first, second = Arena(), Arena()
    a, b = take(first, 100), take(second, 100)
    assert first.owns(a) and first.owns(a[50:]) and second.owns(b)
    assert not first.owns(b) and not second.owns(a)
    assert not first.owns(torch.zeros(100)) and not first.owns(torch.empty(0))
    assert not Arena().owns(a)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_at_is_the_same_memory(dtype: torch.dtype) -> None:
    arena = Arena()
    fill = CHUNK_BYTES // dtype.itemsize
    whole = arena.empty_strided((fill,), (1,), dtype)  # to the last byte of the chunk
    whole.zero_()
    for view in (whole, whole[3:10], whole[-1:], whole[-5::2], whole[1:7].reshape(2, 3).t()):
        again = arena.at(view.data_ptr(), tuple(view.shape), view.stride(), dtype)
        assert again.data_ptr() == view.data_ptr()
        again.fill_(1)
        assert bool((view == 1).all())
        view.zero_()
        assert not again.any()


def test_at_refuses_what_is_not_in_the_arena() -> None:
    arena = Arena()
    take(arena, 10)
    outside = torch.zeros(4)
    with pytest.raises(AssertionError):
        arena.at(outside.data_ptr(), (4,), (1,), torch.float32)


# ---- places ----


def test_place_is_free_again_when_the_tensor_is_gone() -> None:
    arena = Arena()
    first = take(arena, 1000)
    address = first.data_ptr()
    del first
    assert take(arena, 1000).data_ptr() == address


def test_place_is_taken_as_long_as_a_view_lives() -> None:
    arena = Arena()
    first = take(arena, 1000)
    view = first[10:20].view(torch.int16).unsqueeze(0).detach()
    address = first.data_ptr()
    view.fill_(7)
    del first
    for _ in range(3):
        other = take(arena, 1000)
        assert other.data_ptr() != address
        other.fill_(255)
        assert bool((view == 7).all())
    del view, other
    assert take(arena, 1000).data_ptr() == address


def test_large_tensor_gets_a_chunk_of_its_own() -> None:
    arena = Arena()
    assert arena.num_bytes == 0
    small = take(arena, 1)
    assert arena.num_bytes == CHUNK_BYTES
    large = take(arena, 3 * CHUNK_BYTES + 1)
    assert 4 * CHUNK_BYTES < arena.num_bytes <= 4 * CHUNK_BYTES + ALIGNMENT
    assert_disjoint([small, large])


def test_chunks_keep_their_addresses() -> None:
    arena = Arena()
    first = take(arena, 100).fill_(3)
    address = first.data_ptr()
    rest = [take(arena, CHUNK_BYTES) for _ in range(20)]
    assert first.data_ptr() == address
    assert arena.at(address, (100,), (1,), torch.uint8).tolist() == [3] * 100
    assert_disjoint([first, *rest])


def test_restart_gives_everything_to_the_next_tape() -> None:
    arena = Arena()
    kept = take(arena, CHUNK_BYTES)
    arena.restart()
    again = take(arena, CHUNK_BYTES)
    assert again.data_ptr() == kept.data_ptr()
    assert arena.num_bytes == CHUNK_BYTES


def test_place_of_an_earlier_tape_is_not_freed_twice() -> None:
    arena = Arena()
    old = take(arena, 1000)
    arena.restart()
    live = take(arena, 1000)
    assert live.data_ptr() == old.data_ptr()
    del old
    gc.collect()
    assert_disjoint([live, *(take(arena, 1000) for _ in range(1))])
    others = [take(arena, 1000) for _ in range(50)]
    assert_disjoint([live, *others])


def test_cycles_do_not_free_what_lives() -> None:
    """Garbage in cycles goes back whenever the collector runs, also within an allocation."""

    class Node:
        pass

    choose, arena, live = random.Random(0), Arena(), []
    thresholds = gc.get_threshold()
    gc.set_threshold(3)
    try:
        for _ in range(80):
            node = Node()
            node.me, node.tensor = node, take(arena, choose.randrange(1, 5000))
            if choose.random() < 0.3:
                live.append(node.tensor)
            if live and choose.random() < 0.2:
                live.pop(choose.randrange(len(live)))
            assert_disjoint(live)
    finally:
        gc.set_threshold(*thresholds)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 3000)),
        st.tuples(st.just("take"), st.integers(CHUNK_BYTES // 3, CHUNK_BYTES + 5000)),
        st.tuples(st.just("free"), st.integers(0, 1000)),
        st.tuples(st.just("view"), st.integers(0, 1000)),
    ),
    max_size=60,
)


def play(arena: Arena, actions: list[tuple[str, int]], order: random.Random) -> list[int]:
    """Take and free, checking all the while; at the end free the rest. The chunks' sizes."""
    live: list[tuple[Tensor, int]] = []
    chunks = []
    for number, (action, value) in enumerate(actions):
        if action == "take":
            before = arena.num_bytes
            live.append((take(arena, value).fill_(number % 251), number % 251))
            if arena.num_bytes > before:
                chunks.append(arena.num_bytes - before)
        elif live:
            tensor, mark = live.pop(value % len(live))
            if action == "view":  # the place now lives by a view only
                live.append((tensor[tensor.numel() // 2 :], mark))
            del tensor
        assert_disjoint([tensor for tensor, _ in live])
    assert all(bool((tensor == mark).all()) for tensor, mark in live)
    order.shuffle(live)
    while live:
        live.pop()
    return chunks


@settings(max_examples=80, deadline=None, derandomize=True)
@given(actions=ACTIONS, order=st.randoms(use_true_random=False))
def test_places_never_overlap_and_join_when_freed(
    actions: list[tuple[str, int]], order: random.Random
) -> None:
    arena = Arena()
    chunks = play(arena, actions, order)
    # Every chunk is whole again: each can be taken at once, and nothing is added.
    whole = [take(arena, size) for size in sorted(chunks, reverse=True)]
    assert arena.num_bytes == sum(chunks)
    assert_disjoint(whole)


# ---- tapes ----


def test_chain_uses_its_memory_again() -> None:
    backend = TapeBackend()
    x, out = torch.randn(MIB // 4), torch.zeros(MIB // 4)

    def program() -> None:
        y = x
        for _ in range(100):
            y = y * 1.01 + 0.5
        out.copy_(y)

    tape = backend.capture(program)
    assert backend.num_bytes <= 4 * MIB
    tape.replay()
    want = x
    for _ in range(100):
        want = want * 1.01 + 0.5
    assert torch.equal(out, want)


def test_chain_without_out_variants_uses_its_memory_again() -> None:
    backend = TapeBackend()
    x, out = torch.randn(512, 512), torch.zeros(512, 512)

    def program() -> None:
        y = x
        for _ in range(50):
            y = F.rms_norm(y.t(), (512,)).clone(memory_format=torch.contiguous_format)
            y = y.to(torch.float64).to(torch.float32)
        out.copy_(y)

    backend.capture(program)
    assert backend.num_bytes <= 8 * MIB


def test_tape_needs_what_is_live_at_once() -> None:
    backend = TapeBackend()
    x, out = torch.randn(10, MIB // 4), torch.zeros(MIB // 4)

    def program() -> None:
        rows = [row + 1 for row in x]
        out.copy_(torch.stack(rows).sum(0))

    backend.capture(program)
    assert 20 * MIB <= backend.num_bytes <= 24 * MIB


def test_intermediate_held_by_a_view_is_not_overwritten() -> None:
    backend = TapeBackend()
    x = torch.arange(4096.0)
    out, noise = torch.zeros(5), torch.zeros(4096)

    def program() -> None:
        held = (x * 2)[7:12]
        for step in range(30):
            noise.add_(x * step)
        also = (x + 1).view(64, 64).t()[3]
        for step in range(30):
            noise.add_(x - step)
        out.copy_(held + also[:5])

    tape = backend.capture(program)
    for _ in range(2):
        tape.replay()
        assert torch.equal(out, (x * 2)[7:12] + (x + 1).view(64, 64).t()[3][:5])


def test_every_live_intermediate_keeps_its_values() -> None:
    """Many are kept, many dropped, in sizes and orders at random."""
    x, sums = torch.arange(2000.0), torch.zeros(300)

    def program(target: Tensor) -> None:
        choose, live = random.Random(3), []
        for step in range(300):
            size = choose.choice([1, 3, 16, 100, 999, 2000])
            live.append((x[:size] + step)[size // 2 :])
            if len(live) > 12:
                live.pop(choose.randrange(len(live)))
            target[step] = sum(part.sum() for part in live)

    backend = TapeBackend()
    tape = backend.capture(lambda: program(sums))
    want = torch.zeros(300)
    program(want)
    assert not sums.any()
    tape.replay()
    assert torch.equal(sums, want)
    assert backend.num_bytes == CHUNK_BYTES


class Model:
    """Enough of a step to need many kinds of intermediates."""

    def __init__(self, max_rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(max_rows, 64, generator=generator)
        self.up = torch.randn(1024, 64, generator=generator)
        self.down = torch.randn(64, 1024, generator=generator)
        self.head = torch.randn(4096, 64, generator=generator)
        self.tokens = torch.zeros(max_rows, dtype=torch.int64)

    def step(self, rows: int) -> Callable[[], None]:
        def program() -> None:
            h = self.x[:rows]
            for _ in range(2):
                gate = F.linear(F.rms_norm(h, (64,)), self.up)
                h = h + F.linear(F.silu(gate) * gate, self.down)
            self.tokens[:rows] = F.linear(h, self.head).log_softmax(-1).argmax(-1)

        return program

    def forward(self, rows: int) -> Callable[[], None]:
        def program() -> None:
            self.x[:rows] += F.linear(F.linear(self.x[:rows], self.up).relu(), self.down)

        return program


def alone(program: Callable[[], None]) -> int:
    backend = TapeBackend()
    backend.capture(program)
    return backend.num_bytes


def test_smaller_tapes_fit_into_what_the_largest_took() -> None:
    model, backend = Model(256), TapeBackend()
    sizes = default_sizes(256)[::-1]
    backend.capture(model.step(sizes[0]))
    taken = backend.num_bytes
    assert taken > 4 * MIB
    for rows in sizes[1:]:
        backend.capture(model.step(rows))
        assert backend.num_bytes == taken


def test_all_tapes_together_need_less_than_twice_the_largest() -> None:
    model, backend = Model(256), TapeBackend()
    sizes = default_sizes(256)[::-1]
    programs = [model.forward(rows) for rows in sizes] + [model.step(rows) for rows in sizes]
    for program in programs:
        backend.capture(program)
    assert backend.num_bytes < 2 * max(map(alone, programs))


@pytest.mark.parametrize("seed", range(10))
def test_unlike_programs_together_need_less_than_twice_the_largest(seed: int) -> None:
    """Allocations of a program at random, scaled as by ever smaller batches."""

    def replay(arena: Arena, scale: float) -> int:
        choose, live = random.Random(seed), []
        arena.restart()
        for _ in range(60):
            if live and choose.random() < 0.5:
                live.pop(choose.randrange(len(live)))
            else:
                size = choose.choice([1, 2, 4, 8, 16]) * 2**16 + choose.randrange(2**16)
                live.append(take(arena, int(size * scale)))
        assert_disjoint(live)
        return arena.num_bytes

    arena = Arena()
    largest = replay(arena, 1.0)
    for scale in (0.9, 0.8, 0.75, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.01):
        assert replay(arena, scale) < 2 * largest


def test_alternating_tapes_do_not_disturb_each_other() -> None:
    model, twin, backend = Model(32), Model(32), TapeBackend()
    names = [(kind, rows) for rows in (32, 17, 8, 1) for kind in ("step", "forward")]
    tapes = {name: backend.capture(getattr(model, name[0])(name[1])) for name in names}
    assert torch.equal(model.x, twin.x)
    choose = random.Random(1)
    with torch.inference_mode():
        for _ in range(20):
            kind, rows = choose.choice(names)
            model.x.clamp_(-3, 3)
            twin.x.clamp_(-3, 3)
            tapes[kind, rows].replay()
            getattr(twin, kind)(rows)()
            assert torch.equal(model.x, twin.x)
            assert torch.equal(model.tokens, twin.tokens)


def test_refused_capture_gives_its_memory_back() -> None:
    backend = TapeBackend()
    x = torch.ones(MIB // 4)

    def program() -> None:
        y = x * 2
        raise KeyError(y.shape)

    for _ in range(5):
        with pytest.raises(KeyError):
            backend.capture(program)
    backend.capture(lambda: x.add_(x * 2))
    assert backend.num_bytes <= 2 * MIB


def test_backends_share_nothing() -> None:
    first, second = TapeBackend(), TapeBackend()
    x, out = torch.ones(1000), torch.zeros(1000)
    tape = first.capture(lambda: out.copy_(x * 2))
    assert first.num_bytes == CHUNK_BYTES and second.num_bytes == 0
    second.capture(lambda: out.copy_(x * 3 + x * 4))
    tape.replay()
    assert out.tolist() == [2] * 1000
