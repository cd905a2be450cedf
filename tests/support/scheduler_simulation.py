"""The scheduler against a worker that only keeps books (`simulated_worker`).

It simulates the device: up to the world's depth, steps are launched before the results of earlier
ones are read.
"""

import dataclasses
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stoop.config.schema import CacheConfig, ScheduleConfig
from stoop.core.request import Request, RequestStatus
from stoop.core.sampling_params import SamplingParams
from stoop.core.step import PlannedRow, RowResult, StepPlan, StepResult
from stoop.scheduler.block_pool import NULL_BLOCK
from stoop.scheduler.hybrid import HybridScheduler
from stoop.scheduler.scheduler import Scheduler
from support.scheduling import make_rules
from support.simulated_worker import STOP, VOCAB, BookkeepingWorker, undisturbed


@dataclass(frozen=True)
class World:
    """A configuration to run in."""

    block_size: int = 4
    num_blocks: int = 9
    max_model_len: int = 24
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 24
    chunked: bool = True
    prefix_caching: bool = True
    depth: int = 1  # the most steps in flight: the engine's run_ahead + 1
    num_drafts: int = 0  # K
    drafter_has_kv: bool = False
    varies: str = ""  # what varies the number of drafts: "policy", "trial"; nothing if empty
    num_snapshots: int = 0  # layers have recurrent state; 0: without snapshots, or without state

    @property
    def query_len(self) -> int:
        return self.num_drafts + 1

    @property
    def lookahead(self) -> int:
        return self.num_drafts - 1 if self.drafter_has_kv else 0

    @staticmethod
    def draw_speculative(rng: random.Random) -> "World":
        world = World.draw(rng)
        num_drafts = rng.randint(1, 4)
        return dataclasses.replace(
            world,
            num_drafts=num_drafts,
            drafter_has_kv=rng.random() < 0.7,
            # As `resolve` requires: all requests can decode in one step.
            max_num_batched_tokens=max(
                world.max_num_batched_tokens, world.max_num_seqs * (num_drafts + 1)
            ),
        )

    @staticmethod
    def draw(rng: random.Random) -> "World":
        block_size = rng.choice((1, 2, 4))
        max_model_len = rng.randint(12, 28)
        chunked = rng.random() < 0.7
        max_num_seqs = rng.randint(1, 5)
        least = -(-max_model_len // block_size)
        tokens = rng.randint(max_num_seqs, 20) if chunked else max_model_len + rng.randint(0, 8)
        return World(
            block_size=block_size,
            num_blocks=1 + least + rng.choice((0, 0, 1, 2, least)),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=tokens,
            chunked=chunked,
            prefix_caching=rng.random() < 0.7,
            depth=rng.choice((1, 2, 2, 3, 5)),
        )


class Simulation:
    """Scheduler, worker and every invariant that must hold between them."""

    def __init__(self, world: World) -> None:
        self.world = world
        config = ScheduleConfig(
            world.max_model_len,
            world.max_num_seqs,
            world.max_num_batched_tokens,
            world.chunked,
            num_drafts=world.num_drafts,
            drafter_has_kv=world.drafter_has_kv,
        )
        cache = CacheConfig(
            block_size=world.block_size,
            enable_prefix_caching=world.prefix_caching,
            zero_new_blocks=True,
        )
        self.scheduler = Scheduler(config, cache, world.num_blocks)
        if world.num_snapshots:
            self.scheduler = HybridScheduler(
                *(config, cache, world.num_blocks, world.num_snapshots),
                interval=2 * world.block_size,
                shared=world.block_size,
            )
        self.worker = BookkeepingWorker(world)
        self.in_flight: deque[StepResult] = deque()
        self.requests: list[Request] = []
        self.expected: list[list[int]] = []  # answers
        self.by_id: dict[str, Request] = {}  # the newest of each id
        self.told: dict[str, list[int]] = {}  # tokens of all their deltas
        self.num_steps = 0
        self.choices = random.Random(repr(world))  # of numbers of drafts
        self.redrafts_left = 40

    # ---- what may happen ----

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int,
        stops: bool = True,
        min_tokens: int = 0,
        num_drafts: int | None = None,
        request_id: str | None = None,
    ) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=None, min_tokens=min_tokens)
        rules = make_rules(
            max_tokens,
            params,
            stop_ids=(STOP,) if stops else (),
            num_drafts=self.world.num_drafts if num_drafts is None else num_drafts,
        )
        name = f"r{len(self.requests)}" if request_id is None else request_id
        request = Request(name, tuple(prompt), rules, priority)
        self.scheduler.add(request)
        self.requests.append(request)
        self.told[name], self.by_id[name] = [], request
        self.expected.append(undisturbed(request, self.world.max_model_len))

    def abort(self, choice: int) -> str | None:
        """Abort some requests, possibly with steps in flight; returns them."""
        live = [r for r in self.requests if not r.finished]
        if not live:
            return None
        request = live[choice % len(live)]
        assert self.scheduler.abort(request.request_id) is request
        self._check_books()
        return request.request_id

    def vary_drafts(self, num_drafts: int, redraft: bool) -> None:
        """As the policy of an engine does."""
        scheduler = self.scheduler
        scheduler.num_places = scheduler.num_drafts = num_drafts
        if redraft and self.redrafts_left and scheduler.undrafted:
            scheduler.redraft = True
            self.redrafts_left -= 1

    def try_drafts(self, num_places: int, num_drafts: int, keeps_drafter_kv: bool) -> None:
        """As the trial of an engine on a CPU does."""
        scheduler = self.scheduler
        scheduler.num_places, scheduler.num_drafts = num_places, num_drafts
        scheduler.keeps_drafter_kv = keeps_drafter_kv

    def _choose_drafts(self) -> None:
        """Another number, now and then."""
        rng, most = self.choices, self.world.num_drafts
        if not self.world.varies or rng.random() < 0.7:
            return
        if self.world.varies == "policy":
            self.vary_drafts(rng.choice((0, most // 2, most)), rng.random() < 0.3)
        else:
            self.try_drafts(rng.choice((0, most)), rng.choice((0, most)), rng.random() < 0.7)

    def launch(self) -> bool:
        """Whether there was something to do before the next result is known."""
        self._choose_drafts()
        before, pending = self._snapshot(), bool(self.in_flight)
        not_made = self.scheduler.stats.num_drafts_not_made
        plan = self.scheduler.schedule(results_pending=pending)
        preempted = self.scheduler.stats.num_preemptions > before["preemptions"]
        assert not (pending and preempted), "preempted while results are in flight"
        if plan is None:
            assert pending, "there is work, yet nothing is scheduled"
            assert before == self._snapshot(), "something was done for no plan"
            return False
        self.num_steps += 1
        self._check_plan(plan, before)
        asked = [row.rules.num_drafts for row in plan.rows if row.decodes]
        not_made += sum(max(each - self.scheduler.num_drafts, 0) for each in asked)
        assert self.scheduler.stats.num_drafts_not_made == not_made, "other drafts are not made"
        self._check_books()
        num_places = self.scheduler.num_places
        self.in_flight.append(self.worker.execute(plan, self._shared_blocks(), num_places))
        self._check_bounds()
        return True

    def land(self) -> None:
        result = self.in_flight.popleft()
        late = {r.request_id for r in result.rows if self._is_late(r)}
        before = {r: list(r.token_ids) for r in self.requests if r.request_id in late}
        deltas = self.scheduler.update(result)
        assert not late & {delta.request_id for delta in deltas}, "a late result counts"
        assert all(r.token_ids == then for r, then in before.items()), "a late result was taken in"
        for delta in deltas:
            self.told[delta.request_id] += delta.token_ids
        for request in self.requests:
            if self.by_id[request.request_id] is request:
                assert self.told[request.request_id] == request.output_token_ids, "other deltas"
        self._check_books()
        self._check_bounds()
        self._check_answers()
        self._check_cache()

    @property
    def may_launch(self) -> bool:
        return len(self.in_flight) < self.world.depth

    def advance(self) -> None:
        """Do as the engine does: launch as far ahead as the world allows, then read one result.

        With no work left, results of dead steps stay in flight until there is some.
        """
        if self.scheduler.has_work:
            while self.may_launch and self.launch():
                pass
            self.land()

    def drain(self) -> None:
        """Without more arrivals, all requests finish in a bounded number of steps."""
        num_open = sum(not r.finished for r in self.requests)
        bound = self.num_steps + self.world.depth * (num_open + 1) * 2 * self.world.max_model_len
        while self.scheduler.has_work:
            assert self.num_steps <= bound, "a request starves"
            self.advance()
        while self.in_flight:
            self.land()
        self.scheduler.check_idle()
        assert all(request.finished for request in self.requests)
        num_generated = sum(request.num_output_tokens for request in self.requests)
        assert self.scheduler.stats.num_generated_tokens == num_generated

    # ---- what must hold ----

    def _is_late(self, row: RowResult) -> bool:
        """Whether its request was finished since it was launched; another may have its name."""
        request = self.scheduler._requests.get(row.request_id)
        return request is None or request.epoch != row.epoch

    def _snapshot(self) -> dict[str, Any]:
        """What a plan starts from; those that are computed again wait."""
        scheduler = self.scheduler
        again = scheduler.undrafted if scheduler.redraft and not self.in_flight else []
        running = [r for r in scheduler.running if r not in again]
        return {
            "waiting": sorted([*scheduler.waiting, *again], key=lambda r: r.order),
            "running": running,
            "preemptions": scheduler.stats.num_preemptions,
            "steps": scheduler.stats.num_steps,
            "free": scheduler.pool.num_free,
            "computed": [r.num_computed for r in running],
            "in flight": [list(r.in_flight) for r in running],
        }

    def _check_plan(self, plan: StepPlan, before: dict[str, Any]) -> None:
        world, scheduler = self.world, self.scheduler
        rows = {row.request_id: row for row in plan.rows}
        assert plan.num_tokens <= world.max_num_batched_tokens, "over the token budget"
        assert len(plan.rows) <= world.max_num_seqs
        assert len(rows) == len(plan.rows), "a request has two rows"
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "a slot is used twice"
        assert all(row.num_tokens >= 1 for row in plan.rows), "a row computes nothing"
        order = [(not row.decodes, row.num_tokens) for row in plan.rows]
        assert order == sorted(order), "decodes do not lead"
        for row in plan.rows:
            wanted = scheduler.num_places + 1
            assert not row.decodes or row.num_tokens == wanted, "a decode lacks places"
            past = row.num_computed + row.num_tokens
            assert row.seq_len == min(past, world.max_model_len), "a wrong bound of lengths"
            reserved = min(past + world.lookahead, world.max_model_len)
            assert row.num_reserved >= reserved, "too few blocks"
        assert plan.rows, "an empty plan"
        if not world.chunked:
            assert all(row.samples for row in plan.rows), "a chunk, with chunking off"
        for each in plan.admissions:
            (request,) = [r for r in scheduler.running if r.slot == each.slot]
            waits = scheduler.num_drafts and each.rules.num_drafts
            assert not waits or request.num_drafter_kv is None, "it finds no drafter's KV"
        self._check_order(plan, before)
        running = {r.request_id for r in scheduler.running}
        assert set(rows) <= running
        self._check_writes(rows)

    def _check_order(self, plan: StepPlan, before: dict[str, Any]) -> None:
        rows = {row.request_id for row in plan.rows}
        running = self.scheduler.running
        preempted = [r for r in before["running"] if r.status is RequestStatus.WAITING]
        admitted = [r for r in before["waiting"] if r.status is RequestStatus.RUNNING]
        if preempted:
            assert not admitted, "an admission in a step that lacked blocks"
            kept = [r.order for r in running]
            assert not kept or max(kept) < min(r.order for r in preempted), (
                "the preempted were not the last"
            )
        assert admitted == before["waiting"][: len(admitted)], "a request jumped the queue"
        for admission, request in zip(plan.admissions, admitted, strict=True):
            assert admission.token_ids == request.token_ids
            assert admission.slot == request.slot
        for first, in_flight in zip(before["running"][:1], before["in flight"], strict=False):
            # Its steps in flight may end it, but unless they are sure to, it gets one more.
            certain = first.num_tokens + sum(1 for count in in_flight if count)
            limit = first.num_prompt_tokens + first.rules.max_tokens
            if certain < min(limit, self.world.max_model_len):
                assert first.request_id in rows, "the first in order makes no progress"
            else:
                assert first.request_id not in rows, (
                    "a step for a request that is sure to have ended"
                )

    def _check_writes(self, rows: dict[str, PlannedRow]) -> None:
        """What a row may write are its request's own blocks; the worker holds it to that."""
        for request in self.scheduler.running:
            row = rows.get(request.request_id)
            if row is not None:
                held = len(request.block_ids) * self.world.block_size
                assert row.num_reserved == held, "the worker is told of other blocks"

    def _shared_blocks(self) -> set[int]:
        """Blocks that must not be written: with two holders, or offered to the prefix cache."""
        pool = self.scheduler.pool
        shared = {b for b in range(1, self.world.num_blocks) if pool.refs(b) > 1}
        return shared | set(pool._cached)

    def _check_bounds(self) -> None:
        """The host's upper bounds are never below the device's numbers, nor its known counts above
        them; with no step of a request in flight they are equal."""
        worker = self.worker
        under_way = Counter((row.request_id, row.epoch) for r in self.in_flight for row in r.rows)
        for request in self.scheduler.running:
            slot, num_steps = request.slot, under_way[request.request_id, request.epoch]
            assert len(request.in_flight) == num_steps, "steps in flight are miscounted"
            blocks = worker.block_table[slot][: len(request.block_ids)]
            assert blocks == request.block_ids, "the device has other blocks"
            known, computed = worker.num_tokens[slot], worker.num_computed[slot]
            assert request.num_tokens <= known <= request.num_expected, "tokens out of bounds"
            assert computed <= request.num_computed, "more is computed than the host thinks"
            assert worker.text(slot)[: request.num_tokens] == request.token_ids
            if not num_steps:
                both = (request.num_tokens, request.num_computed)
                assert (known, computed) == both, "host and device differ with nothing in flight"
                assert not worker.ended(slot), "the host goes on with an ended request"

    def _check_books(self) -> None:
        scheduler = self.scheduler
        scheduler.pool.check()
        scheduler.snapshots.check()
        holders = Counter(b for r in scheduler.running for b in r.block_ids)
        assert NULL_BLOCK not in holders, "the null block was handed out"
        for block in range(1, self.world.num_blocks):
            assert scheduler.pool.refs(block) == holders[block], f"block {block} leaks"
        slots = [r.slot for r in scheduler.running] + scheduler._free_slots
        assert sorted(slots) == list(range(self.world.max_num_seqs)), "slots leak"
        for queue in (scheduler.waiting, scheduler.running):
            assert [r.order for r in queue] == sorted(r.order for r in queue)
        for request in [*scheduler.waiting, *self.requests]:
            if request.status is not RequestStatus.RUNNING:
                held = request.slot != -1 or request.block_ids
                assert not held and not request.in_flight, "not running, yet it holds something"
                assert request.num_expected == request.num_tokens, "tokens of no step"
        for request in scheduler.running:
            assert len(set(request.block_ids)) == len(request.block_ids)

    def _check_answers(self) -> None:
        for request, expected in zip(self.requests, self.expected, strict=True):
            found = request.output_token_ids
            assert found == expected[: len(found)], f"{request.request_id} answers wrong"
            if request.finished and request.finish_reason != "abort":
                assert found == expected, f"{request.request_id} ended early"

    def _check_cache(self) -> None:
        """Every cached block holds the tokens that its entry names."""
        size, worker, cache = self.world.block_size, self.worker, self.scheduler.prefix_cache
        assert cache._undrafted <= cache._digest_of.keys()
        for entry in cache._entries.values():
            assert len(entry.tokens) == size + self.world.drafter_has_kv
            for offset, token in enumerate(entry.tokens[:size]):
                found = worker.written.get((entry.block, offset))
                assert found is not None and found[1] == token, "a cached block holds other tokens"
            followed = self.world.drafter_has_kv and entry.block not in cache._undrafted
            for offset, token in enumerate(entry.tokens[1:] if followed else ()):
                found = worker.draft_written.get((entry.block, offset))
                assert found is not None and found[1] == token, "a cached block goes on otherwise"
        self._check_snapshots()

    def _check_snapshots(self) -> None:
        """Every snapshot that can be found is of exactly the text that its entry names."""
        size, scheduler = self.world.block_size, self.scheduler
        unsaved = {c.snapshot for c in getattr(scheduler, "_ended", ())}  # the next plan saves them
        for entry in scheduler.snapshots._entries.values():
            tokens, node = [], entry.node
            while node is not None:
                tokens[:0] = node.tokens[:size]
                node = node.parent
            if entry.snapshot not in unsaved:
                assert self.worker.states is not None
                state = self.worker.states.snapshots[entry.snapshot]
                assert list(state.text) == tokens, "a snapshot of another length or text"


class Traffic:
    """Random arrivals, aborts and steps."""

    def __init__(self, seed: int, world: World | Callable[[random.Random], World]) -> None:
        self.rng = random.Random(seed)
        self.sim = Simulation(world if isinstance(world, World) else world(self.rng))
        self.prefixes = [self._tokens(self.sim.world.max_model_len) for _ in range(3)]

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(1, VOCAB) for _ in range(count)]

    def _arrive(self, name: str | None = None) -> None:
        rng, world = self.rng, self.sim.world
        length = rng.randint(1, rng.choice((4, world.max_model_len - 1)))
        shared = rng.randint(0, length) if rng.random() < 0.7 else 0
        prompt = rng.choice(self.prefixes)[:shared] + self._tokens(length - shared)
        # Also what another request has generated, as a second turn of a conversation.
        if self.sim.requests and rng.random() < 0.3:
            prompt = rng.choice(self.sim.requests).token_ids[: world.max_model_len - 1]
        self.sim.add(
            prompt,
            max_tokens=rng.randint(1, 24),
            priority=rng.choice((0, 0, 1, -1)),
            stops=rng.random() < 0.3,
            min_tokens=rng.choice((0, 3)),
            num_drafts=rng.choice((world.num_drafts, rng.randint(0, world.num_drafts)))
            if world.num_drafts
            else 0,
            request_id=name,
        )

    def run(self, num_events: int) -> Simulation:
        busy = self.rng.uniform(0.05, 0.6)
        for _ in range(num_events):
            if self.rng.random() < busy:
                self._arrive()
            if self.rng.random() < 0.06:
                name = self.sim.abort(self.rng.randrange(100))
                if name is not None and self.rng.random() < 0.5:
                    self._arrive(name)  # the same name, while results of the other are in flight
            self.sim.advance()
        self.sim.drain()
        return self.sim


def run_traffic(
    seeds: range,
    world: World | Callable[[random.Random], World] = World.draw,
    num_events: int = 60,
) -> Counter[str]:
    totals: Counter[str] = Counter()
    for seed in seeds:
        sim = Traffic(seed, world).run(num_events)
        stats = sim.scheduler.stats
        totals["steps"] += sim.num_steps
        totals["preemptions"] += stats.num_preemptions
        totals["hits"] += sim.scheduler.prefix_cache.num_hit_tokens
        totals["taken"] += sim.scheduler.snapshots.num_taken
        totals["restored"] += sim.scheduler.snapshots.num_restored
        totals["aborts"] += sum(r.finish_reason == "abort" for r in sim.requests)
        totals["stops"] += sum(r.finish_reason == "stop" for r in sim.requests)
        limit = sim.world.max_model_len
        totals["limits"] += sum(r.num_tokens == limit for r in sim.requests)
        totals["drafted"] += stats.spec.num_draft_tokens
        totals["accepted"] += stats.spec.num_accepted_tokens
        totals["dead"] += sim.worker.num_dead_rows
        totals["again"] += stats.num_computed_again
        totals["without place"] += sim.worker.num_without_place
    return totals


# ---- worlds ----

# Many decodes beside a long prompt that may take their blocks from them.
CROWDED = World(
    block_size=1,
    num_blocks=60,
    max_model_len=28,
    max_num_seqs=8,
    max_num_batched_tokens=9,
    prefix_caching=False,
)
TIGHT = World(block_size=2, num_blocks=13, max_model_len=24, max_num_batched_tokens=8)
TIGHT_SPECULATIVE = dataclasses.replace(
    TIGHT, max_num_batched_tokens=16, num_drafts=3, drafter_has_kv=True
)


def run_ahead_world(rng: random.Random) -> World:
    world = World.draw_speculative(rng) if rng.random() < 0.6 else World.draw(rng)
    return dataclasses.replace(world, depth=rng.choice((2, 3, 5)))


def varied_world(rng: random.Random) -> World:
    """The number of drafts varies from step to step, also with recurrent layers."""
    world = recurrent_world(rng) if rng.random() < 0.6 else World.draw_speculative(rng)
    if not world.num_drafts:
        world = World.draw_speculative(rng)
    return dataclasses.replace(world, varies=rng.choice(("policy", "trial")))


def recurrent_world(rng: random.Random) -> World:
    """With recurrent layers, and few snapshots or many."""
    return dataclasses.replace(
        run_ahead_world(rng),
        prefix_caching=True,
        depth=rng.choice((1, 2, 3)),
        num_snapshots=rng.choice((1, 2, 4, 20)),
    )


def run_traffic_of_all_kinds() -> None:
    run_traffic(range(30))
    run_traffic(range(30), CROWDED)
