"""Eager runs of the same functions on the same buffers, to compare tapes with."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from stoop.graph.tape import TapeBackend

OUTER = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
FLOATS = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16}
HOST_READS = ("tolist", "numpy", "__array__")
ORIGINAL_READS = {name: getattr(Tensor, name) for name in HOST_READS}


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, NaNs and signs of zero included."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def poison(backend: TapeBackend) -> None:
    """All ones: NaN, -1 or True. No tape may keep anything in the arena between replays."""
    for chunk in backend.arena._chunks:
        chunk.memory.fill(255)


def flatten(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [] if result is None else list(result)


def inputs(seed: int, dtype: torch.dtype) -> SimpleNamespace:
    """The persistent buffers that programs read and write."""
    generator = torch.Generator().manual_seed(seed)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def ints(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    return SimpleNamespace(
        x=floats(6, 8),
        y=floats(6, 8),
        w=floats(8, 8),
        b=floats(8),
        batch=floats(2, 6, 8),
        q=floats(2, 4, 5, 8),
        k=floats(2, 4, 5, 8),
        v=floats(2, 4, 5, 8),
        kv=floats(32, 8),
        scalar=floats(),
        i=ints(6, 6),
        j=ints(6, 6, 8),
        slots=torch.randperm(32, generator=generator)[:6],
        m=ints(2, 6, 8).bool(),
        n=ints(100, 6, 8).int(),
    )


def copied(tensors: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(**{name: tensor.clone() for name, tensor in vars(tensors).items()})


def assert_same(got: SimpleNamespace, want: SimpleNamespace, when: str) -> None:
    for name, tensor in vars(want).items():
        assert same(getattr(got, name), tensor), f"{name} {when}"


def check_replays(
    function: Callable[[SimpleNamespace], Any], dtype: torch.dtype, num_replays: int = 3
) -> None:
    """Capture changes nothing; each replay, on new inputs, does what eager does."""
    tensors = inputs(0, dtype)
    outputs = [torch.full_like(t, 77) for t in flatten(function(copied(tensors)))]

    def program() -> None:
        for output, result in zip(outputs, flatten(function(tensors)), strict=True):
            assert (output.shape, output.dtype) == (result.shape, result.dtype)
            output.copy_(result)

    before, random_state = copied(tensors), torch.get_rng_state()
    backend = TapeBackend()
    tape = backend.capture(program)
    assert_same(tensors, before, "after capture")
    assert all(same(output, torch.full_like(output, 77)) for output in outputs)
    assert torch.equal(torch.get_rng_state(), random_state)

    for replay in range(num_replays):
        for name, value in vars(inputs(replay + 1, dtype)).items():
            getattr(tensors, name).copy_(value)
        twin = copied(tensors)
        wanted = flatten(function(twin))
        poison(backend)
        tape.replay()
        assert_same(tensors, twin, f"after replay {replay}")
        for index, (output, want) in enumerate(zip(outputs, wanted, strict=True)):
            assert same(output, want), f"output {index} of replay {replay}"
