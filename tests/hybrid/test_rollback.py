"""Recurrent layers by themselves: what a step leaves in a slot, whatever was accepted of it.

Every layer kind is driven with given inputs, so that nothing but the recurrence can differ: states
and outputs must then have the bits of one token a step.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from stoop.layers.recurrent import (
    DeltaNet,
    DeltaNetShape,
    Mamba2,
    Mamba2Shape,
    ShortConv,
    _Mixer,
)
from stoop.ops.recurrent import RecurrentRows

KINDS = ("short conv", "delta net", "mamba-2")
DTYPES = (torch.float32, torch.float64)
SLOT, SINK = 1, 3
PROMPT, ANSWER = 19, 12

every_kind = pytest.mark.parametrize("kind", KINDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def make_layer(kind: str, dtype: torch.dtype) -> _Mixer:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if kind == "short conv":
            layer: _Mixer = ShortConv(6, 3, bias=True)
        elif kind == "delta net":
            layer = DeltaNet(DeltaNetShape(8, 2, 4, 4, 6, conv_width=4, eps=1e-6))
        else:
            layer = Mamba2(Mamba2Shape(8, 4, 3, 5, 2, conv_width=4, eps=1e-6))
    finally:
        torch.set_default_dtype(default)
    generator = torch.Generator().manual_seed(5)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.rand(parameter.shape, generator=generator) - 0.3)
    return layer


def make_inputs(layer: _Mixer, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (count, layer.in_proj.num_outputs)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(layer.conv_weight.dtype)


@dataclass
class Driver:
    """One request in a slot of its own; the other slots hold NaN, which must stay there."""

    layer: _Mixer
    log_len: int

    def __post_init__(self) -> None:
        specs = self.layer.state.slot_tensors(self.log_len)
        self.state = {
            name: torch.full((SINK + 1, *spec.shape), torch.nan, dtype=getattr(torch, spec.dtype))
            for name, spec in specs.items()
        }
        self.pending = torch.zeros(SINK + 1, dtype=torch.int64)
        self.context = 0

    def step(self, inputs: Tensor, confirmed: int | None = None, dead: int = 0) -> Tensor:
        """Compute tokens, of which the first `confirmed` count; returns the outputs of those."""
        live = inputs.shape[0]
        confirmed = live if confirmed is None else confirmed
        padding = torch.full((dead + 2, inputs.shape[1]), 7.0, dtype=inputs.dtype)
        count = live + dead
        rows = RecurrentRows(
            query_start_loc=torch.tensor([0, count, count, count], dtype=torch.int32),
            context_lens=torch.tensor([self.context, 0, 0], dtype=torch.int32),
            seq_lens=torch.tensor([self.context + live, 0, 0], dtype=torch.int32),
            slots=torch.tensor([SLOT, SINK, SINK]),
            pending=self.pending,
            short=count <= self.log_len,
        )
        out = self.layer.core(self.state, rows, torch.cat((inputs, padding)))
        assert bool((out[live:] == 0).all()), "dead tokens and padding come out as zeros"
        self.pending[SLOT] = confirmed if count <= self.log_len else 0
        self.context += confirmed
        for name, tensor in self.state.items():
            others = [slot for slot in range(SINK) if slot != SLOT]
            assert bool(tensor[others].isnan().all()), f"{name} of another slot was written"
        return out[:confirmed]

    def fold(self, inputs: Tensor) -> dict[str, Tensor]:
        """The state before one more token, which that token's step stores."""
        self.step(inputs)
        return {
            name: tensor[SLOT].clone()
            for name, tensor in self.state.items()
            if not name.endswith("log")
        }


def sequential(layer: _Mixer, inputs: Tensor, log_len: int = 1) -> Driver:
    driver = Driver(layer, log_len)
    driver.step(inputs[:PROMPT])
    for token in inputs[PROMPT:].split(1):
        driver.step(token)
    return driver


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(tensor, second[name]) and not tensor.isnan().any()
        for name, tensor in first.items()
    )


@every_dtype
@every_kind
@pytest.mark.parametrize("num_drafts", range(8))
def test_state_after_j_accepted_drafts_is_that_of_sequential_decode(
    kind: str, dtype: torch.dtype, num_drafts: int
) -> None:
    """Invariant 1: for every j, bit for bit, outputs too."""
    layer = make_layer(kind, dtype)
    inputs, wrong = make_inputs(layer, PROMPT + ANSWER, 1), make_inputs(layer, 8, 2)
    for accepted in range(num_drafts + 1):
        known = PROMPT + accepted + 1
        wanted = sequential(layer, inputs[:known])
        driver = Driver(layer, num_drafts + 1)
        driver.step(inputs[:PROMPT])
        tokens = torch.cat((inputs[PROMPT:known], wrong[: num_drafts - accepted]))
        driver.step(tokens, confirmed=accepted + 1)
        assert driver.context == wanted.context == known
        token = inputs[known : known + 1]
        assert same_bits(driver.fold(token), wanted.fold(token)), accepted


@every_dtype
@every_kind
def test_steps_with_any_number_of_drafts_interleave(kind: str, dtype: torch.dtype) -> None:
    """Invariant 2: no drafts, few, all; some accepted; dead tokens behind them."""
    layer, source = make_layer(kind, dtype), random.Random(3)
    inputs, wrong = make_inputs(layer, 80, 3), make_inputs(layer, 8, 4)
    wanted = Driver(layer, 1)
    expected = [wanted.step(inputs[:PROMPT])]
    expected += [wanted.step(token) for token in inputs[PROMPT:79].split(1)]
    driver = Driver(layer, 5)
    found = [driver.step(inputs[:PROMPT])]
    while driver.context < 79:
        room = min(4, 78 - driver.context)
        drafts = source.randint(0, room)
        accepted = source.randint(0, drafts)
        known = driver.context + accepted + 1
        tokens = torch.cat((inputs[driver.context : known], wrong[: drafts - accepted]))
        found.append(driver.step(tokens, confirmed=accepted + 1, dead=4 - drafts))
    assert torch.equal(torch.cat(found), torch.cat(expected))
    assert same_bits(driver.fold(inputs[79:]), wanted.fold(inputs[79:]))


@every_dtype
@every_kind
@pytest.mark.parametrize("sizes", [(1,) * 40, (16, 16, 8), (5, 3, 32), (39, 1), (2, 4, 4, 30)])
def test_any_chunking_of_a_prompt_gives_the_same_state(
    kind: str, dtype: torch.dtype, sizes: Sequence[int]
) -> None:
    """Invariant 5: chunks shorter than the log are logged, others are not."""
    layer = make_layer(kind, dtype)
    inputs = make_inputs(layer, 41, 6)
    wanted, driver = Driver(layer, 4), Driver(layer, 4)
    expected = wanted.step(inputs[:40])
    found = torch.cat([driver.step(part) for part in inputs[:40].split(list(sizes))])
    assert torch.equal(found, expected)
    assert same_bits(driver.fold(inputs[40:]), wanted.fold(inputs[40:]))


@every_kind
def test_states_and_logs_are_wide(kind: str) -> None:
    """What is summed up over a text has float32, in a model of bfloat16 too."""
    layer = make_layer(kind, torch.bfloat16)
    specs = layer.state.slot_tensors(2)
    wide = {name for name, spec in specs.items() if spec.dtype == "float32"}
    assert wide == specs.keys() - {"window", "window_log"}  # inputs, which are copied
    for name in ("a_log", "dt_bias", "d"):
        assert getattr(layer, name, torch.zeros(0)).dtype == torch.float32


@pytest.mark.parametrize("kind", ["delta net", "mamba-2"])
def test_a_log_of_bfloat16_is_noticed(kind: str) -> None:
    """Mutant: what the log loses, every later token misses."""
    layer = make_layer(kind, torch.float32)
    inputs = make_inputs(layer, PROMPT + 5, 1)
    driver, wanted = Driver(layer, 4), sequential(layer, inputs[: PROMPT + 4])
    driver.step(inputs[:PROMPT])
    driver.step(inputs[PROMPT : PROMPT + 4])
    for name, tensor in driver.state.items():
        if name.endswith("log"):
            tensor.copy_(tensor.bfloat16().float())
    token = inputs[PROMPT + 4 :]
    assert not same_bits(driver.fold(token), wanted.fold(token))
