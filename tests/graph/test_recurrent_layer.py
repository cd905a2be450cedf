"""A family with recurrent state: every graph mode, drafts, chunks and preemption change nothing.

The family is tests/support/running_sum.py. Its layers keep a decaying sum by slot, so a slot that
was not reset, a chunk that was counted twice, a rejected draft or a padded row would show.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import stoop
from stoop.core.state import PagedState, RecurrentState
from stoop.graph.sanitizer import SanitizerError
from stoop.models import registry
from stoop.models.family import Family
from stoop.models.llama import read_spec
from support.drafters import MODES
from support.graph_workload import GREEDY, Answers, make_graph_llm, run
from support.running_sum import DECAY, RunningSumModel, RunningSumState
from support.small_models import HIDDEN, write_target

ARCHITECTURE = "RunningSumForCausalLM"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    """For these tests only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_families", dict(registry._families))
        stoop.register_model(Family((ARCHITECTURE,), read_spec, RunningSumModel))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_target(tmp_path_factory.mktemp("sum") / "target", 128)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(4)
    for layer in range(2):
        weight = 0.3 * torch.randn(HIDDEN, generator=generator, dtype=torch.float64)
        tensors[f"model.layers.{layer}.running.weight"] = weight
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [ARCHITECTURE], "max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Answers:
    """Eager, each prompt in one piece, none preempted."""
    return run(make_graph_llm(folder, max_num_batched_tokens=1024, num_kv_blocks=200))


def test_its_states_are_declared(folder: Path) -> None:
    layout = make_graph_llm(folder).engine.runner.state_layout
    assert [type(state) for state in layout.states] == [PagedState, RecurrentState] * 2
    assert layout.slot_bytes == 2 * 8 * HIDDEN * 2  # a sum and a log of one token, two layers


def test_the_sum_matters(folder: Path, plain: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.running_sum.DECAY", 0.5 * DECAY)
    assert run(make_graph_llm(folder)).token_ids != plain.token_ids


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("mode", MODES)
def test_answers_are_those_of_whole_prompts(
    folder: Path, plain: Answers, mode: str, drafts: bool
) -> None:
    """With chunks and preemption, and with drafts of which most are rejected."""
    spec = NGRAM if drafts else None
    options = {"graph_mode": mode, "sanitize": mode != "none", "speculative_config": spec}
    llm = make_graph_llm(folder, **options)
    assert run(llm).token_ids == plain.token_ids
    metrics = llm.metrics()
    assert metrics["num_preemptions"] > 0
    assert metrics["prefix_cache_hit_tokens"] == 0
    if drafts:
        assert metrics["spec_decode_num_accepted_tokens"] > 0
        assert metrics["spec_decode_num_accepted_tokens"] < metrics["spec_decode_num_draft_tokens"]


# ---- bugs, put back ----


def forget_to_commit(patch: pytest.MonkeyPatch) -> None:
    """Rejected drafts count: what was logged is added whole."""

    def whole(self: RunningSumState) -> None:
        step = self.setup.buffers.step
        starts = self.setup.buffers.rows.query_start_loc.long()
        self.pending[step.row_slots] = (starts[1:] - starts[:-1]).clamp(max=self.log_len)

    patch.setattr(RunningSumState, "commit", whole)


def test_a_rejected_draft_that_counts_is_noticed(
    folder: Path, plain: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_to_commit(monkeypatch)
    assert run(make_graph_llm(folder, speculative_config=NGRAM)).token_ids != plain.token_ids


def test_a_stale_pointer_to_the_state_is_noticed(folder: Path) -> None:
    llm = make_graph_llm(folder, graph_mode="step", sanitize=True)
    state = llm.engine.runner.target.model_state
    assert isinstance(state, RunningSumState)
    state.pending = state.pending.clone()
    with pytest.raises(SanitizerError, match="`pending` has moved"):
        llm.generate([[1, 2, 3]], GREEDY)
