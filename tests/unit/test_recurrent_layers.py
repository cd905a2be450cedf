"""Recurrent layers by themselves: transformers' outputs, however a text is cut into steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stoop.core.state import RecurrentState
from stoop.layers.norm import RMSNorm
from stoop.layers.recurrent import Mamba2, ShortConv
from stoop.layers.stateful import StateContext
from stoop.models.hybrid import read_mamba
from stoop.ops.recurrent import RecurrentRows
from support.checkpoints import make_model
from support.huggingface import make_exact

LOG_LEN, SLOT, NUM_SLOTS = 4, 2, 3
NUM_TOKENS = 61
# Tokens of each step, and how many of them count: the rest are drafts that were rejected.
CUTS: dict[str, list[tuple[int, int]]] = {
    "whole": [(61, 61)],
    "chunks": [(20, 20), (3, 3), (38, 38)],
    "one-by-one": [(30, 30), *[(1, 1)] * 31],
    "drafts": [(50, 50), (4, 1), (4, 3), (4, 4), (2, 1), (2, 2)],
    "short-prompt": [(2, 2), (4, 2), (4, 1), (56, 56)],
}
NAMES = ("lfm2", "lfm2-biases", "granite-hybrid", "granite-groups", "bamba", "bamba-groups")


@dataclass(frozen=True)
class Pair:
    ours: Mamba2 | ShortConv
    theirs: nn.Module


def make_pair(name: str, exact: bool = True, **changes: Any) -> Pair:
    model = make_model(name, 0)
    for key, value in changes.items():
        setattr(model.config, key, value)
        for module in model.modules():
            if hasattr(module, key):
                setattr(module, key, value)
    if exact:
        make_exact(model)
    layer, config = model.model.layers[0], model.config
    ours: Mamba2 | ShortConv
    torch.set_default_dtype(torch.float64)
    try:
        if config.model_type == "lfm2":
            theirs = layer.conv
            ours = ShortConv(config.hidden_size, config.conv_L_cache, bias=config.conv_bias)
        else:
            theirs = layer.mamba
            config = {key: _plain(value) for key, value in vars(config).items()}
            ours = Mamba2(read_mamba(config, config["hidden_size"], config["rms_norm_eps"]))
    finally:
        torch.set_default_dtype(torch.float32)
    weights = theirs.state_dict()
    for view in ours.weight_views():
        view.fill(weights.pop(view.name))
    assert not weights
    ours.index = 0
    return Pair(ours, theirs)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def inputs() -> Tensor:
    """[tokens, hidden_size], normalised as a norm of ones leaves it"""
    x = torch.randn(NUM_TOKENS, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return nn.functional.rms_norm(x, (64,))


def run_ours(layer: Mamba2 | ShortConv, x: Tensor, steps: Sequence[tuple[int, int]]) -> Tensor:
    """The outputs of the tokens that count, from a slot full of another request's numbers."""
    norm = RMSNorm(64, 0.0)
    norm.weight.data = torch.ones(64, dtype=torch.float64)
    state = {
        name: torch.full((NUM_SLOTS + 1, *spec.shape), 7.0, dtype=torch.float64)
        for name, spec in layer.state.slot_tensors(LOG_LEN).items()
    }
    before = {name: tensor.clone() for name, tensor in state.items()}
    pending = torch.full((NUM_SLOTS + 1,), 3)
    outputs, context = [], 0
    for count, kept in steps:
        rows = RecurrentRows(
            query_start_loc=torch.tensor([0, count], dtype=torch.int32),
            context_lens=torch.tensor([context], dtype=torch.int32),
            seq_lens=torch.tensor([context + count], dtype=torch.int32),
            slots=torch.tensor([SLOT]),
            pending=pending,
            short=count <= LOG_LEN,
        )
        tokens = x[context : context + count].clone()
        tokens[kept:] *= -2.0  # rejected drafts are other tokens
        ctx = StateContext([state], {RecurrentState: rows})
        outputs.append(layer.branch(tokens, norm, ctx)[:kept])
        pending[SLOT] = kept if count <= LOG_LEN else 0
        context += kept
    others = [slot for slot in range(NUM_SLOTS + 1) if slot != SLOT]
    assert all(torch.equal(state[name][others], before[name][others]) for name in state)
    return torch.cat(outputs)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_transformers(name: str) -> None:
    pair, x = make_pair(name), inputs()
    with torch.no_grad():
        wanted = pair.theirs(x[None])[0]
        for cut, steps in CUTS.items():
            found = run_ours(pair.ours, x, steps)
            error = (found - wanted[: len(found)]).abs().max()
            assert float(error) < 1e-12, (cut, float(error))


@pytest.mark.parametrize("name", ["granite-hybrid", "bamba-groups"])
def test_so_are_those_of_its_own_float32_scan(name: str) -> None:
    """The reference above replaces transformers' scan; this one does not."""
    pair, x = make_pair(name, exact=False), inputs()
    with torch.no_grad():
        wanted = pair.theirs(x[None])[0]
        found = run_ours(pair.ours, x, CUTS["chunks"])
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)
    assert float(wanted.abs().mean()) > 0.05


def test_time_steps_are_limited_however_a_text_is_cut() -> None:
    """transformers limits them in passes over several tokens only."""
    pair, x = make_pair("granite-hybrid", time_step_limit=(0.4, 0.9)), inputs()
    free = make_pair("granite-hybrid")
    with torch.no_grad():
        wanted = pair.theirs(x[None])[0]
        assert float((wanted - free.theirs(x[None])[0]).abs().max()) > 1e-2
        for steps in CUTS.values():
            found = run_ours(pair.ours, x, steps)
            torch.testing.assert_close(found, wanted[: len(found)], rtol=0, atol=1e-12)
