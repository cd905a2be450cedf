"""The number of drafts changes from step to step, and no answer changes with it."""

import functools
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from stoop import LLM
from stoop.batch.request_state import RequestState
from stoop.check import graphs
from stoop.check.workloads import GREEDY, Trace
from stoop.cli.start import print_started
from stoop.config.errors import ConfigError
from stoop.config.speculation import settle_speculation
from stoop.core.request import Request
from stoop.core.step import StepPlan
from stoop.engine import choose_drafter
from stoop.engine.draft_policy import AdaptiveDrafts
from stoop.engine.step_costs import StepTimes
from stoop.graph.sanitizer import SanitizerError
from stoop.scheduler.plan import PlanBuilder
from stoop.scheduler.prefix_cache import PrefixCache
from stoop.scheduler.scheduler import Scheduler
from support.draft_policies import RandomDrafts
from support.drafters import MODES, DrafterStore, assert_same_drafts, make_spec_llm, pairwise, run
from support.engines import generate_ids

EVERY = bool(os.environ.get("STOOP_TEST_ALL"))
DRAFTERS = ("eagle3-noisy", "ngram-right", *(["eagle-noisy", "eagle3-some"] if EVERY else []))
MOST = (3, 7)
AHEAD = (0, 2)
SEEDS = tuple(range(10)) if EVERY else (1, 2)
CAPTURED = ("full", "full_decode_only", "full_and_piecewise", "step")


def make(
    drafters: DrafterStore, name: str, most: int, mode: str, seed: int = 0, **options: Any
) -> LLM:
    spec = {"adaptive": True} if mode in CAPTURED else {}
    options |= {"graph_mode": mode, "sanitize": mode != "none"}
    llm = make_spec_llm(drafters.get(name), most, spec, **options)
    counts = {3: (0, 1, 3), 7: (0, 1, 3, 7)}[most]
    if mode in CAPTURED:
        assert llm.config.schedule.draft_counts == counts
        assert isinstance(llm.engine.core.drafts, AdaptiveDrafts)
    llm.engine.core.drafts = RandomDrafts(counts, seed, eager=mode == "none")
    return llm


@pytest.fixture(scope="module")
def expected(drafters: DrafterStore) -> "functools._lru_cache_wrapper[Trace]":
    @functools.lru_cache
    def trace(name: str, most: int) -> Trace:
        return run(make_spec_llm(drafters.get(name), most, run_ahead=0), most)

    return trace


def check(llm: LLM, most: int, expected: Trace) -> Trace:
    """Drafts after the same text are those of an engine that never pauses, as many as were made."""
    trace = run(llm, most)
    assert trace.answers == expected.answers
    assert trace.finish_reasons == expected.finish_reasons
    assert_same_drafts(trace, expected)
    llm.engine.scheduler.check_idle()
    return trace


def choose() -> Iterator[tuple[str, int, str, int, int]]:
    """Pairs; the larger number, which takes longest, with two of the modes."""
    if EVERY:
        yield from pairwise(DRAFTERS, MOST, MODES, AHEAD, SEEDS)
        return
    larger = (("eagle3-noisy", "full"), ("ngram-right", "step"))
    for name, mode, ahead, seed in pairwise(DRAFTERS, MODES, AHEAD, SEEDS):
        yield name, MOST[(name, mode) in larger], mode, ahead, seed


@pytest.mark.parametrize(("name", "most", "mode", "ahead", "seed"), list(choose()))
def test_no_answer_depends_on_the_number_of_drafts(
    drafters: DrafterStore, expected: Any, name: str, most: int, mode: str, ahead: int, seed: int
) -> None:
    llm = make(drafters, name, most, mode, seed, run_ahead=ahead)
    replayed: set[int | None] = set()
    llm.engine.runner.executor.on_replay.append(lambda _, d: replayed.add(d.query_len))
    trace = check(llm, most, expected(name, most))
    policy = llm.engine.core.drafts
    assert isinstance(policy, RandomDrafts) and len(set(policy.chosen)) == len(policy.counts)
    if mode in CAPTURED:  # each number has graphs of its own
        assert replayed >= policy.query_lens and len(policy.query_lens) > 2
    assert trace.metrics["num_preemptions"] > 0
    lengths = {len(drafts) for drafts in trace.drafts.values()}
    assert lengths <= set(range(most + 1))
    if name == "ngram-right":  # a lookup finds all drafts or none; the next step takes some
        assert {0, most} <= lengths
    else:
        assert {0, 1} < lengths
        assert trace.metrics["num_computed_again"] > 0


@pytest.mark.parametrize(("mode", "ahead"), [("none", 1), ("piecewise", 0)])
def test_it_needs_graphs_of_decodes_or_steps_that_can_be_timed(
    drafters: DrafterStore, mode: str, ahead: int
) -> None:
    for spec in ({"adaptive": True}, {"num_speculative_tokens": "auto", "adaptive": None}):
        with pytest.raises(ConfigError, match="set graph_mode to step or full, or to none with"):
            make_spec_llm(drafters.get("eagle3-right"), 3, spec, graph_mode=mode, run_ahead=ahead)


@pytest.mark.parametrize(
    ("number", "adaptive", "expected"),
    [
        (3, None, {"piecewise": (3,), "step": (0, 1, 3)}),  # as on a GPU
        ("auto", None, {"full": (0, 1, 3)}),
        (3, False, {"step": (3,)}),
        *(
            [
                (3, None, {"full": (0, 1, 3)}),
                ("auto", None, {"piecewise": (3,), "step": (0, 1, 3)}),
                (3, False, {"piecewise": (3,), "full": (3,)}),
            ]
            if EVERY
            else []
        ),
    ],
)
def test_check_varies_the_drafts_where_engines_do(
    monkeypatch: pytest.MonkeyPatch, number: Any, adaptive: Any, expected: Any
) -> None:
    def settle_as_on_a_gpu(*given: Any) -> Any:
        return settle_speculation(*given[:4], True)

    found: dict[str, tuple[int, ...]] = {}

    def note(llm: LLM, case: graphs.Case, *_: Any) -> graphs.Case:
        found[case.mode] = llm.config.schedule.draft_counts
        return case

    monkeypatch.setattr(choose_drafter, "settle_speculation", settle_as_on_a_gpu)
    monkeypatch.setattr(graphs, "_check", note)
    monkeypatch.setattr(graphs, "_record_eager", lambda *_: {})
    spec = {"method": "eagle3", "model": "tiny", "num_speculative_tokens": number}
    asked = {"device": "cpu", "speculative_config": spec | {"adaptive": adaptive}}
    with graphs.tiny_model("tiny", asked) as (folder, engine):
        modes, backends = tuple(expected), ("reference",)
        checks = [*graphs.run_checks(folder, modes, backends, engine, lambda *_: None)]
    assert len(checks) == len(expected) and found == expected


def test_a_head_that_knows_nothing_is_left_out(drafters: DrafterStore) -> None:
    """The policy that engines have, with the times of this machine."""
    spec = {"num_speculative_tokens": "auto", "adaptive": None}
    llm = make_spec_llm(drafters.get("eagle3-random"), 3, spec, graph_mode="step")
    policy = llm.engine.core.drafts
    assert isinstance(policy, AdaptiveDrafts)
    # A draft costs a quarter of a step, whatever this machine says.
    seconds = {
        (size, k): 1.0 + 0.25 * k for size in policy.costs.times.sizes for k in policy.counts
    }
    policy.costs.times = StepTimes(seconds)
    long = GREEDY.replace(max_tokens=60)
    plain = make_spec_llm(drafters.get("eagle3-random"), 0)
    every = [[n] for n in range(12)]
    assert generate_ids(llm, every, long) == generate_ids(plain, every, long)
    metrics = llm.metrics()
    assert metrics["num_steps_by_drafts"][0] > 0.5 * metrics["num_steps"]
    assert metrics["spec_decode_num_accepted_tokens"] == 0
    assert metrics["num_drafts_not_made"] > 0 and not metrics["drafting"]


@pytest.mark.parametrize(
    ("sizes", "line", "warning"),
    [
        ({}, "up to 3 draft tokens per step (3 drafts at 1 to 4 requests, none above 4)", None),
        ({"capture_sizes": "1,2"}, "none above 2)", "give larger capture_sizes, up to max_num_se"),
        ({"capture_sizes": None, "max_capture_size": 2}, "none above 2)", "raise max_capture_size"),
        ({"capture_sizes": "40"}, "EAGLE-3 head, 3 draft tokens per step", "every step makes 3"),
    ],
)
def test_a_start_says_where_drafts_are_made(
    drafters: DrafterStore,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    sizes: dict[str, Any],
    line: str,
    warning: str | None,
) -> None:
    with caplog.at_level("WARNING", "stoop.engine.build"):
        spec, options = {"adaptive": True}, {"graph_mode": "step", **sizes}
        llm = make_spec_llm(drafters.get("eagle3-right"), 3, spec, **options)
    policy = llm.engine.core.drafts
    if isinstance(policy, AdaptiveDrafts):  # drafts cost nothing, whatever this machine says
        policy.costs.times = StepTimes(
            {(n, k): 1.0 for n in policy.costs.times.sizes for k in policy.counts}
        )
    print_started("toy", llm.config, llm.metrics(), 1.0)
    assert line in capsys.readouterr().err
    found = [each.getMessage() for each in caplog.records if each.name == "stoop.engine.build"]
    assert len(found) == (warning is not None) and all(warning in each for each in found)


def test_drafts_after_other_texts_prove_nothing(expected: Any) -> None:
    """Nor do drafts that were not made."""
    wanted = expected("eagle3-noisy", 3)
    elsewhere = {(f"other {name}", known): made for (name, known), made in wanted.drafts.items()}
    for drafts, problem in ((elsewhere, "text"), ({key: [] for key in wanted.drafts}, "drafts")):
        with pytest.raises(AssertionError, match=f"hardly any {problem}"):
            assert_same_drafts(Trace(drafts=drafts), wanted)
    assert_same_drafts(wanted, wanted)


# ---- bugs put back ----


def draft_after_a_gap(patch: pytest.MonkeyPatch) -> None:
    """Requests that went without the drafter get drafts again, with KV that it never wrote."""
    patch.setattr(Request, "lose_drafter_kv", lambda self: False)


def forget_the_limit(patch: pytest.MonkeyPatch) -> None:
    """The host knows of the gap, the device does not."""
    patch.setattr(RequestState, "stop_drafts", lambda self, staged, slot: None)


def offer_blocks_after_a_gap(patch: pytest.MonkeyPatch) -> None:
    insert = PrefixCache.insert

    def mutant(self: PrefixCache, request: Request) -> None:
        kept, request.num_drafter_kv = request.num_drafter_kv, None
        insert(self, request)
        request.num_drafter_kv = kept

    patch.setattr(PrefixCache, "insert", mutant)
    patch.setattr(Request, "lacks_drafter_kv", lambda self, num_tokens: False)


def leave_out_prompts(patch: pytest.MonkeyPatch) -> None:
    """Prompts lack the drafter's KV, although drafts follow."""
    finish = Scheduler._finish_plan

    def mutant(self: Scheduler, plan: PlanBuilder) -> StepPlan:
        step = finish(self, plan)
        return step if self.num_drafts else replace(step, num_drafts=0)

    patch.setattr(Scheduler, "_finish_plan", mutant)


MUTANTS = [
    draft_after_a_gap,
    forget_the_limit,
    offer_blocks_after_a_gap,
    leave_out_prompts,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.__name__ for mutant in MUTANTS])
def test_a_mutant_is_caught(
    drafters: DrafterStore, expected: Any, monkeypatch: pytest.MonkeyPatch, mutant: Any
) -> None:
    wanted = expected("eagle-noisy", 3)
    mutant(monkeypatch)
    llm = make(drafters, "eagle-noisy", 3, "step", seed=1, run_ahead=2)
    with pytest.raises((AssertionError, SanitizerError)):
        check(llm, 3, wanted)
