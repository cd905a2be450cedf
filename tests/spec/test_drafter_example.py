"""A drafter outside of stoop, as examples/my_drafter.py registers it, changes no answer."""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import stoop
from stoop import LLM, SamplingParams
from stoop.config import speculation
from stoop.config.errors import ConfigError
from stoop.core.step import StepPlan
from stoop.graph.phases import Phase
from stoop.graph.refusals import CaptureError
from stoop.spec import registry
from stoop.spec.base import Pass
from stoop.worker.output import LaunchedStep
from support.drafters import MODES, Drafter, DrafterStore, Trace, make_spec_llm, run
from support.engines import generate_ids

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_drafter.py"
K = 3
PROMPT = [5, 9, 3, 40]


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """Registered for these tests only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "SPECULATORS", dict(registry.SPECULATORS))
        patch.setattr(speculation, "_headless", list(speculation._headless))
        spec = importlib.util.spec_from_file_location("my_drafter", EXAMPLE)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "my_drafter", module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def repeat(example: ModuleType, drafters: DrafterStore) -> Drafter:
    return Drafter(drafters.get("ngram").target, "repeat")


@pytest.fixture(scope="module")
def plain(repeat: Drafter) -> Trace:
    """Answers without speculation."""
    return run(make_spec_llm(repeat, 0), 0)


@pytest.fixture(scope="module")
def eager(repeat: Drafter) -> Trace:
    return run(make_spec_llm(repeat, K), K)


@pytest.mark.parametrize("mode", MODES)
def test_answers_equal_plain_decoding(
    repeat: Drafter, plain: Trace, eager: Trace, mode: str
) -> None:
    """Drafts are those of eager steps, too: in a graph they could be stale and do no harm."""
    trace = run(make_spec_llm(repeat, K, graph_mode=mode, sanitize=mode != "none"), K)
    assert trace.answers == plain.answers
    assert trace.finish_reasons == plain.finish_reasons
    assert trace.drafts == eager.drafts


@pytest.mark.parametrize("mode", ["none", "step"])
def test_drafts_repeat_the_newest_token(repeat: Drafter, mode: str) -> None:
    llm = make_spec_llm(repeat, K, graph_mode=mode)
    found = note_drafts(llm)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (answer,) = generate_ids(llm, [PROMPT], params)
    text = PROMPT + answer
    assert found
    for known, drafts in found.items():
        left = len(text) - known  # the last token of an answer is not drafted
        assert drafts == [text[known - 1]] * max(min(K, left - 1), 0), known


@pytest.mark.parametrize(("wanted", "found"), [(0, 0), (2, 2)])
def test_a_request_may_have_fewer_drafts(repeat: Drafter, wanted: int, found: int) -> None:
    llm = make_spec_llm(repeat, K)
    drafts = note_drafts(llm)
    params = SamplingParams(max_tokens=12, ignore_eos=True, num_speculative_tokens=wanted)
    generate_ids(llm, [PROMPT], params)
    assert max(map(len, drafts.values())) == found


def test_a_buffer_that_does_not_exist_is_named_at_the_start(
    example: ModuleType, repeat: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = example.RepeatSpeculator.phases

    def phases(self: Any) -> list[Phase]:
        return [replace(phase, reads=phase.reads | {"tokens"}) for phase in declared(self)]

    monkeypatch.setattr(example.RepeatSpeculator, "phases", phases)
    with pytest.raises(ValueError, match="phase R names `tokens`, which is not a buffer"):
        make_spec_llm(repeat, K)


def test_a_decision_on_the_host_is_refused_by_a_graph(
    example: ModuleType, repeat: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeat_ = example.RepeatSpeculator.repeat

    def decide(self: Any, run: Pass) -> None:
        if self.setup.slots.num_tokens.max().item() < 40:
            repeat_(self, run)

    monkeypatch.setattr(example.RepeatSpeculator, "repeat", decide)
    with pytest.raises(CaptureError, match="reads a value on the host"):
        make_spec_llm(repeat, K, graph_mode="step")


def note_drafts(llm: LLM) -> dict[int, list[int]]:
    """From now on, of one request: its drafts by the number of tokens known before them."""
    found: dict[int, list[int]] = {}
    runner = llm.engine.runner
    launch = runner.launch

    def spy(plan: StepPlan) -> LaunchedStep:
        launched = launch(plan)
        slots, (row,) = runner.target.state.tensors, plan.rows
        known, count = int(slots.num_tokens[row.slot]), int(slots.num_drafts[row.slot])
        found[known] = slots.token_ids[row.slot, known : known + count].tolist()
        return launched

    runner.launch = spy  # type: ignore[method-assign]
    return found


# ---- refusals ----


@pytest.mark.parametrize("name", ["repeat", "ngram", "eagle3"])
def test_a_name_is_registered_once(example: ModuleType, name: str) -> None:
    before = registry.SPECULATORS[name]
    with pytest.raises(ConfigError, match=f"drafter named '{name}' already exists: use"):
        stoop.register_drafter(name, example.RepeatSpeculator)
    assert registry.SPECULATORS[name] is before


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"model": "path/to/head"}, "a model or revision with method repeat, which takes none"),
        ({"revision": "main"}, "a model or revision with method repeat, which takes none"),
        ({"draft_sample_method": "coupled"}, "with method repeat, which has no probabilities"),
        ({"prompt_lookup_min": 2}, "which belong to method ngram: leave them out"),
        ({"num_speculative_tokens": None}, "lacks num_speculative_tokens"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_it_cannot_take_is_refused(
    repeat: Drafter, given: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        make_spec_llm(repeat, K, spec=given)
    assert "\n" not in str(refused.value)


def test_it_is_unknown_until_it_is_registered(
    repeat: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "_headless", ["ngram"])
    with pytest.raises(ConfigError, match="has method='repeat': use eagle, eagle3, mtp or"):
        make_spec_llm(repeat, K)


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 100
