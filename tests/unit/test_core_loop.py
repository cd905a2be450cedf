"""The loop of a core in a process of its own, without processes: commands in, messages out."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from stoop.config.schema import CacheConfig, ScheduleConfig
from stoop.core.messages import Delta, EngineRequest
from stoop.core.step import StepPlan, StepResult, TokenScores
from stoop.engine.core import EngineCore
from stoop.engine.core_loop import (
    BUSY_SECONDS,
    IDLE_SECONDS,
    MAX_FAILURES,
    CoreBroken,
    CoreLoop,
)
from stoop.engine.draft_policy import HeldDrafts, StepTime
from stoop.engine.wire import (
    Abort,
    Add,
    Decoder,
    Deltas,
    Heartbeat,
    Lost,
    Reply,
    ResetPrefixCache,
    Stop,
    encode,
)
from support.fake_executor import FakeExecutor
from support.scheduling import GREEDY, make_rules


class Bench:
    """A loop over two slots, its messages, and a clock that tests set."""

    def __init__(self, run_ahead: int = 0) -> None:
        self.executor = FakeExecutor(num_blocks=64)
        schedule = ScheduleConfig(128, 2, 64, True, run_ahead=run_ahead)
        core = EngineCore(schedule, CacheConfig(block_size=4), self.executor)
        self.messages: list[Any] = []
        self.now = 0.0
        self.is_fatal = False
        self.loop = CoreLoop(
            core, self.messages.append, lambda error: self.is_fatal, lambda: self.now
        )

    def add(self, *names: str, max_tokens: int = 5) -> None:
        rules = make_rules(max_tokens)
        self.loop.take(Add([EngineRequest(name, (1, 2, 3), rules) for name in names]))

    def run(self, num_turns: int = 1000) -> None:
        while self.loop.has_work and num_turns:
            self.loop.turn()
            num_turns -= 1

    def of(self, kind: type) -> list[Any]:
        return [each for each in self.messages if type(each) is kind]

    def tokens(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for message in self.of(Deltas):
            for delta in message.deltas:
                found.setdefault(delta.request_id, []).extend(delta.token_ids)
        return found


def test_requests_run_to_their_end() -> None:
    bench = Bench()
    bench.add("a", "b", "c")
    bench.run()
    assert bench.tokens() == {key: [0, 1, 2, 3, 4] for key in "abc"}
    assert [d.finish_reason for d in bench.of(Deltas)[-1].deltas] == ["length"]
    assert not bench.of(Lost)


def test_an_abort_is_silent_and_unknown_ids_are_ignored() -> None:
    bench = Bench()
    bench.add("a", "b", max_tokens=50)
    bench.run(3)
    bench.loop.take(Abort(["a", "never", "b"]))
    assert not bench.loop.has_work
    num_messages = len(bench.messages)
    bench.loop.turn()
    (last,) = bench.messages[num_messages:]  # the loop tells at once that it is idle
    assert last.metrics["kv_cache_usage"] == 0 and last.metrics["num_requests_running"] == 0
    bench.loop.take(Abort(["a"]))
    assert not bench.of(Lost)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_failing_step_loses_its_own_requests_only(run_ahead: int) -> None:
    bench = Bench(run_ahead)
    bench.add("a", "b", "c", "d")  # two at a time
    bench.run(2)
    bench.executor.fails = lambda plan: plan.rows[0].request_id in "ab"
    bench.run(2)
    (lost,) = bench.of(Lost)
    assert set(lost.request_ids) == {"a", "b"}
    assert lost.sentence == (
        "a step of the engine failed (RuntimeError: the device says no): retry"
    )
    bench.run()
    found = bench.tokens()
    assert found["c"] == found["d"] == [0, 1, 2, 3, 4] and len(found["a"]) < 5
    bench.loop.core.scheduler.check_idle()


def test_requests_outside_the_failing_step_go_on_from_their_tokens() -> None:
    bench = Bench()
    bench.add("a", "b", max_tokens=6)
    bench.run(3)
    failing = iter([True])
    # The plan at hand holds `b` alone, as after a chunked prompt took the budget.
    schedule = bench.loop.core.scheduler.schedule

    def only_b(**options: Any) -> StepPlan | None:
        plan = schedule(**options)
        assert plan is not None
        if bench.executor.fails is never:
            return plan
        return StepPlan(plan.index, [row for row in plan.rows if row.request_id == "b"])

    def never(plan: StepPlan) -> bool:
        return False

    def once(plan: StepPlan) -> bool:
        bench.executor.fails = never
        return next(failing)

    bench.executor.fails = once
    bench.loop.core.scheduler.schedule = only_b  # type: ignore[method-assign]
    bench.run()
    assert [each.request_ids for each in bench.of(Lost)] == [["b"]]
    assert bench.tokens()["a"] == [0, 1, 2, 3, 4, 5]


def test_a_request_that_the_core_refuses_is_lost_alone() -> None:
    bench = Bench()
    bench.add("a", "a", "b")
    (lost,) = bench.of(Lost)
    assert lost.request_ids == ["a"] and "is in use" in lost.sentence
    bench.run()
    assert bench.tokens()["b"] == [0, 1, 2, 3, 4]


def test_a_core_that_keeps_failing_is_given_up() -> None:
    bench = Bench()
    bench.executor.fails = lambda plan: True
    bench.add(*(f"r{i}" for i in range(2 * MAX_FAILURES)))
    for _ in range(MAX_FAILURES - 1):
        bench.loop.turn()
    with pytest.raises(CoreBroken, match="the device says no"):
        bench.loop.turn()


def test_an_error_that_breaks_the_device_ends_the_loop_at_once() -> None:
    bench = Bench()
    bench.add("a")
    bench.executor.fails = lambda plan: True
    bench.is_fatal = True
    with pytest.raises(CoreBroken):
        bench.loop.turn()


def test_planning_that_fails_twice_loses_all_requests() -> None:
    bench = Bench()
    bench.add("a", "b", "c")

    def fail(**options: Any) -> None:
        raise ValueError("a bug")

    scheduler = bench.loop.core.scheduler
    plan, scheduler.schedule = scheduler.schedule, fail  # type: ignore[assignment]
    bench.loop.turn()
    assert bench.of(Lost) == [] and bench.loop.has_work
    bench.loop.turn()
    assert bench.of(Lost)[0].request_ids == ["a", "b", "c"] and not bench.loop.has_work
    scheduler.schedule = plan  # type: ignore[method-assign]
    bench.add("d")
    bench.run()
    assert bench.tokens()["d"] == [0, 1, 2, 3, 4]


def test_heartbeats() -> None:
    bench = Bench()
    bench.loop.turn()
    assert len(bench.of(Heartbeat)) == 1 and bench.loop.patience == IDLE_SECONDS
    bench.now = IDLE_SECONDS / 2
    bench.loop.turn()
    assert len(bench.of(Heartbeat)) == 1 and bench.loop.patience == IDLE_SECONDS / 2
    bench.now = IDLE_SECONDS
    bench.add("a", max_tokens=90)
    assert bench.loop.patience == 0
    for beat in range(8):
        bench.now = IDLE_SECONDS + beat * BUSY_SECONDS / 2
        bench.loop.turn()
    assert len(bench.of(Heartbeat)) == 1 + 4
    assert bench.of(Heartbeat)[-1].metrics["num_requests_running"] == 1


def test_commands_with_an_answer() -> None:
    bench = Bench()
    bench.add("a")
    bench.loop.take(ResetPrefixCache(7))
    bench.run()
    bench.loop.take(ResetPrefixCache(8))
    assert bench.of(Reply) == [Reply(7, False), Reply(8, True)]
    bench.loop.take(Stop())
    assert bench.loop.stopped


def test_frames_survive_any_cut() -> None:
    scores = [TokenScores([4, 5], [-0.25, -1.5], 1)]
    messages = [
        Deltas([Delta("a/0", [1, 2], None, None, 16, 3, 1), Delta("b/0", [], "stop", 9)]),
        Heartbeat({"num_steps": 3}),
        Deltas([Delta("c/1", [7], scores=scores, prompt_scores=scores, prompt_scores_start=2)]),
        Abort(["a/0"]),
    ]
    stream = b"".join(map(encode, messages))
    for size in (1, 7, 64, len(stream)):
        decoder, found = Decoder(), []
        for start in range(0, len(stream), size):
            found += decoder.feed(stream[start : start + size])
        assert found == messages


class NeverCompiled:
    done, error = False, None

    def wait(self, seconds: float | None = None) -> bool:
        return False


def test_a_request_whose_grammar_is_compiled_survives_the_failure_of_others() -> None:
    """It is in no step, so a failed one must not drop it without a word."""
    bench = Bench()
    bench.executor.compile_grammar = lambda asked: NeverCompiled()  # type: ignore[attr-defined]
    rules = make_rules(5)
    params = rules.params.replace(structured_outputs={"regex": "a"})
    waiting = EngineRequest("waiting", (1, 2, 3), replace(rules, params=params))
    bench.loop.take(Add([waiting]))
    bench.add("a")
    bench.executor.fails = lambda plan: True
    bench.loop.turn()
    assert [each.request_ids for each in bench.of(Lost)] == [["a"]]
    assert bench.loop.core.knows("waiting") and bench.loop.has_work
    assert bench.loop.core.open_requests == ["waiting"]


# ---- times of steps ----


class NotedTimes(HeldDrafts):
    """Keeps what it hears of the times of steps."""

    def __init__(self) -> None:
        super().__init__(0)
        self.times: list[StepTime] = []

    def note(self, plan: StepPlan, result: StepResult, time: StepTime) -> None:
        self.times.append(time)


def test_a_wait_for_a_grammar_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = FakeExecutor(num_blocks=64)
    core = EngineCore(ScheduleConfig(128, 2, 64, True), CacheConfig(block_size=4), executor)
    core.drafts = noted = NotedTimes()
    grammar = SimpleNamespace(done=False, error=None, wait=lambda seconds: None)
    monkeypatch.setattr(executor, "compile_grammar", lambda asked: grammar, raising=False)
    asked = GREEDY.replace(structured_outputs={"regex": "a"})
    core.add([EngineRequest("a", (1, 2, 3), make_rules(2))])
    core.add([EngineRequest("b", (1, 2, 3), make_rules(2, asked))])
    while core.scheduler.has_work:
        core.step()
    assert core.has_work and core.step() == []
    grammar.done = True
    while core.has_work:
        core.step()
    assert [time.seconds is None for time in noted.times] == [True, False, True, False]


def test_a_policy_hears_what_a_step_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """From result to result, within the core, and of that for drafts."""
    executor = FakeExecutor(num_blocks=64)
    core = EngineCore(ScheduleConfig(128, 2, 64, True), CacheConfig(block_size=4), executor)
    core.drafts = noted = NotedTimes()
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("stoop.engine.core.time.perf_counter", lambda: clock.now)
    launch = executor.launch

    def slow(plan: StepPlan) -> FakeExecutor:
        clock.now += 3.0
        executor.draft_seconds, executor.busy = 0.5, True
        executor.waited += 0.25
        return launch(plan)

    monkeypatch.setattr(executor, "launch", slow)
    core.add([EngineRequest("a", (1, 2, 3), make_rules(2))])
    while core.has_work:
        core.step()
        clock.now += 10.0  # the caller takes its time
    assert noted.times == [StepTime(None, 0.0, 3.0, 0.5, True), StepTime(13.0, 0.0, 3.0, 0.5, True)]
