"""The scheduler against a worker that only keeps books.

The worker follows a plan as the real one does (slot state, block tables, token history) but in
place of keys and values it records, for each place of each block, which text was written there.
So a wrong, shared, stale or lost block shows in the step that reads it. It stands for the device:
steps are launched before the results of earlier ones are taken in, as many as the world's depth.

It may draft too, right and wrong tokens at random. A drafter's place in a block is written with the
token that follows as well, as an EAGLE head's is, so that a block which goes on otherwise is wrong.
"""

import dataclasses
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from helpers import make_rules
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from stoop.config.schema import CacheConfig, ScheduleConfig
from stoop.core.request import Request, RequestStatus
from stoop.core.sampling_params import SamplingParams
from stoop.core.step import Admission, BlockAppend, PlannedRow, RowResult, StepPlan, StepResult
from stoop.scheduler import prefix_cache as prefix_cache_module
from stoop.scheduler.block_pool import NULL_BLOCK, BlockPool
from stoop.scheduler.prefix_cache import PrefixCache
from stoop.scheduler.scheduler import Scheduler, _Draft

VOCAB = 6
STOP = 0
_PRIME = 2**61 - 1


def text_key(before: int, token: int) -> int:
    """Names a whole text: the key of all but its last token, and that token."""
    return (before * 1_000_003 + token + 1) % _PRIME


def text_keys(tokens: list[int]) -> list[int]:
    keys, key = [], 1
    for token in tokens:
        key = text_key(key, token)
        keys.append(key)
    return keys


def next_token(tokens: list[int]) -> int:
    """The model: any text has exactly one continuation."""
    return random.Random(text_keys(tokens)[-1]).randrange(VOCAB)


def undisturbed(request: Request, max_model_len: int) -> list[int]:
    """What a request must answer, whatever else goes on."""
    tokens = list(request.prompt_token_ids)
    rules = request.rules
    while True:
        tokens.append(next_token(tokens))
        num_output = len(tokens) - request.num_prompt_tokens
        stopped = tokens[-1] in rules.stop_ids and num_output > rules.params.min_tokens
        if stopped or num_output >= rules.max_tokens or len(tokens) >= max_model_len:
            return tokens[request.num_prompt_tokens :]


Place = tuple[int, int]  # block, and offset in it
NOBODYS = (-1, -1)  # what a rejected draft leaves: to read it is an error


class BookkeepingWorker:
    """The device: slot state as in `stoop.batch`, phases as in `stoop.ops`, texts in place of KV.

    It runs plans in the order of their launch and follows its own counters, whatever the host
    reckons with: a plan may be made before the host knows what earlier ones yielded, or that a
    request has ended.
    """

    def __init__(self, world: "World") -> None:
        self.world, self.block_size = world, world.block_size
        num_slots, max_model_len = world.max_num_seqs, world.max_model_len
        max_blocks = -(-max_model_len // world.block_size)
        self.token_ids = [[-1] * max_model_len for _ in range(num_slots)]
        self.num_tokens = [0] * num_slots
        self.num_computed = [0] * num_slots
        self.num_drafts = [0] * num_slots
        self.draft_limit = [0] * num_slots
        self.token_limit = [0] * num_slots
        self.admissions: list[Admission | None] = [None] * num_slots
        self.block_table = [[NULL_BLOCK] * max_blocks for _ in range(num_slots)]
        self.written: dict[Place, tuple[int, int]] = {}  # place -> (text, token)
        self.draft_written: dict[Place, tuple[int, int]] = {}  # ... -> (text, token), one further
        self.luck = random.Random(0)
        self.num_dead_rows = 0

    def execute(self, plan: StepPlan, no_writes: set[int]) -> StepResult:
        """no_writes: blocks that somebody else may read."""
        self._stage(plan)
        self.no_writes = no_writes
        live = [row for row in plan.rows if not self.ended(row.slot)]
        self.num_dead_rows += len(plan.rows) - len(live)
        contexts = [self.num_computed[row.slot] for row in live]
        counts = [self._num_live(row) for row in live]
        self._write_all(live)
        for row in live:  # a layer stores every row's KV before it attends to any
            self._check_reads(row)
        answers = {row.request_id: self._answer(row) for row in live}
        if self.world.drafter_has_kv:
            self._draft_prefill(live, contexts, counts)
        places: set[Place] = set()
        for row in live:
            self._draft(row, places)
        dead = RowResult("", -1, [])
        rows = [
            dataclasses.replace(
                answers.get(row.request_id, dead), request_id=row.request_id, epoch=row.epoch
            )
            for row in plan.rows
        ]
        return StepResult(plan.index, rows)

    def ended(self, slot: int) -> bool:
        return self.num_tokens[slot] >= self.token_limit[slot]

    def _stage(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self._admit(admission)
        for append in plan.block_appends:
            row = self.block_table[append.slot]
            stop = append.start + len(append.block_ids)
            assert stop <= len(row), "a block append overruns its row"
            row[append.start : stop] = append.block_ids

    def _admit(self, admission: Admission) -> None:
        slot, tokens = admission.slot, admission.token_ids
        assert len(tokens) < len(self.token_ids[slot]), "no room for an answer"
        self.token_ids[slot][: len(tokens)] = tokens
        self.num_tokens[slot] = len(tokens)
        self.num_computed[slot] = admission.num_computed
        self.num_drafts[slot] = 0
        self.draft_limit[slot] = admission.rules.num_drafts
        limit = admission.num_prompt_tokens + admission.rules.max_tokens
        self.token_limit[slot] = min(limit, self.world.max_model_len)
        self.admissions[slot] = admission

    def text(self, slot: int, drafts: bool = False) -> list[int]:
        count = self.num_tokens[slot] + (self.num_drafts[slot] if drafts else 0)
        return self.token_ids[slot][:count]

    def _place(self, slot: int, position: int) -> Place:
        block = self.block_table[slot][position // self.block_size]
        return block, position % self.block_size

    def _num_live(self, row: PlannedRow) -> int:
        slot = row.slot
        known = self.num_tokens[slot] + self.num_drafts[slot]
        return min(row.num_tokens, known - self.num_computed[slot])

    def _claim(self, row: PlannedRow, position: int, places: set[Place]) -> Place:
        """A place that a row writes; nobody else may in the same phase."""
        # What stands behind in its block table is a former holder's.
        assert position < row.num_reserved, "a row writes behind what is reserved"
        place = self._place(row.slot, position)
        assert place[0] != NULL_BLOCK, "a live row writes the null block"
        assert place[0] not in self.no_writes, "a block that others may read is written"
        assert place not in places, "two rows write one place"
        places.add(place)
        return place

    def _write_all(self, rows: list[PlannedRow]) -> None:
        places: set[Place] = set()
        for row in rows:
            start, known = self.num_computed[row.slot], self.num_tokens[row.slot]
            decodes = known - start == 1 and start >= row.num_prompt_tokens
            assert row.num_computed >= start, "the host's bound of what is computed is too low"
            assert decodes or row.num_computed == start, "a chunk is not where the host thinks"
            decodes &= row.num_tokens == self.world.query_len  # one just resumed may have less
            assert decodes == row.decodes, "host and device disagree on who decodes"
            dead = row.num_tokens - self._num_live(row)
            assert not dead or row.decodes, "a row computes unknown tokens"
            text = self.text(row.slot, drafts=True)
            keys = text_keys(text)
            for position in range(start, start + self._num_live(row)):
                place = self._claim(row, position, places)
                self.written[place] = (keys[position], text[position])

    def _check_reads(self, row: PlannedRow) -> None:
        keys = text_keys(self.text(row.slot, drafts=True))
        length = self.num_computed[row.slot] + self._num_live(row)
        assert length <= row.seq_len, "the host's bound is too low"
        for position in range(length):
            found = self.written.get(self._place(row.slot, position))
            assert found is not None, f"{row.request_id} reads KV that nobody wrote"
            assert found[0] == keys[position], f"{row.request_id} reads another text's KV"

    def _answer(self, row: PlannedRow) -> RowResult:
        slot, live = row.slot, self._num_live(row)
        samples = self.num_computed[slot] + live >= self.num_tokens[slot]
        assert samples == row.samples, "host and device disagree on who samples"
        if not samples:
            self.num_computed[slot] += row.num_tokens
            return RowResult(row.request_id, row.epoch, [])
        verified = self.num_computed[slot] + live - self.num_tokens[slot]
        assert verified == self.num_drafts[slot], "a draft has no place in the step"
        known, text = self.num_tokens[slot], self.text(slot)
        drafts = self.token_ids[slot][known : known + verified]
        while True:
            text.append(next_token(text))
            accepted = len(text) - known
            if accepted > verified or drafts[accepted - 1] != text[-1]:
                break
        self.token_ids[slot][: len(text)] = text
        self.num_tokens[slot] = len(text)
        self.num_computed[slot] = len(text) - 1
        self.num_drafts[slot] = 0
        if self._stops(slot, known):
            self.token_limit[slot] = 0
        return RowResult(row.request_id, row.epoch, text[known:], num_drafts=verified)

    def _stops(self, slot: int, known: int) -> bool:
        """Whether a stop token is among those taken; what stands behind it is taken too."""
        admission = self.admissions[slot]
        assert admission is not None
        rules, text = admission.rules, self.text(slot)
        first = max(known, admission.num_prompt_tokens + rules.params.min_tokens)
        return any(token in rules.stop_ids for token in text[first:])

    # ---- the drafter ----

    def _draft_prefill(self, rows: list[PlannedRow], contexts: list[int], live: list[int]) -> None:
        """Over the step's positions, each with the token that follows it."""
        places: set[Place] = set()
        for row, start, count in zip(rows, contexts, live, strict=True):
            text = self.text(row.slot)
            keys = text_keys(text)
            for position in range(start, start + count):
                place = self._claim(row, position, places)
                known = position + 1 < len(text)
                value = (keys[position + 1], text[position + 1]) if known else NOBODYS
                self.draft_written[place] = value
        for row, start, count in zip(rows, contexts, live, strict=True):
            text = self.text(row.slot)
            keys = text_keys(text)
            for position in range(min(start + count, len(text) - 1)):
                found = self.draft_written.get(self._place(row.slot, position))
                assert found is not None, f"{row.request_id} drafts from KV that nobody wrote"
                assert found[0] == keys[position + 1], f"{row.request_id} drafts from another text"

    def _draft(self, row: PlannedRow, places: set[Place]) -> None:
        """Drafts behind the known tokens, and a drafter's KV of all but the last of them."""
        slot, known = row.slot, self.num_tokens[row.slot]
        room = min(self.draft_limit[slot], self.token_limit[slot] - 1 - known)
        for number in range(room if row.samples else 0):
            if number and self.world.drafter_has_kv:
                place = self._claim(row, known - 2 + number, places)
                self.draft_written[place] = NOBODYS
            right = self.luck.random() < 0.7
            draft = next_token(self.text(slot, drafts=True)) if right else STOP
            self.token_ids[slot][known + number] = draft
            self.num_drafts[slot] += 1


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
    depth: int = 1  # steps that may be under way before the first one's result is taken in: the
    # engine's run_ahead + 1
    num_drafts: int = 0  # K
    drafter_has_kv: bool = False

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
            # As `resolve` asks: everybody may decode in one step.
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
        cache = CacheConfig(block_size=world.block_size, enable_prefix_caching=world.prefix_caching)
        self.scheduler = Scheduler(config, cache, world.num_blocks)
        self.worker = BookkeepingWorker(world)
        self.in_flight: deque[StepResult] = deque()
        self.requests: list[Request] = []
        self.expected: list[list[int]] = []  # answers
        self.num_steps = 0

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
        self.expected.append(undisturbed(request, self.world.max_model_len))

    def abort(self, choice: int) -> str | None:
        """Returns whom, while steps of theirs may be under way."""
        live = [r for r in self.requests if not r.finished]
        if not live:
            return None
        request = live[choice % len(live)]
        assert self.scheduler.abort(request.request_id) is request
        self._check_books()
        return request.request_id

    def launch(self) -> bool:
        """Whether there was something to do before the next result is known."""
        before, pending = self._snapshot(), bool(self.in_flight)
        plan = self.scheduler.schedule(results_pending=pending)
        preempted = self.scheduler.stats.num_preemptions > before["preemptions"]
        assert not (pending and preempted), "preempted while results are under way"
        if plan is None:
            assert pending, "there is work, yet nothing is scheduled"
            assert before == self._snapshot(), "something was done for no plan"
            return False
        self.num_steps += 1
        self._check_plan(plan, before)
        self._check_books()
        self.in_flight.append(self.worker.execute(plan, self._shared_blocks()))
        self._check_bounds()
        return True

    def land(self) -> None:
        result = self.in_flight.popleft()
        late = {r.request_id for r in result.rows if self._is_late(r)}
        before = {r: list(r.token_ids) for r in self.requests if r.request_id in late}
        rows = self.scheduler.update(result)
        assert not late & {request.request_id for request, _ in rows}, "a late result counts"
        assert all(r.token_ids == then for r, then in before.items()), "a late result was taken in"
        self._check_books()
        self._check_bounds()
        self._check_answers()
        self._check_cache()

    @property
    def may_launch(self) -> bool:
        return len(self.in_flight) < self.world.depth

    def advance(self) -> None:
        """As the engine does: launch as far ahead as the world allows, then read one result.

        With nothing left to do, results of dead steps stay under way until there is.
        """
        if self.scheduler.has_work:
            while self.may_launch and self.launch():
                pass
            self.land()

    def drain(self) -> None:
        """No more arrivals: everybody finishes in a bounded number of steps."""
        num_open = sum(not r.finished for r in self.requests)
        bound = self.num_steps + self.world.depth * (num_open + 1) * 2 * self.world.max_model_len
        while self.scheduler.has_work:
            assert self.num_steps <= bound, "somebody starves"
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
        scheduler = self.scheduler
        return {
            "waiting": list(scheduler.waiting),
            "running": list(scheduler.running),
            "preemptions": scheduler.stats.num_preemptions,
            "steps": scheduler.stats.num_steps,
            "free": scheduler.pool.num_free,
            "computed": [r.num_computed for r in scheduler.running],
            "in flight": [list(r.in_flight) for r in scheduler.running],
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
            assert not row.decodes or row.num_tokens == world.query_len, "a decode lacks places"
            past = row.num_computed + row.num_tokens
            assert row.seq_len == min(past, world.max_model_len)
            assert row.num_reserved >= min(past + world.lookahead, world.max_model_len)
        assert plan.rows, "an empty plan"
        if not world.chunked:
            assert all(row.samples for row in plan.rows), "a chunk, with chunking off"
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
            assert not kept or max(kept) < min(r.order for r in preempted), "not the last went"
        assert admitted == before["waiting"][: len(admitted)], "somebody jumped the queue"
        for admission, request in zip(plan.admissions, admitted, strict=True):
            assert admission.token_ids == request.token_ids
            assert admission.slot == request.slot
        for first, in_flight in zip(before["running"][:1], before["in flight"], strict=False):
            # Its steps under way may end it, but unless they must, there is one more.
            certain = first.num_tokens + sum(1 for count in in_flight if count)
            limit = first.num_prompt_tokens + first.rules.max_tokens
            if certain < min(limit, self.world.max_model_len):
                assert first.request_id in rows, "the first in order makes no progress"
            else:
                assert first.request_id not in rows, "a step for one who is sure to have ended"

    def _check_writes(self, rows: dict[str, PlannedRow]) -> None:
        """What a row may write are its request's own blocks; the worker holds it to that."""
        for request in self.scheduler.running:
            row = rows.get(request.request_id)
            if row is not None:
                held = len(request.block_ids) * self.world.block_size
                assert row.num_reserved == held, "the worker is told of other blocks"

    def _shared_blocks(self) -> set[int]:
        """Which nobody may write: of two holders, or offered to others."""
        pool = self.scheduler.pool
        shared = {b for b in range(1, self.world.num_blocks) if pool.refs(b) > 1}
        return shared | set(pool._cached)

    def _check_bounds(self) -> None:
        """What the host reckons with is never below the device's numbers, nor what it knows
        above them; with nothing of a request under way both are equal."""
        worker = self.worker
        under_way = Counter((row.request_id, row.epoch) for r in self.in_flight for row in r.rows)
        for request in self.scheduler.running:
            slot, num_steps = request.slot, under_way[request.request_id, request.epoch]
            assert len(request.in_flight) == num_steps, "steps under way are miscounted"
            blocks = worker.block_table[slot][: len(request.block_ids)]
            assert blocks == request.block_ids, "the device has other blocks"
            known, computed = worker.num_tokens[slot], worker.num_computed[slot]
            assert request.num_tokens <= known <= request.num_expected, "tokens out of bounds"
            assert computed <= request.num_computed, "more is computed than the host thinks"
            assert worker.text(slot)[: request.num_tokens] == request.token_ids
            if not num_steps:
                assert (known, computed) == (request.num_tokens, request.num_computed)
                assert not worker.ended(slot), "the host goes on with an ended request"

    def _check_books(self) -> None:
        scheduler = self.scheduler
        scheduler.pool.check()
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
                assert request.slot == -1 and not request.block_ids and not request.in_flight
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
        size, worker = self.world.block_size, self.worker
        for entry in self.scheduler.prefix_cache._entries.values():
            assert len(entry.tokens) == size + self.world.drafter_has_kv
            for offset, token in enumerate(entry.tokens[:size]):
                found = worker.written.get((entry.block, offset))
                assert found is not None and found[1] == token, "a cached block holds other tokens"
            for offset, token in enumerate(entry.tokens[1:] if self.world.drafter_has_kv else ()):
                found = worker.draft_written.get((entry.block, offset))
                assert found is not None and found[1] == token, "a cached block goes on otherwise"


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
        # Also what somebody else has generated, as a second turn of a conversation.
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
                    self._arrive(name)  # the same name, while results of the other are under way
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
        totals["aborts"] += sum(r.finish_reason == "abort" for r in sim.requests)
        totals["stops"] += sum(r.finish_reason == "stop" for r in sim.requests)
        limit = sim.world.max_model_len
        totals["limits"] += sum(r.num_tokens == limit for r in sim.requests)
        totals["drafted"] += stats.spec.num_draft_tokens
        totals["accepted"] += stats.spec.num_accepted_tokens
        totals["dead"] += sim.worker.num_dead_rows
    return totals


# ---- the scheduler itself ----


@pytest.mark.parametrize("chunk", range(4))
def test_random_traffic_keeps_every_invariant(chunk: int) -> None:
    totals = run_traffic(range(chunk * 60, chunk * 60 + 60))
    # The traffic must reach what it is meant to test.
    assert totals["steps"] > 5000
    kinds = ("preemptions", "hits", "aborts", "stops", "dead")
    assert min(totals[k] for k in kinds) > 20, totals


@pytest.mark.parametrize("chunk", range(4))
def test_random_speculative_traffic_keeps_every_invariant(chunk: int) -> None:
    totals = run_traffic(range(chunk * 60, chunk * 60 + 60), World.draw_speculative)
    assert totals["steps"] > 3000
    kinds = ("preemptions", "hits", "aborts", "stops", "limits", "dead")
    assert min(totals[k] for k in kinds) > 20, totals
    assert totals["drafted"] > totals["accepted"] > 1000, totals


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
    run_traffic(range(10), World(block_size=2, num_blocks=20))


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


def run_traffic_of_all_kinds() -> None:
    run_traffic(range(30))
    run_traffic(range(30), CROWDED)


# ---- mutants: bugs put back, which the traffic must notice ----


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
    return lambda self, request, index: self._entries.get(self._node(request, index).digest)


def match_one_too_many(match: Any) -> Any:
    def mutant(self: PrefixCache, request: Request) -> list[int]:
        blocks = match(self, request)
        entry = None
        if (len(blocks) + 1) * self.block_size <= request.num_tokens and self.enabled:
            entry = self._find(request, len(blocks))
        return blocks + ([entry.block] if entry else [])

    return mutant


def match_one_block_unseen(match: Any) -> Any:
    def mutant(self: PrefixCache, request: Request) -> list[int]:
        blocks = match(self, request)
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
    return lambda self, request, num, draft: grow(self, request, max(num - 1, 0), draft)


def preempt_without_release(preempt: Any) -> Any:
    def mutant(self: Scheduler, request: Request) -> None:
        with patched(BlockPool, "release", lambda release: lambda pool, blocks: None):
            preempt(self, request)

    return mutant


def preempt_the_first(make_room: Any) -> Any:
    def mutant(self: Scheduler, request: Request, num: int, draft: _Draft) -> bool:
        while not self._grow(request, num, draft):
            victim = self.running[0]
            self._preempt(victim)
            draft.drop(victim)
            draft.preempted = True
            if victim is request:
                return False
        return True

    return mutant


def keep_rows_of_the_preempted(drop: Any) -> Any:
    return lambda self, request: None


def forget_the_budget(put: Any) -> Any:
    def mutant(self: _Draft, request: Request, num_tokens: int) -> None:
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
    def mutant(draft: _Draft) -> Iterator[BlockAppend]:
        for append in block_appends(draft):
            if append.start:
                append = BlockAppend(append.slot, append.start - 1, append.block_ids)
            yield append

    return staticmethod(mutant)


def appends_lost_for_running(block_appends: Any) -> Any:
    return staticmethod(lambda draft: [a for a in block_appends(draft) if a.start == 0])


def queue_newest_first(add: Any) -> Any:
    def mutant(self: Scheduler, request: Request) -> None:
        add(self, request)
        self.waiting.remove(request)
        self.waiting.insert(0, request)

    return mutant


def chunks_sample_too(row: Any) -> Any:
    return lambda self, request, num: dataclasses.replace(row(self, request, num), samples=True)


def resume_without_generated(admission: Any) -> Any:
    def mutant(request: Request) -> Admission:
        return dataclasses.replace(admission(request), token_ids=list(request.prompt_token_ids))

    return staticmethod(mutant)


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
    (Scheduler, "_block_appends", appends_one_late),
    (Scheduler, "_block_appends", appends_lost_for_running),
    (Scheduler, "update", update_without_epochs),
    (Scheduler, "add", queue_newest_first),
    (Scheduler, "_row", chunks_sample_too),
    (Scheduler, "_admission", resume_without_generated),
    (_Draft, "drop", keep_rows_of_the_preempted),
    (_Draft, "put", forget_the_budget),
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
    def mutant(self: Scheduler, request: Request, row: RowResult) -> None:
        computed = request.num_computed
        take_tokens(self, request, row)
        if not request.finished:
            request.num_computed = min(computed, request.num_tokens)

    return mutant


def run_past_the_stop(stops: Any) -> Any:
    """The tokens behind the one that ends a request are kept as well."""

    def mutant(self: Scheduler, request: Request, token: int) -> bool:
        if not request.finished:
            stops(self, request, token)
        return False

    return mutant


def drop_the_rest_of_a_run(take_tokens: Any) -> Any:
    def mutant(self: Scheduler, request: Request, row: RowResult) -> None:
        take_tokens(self, request, dataclasses.replace(row, token_ids=row.token_ids[:2]))

    return mutant


def decode_without_places(num_wanted: Any) -> Any:
    return lambda self, request: request.num_tokens - request.num_computed


SPECULATIVE_MUTANTS = [
    (Scheduler, "_num_reserved", reserve_no_lookahead),
    (Scheduler, "_num_reserved", reserve_one_too_few),
    (Scheduler, "_num_reserved", reserve_beyond_the_model),
    (PrefixCache, "__init__", ignore_the_following_token),
    (Scheduler, "_take_tokens", count_rejected_drafts),
    (Scheduler, "_stops", run_past_the_stop),
    (Scheduler, "_take_tokens", drop_the_rest_of_a_run),
    (Scheduler, "_num_wanted", decode_without_places),
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


def steps_kept_when_vacated(forget_steps: Any) -> Any:
    return lambda self: None


def bound_raised_by_one(launch: Any) -> Any:
    """However many drafts may be accepted: the host's numbers fall behind the device's."""

    def mutant(self: Request, num_tokens: int, num_yielded: int) -> None:
        launch(self, *((1, 1) if num_yielded > 1 else (num_tokens, num_yielded)))

    return mutant


def a_step_yields_one(most_tokens: Any) -> Any:
    return lambda self, request, num: min(1, most_tokens(self, request, num))


def a_chunk_yields_one(most_tokens: Any) -> Any:
    return lambda self, request, num: max(1, most_tokens(self, request, num))


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

    def mutant(self: Scheduler, request: Request, row: RowResult) -> None:
        computed = request.num_computed
        take_tokens(self, request, row)
        if not request.finished:
            request.num_computed = computed

    return mutant


def bound_lowered_to_what_is_known(take_tokens: Any) -> Any:
    """As if nothing else were under way."""

    def mutant(self: Scheduler, request: Request, row: RowResult) -> None:
        take_tokens(self, request, row)
        if not request.finished and row.token_ids:
            request.num_computed = request.num_tokens - 1

    return mutant


def blocks_for_what_is_known(grow: Any) -> Any:
    def mutant(self: Scheduler, request: Request, num: int, draft: _Draft) -> bool:
        computed = request.num_computed
        request.num_computed = min(computed, request.num_tokens - 1)
        found = grow(self, request, num, draft)
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

    def mutant(self: BookkeepingWorker, plan: StepPlan, no_writes: set[int]) -> StepResult:
        with patched(BookkeepingWorker, "ended", lambda _: lambda self, slot: False):
            return execute(self, plan, no_writes)

    return mutant


RUN_AHEAD_MUTANTS = [
    (Request, "land", results_not_counted_off, "miscounted"),
    (Request, "forget_steps", steps_kept_when_vacated, "in_flight"),
    (Request, "launch", bound_raised_by_one, "out of bounds|too low|host thinks"),
    (Scheduler, "_most_tokens", a_step_yields_one, "computes nothing"),
    (Scheduler, "_most_tokens", a_chunk_yields_one, "disagree|computes unknown|not where"),
    (PrefixCache, "insert", offer_the_newest_token, "cached block|nobody wrote|others may read"),
    (Scheduler, "_lacks_blocks", preempt_while_pending, "preempted while"),
    (Scheduler, "schedule", never_tell_that_results_are_pending, "preempted while"),
    (Scheduler, "update", take_late_results, "late result"),
    (Scheduler, "_take_tokens", bound_left_where_it_was, "computes nothing|both|=="),
    (Scheduler, "_take_tokens", bound_lowered_to_what_is_known, "too low|host thinks"),
    (Scheduler, "_grow", blocks_for_what_is_known, "num_reserved|reserved"),
    (Scheduler, "_row", lengths_of_what_is_known, "seq_len|too low"),
    (Request, "ends_in_flight", ends_by_what_may_come, "no progress"),
    (Request, "ends_in_flight", never_sure_to_end, "sure to have ended"),
    (BookkeepingWorker, "execute", a_dead_row_yields_a_token, "."),
]


def run_ahead_world(rng: random.Random) -> World:
    world = World.draw_speculative(rng) if rng.random() < 0.6 else World.draw(rng)
    return dataclasses.replace(world, depth=rng.choice((2, 3, 5)))


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "noticed"),
    RUN_AHEAD_MUTANTS,
    ids=[mutant.__name__ for _, _, mutant, _ in RUN_AHEAD_MUTANTS],
)
def test_run_ahead_traffic_notices_mutant(owner: Any, name: str, mutant: Any, noticed: str) -> None:
    with patched(owner, name, mutant), pytest.raises(AssertionError, match=noticed):
        run_traffic(range(40), run_ahead_world)


def test_run_ahead_traffic_is_right_without_mutants() -> None:
    """Else the test above would show nothing."""
    totals = run_traffic(range(40), run_ahead_world)
    assert totals["dead"] > 100 and totals["preemptions"] > 20, totals


def test_plain_steps_have_no_dead_rows() -> None:
    """The slow twin reads every result before it plans: nothing is launched in vain."""
    plain = dataclasses.replace(TIGHT_SPECULATIVE, depth=1)
    assert run_traffic(range(8), plain)["dead"] == 0
    assert run_traffic(range(8), dataclasses.replace(plain, depth=3))["dead"] > 0
