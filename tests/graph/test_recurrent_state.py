"""The state seam, proved with a toy layer that keeps a running sum by slot.

Every answer is compared with the same model run over the whole text for each token, which keeps
nothing: slots, padding, chunks, preemption and the undoing of rejected drafts must all be right.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stoop import LLM, SamplingParams
from stoop.core.step import Admission
from stoop.graph.sanitizer import ReplayMismatch, SanitizerError
from stoop.model_state.mamba_hybrid import MambaHybridModelState
from stoop.models import registry
from support import running_sum
from support.engines import make_llm
from support.running_sum import RunningSumModel, greedy_by_recomputing

MODES = ("none", "piecewise", "full", "full_decode_only", "full_and_piecewise", "step")
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 2,
}
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
# Lengths around blocks, around the log of 4 tokens, and longer than a step takes.
PROMPTS = [[7 * i % 128 for i in range(n)] for n in (1, 3, 4, 5, 8, 9, 50, 23)]
PROMPTS.append([5, 6, 7] * 6)  # a text that repeats itself: n-grams find drafts
SETTINGS: dict[str, Any] = {
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,  # long prompts come in chunks
    "block_size": 8,
    "num_kv_blocks": 15,  # too few for all: some are preempted
    "capture_sizes": "1,2,4,24",
}

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module", autouse=True)
def _family() -> Iterator[None]:
    """Registered for these tests only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_families", dict(registry._families))
        registry.register_model(running_sum.FAMILY)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return running_sum.write_checkpoint(tmp_path_factory.mktemp("models") / "running-sum")


def make(folder: Path, **options: Any) -> LLM:
    return make_llm(folder, **(SETTINGS | options))


def answers(llm: LLM) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    model = make(folder).engine.runner.model
    assert isinstance(model, RunningSumModel)
    assert GREEDY.max_tokens is not None
    return [greedy_by_recomputing(model, prompt, GREEDY.max_tokens) for prompt in PROMPTS]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spec", [None, NGRAM], ids=["plain", "ngram"])
def test_answers_are_those_of_recomputing_everything(
    folder: Path, expected: list[list[int]], mode: str, spec: Any
) -> None:
    """With graphs under the sanitizer: each replay equals its eager twin, states included."""
    llm = make(folder, graph_mode=mode, speculative_config=spec, sanitize=mode != "none")
    assert answers(llm) == expected
    metrics = llm.metrics()
    assert metrics["num_preemptions"] > 0
    if spec is not None:  # drafts were both accepted and rejected
        accepted = metrics["spec_decode_num_accepted_tokens"]
        assert 0 < accepted < metrics["spec_decode_num_draft_tokens"]
    assert answers(llm) == expected  # slots have been used before


@pytest.mark.parametrize("mode", ["none", "step"])
def test_run_ahead_changes_nothing(folder: Path, expected: list[list[int]], mode: str) -> None:
    llm = make(folder, graph_mode=mode, speculative_config=NGRAM, run_ahead=2)
    assert answers(llm) == expected


def test_states_are_sized_and_kept_out_of_the_prefix_cache(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        llm = make(folder, speculative_config=NGRAM)
    assert "prefix caching is off: the model's layers have recurrent state" in caplog.text
    layout = llm.engine.runner.state_layout
    assert (len(layout.paged), len(layout.recurrent)) == (2, 2)
    assert layout.slot_bytes == 2 * (16 + 4 * 16) * 8  # the sum, and the log of K + 1 tokens
    shared = [list(range(40))] * 2
    llm.generate(shared, GREEDY)
    assert llm.metrics()["prefix_cache_hit_tokens"] == 0


# ---- bugs put back ----


def keep_rejected_drafts(patch: Patch) -> None:
    """All of a step's tokens count, accepted or not."""

    def commit(self: MambaHybridModelState) -> None:
        step = self.setup.buffers.step
        lengths = step.seq_lens - step.context_lens
        self.pending[step.row_slots] = torch.where(lengths <= self.log_len, lengths, 0).long()

    patch.setattr(MambaHybridModelState, "commit", commit)


def never_commit(patch: Patch) -> None:
    """No logged token is ever added to the sum."""
    patch.setattr(MambaHybridModelState, "commit", lambda self: None)


def keep_the_former_holders_log(patch: Patch) -> None:
    """A request enters a slot whose counter still is the last one's, and the context is not looked
    at."""

    def admit(self: MambaHybridModelState, staged: Any, admission: Admission) -> None:
        pass

    patch.setattr(MambaHybridModelState, "admit", admit)
    start_from_the_slot(patch)


def start_from_the_slot(patch: Patch) -> None:
    """A request without context starts from what its slot holds."""
    prepare = MambaHybridModelState.prepare_attn

    def careless(self: MambaHybridModelState, batch: Any, for_capture: bool = False) -> Any:
        found = dict(prepare(self, batch, for_capture))
        metadata = found[running_sum.RecurrentState]
        found[running_sum.RecurrentState] = _Pretended(metadata)
        return found

    patch.setattr(MambaHybridModelState, "prepare_attn", careless)


class _Pretended:
    """Metadata in which every row has context."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.real, name)
        if name in ("context_lens", "seq_lens"):
            return value + 1  # as many live tokens, after one more
        return value


def let_padding_write(patch: Patch) -> None:
    """Padded rows count as rows of slot 0."""
    prepare = MambaHybridModelState.prepare_attn

    def aliased(self: MambaHybridModelState, batch: Any, for_capture: bool = False) -> Any:
        found = dict(prepare(self, batch, for_capture))
        found[running_sum.RecurrentState] = _Aliased(found[running_sum.RecurrentState])
        return found

    patch.setattr(MambaHybridModelState, "prepare_attn", aliased)


class _Aliased:
    """Metadata whose padded rows have one token and slot 0."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        value, padded = getattr(self.real, name), self.real.seq_lens == 0
        if name == "slots":
            return torch.where(padded, 0, value)
        if name == "seq_lens":
            return torch.where(padded, 1, value)
        return value


MUTANTS: list[tuple[str, Callable[[Patch], None], str]] = [
    ("rejected drafts count", keep_rejected_drafts, "none"),
    ("rejected drafts count, in a step graph", keep_rejected_drafts, "step"),
    ("nothing is committed", never_commit, "none"),
    ("the former holder's state", start_from_the_slot, "none"),
    ("the former holder's log", keep_the_former_holders_log, "full"),
    ("padding writes slot 0", let_padding_write, "full_decode_only"),
]


@pytest.mark.parametrize(("name", "apply", "mode"), MUTANTS, ids=[m[0] for m in MUTANTS])
def test_a_mutant_is_caught(
    folder: Path,
    expected: list[list[int]],
    monkeypatch: Patch,
    name: str,
    apply: Callable[[Patch], None],
    mode: str,
) -> None:
    apply(monkeypatch)
    llm = make(folder, graph_mode=mode, speculative_config=NGRAM)
    assert [answers(llm), answers(llm)] != [expected, expected]


def test_the_sanitizer_sees_state_that_a_graph_does_not_update(
    folder: Path, monkeypatch: Patch
) -> None:
    """The commit is left out of the graph alone: the eager twin's counter differs."""
    commit = MambaHybridModelState.commit

    def outside_graphs(self: MambaHybridModelState) -> None:
        if torch.utils._python_dispatch._get_current_dispatch_mode() is None:
            commit(self)

    monkeypatch.setattr(MambaHybridModelState, "commit", outside_graphs)
    llm = make(folder, graph_mode="step", speculative_config=NGRAM, sanitize=True)
    with pytest.raises(SanitizerError, match="`pending`") as caught:
        answers(llm)
    assert isinstance(caught.value, ReplayMismatch)
