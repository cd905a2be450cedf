"""Bugs put back into the scheduler, one at a time: the traffic must notice each."""

import dataclasses
import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from stoop.core.request import Request
from stoop.core.step import Admission, BlockAppend, PlannedRow, RowResult, StepPlan, StepResult
from stoop.scheduler import prefix_cache as prefix_cache_module
from stoop.scheduler import scheduler as scheduler_module
from stoop.scheduler.block_pool import BlockPool
from stoop.scheduler.plan import PlanBuilder, RowWatch, SchedulerStats
from stoop.scheduler.prefix_cache import PrefixCache
from stoop.scheduler.queue import RequestQueue
from stoop.scheduler.scheduler import Scheduler
from support.scheduler_simulation import (
    BookkeepingWorker,
    World,
    run_ahead_world,
    run_traffic,
    run_traffic_of_all_kinds,
    varied_world,
)


@contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, make(getattr(owner, name)))
        yield


def allocate_without_evicting(allocate: Any) -> Any:
    def mutant(self: BlockPool, count: int) -> list[int]:
        self._cached = set()
        return allocate(self, count)

    return mutant


def share_without_counting(share: Any) -> Any:
    def mutant(self: BlockPool, blocks: list[int]) -> None:
        share(self, [b for b in blocks if self._refs[b] == 0])

    return mutant


def release_all_but_last(release: Any) -> Any:
    return lambda self, blocks: release(self, blocks[:-1])


def find_by_digest_alone(find: Any) -> Any:
    return lambda self, request, index: self._entries.get(self.node(request, index).digest)


def match_one_too_many(match: Any) -> Any:
    def mutant(self: PrefixCache, request: Request, *for_drafts: bool) -> list[int]:
        blocks = match(self, request, *for_drafts)
        entry = None
        if (len(blocks) + 1) * self.block_size <= request.num_tokens and self.enabled:
            entry = self._find(request, len(blocks))
        return blocks + ([entry.block] if entry else [])

    return mutant


def match_one_block_unseen(match: Any) -> Any:
    def mutant(self: PrefixCache, request: Request, *for_drafts: bool) -> list[int]:
        blocks = match(self, request, *for_drafts)
        spare = [e.block for e in self._entries.values() if e.block not in blocks]
        room = (request.num_tokens - 1) // self.block_size > len(blocks)
        return blocks + spare[:1] if room else blocks

    return mutant


def insert_before_computed(insert: Any) -> Any:
    def mutant(self: PrefixCache, request: Request) -> None:
        computed = request.num_computed
        held = len(request.block_ids) * self.block_size
        request.num_computed = min(request.num_tokens, held)
        insert(self, request)
        request.num_computed = computed

    return mutant


def grow_too_little(grow: Any) -> Any:
    return lambda self, request, num, plan: grow(self, request, max(num - 1, 0), plan)


def preempt_without_release(preempt: Any) -> Any:
    def mutant(self: Scheduler, request: Request) -> None:
        with patched(BlockPool, "release", lambda release: lambda pool, blocks: None):
            preempt(self, request)

    return mutant


def preempt_the_first(make_room: Any) -> Any:
    def mutant(self: Scheduler, request: Request, num: int, plan: PlanBuilder) -> bool:
        while not self._grow(request, num, plan):
            victim = self.running[0]
            self._preempt(victim)
            plan.remove(victim)
            plan.preempted = True
            if victim is request:
                return False
        return True

    return mutant


def keep_rows_of_the_preempted(remove: Any) -> Any:
    return lambda self, request: None


def forget_the_budget(add: Any) -> Any:
    def mutant(self: PlanBuilder, request: Request, num_tokens: int) -> None:
        self.num_scheduled[request] = num_tokens

    return mutant


def update_without_epochs(update: Any) -> Any:
    def mutant(self: Scheduler, result: StepResult) -> Any:
        rows = []
        for row in result.rows:
            request = self._requests.get(row.request_id)
            epoch = row.epoch if request is None else request.epoch
            rows.append(RowResult(row.request_id, epoch, row.token_ids))
        return update(self, StepResult(result.index, rows))

    return mutant


def finish_without_vacating(vacate: Any) -> Any:
    def mutant(self: Scheduler, request: Request) -> None:
        slot = request.slot
        vacate(self, request)
        self._free_slots.remove(slot)

    return mutant


def vacate_keeps_offers(vacate: Any) -> Any:
    """A resumed request would think its new blocks offered already, or offer stale ones."""

    def mutant(self: Scheduler, request: Request) -> None:
        blocks = list(request.block_ids)
        vacate(self, request)
        request.block_ids = blocks

    return mutant


def appends_one_late(block_appends: Any) -> Any:
    def mutant(plan: PlanBuilder) -> Iterator[BlockAppend]:
        for append in block_appends(plan):
            if append.start:
                append = BlockAppend(append.slot, append.start - 1, append.block_ids)
            yield append

    return mutant


def appends_lost_for_running(block_appends: Any) -> Any:
    return lambda plan: [a for a in block_appends(plan) if a.start == 0]


def zero_only_what_is_admitted(blocks_to_zero: Any) -> Any:
    def mutant(plan: PlanBuilder) -> list[int]:
        return [b for r in plan.admitted for b in r.block_ids[plan.appended.get(r, 0) :]]

    return mutant


def zero_cached_prefixes(blocks_to_zero: Any) -> Any:
    def mutant(plan: PlanBuilder) -> list[int]:
        return [b for r in plan.admitted for b in r.block_ids] + [
            b for r, start in plan.appended.items() if r not in plan.admitted
            for b in r.block_ids[start:]
        ]  # fmt: skip

    return mutant


def zero_what_the_preempted_had(grow: Any) -> Any:
    """Blocks are listed as they are allocated, and stay listed when their holder loses them."""

    def mutant(self: Scheduler, request: Request, num: int, plan: PlanBuilder) -> bool:
        held = len(request.block_ids)
        grown = grow(self, request, num, plan)
        listed = vars(plan).setdefault("listed", [])
        listed += request.block_ids[held:]
        plan.new_blocks = lambda: listed  # type: ignore[method-assign]
        return bool(grown)

    return mutant


def queue_newest_first(push: Any) -> Any:
    def mutant(self: RequestQueue, request: Request) -> None:
        self._queued.add(request)
        priority, arrival = request.order
        heapq.heappush(self._heap, ((priority, -arrival), request))

    return mutant


def chunks_sample_too(row: Any) -> Any:
    return lambda self, request, num: dataclasses.replace(row(self, request, num), samples=True)


def limit_beyond_the_model(admission: Any) -> Any:
    def mutant(request: Request) -> Admission:
        limit = request.num_prompt_tokens + request.rules.max_tokens
        return dataclasses.replace(admission(request), token_limit=limit)

    return mutant


def resume_without_generated(admission: Any) -> Any:
    def mutant(request: Request) -> Admission:
        return dataclasses.replace(admission(request), token_ids=list(request.prompt_token_ids))

    return mutant


MUTANTS = [
    (BlockPool, "allocate", allocate_without_evicting),
    (BlockPool, "share", share_without_counting),
    (BlockPool, "release", release_all_but_last),
    (PrefixCache, "match", match_one_too_many),
    (PrefixCache, "match", match_one_block_unseen),
    (PrefixCache, "insert", insert_before_computed),
    (Scheduler, "_grow", grow_too_little),
    (Scheduler, "_preempt", preempt_without_release),
    (Scheduler, "_make_room", preempt_the_first),
    (Scheduler, "_vacate", finish_without_vacating),
    (Scheduler, "_vacate", vacate_keeps_offers),
    (PlanBuilder, "block_appends", appends_one_late),
    (PlanBuilder, "block_appends", appends_lost_for_running),
    (PlanBuilder, "new_blocks", zero_only_what_is_admitted),
    (PlanBuilder, "new_blocks", zero_cached_prefixes),
    (Scheduler, "_grow", zero_what_the_preempted_had),
    (Scheduler, "update", update_without_epochs),
    (RequestQueue, "push", queue_newest_first),
    (Scheduler, "_row", chunks_sample_too),
    (scheduler_module, "make_admission", resume_without_generated),
    (scheduler_module, "make_admission", limit_beyond_the_model),
    (PlanBuilder, "remove", keep_rows_of_the_preempted),
    (PlanBuilder, "add", forget_the_budget),
]


# ---- mutants of speculation ----


def reserve_no_lookahead(num_reserved: Any) -> Any:
    """A drafter writes behind the step's own tokens, into blocks of others or of nobody."""
    return lambda self, num: min(num, self.config.max_model_len)


def reserve_one_too_few(num_reserved: Any) -> Any:
    return lambda self, num: num_reserved(self, num - 1)


def reserve_beyond_the_model(num_reserved: Any) -> Any:
    return lambda self, num: num + self.config.num_lookahead


def ignore_the_following_token(init: Any) -> Any:
    def mutant(self: PrefixCache, *args: Any, looks_ahead: bool = False) -> None:
        init(self, *args)

    return mutant


def count_rejected_drafts(take_tokens: Any) -> Any:
    def mutant(self: Scheduler, request: Request, row: RowResult) -> list[int]:
        computed = request.num_computed
        new_ids = take_tokens(self, request, row)
        if not request.finished:
            request.num_computed = min(computed, request.num_tokens)
        return list(new_ids)

    return mutant


def run_past_the_stop(take_tokens: Any) -> Any:
    """The tokens behind the one that ends a request are kept as well."""

    def mutant(self: Scheduler, request: Request, row: RowResult) -> list[int]:
        num_before = request.num_tokens
        take_tokens(self, request, row)
        if request.finished:
            request.token_ids += row.token_ids[request.num_tokens - num_before :]
        return request.token_ids[num_before:]

    return mutant


def drop_the_rest_of_a_run(take_tokens: Any) -> Any:
    def mutant(self: Scheduler, request: Request, row: RowResult) -> list[int]:
        cut = dataclasses.replace(row, token_ids=row.token_ids[:2])
        return list(take_tokens(self, request, cut))

    return mutant


def repeat_what_was_cut(take_tokens: Any) -> Any:
    """The request is right, but what the front end is told goes past the token that ends it."""

    def mutant(self: Scheduler, request: Request, row: RowResult) -> list[int]:
        take_tokens(self, request, row)
        return row.token_ids

    return mutant


def decode_without_places(order_running: Any) -> Any:
    return lambda self: [(r, r.num_tokens - r.num_computed) for r, _ in order_running(self)]


SPECULATIVE_MUTANTS = [
    (Scheduler, "_num_reserved", reserve_no_lookahead),
    (Scheduler, "_num_reserved", reserve_one_too_few),
    (Scheduler, "_num_reserved", reserve_beyond_the_model),
    (PrefixCache, "__init__", ignore_the_following_token),
    (Scheduler, "_take_tokens", count_rejected_drafts),
    (Scheduler, "_take_tokens", run_past_the_stop),
    (Scheduler, "_take_tokens", drop_the_rest_of_a_run),
    (Scheduler, "_take_tokens", repeat_what_was_cut),
    (Scheduler, "_order_running", decode_without_places),
]


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    SPECULATIVE_MUTANTS,
    ids=[mutant.__name__ for *_, mutant in SPECULATIVE_MUTANTS],
)
def test_speculative_traffic_notices_mutant(owner: Any, name: str, mutant: Any) -> None:
    with patched(owner, name, mutant), pytest.raises(AssertionError):
        run_traffic(range(30), World.draw_speculative)


@pytest.mark.parametrize(
    ("owner", "name", "mutant"), MUTANTS, ids=[mutant.__name__ for *_, mutant in MUTANTS]
)
def test_traffic_notices_mutant(owner: Any, name: str, mutant: Any) -> None:
    # Any other error would show the bug too, but by accident: the checks must find it.
    with patched(owner, name, mutant), pytest.raises(AssertionError):
        run_traffic_of_all_kinds()


def test_traffic_notices_matches_that_ignore_tokens() -> None:
    def by_depth(_: Any) -> Any:
        return lambda parent, tokens: parent + b"deeper"

    with (
        patched(prefix_cache_module, "block_digest", by_depth),
        patched(PrefixCache, "_find", find_by_digest_alone),
        pytest.raises(AssertionError, match="another text"),
    ):
        run_traffic(range(20))


# ---- mutants of run-ahead ----


def results_not_counted_off(land: Any) -> Any:
    return lambda self: None


def steps_kept_when_vacated(leave_slot: Any) -> Any:
    def mutant(self: Request) -> None:
        steps, num_pending, num_due = list(self.in_flight), self.num_pending, self.num_due
        leave_slot(self)
        self.in_flight.extend(steps)
        self.num_pending, self.num_due = num_pending, num_due

    return mutant


def bound_raised_by_one(launch: Any) -> Any:
    """However many drafts may be accepted: the host's numbers fall behind the device's."""

    def mutant(self: Request, num_tokens: int, max_new_tokens: int) -> None:
        launch(self, *((1, 1) if max_new_tokens > 1 else (num_tokens, max_new_tokens)))

    return mutant


def a_step_yields_one(max_new_tokens: Any) -> Any:
    return lambda self, request, row: min(1, max_new_tokens(self, request, row))


def a_chunk_yields_one(max_new_tokens: Any) -> Any:
    return lambda self, request, row: max(1, max_new_tokens(self, request, row))


def offer_the_newest_token(insert: Any) -> Any:
    """Its KV would be written by a step under way, which may find the request ended."""

    def mutant(self: PrefixCache, request: Request) -> None:
        insert(self, request)
        filled = min(request.num_computed, request.num_tokens)
        if self.enabled and filled == request.num_tokens and filled % self.block_size == 0:
            request.token_ids.append(request.token_ids[-1])  # the guard looks at their number
            insert(self, request)
            request.token_ids.pop()

    return mutant


def preempt_while_pending(lacks_blocks: Any) -> Any:
    return lambda self, *args: False


def never_tell_that_results_are_pending(schedule: Any) -> Any:
    return lambda self, results_pending=False: schedule(self)


def take_late_results(update: Any) -> Any:
    """By name alone: one who came back under the same name gets the other's tokens."""
    return update_without_epochs(update)


def bound_left_where_it_was(take_tokens: Any) -> Any:
    """Rejected drafts stay in the bound, which then never comes down again."""

    def mutant(self: Scheduler, request: Request, row: RowResult) -> list[int]:
        computed = request.num_computed
        new_ids = take_tokens(self, request, row)
        if not request.finished:
            request.num_computed = computed
        return list(new_ids)

    return mutant


def bound_lowered_to_what_is_known(take_tokens: Any) -> Any:
    """As if nothing else were under way."""

    def mutant(self: Scheduler, request: Request, row: RowResult) -> list[int]:
        new_ids = take_tokens(self, request, row)
        if not request.finished and row.token_ids:
            request.num_computed = request.num_tokens - 1
        return list(new_ids)

    return mutant


def blocks_for_what_is_known(grow: Any) -> Any:
    def mutant(self: Scheduler, request: Request, num: int, plan: PlanBuilder) -> bool:
        computed = request.num_computed
        request.num_computed = min(computed, request.num_tokens - 1)
        found = grow(self, request, num, plan)
        request.num_computed = computed
        return bool(found)

    return mutant


def lengths_of_what_is_known(row: Any) -> Any:
    def mutant(self: Scheduler, request: Request, num: int) -> PlannedRow:
        made = row(self, request, num)
        return dataclasses.replace(made, seq_len=min(made.seq_len, request.num_tokens - 1 + num))

    return mutant


def ends_by_what_may_come(ends_in_flight: Any) -> Any:
    return property(lambda self: self.num_expected >= self.token_limit)


def never_sure_to_end(ends_in_flight: Any) -> Any:
    return property(lambda self: False)


def a_dead_row_yields_a_token(execute: Any) -> Any:
    """The device's own: an ended request goes on, past its stop token."""

    def mutant(self: BookkeepingWorker, *args: Any) -> StepResult:
        with patched(BookkeepingWorker, "ended", lambda _: lambda self, slot: False):
            return execute(self, *args)

    return mutant


RUN_AHEAD_MUTANTS = [
    (Request, "land", results_not_counted_off, "miscounted"),
    (Request, "leave_slot", steps_kept_when_vacated, "holds something"),
    (Request, "launch", bound_raised_by_one, "out of bounds|too low|host thinks"),
    (Scheduler, "_max_new_tokens", a_step_yields_one, "computes nothing"),
    (Scheduler, "_max_new_tokens", a_chunk_yields_one, "disagree|computes unknown|not where"),
    (PrefixCache, "insert", offer_the_newest_token, "cached block|never written|others may read"),
    (Scheduler, "_lacks_blocks", preempt_while_pending, "preempted while"),
    (Scheduler, "schedule", never_tell_that_results_are_pending, "preempted while"),
    (Scheduler, "update", take_late_results, "late result"),
    (Scheduler, "_take_tokens", bound_left_where_it_was, "computes nothing|differ"),
    (Scheduler, "_take_tokens", bound_lowered_to_what_is_known, "too low|host thinks"),
    (Scheduler, "_grow", blocks_for_what_is_known, "too few blocks"),
    (Scheduler, "_row", lengths_of_what_is_known, "bound of lengths"),
    (Request, "ends_in_flight", ends_by_what_may_come, "no progress"),
    (Request, "ends_in_flight", never_sure_to_end, "sure to have ended"),
    (BookkeepingWorker, "execute", a_dead_row_yields_a_token, "."),
]


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "noticed"),
    RUN_AHEAD_MUTANTS,
    ids=[mutant.__name__ for _, _, mutant, _ in RUN_AHEAD_MUTANTS],
)
def test_run_ahead_traffic_notices_mutant(owner: Any, name: str, mutant: Any, noticed: str) -> None:
    with patched(owner, name, mutant), pytest.raises(AssertionError, match=noticed):
        run_traffic(range(40), run_ahead_world)


# ---- the number of drafts varies ----


def drafts_go_on_after_a_gap(lose_drafter_kv: Any) -> Any:
    return lambda self: False


def a_gap_begins_one_later(lose_drafter_kv: Any) -> Any:
    def mutant(self: Request) -> bool:
        new = lose_drafter_kv(self)
        if new and self.num_drafter_kv is not None:
            self.num_drafter_kv += 1
        return bool(new)

    return mutant


def prompts_without_the_drafter(finish_plan: Any) -> Any:
    """They are taken to have its KV all the same."""

    def mutant(self: Scheduler, plan: PlanBuilder) -> StepPlan:
        step = finish_plan(self, plan)
        return dataclasses.replace(step, num_drafts=self.num_drafts)

    return mutant


def places_of_the_most_drafts(order_running: Any) -> Any:
    def mutant(self: Scheduler) -> list[tuple[Request, int]]:
        places, self.num_places = self.num_places, self.config.num_drafts
        todo = order_running(self)
        self.num_places = places
        return list(todo)

    return mutant


def blocks_without_the_drafters_kv_for_drafts(match: Any) -> Any:
    return lambda self, request, for_drafts=False: match(self, request)


def blocks_taken_to_have_the_drafters_kv(num_drafter_kv: Any) -> Any:
    return lambda self, blocks: None


def blocks_offered_as_if_the_drafter_had_followed(lacks_drafter_kv: Any) -> Any:
    return lambda self, num_tokens: False


def the_device_does_not_know_of_found_blocks(finish_plan: Any) -> Any:
    def mutant(self: Scheduler, plan: PlanBuilder) -> StepPlan:
        found = {each.slot for each in plan.admitted if each.num_drafter_kv is not None}
        step = finish_plan(self, plan)
        told = [slot for slot in step.no_drafts if slot not in found]
        return dataclasses.replace(step, no_drafts=told)

    return mutant


def _known_by(key: Callable[[PlannedRow], tuple[int, int, bool]]) -> Any:
    def same(self: RowWatch, rows: Sequence[PlannedRow]) -> bool:
        last, self._key = self._key, [key(row) for row in rows]
        return self._key == last

    return same


def rows_known_by_their_requests(same: Any) -> Any:
    """Whatever they compute: K changes, and a prompt's last token is taken for a decode."""
    return _known_by(lambda row: (row.epoch, 0, False))


def rows_known_by_their_slots(same: Any) -> Any:
    return _known_by(lambda row: (row.slot, row.num_tokens, row.decodes))


def drafts_counted_as_in_the_step_before(add_step: Any) -> Any:
    def mutant(self: SchedulerStats, rows: Any, same: bool, num_drafts: int, most: int) -> None:
        if same:
            self._last = num_drafts, self._last[1]
        add_step(self, rows, same, num_drafts, most)

    return mutant


VARIED_MUTANTS = [
    (Request, "lose_drafter_kv", drafts_go_on_after_a_gap, "drafts from|goes on otherwise"),
    (Request, "lose_drafter_kv", a_gap_begins_one_later, "drafts from|goes on otherwise"),
    (Scheduler, "_finish_plan", prompts_without_the_drafter, "drafts from|goes on otherwise"),
    (Scheduler, "_order_running", places_of_the_most_drafts, "no place in the step"),
    (PrefixCache, "match", blocks_without_the_drafters_kv_for_drafts, "finds no drafter's KV"),
    (PrefixCache, "num_drafter_kv", blocks_taken_to_have_the_drafters_kv, "drafts from"),
    (
        Request,
        "lacks_drafter_kv",
        blocks_offered_as_if_the_drafter_had_followed,
        "goes on otherwise",
    ),
    (Scheduler, "_finish_plan", the_device_does_not_know_of_found_blocks, "drafts from"),
    (RowWatch, "same", rows_known_by_their_requests, "wrong about its rows"),
    (RowWatch, "same", rows_known_by_their_slots, "wrong about its rows"),
    (
        SchedulerStats,
        "add_step",
        drafts_counted_as_in_the_step_before,
        "other drafts are not made",
    ),
]


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "noticed"),
    VARIED_MUTANTS,
    ids=[mutant.__name__ for _, _, mutant, _ in VARIED_MUTANTS],
)
def test_varied_traffic_notices_mutant(owner: Any, name: str, mutant: Any, noticed: str) -> None:
    with patched(owner, name, mutant), pytest.raises(AssertionError, match=noticed):
        run_traffic(range(40), varied_world)
