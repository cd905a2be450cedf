"""What prefixes models with recurrent layers may skip: where blocks and a snapshot end together."""

from collections.abc import Sequence
from typing import Any

import pytest

from stoop.config.schema import CacheConfig, ScheduleConfig
from stoop.core.request import PrefixNode, Request
from stoop.core.sampling_params import SamplingParams
from stoop.core.step import EndedCopy, RowResult, StateCopies, StateCopy, StepPlan, StepResult
from stoop.scheduler import prefix_cache as prefix_cache_module
from stoop.scheduler.hybrid import HybridScheduler
from stoop.scheduler.snapshots import SnapshotIndex
from support.scheduling import make_request, result_of, rows_of, step

NO_COPIES = StateCopies()


def make_scheduler(
    num_snapshots: int = 8,
    num_blocks: int = 64,
    max_num_seqs: int = 4,
    budget: int = 64,
    chunked: bool = True,
    num_drafts: int = 0,
    drafter_has_kv: bool = False,
    interval: int = 1024,
    shared: int = 8,
) -> HybridScheduler:
    """Blocks of four tokens."""
    config = ScheduleConfig(
        64, max_num_seqs, budget, chunked, num_drafts=num_drafts, drafter_has_kv=drafter_has_kv
    )
    cache = CacheConfig(block_size=4)
    return HybridScheduler(
        config, cache, num_blocks, num_snapshots, interval=interval, shared=shared
    )


def run(scheduler: HybridScheduler, name: str, prompt: Sequence[int], max_tokens: int = 1) -> Any:
    """Run a request alone to its end; returns its rows, and all copies."""
    scheduler.add(make_request(name, prompt, max_tokens))
    rows, copies = [], []
    while scheduler.has_work:
        plan = step(scheduler, token=9)
        rows.append(rows_of(plan)[name])
        copies.append(plan.copies or NO_COPIES)
    scheduler.check_idle()
    return rows, copies


def hit(scheduler: HybridScheduler, prompt: Sequence[int]) -> int:
    """Tokens that the cache would spare, without running the prompt."""
    return len(scheduler.prefix_cache.match(make_request("probe", prompt))) * 4


def held_lengths(scheduler: HybridScheduler) -> list[int]:
    return sorted(depth(entry.node) * 4 for entry in scheduler.snapshots._entries.values())


def depth(node: PrefixNode | None) -> int:
    return 0 if node is None else 1 + depth(node.parent)


# ---- where prompts are cut ----


@pytest.mark.parametrize(
    ("length", "rows"),
    [
        (1, [(0, 1)]),
        (4, [(0, 4)]),
        (5, [(0, 4), (4, 1)]),
        (7, [(0, 4), (4, 3)]),
        (8, [(0, 4), (4, 4)]),  # a multiple of the block: one block is left to compute
        (9, [(0, 8), (8, 1)]),
        (11, [(0, 8), (8, 3)]),
        (12, [(0, 8), (8, 4)]),
        (13, [(0, 12), (12, 1)]),
    ],
)
def test_a_prompt_is_cut_at_its_last_block_and_found_there(length: int, rows: Any) -> None:
    scheduler = make_scheduler()
    found, copies = run(scheduler, "a", range(length))
    cut = (length - 1) // 4 * 4
    assert found == rows
    assert [len(each.saves) for each in copies] == [1, 0][: len(rows)] if cut else [0]
    assert held_lengths(scheduler) == ([cut] if cut else [])
    assert hit(scheduler, range(length)) == cut
    # The same prompt again restores and is not cut.
    found, copies = run(scheduler, "b", range(length))
    assert found == [(cut, length - cut)]
    assert [len(each.restores) for each in copies] == [int(cut > 0)]
    assert sum(len(each.saves) for each in copies) == 0


def test_the_restored_state_is_that_of_the_hit() -> None:
    scheduler = make_scheduler()
    _, (first, _) = run(scheduler, "a", range(9))
    _, (second,) = run(scheduler, "b", range(9))
    (saved,), (restored,) = first.saves, second.restores
    assert saved.snapshot == restored.snapshot


def test_a_hit_ends_where_a_snapshot_is_though_blocks_go_on() -> None:
    scheduler = make_scheduler()
    run(scheduler, "a", range(9))  # a snapshot at 8
    run(scheduler, "b", range(21))  # and at 20; all blocks are known
    assert held_lengths(scheduler) == [8, 20]
    assert hit(scheduler, range(21)) == hit(scheduler, [*range(20), 99]) == 20
    for shorter in (20, 19, 16, 13, 12, 9):
        assert hit(scheduler, range(shorter)) == 8, shorter
    assert hit(scheduler, range(8)) == 0
    assert hit(scheduler, [*range(7), 99, 99]) == 0


def test_blocks_without_a_snapshot_are_no_hit() -> None:
    scheduler = make_scheduler(num_snapshots=1)
    run(scheduler, "a", range(9))
    run(scheduler, "b", range(50, 59))  # evicts the only snapshot
    assert len(scheduler.prefix_cache) == 4 and held_lengths(scheduler) == [8]
    assert hit(scheduler, range(9)) == 0
    assert hit(scheduler, range(50, 59)) == 8


def test_a_snapshot_without_blocks_is_no_hit() -> None:
    scheduler = make_scheduler(num_blocks=17)
    run(scheduler, "a", range(9))
    run(scheduler, "b", range(1, 63))  # takes all sixteen blocks
    assert 8 in held_lengths(scheduler)
    assert hit(scheduler, range(9)) == 0


def test_budgets_that_end_inside_a_block() -> None:
    """Chunks of 5: the state at 5 and 10 is of no use, and the last cut is at 12."""
    scheduler = make_scheduler(budget=5)
    rows, copies = run(scheduler, "a", range(15))
    assert rows == [(0, 5), (5, 5), (10, 2), (12, 3)]
    assert [len(each.saves) for each in copies] == [0, 0, 1, 0]
    assert held_lengths(scheduler) == [12]


def test_chunks_that_end_at_a_block_are_saved_now_and_then() -> None:
    scheduler = make_scheduler(budget=4, interval=8)
    _, copies = run(scheduler, "a", range(23))
    assert held_lengths(scheduler) == [8, 16, 20]
    assert sum(len(each.saves) for each in copies) == 3


def test_a_whole_prompt_may_be_saved_at_its_end() -> None:
    scheduler = make_scheduler(budget=64, chunked=False, interval=8)
    rows, _ = run(scheduler, "a", range(16))
    assert rows == [(0, 16)] and held_lengths(scheduler) == [16]
    assert hit(scheduler, range(16)) == 0 and hit(scheduler, range(17)) == 16


def test_nothing_is_cut_without_chunked_prefill() -> None:
    scheduler = make_scheduler(chunked=False)
    rows, copies = run(scheduler, "a", range(15))
    assert rows == [(0, 15)] and copies == [NO_COPIES]


def test_a_prefix_that_two_prompts_share_gets_a_snapshot() -> None:
    scheduler = make_scheduler()
    run(scheduler, "a", [*range(12), *range(50, 59)])
    assert hit(scheduler, [*range(12), 70, 71]) == 0
    rows, _ = run(scheduler, "b", [*range(12), *range(60, 69)])
    assert rows == [(0, 12), (12, 8), (20, 1)]  # its blocks were known up to 12
    assert held_lengths(scheduler) == [12, 20, 20]
    rows, _ = run(scheduler, "c", [*range(12), *range(70, 79)])
    assert rows == [(12, 8), (20, 1)]


def test_a_short_shared_prefix_is_not_worth_one() -> None:
    scheduler = make_scheduler(shared=16)
    run(scheduler, "a", [*range(12), *range(50, 59)])
    rows, _ = run(scheduler, "b", [*range(12), *range(60, 69)])
    assert rows == [(0, 20), (20, 1)]


def test_rows_always_have_tokens_however_small_the_budget() -> None:
    scheduler = make_scheduler(budget=4, max_num_seqs=4)
    for index in range(4):
        scheduler.add(make_request(f"r{index}", range(index, index + 9), max_tokens=3))
    for _ in range(60):
        if not scheduler.has_work:
            break
        plan = step(scheduler)
        assert plan.rows and all(row.num_tokens >= 1 for row in plan.rows)
    scheduler.check_idle()


# ---- when a snapshot can be found ----


def test_nothing_is_found_before_the_result_is_in() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", range(9)))
    plan = scheduler.schedule()
    assert plan is not None and plan.copies is not None and len(plan.copies.saves) == 1
    assert scheduler.snapshots.num_held == 0 and hit(scheduler, range(9)) == 0
    scheduler.update(result_of(plan))
    assert scheduler.snapshots.num_held == 1 and hit(scheduler, range(9)) == 8


def test_two_steps_in_flight_land_one_by_one() -> None:
    scheduler = make_scheduler(budget=4, interval=4)
    scheduler.add(make_request("a", range(13)))
    plans = [scheduler.schedule(results_pending=i > 0) for i in range(3)]
    assert [len((plan.copies or NO_COPIES).saves) for plan in plans if plan] == [1, 1, 1]
    for number, plan in enumerate(plans, start=1):
        assert plan is not None
        scheduler.update(result_of(plan))
        assert held_lengths(scheduler) == [4, 8, 12][:number]


def test_an_abort_between_plan_and_result_leaves_nothing() -> None:
    scheduler = make_scheduler(num_snapshots=1)
    scheduler.add(make_request("a", range(9)))
    plan = scheduler.schedule()
    scheduler.abort("a")
    scheduler.check_idle()
    scheduler.update(result_of(plan))
    assert scheduler.snapshots.num_held == 0
    run(scheduler, "b", range(9))  # the snapshot is free again
    assert scheduler.snapshots.num_held == 1


def test_a_late_result_of_the_same_name_publishes_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", range(9)))
    first = scheduler.schedule()
    scheduler.abort("a")
    scheduler.add(make_request("a", range(50, 59)))
    second = scheduler.schedule()
    scheduler.update(result_of(first))
    assert scheduler.snapshots.num_held == 0
    scheduler.update(result_of(second))
    assert hit(scheduler, range(50, 59)) == 8 and hit(scheduler, range(9)) == 0


def test_equal_prompts_at_the_same_time_are_saved_once() -> None:
    scheduler = make_scheduler()
    for name in "abc":
        scheduler.add(make_request(name, range(9), max_tokens=1))
    plan = step(scheduler)
    assert len(plan.copies.saves) == 1
    # Only the first is cut: the others need no snapshot of their own.
    while scheduler.has_work:
        step(scheduler)
    scheduler.check_idle()
    assert scheduler.snapshots.num_taken == 1


def test_a_failed_request_withdraws_what_it_saved_and_used() -> None:
    scheduler = make_scheduler()
    run(scheduler, "a", range(9))
    run(scheduler, "other", range(50, 59))
    scheduler.add(make_request("b", range(21), max_tokens=4))
    step(scheduler)
    assert held_lengths(scheduler) == [8, 8, 20]
    plan = scheduler.schedule()
    row = RowResult("b", plan.rows[0].epoch, [], failed=True)
    scheduler.update(StepResult(plan.index, [row]))
    assert held_lengths(scheduler) == [8] and hit(scheduler, range(50, 59)) == 8
    assert hit(scheduler, range(21)) == hit(scheduler, range(9)) == 0
    scheduler.check_idle()


def test_restart_forgets_all() -> None:
    scheduler = make_scheduler()
    run(scheduler, "a", range(9))
    scheduler.add(make_request("b", range(50, 59)))
    scheduler.schedule()
    scheduler.restart(["b"])
    assert scheduler.snapshots.num_held == 0
    while scheduler.has_work:
        step(scheduler)
    scheduler.check_idle()
    assert held_lengths(scheduler)[0] == 8


def test_a_preempted_request_resumes_from_its_snapshot() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", range(9), max_tokens=20))
    for _ in range(4):
        step(scheduler)
    request = scheduler.running[0]
    scheduler._preempt(request)
    plan = step(scheduler)
    assert rows_of(plan) == {"a": (8, 4)}  # 12 tokens are known
    assert plan.copies.restores == [StateCopy(request.slot, 0)]
    assert plan.admissions[0].num_computed == 8


def test_prompt_scores_need_the_whole_prompt_computed() -> None:
    scheduler = make_scheduler()
    run(scheduler, "a", range(9))
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    scheduler.add(make_request("b", range(9), params=params))
    assert rows_of(scheduler.schedule()) == {"b": (0, 9)}


# ---- eviction ----


def test_the_least_recently_restored_is_evicted_first() -> None:
    scheduler = make_scheduler(num_snapshots=2)
    run(scheduler, "a", range(9))
    run(scheduler, "b", range(20, 29))
    run(scheduler, "a2", range(9))
    run(scheduler, "c", range(40, 49))
    assert [hit(scheduler, range(n, n + 9)) for n in (0, 20, 40)] == [8, 0, 8]


def test_a_snapshot_that_a_plan_restores_is_not_evicted_by_the_same_plan() -> None:
    scheduler = make_scheduler(num_snapshots=1)
    run(scheduler, "a", range(9))
    scheduler.add(make_request("b", range(9), max_tokens=1))
    scheduler.add(make_request("c", range(40, 49), max_tokens=1))
    plan = step(scheduler)
    assert len(plan.copies.restores) == 1 and not plan.copies.saves
    assert rows_of(plan) == {"b": (8, 1), "c": (0, 8)}  # cut, and yet it gets no snapshot
    while scheduler.has_work:
        step(scheduler)
    assert hit(scheduler, range(9)) == 8


def test_snapshots_of_steps_in_flight_are_not_evicted() -> None:
    scheduler = make_scheduler(num_snapshots=1)
    scheduler.add(make_request("a", range(9), max_tokens=1))
    first = scheduler.schedule()
    scheduler.add(make_request("b", range(40, 49), max_tokens=1))
    second = scheduler.schedule(results_pending=True)
    assert not (second.copies or NO_COPIES).saves
    scheduler.update(result_of(first))
    assert hit(scheduler, range(9)) == 8


def test_an_index_hands_out_each_snapshot_once() -> None:
    index, request = SnapshotIndex(2), make_request("a", [1])
    nodes = [PrefixNode(bytes([n]), (n,), None) for n in range(4)]
    assert {index.take(request, nodes[n], step=n) for n in range(2)} == {0, 1}
    assert index.take(request, nodes[2], step=2) is None
    index.publish(0)
    assert (index.find(nodes[0]), index.find(nodes[1])) != (None, None)
    index.check()
    pinned = index.use(nodes[0])
    assert index.hold(nodes[2]) is None  # one is pinned, the other being taken
    index.withdraw([nodes[0]])
    assert index.hold(nodes[2]) is None, "a plan still copies from it"
    index.unpin()
    assert index.hold(nodes[2]) == pinned
    index.drop(request)
    index.check()
    assert index.num_held == 1


def test_colliding_digests_never_restore_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache_module, "block_digest", lambda parent, tokens: b"same")
    scheduler = make_scheduler()
    run(scheduler, "a", range(5))
    assert hit(scheduler, range(50, 55)) == 0
    assert hit(scheduler, range(5)) == 4


# ---- ends of requests ----


def ended(scheduler: HybridScheduler) -> list[EndedCopy]:
    return scheduler._ended


def finish(
    prompt: int, tokens: Sequence[Sequence[int]], num_drafts: int = 3, **options: Any
) -> HybridScheduler:
    """One request whose steps yield these tokens; it ends with the last of them."""
    scheduler = make_scheduler(num_drafts=num_drafts, **options)
    total = sum(map(len, tokens))
    scheduler.add(make_request("a", range(prompt), max_tokens=total, num_drafts=num_drafts))
    while scheduler.running or scheduler.waiting:
        plan = scheduler.schedule()
        (row,) = plan.rows
        new: Sequence[int] = []
        if row.samples:
            new, *tokens = tokens
        found = RowResult("a", row.epoch, list(new), num_drafts=max(0, len(new) - 1))
        scheduler.update(StepResult(plan.index, [found]))
    return scheduler


@pytest.mark.parametrize(
    ("tokens", "length", "pending"),
    [
        # Computed: 5 of the prompt, then all but the newest. The log begins with the newest token
        # that was known before the step.
        ([[50], [51, 52, 53]], 8, 3),  # 5 .. 8
        ([[50], [51, 52, 53, 54]], 8, 3),  # 9 are computed, and 8 count
        ([[50], [51, 52], [53]], 8, 1),
        ([[50], [51, 52, 53], [54]], 8, 0),  # the checkpoint itself
        ([[50], [51, 52, 53, 54], [55]], None, None),  # it is past the boundary
        ([[50], [51, 52]], None, None),  # 7 are computed
        ([[50]], None, None),
    ],
)
def test_the_end_of_a_request_is_saved_where_its_log_reaches(
    tokens: Any, length: int | None, pending: int | None
) -> None:
    scheduler = finish(5, tokens)
    lengths = held_lengths(scheduler)
    assert lengths == ([4] if length is None else [4, length])
    assert [copy.pending for copy in ended(scheduler)] == ([] if pending is None else [pending])
    scheduler.check_idle()
    if length is not None:
        text = [*range(5), *(token for step in tokens for token in step), 99]
        assert hit(scheduler, text) == length
        scheduler.add(make_request("b", text))
        plan = scheduler.schedule()
        # Saved first, then restored, though it may be into the same slot.
        (saved,), (restored,) = plan.copies.ended, plan.copies.restores
        assert saved.snapshot == restored.snapshot and saved.slot == restored.slot
        assert scheduler._ended == []


def test_an_end_that_the_device_does_not_know_of_is_not_saved() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", range(5), max_tokens=20))
    for token in (None, 50, 51, 52, 53):
        step(scheduler, token or 0)
    assert scheduler.running[0].num_computed == 8
    scheduler.abort("a")
    assert ended(scheduler) == [] and held_lengths(scheduler) == [4]


def test_a_run_that_fails_is_not_saved() -> None:
    scheduler = make_scheduler(num_drafts=3)
    scheduler.add(make_request("a", range(5), max_tokens=4, num_drafts=3))
    step(scheduler), step(scheduler, 50)
    plan = scheduler.schedule()
    row = RowResult("a", plan.rows[0].epoch, [51, 52, 53], num_drafts=3, failed=True)
    scheduler.update(StepResult(plan.index, [row]))
    assert not scheduler.has_work and ended(scheduler) == []


def test_the_tokens_of_a_prompts_last_chunk_are_not_taken_for_a_log() -> None:
    """A resumed request ends with its first token: its step may have been a long chunk."""
    scheduler = make_scheduler()
    request = make_request("a", range(5), max_tokens=4)
    scheduler.add(request)
    for token in (0, 50, 51, 52):
        step(scheduler, token)
    scheduler._preempt(request)
    scheduler.snapshots.withdraw(request.prefix_nodes)
    while scheduler.has_work:
        step(scheduler, 53)
    assert request.finished and ended(scheduler) == []


def test_two_ends_before_a_plan_get_two_snapshots() -> None:
    scheduler = make_scheduler(num_snapshots=3)
    for name, start in (("a", 0), ("b", 20)):
        scheduler.add(make_request(name, range(start, start + 5), max_tokens=4))
    for _ in range(5):
        step(scheduler, token=lambda name: 60 if name == "a" else 61)
    assert not scheduler.has_work
    snapshots = {copy.snapshot for copy in ended(scheduler)}
    assert len(ended(scheduler)) == len(snapshots) == 2
    scheduler.check_idle()
    assert scheduler.snapshots.num_held == 3  # one of the prompts' went


# ---- drafters whose KV depends on the next token ----


def test_a_snapshot_is_found_with_the_same_following_token_only() -> None:
    scheduler = make_scheduler(num_drafts=2, drafter_has_kv=True)
    run(scheduler, "a", range(10))
    assert held_lengths(scheduler) == [8]
    assert hit(scheduler, [*range(9), 99]) == 8
    assert hit(scheduler, [*range(8), 99, 99]) == 0  # blocks up to 4, and no snapshot there
    run(scheduler, "b", [*range(8), 99, 99])
    assert held_lengths(scheduler) == [8, 8]
    assert hit(scheduler, [*range(8), 99, 98]) == 8


def test_no_name_is_made_before_the_next_token_is_known() -> None:
    scheduler = make_scheduler(num_drafts=2, drafter_has_kv=True, interval=4, chunked=False)
    run(scheduler, "a", range(16))  # it ends at a block, and what follows is not known yet
    assert held_lengths(scheduler) == []
    assert hit(scheduler, [*range(16), 9, 9]) == 0
    request = make_request("b", [*range(16), 9, 9])
    scheduler.prefix_cache.match(request)
    assert all(len(node.tokens) == 5 for node in request.prefix_nodes)


def test_plans_without_copies_say_so() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3]))
    plan: StepPlan = step(scheduler)
    assert plan.copies is None


def test_requests_are_forgotten() -> None:
    scheduler = make_scheduler()
    request: Request = make_request("a", range(9), max_tokens=3)
    scheduler.add(request)
    step(scheduler)
    assert list(scheduler._stays) == [request]
    scheduler.abort("a")
    assert not scheduler._stays and not scheduler.snapshots._taking
