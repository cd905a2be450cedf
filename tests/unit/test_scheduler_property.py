"""Random traffic through the scheduler, step by step and ahead of results."""

import dataclasses
import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from stoop.scheduler import prefix_cache as prefix_cache_module
from support.scheduler_simulation import (
    CROWDED,
    TIGHT,
    TIGHT_SPECULATIVE,
    Simulation,
    World,
    run_ahead_world,
    run_traffic,
    varied_world,
)

CHUNKS = range(4 if os.environ.get("STOOP_TEST_ALL") else 2)  # of seeds


@pytest.mark.parametrize("chunk", CHUNKS)
def test_random_traffic_keeps_every_invariant(chunk: int) -> None:
    totals = run_traffic(range(chunk * 60, chunk * 60 + 60))
    # The traffic must reach what it is meant to test.
    assert totals["steps"] > 5000
    kinds = ("preemptions", "hits", "aborts", "stops", "dead")
    assert min(totals[k] for k in kinds) > 20, totals


@pytest.mark.parametrize("chunk", CHUNKS)
def test_random_speculative_traffic_keeps_every_invariant(chunk: int) -> None:
    totals = run_traffic(range(chunk * 60, chunk * 60 + 60), World.draw_speculative)
    assert totals["steps"] > 3000
    kinds = ("preemptions", "hits", "aborts", "stops", "limits", "dead")
    assert min(totals[k] for k in kinds) > 20, totals
    assert totals["drafted"] > totals["accepted"] > 1000, totals


@pytest.mark.parametrize("chunk", CHUNKS)
def test_random_traffic_with_varying_drafts_keeps_every_invariant(chunk: int) -> None:
    totals = run_traffic(range(chunk * 60, chunk * 60 + 60), varied_world)
    kinds = ("preemptions", "hits", "aborts", "stops", "limits", "dead", "again", "restored")
    assert min(totals[k] for k in kinds) > 20, totals
    assert totals["drafted"] > totals["accepted"] > 500 and totals["without place"] > 100, totals


@pytest.mark.parametrize("depth", [1, 2, 3, 9])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_tight_pool_preempts_and_still_answers_right(depth: int, prefix_caching: bool) -> None:
    world = World(**(vars(TIGHT) | {"depth": depth, "prefix_caching": prefix_caching}))
    assert run_traffic(range(6), world)["preemptions"] > 10


@pytest.mark.parametrize("depth", [1, 2, 3, 9])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("drafter_has_kv", [False, True])
def test_tight_pool_of_a_speculative_engine(
    depth: int, prefix_caching: bool, drafter_has_kv: bool
) -> None:
    changes = {"depth": depth, "prefix_caching": prefix_caching, "drafter_has_kv": drafter_has_kv}
    world = dataclasses.replace(TIGHT_SPECULATIVE, **changes)
    totals = run_traffic(range(8), world)
    assert totals["preemptions"] > 10 and totals["accepted"] > 100, totals
    assert (totals["hits"] > 20) == prefix_caching


def test_crowded_traffic() -> None:
    assert run_traffic(range(20), CROWDED)["preemptions"] > 20


def test_unchunked_traffic() -> None:
    world = World(**(vars(TIGHT) | {"chunked": False, "max_num_batched_tokens": 24}))
    assert run_traffic(range(10), world)["preemptions"] > 10


def test_colliding_digests_never_hand_out_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache_module, "block_digest", lambda parent, tokens: b"same")
    # The worker compares what it reads with each request's own text, block by block.
    totals = run_traffic(range(10), World(block_size=2, num_blocks=20))
    assert totals["hits"] > 0, "nothing was handed out at all"


class SchedulerMachine(RuleBasedStateMachine):
    """The same world, with hypothesis choosing (and shrinking) the events."""

    @initialize(
        num_spare=st.integers(0, 3),
        budget=st.integers(4, 12),
        chunked=st.booleans(),
        caching=st.booleans(),
        num_drafts=st.sampled_from((0, 0, 1, 2, 3)),
        drafter_has_kv=st.booleans(),
        depth=st.sampled_from((1, 2, 3, 5)),
        num_snapshots=st.sampled_from((0, 1, 2, 9)),
    )
    def begin(
        self,
        num_spare: int,
        budget: int,
        chunked: bool,
        caching: bool,
        num_drafts: int,
        drafter_has_kv: bool,
        depth: int,
        num_snapshots: int,
    ) -> None:
        budget = max(budget if chunked else 12, 3 * (num_drafts + 1))
        self.sim = Simulation(
            World(
                block_size=2,
                num_blocks=7 + num_spare,
                max_model_len=12,
                max_num_seqs=3,
                max_num_batched_tokens=budget,
                chunked=chunked,
                prefix_caching=caching,
                depth=depth,
                num_drafts=num_drafts,
                drafter_has_kv=drafter_has_kv and num_drafts > 0,
                num_snapshots=num_snapshots if caching else 0,
            )
        )

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=11),
        max_tokens=st.integers(1, 8),
        priority=st.integers(0, 1),
        min_tokens=st.integers(0, 2),
    )
    def add(self, prompt: list[int], max_tokens: int, priority: int, min_tokens: int) -> None:
        self.sim.add(prompt, max_tokens, priority, min_tokens=min_tokens)

    @rule(choice=st.integers(0, 9))
    def abort(self, choice: int) -> None:
        self.sim.abort(choice)

    @rule(count=st.integers(0, 3), redraft=st.booleans())
    def vary_drafts(self, count: int, redraft: bool) -> None:
        self.sim.vary_drafts(min(count, self.sim.world.num_drafts), redraft)

    @rule(places=st.booleans(), drafts=st.booleans(), keeps_drafter_kv=st.booleans())
    def try_drafts(self, places: bool, drafts: bool, keeps_drafter_kv: bool) -> None:
        most = self.sim.world.num_drafts
        self.sim.try_drafts(most * places, most * drafts, keeps_drafter_kv)

    @precondition(lambda self: self.sim.scheduler.has_work and self.sim.may_launch)
    @rule()
    def launch(self) -> None:
        self.sim.launch()

    @precondition(lambda self: self.sim.in_flight)
    @rule()
    def land(self) -> None:
        self.sim.land()

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            self.sim.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def test_run_ahead_traffic_is_right_without_mutants() -> None:
    """Else the mutants of run-ahead would show nothing."""
    totals = run_traffic(range(40), run_ahead_world)
    assert totals["dead"] > 100 and totals["preemptions"] > 20, totals


def test_plain_steps_have_no_dead_rows() -> None:
    """The slow twin reads every result before it plans: nothing is launched in vain."""
    plain = dataclasses.replace(TIGHT_SPECULATIVE, depth=1)
    assert run_traffic(range(8), plain)["dead"] == 0
    assert run_traffic(range(8), dataclasses.replace(plain, depth=3))["dead"] > 0
