"""Bugs of other engines put back, and what catches each (docs/hybrid.md has the table)."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stoop import LLM, SamplingParams
from stoop.check.mutants import hybrid
from stoop.check.mutants.base import Mutant
from stoop.check.mutants.harness import TinyEngines, healthy, run_mutant
from stoop.core.state import RecurrentState
from stoop.graph.sanitizer import SanitizerError
from stoop.layers import recurrent
from stoop.layers.norm import RMSNorm
from stoop.model_state.mamba_hybrid import MambaHybridModelState
from stoop.ops import causal_conv, delta_net
from stoop.ops.delta_net import DeltaGates
from support.checkpoints import MIXERS, VOCAB_SIZE, CheckpointStore
from support.engines import generate_ids, make_llm
from support.huggingface import HuggingFace
from support.mutants import assert_caught, documented_rows, rows
from support.scripted import scripted, scripted_config

Patch = pytest.MonkeyPatch
NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = [[number, *(11 * i * number % VOCAB_SIZE for i in range(1, n))]
           for number, n in enumerate((1, 6, 9, 30, 41), start=1)]  # fmt: skip
SETTINGS: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "block_size": 8,
    "capture_sizes": "4,24",  # three requests or fewer are padded
}


def skip_the_window_log(patch: Patch) -> None:
    """A window is shifted before the tokens that count are in it."""
    convolve = causal_conv._convolve

    def early(x: Any, weight: Any, bias: Any, row: Any, window: Any, log: Any) -> Any:
        return convolve(x, weight, bias, replace(row, pending=0), window, log)

    patch.setattr(causal_conv, "_convolve", early)


def swap_a_and_b(patch: Patch) -> None:
    patch.setattr(recurrent, "DeltaGates", lambda z, b, a: DeltaGates(z, a, b))


def gate_of_the_token_before(patch: Patch) -> None:
    """A gather that is off by one."""
    patch.setattr(recurrent, "DeltaGates", lambda z, b, a: DeltaGates(z.roll(1, 0), b, a))


def gate_before_the_norm(patch: Patch) -> None:
    """Mamba-2's order in a delta net."""
    run = delta_net._run

    def ungated(*args: Any) -> Tensor:
        return torch.nn.functional.silu(run(*args))

    patch.setattr(delta_net, "_run", ungated)


def norm_before_the_gate(patch: Patch) -> None:
    """A delta net's order in Mamba-2."""

    def swapped(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
        normed = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
        return normed * torch.nn.functional.silu(gate)

    patch.setattr(recurrent, "gated_norm", swapped)


def forget_the_offset(patch: Patch) -> None:
    """Norms multiply by the weight instead of 1 + weight."""
    views = RMSNorm.weight_views

    def plain(self: RMSNorm) -> Any:
        for view in views(self):
            yield view._replace(offset=0.0)

    patch.setattr(RMSNorm, "weight_views", plain)


Case = tuple[str, Callable[[Patch], None], tuple[str, ...], str | None]
# name, bug, families, the buffer that the sanitizer names (None: it sees no difference)
MUTANTS: list[Case] = [
    *((each.name, each.apply, MIXERS, each.buffer) for each in hybrid.MUTANTS),
    ("window shifted too early", skip_the_window_log, MIXERS, None),
    ("gates a and b swapped", swap_a_and_b, ("qwen3.5",), None),
    ("gate of the token before", gate_of_the_token_before, ("qwen3.5",), None),
    ("gate before the norm", gate_before_the_norm, ("qwen3.5",), None),
    ("norm before the gate", norm_before_the_gate, ("granite-hybrid",), None),
    ("norms without 1 +", forget_the_offset, ("qwen3.5",), None),
]
EVERY = bool(os.environ.get("STOOP_TEST_ALL"))
# One family a bug, another than that of the same bug in the package; `make test-all` has all.
CASES = [
    pytest.param(name, bug, family, buffer, id=f"{name}-{family}")
    for number, (name, bug, families, buffer) in enumerate(MUTANTS)
    for family in (families if EVERY else [families[(number + 1) % len(families)]])
]


class Answers:
    """What transformers answers, by family, made once."""

    def __init__(self, checkpoints: CheckpointStore) -> None:
        self.checkpoints = checkpoints
        self.known: dict[str, list[list[int]]] = {}
        self.healthy: set[str] = set()

    def get(self, family: str) -> tuple[Path, list[list[int]]]:
        folder = self.checkpoints.get(family, dtype="float64")
        if family not in self.known:
            model = HuggingFace(folder, "float64")
            self.known[family] = [model.greedy(p, NUM_TOKENS).token_ids for p in PROMPTS]
        return folder, self.known[family]

    def check_healthy(self, family: str) -> None:
        """Once a family, before any bug."""
        if family not in self.healthy:
            folder, expected = self.get(family)
            assert twice(make(folder)) == expected * 2, "healthy"
            self.healthy.add(family)


@pytest.fixture(scope="module")
def answers(checkpoints: CheckpointStore) -> Answers:
    return Answers(checkpoints)


def make(folder: Path, **options: Any) -> LLM:
    drafts = {"speculative_config": scripted_config(3)}
    return make_llm(folder, **(SETTINGS | drafts | {"graph_mode": "step"} | options))


def twice(llm: LLM) -> list[list[int]]:
    """Alone, then together, so that slots are used again."""
    alone = [generate_ids(llm, [prompt], GREEDY)[0] for prompt in PROMPTS]
    return alone + generate_ids(llm, PROMPTS, GREEDY)


@pytest.mark.parametrize(("name", "bug", "family", "buffer"), CASES)
def test_a_mutant_is_caught(
    answers: Answers,
    monkeypatch: Patch,
    name: str,
    bug: Callable[[Patch], None],
    family: str,
    buffer: str | None,
) -> None:
    folder, expected = answers.get(family)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    with scripted(texts, VOCAB_SIZE):
        answers.check_healthy(family)
        bug(monkeypatch)
        assert twice(make(folder)) != expected * 2
        if buffer is not None:
            with pytest.raises(SanitizerError, match=f"`{buffer}`"):
                twice(make(folder, sanitize=True))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> TinyEngines:
    return TinyEngines(tmp_path_factory.mktemp("engines"))


# One of each model; the others are caught above.
CHECKED = hybrid.MUTANTS if EVERY else {each.model: each for each in hybrid.MUTANTS}.values()


@pytest.mark.parametrize("mutant", CHECKED, ids=lambda mutant: mutant.label)
def test_stoop_check_catches_it(mutant: Mutant, engines: TinyEngines) -> None:
    """On the tiny hybrids of `stoop check --mutants`, with drafts of an n-gram lookup."""
    assert_caught(run_mutant(mutant, engines))


def test_the_same_engines_without_mutants_are_clean(engines: TinyEngines) -> None:
    for mutant in dict.fromkeys(healthy(mutant) for mutant in CHECKED):
        assert engines.run(mutant, sanitize=True).failed is False
        counts = engines.expected(mutant).metrics
        accepted = counts["spec_decode_num_accepted_tokens"]
        assert 0 < accepted < counts["spec_decode_num_draft_tokens"]


def test_the_documents_table_is_this_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "hybrid.md").read_text()
    assert documented_rows(text, "| mutant | equality | sanitizer |") == rows(hybrid.MUTANTS)


def test_the_sanitizer_names_state_that_a_graph_does_not_update(
    answers: Answers, monkeypatch: Patch
) -> None:
    """The commit is left out of the graph alone."""
    folder, expected = answers.get("lfm2")
    commit = MambaHybridModelState.commit

    def outside_graphs(self: MambaHybridModelState) -> None:
        if torch.utils._python_dispatch._get_current_dispatch_mode() is None:
            commit(self)

    monkeypatch.setattr(MambaHybridModelState, "commit", outside_graphs)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    with scripted(texts, VOCAB_SIZE), pytest.raises(SanitizerError, match="`pending`"):
        twice(make(folder, sanitize=True))


def test_a_step_passes_its_own_longest_sequence(answers: Answers) -> None:
    """Mechanism 5 for hybrids: metadata is built with the batch's bound, the worst case only for a
    capture; recurrent metadata is views of the step's buffers."""
    folder, _ = answers.get("lfm2")
    llm = make_llm(folder, **SETTINGS, graph_mode="none")
    runner = llm.engine.runner
    state, seen = runner.target.model_state, []
    prepare = state.prepare_attn

    def spy(batch: Any, for_capture: bool = False) -> Any:
        seen.append((batch.max_seq_len, for_capture))
        found = prepare(batch, for_capture)
        assert found[RecurrentState].slots.data_ptr() == batch.step.row_slots.data_ptr()
        return found

    state.prepare_attn = spy  # type: ignore[method-assign]
    generate_ids(llm, [PROMPTS[1]], GREEDY)
    assert [length for length, _ in seen] == list(range(6, 6 + NUM_TOKENS))
    assert not any(for_capture for _, for_capture in seen)
