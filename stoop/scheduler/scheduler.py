"""Plans each step: which requests run, and how many tokens each computes.

There is no prefill phase and no decode phase: a request computes the tokens that are known and not
yet computed. A decode computes one such token, a prefill many, a chunk some of them. Requests are
served in order of priority, then arrival. When a request cannot get a block, the last request in
that order gives up its blocks and is computed again later (preemption by recomputation).

A step may be planned before the results of earlier ones are known. The scheduler then assumes that
those steps produce as many tokens as they can and reserves blocks for that many; the device knows
the true numbers and uses what it needs. No request is preempted while results are in flight.

The scheduler holds numbers only and imports no torch.
"""

import itertools
import time
from bisect import insort
from collections.abc import Iterable

from stoop.config.errors import RequestError
from stoop.config.schema import CacheConfig, ScheduleConfig
from stoop.core.messages import Delta
from stoop.core.outputs import SpecCounts
from stoop.core.request import OWN_LATER, PromptLimits, Request, RequestStatus
from stoop.core.step import PlannedRow, RowResult, StepPlan, StepResult
from stoop.scheduler.block_pool import BlockPool
from stoop.scheduler.plan import (
    PlanBuilder,
    RowWatch,
    SchedulerStats,
    make_admission,
    make_delta,
    place_in_batch,
)
from stoop.scheduler.prefix_cache import PrefixCache
from stoop.scheduler.queue import RequestQueue
from stoop.scheduler.snapshots import SnapshotIndex

NO_TOKEN = (
    "the model's logits are NaN or rule out every token: check the model's files, and whether its "
    "numbers fit the dtype (float16 overflows where bfloat16 does not)"
)


class Scheduler:
    """Queues, KV blocks and slots of all requests."""

    def __init__(
        self, config: ScheduleConfig, cache: CacheConfig, num_blocks: int, num_snapshots: int = 0
    ) -> None:
        self.config = config
        self._num_lookahead = config.num_lookahead
        self.block_size = cache.block_size
        self._zero_new_blocks = cache.zero_new_blocks
        self.pool = BlockPool(num_blocks)
        self.snapshots = SnapshotIndex(num_snapshots)
        self.prefix_cache = self._make_prefix_cache(cache)
        self.limits = PromptLimits(
            config.max_model_len, kv_tokens=self.pool.num_usable * cache.block_size
        )
        self.stats = SchedulerStats(spec=SpecCounts(config.num_drafts))
        self.waiting = RequestQueue()
        self.running: list[Request] = []  # in order
        self._requests: dict[str, Request] = {}
        # Of the next step. In a graph of a whole step both numbers are the same.
        self.num_places = config.num_drafts  # drafts that a decode has places for
        self.num_drafts = config.num_drafts  # drafts that it makes
        self.redraft = False  # whether to compute again what the drafter lacks KV of
        self.keeps_drafter_kv = True  # whether prompts get it even if no drafts are made
        self._free_slots = list(reversed(range(config.max_num_seqs)))
        self._num_arrivals = 0
        self._epochs = itertools.count()  # never repeats, even if a request id does
        self._row_watch = RowWatch()
        self._left_out = False  # whether the drafter did not see the last step

    def _make_prefix_cache(self, cache: CacheConfig) -> PrefixCache:
        enabled, looks_ahead = cache.enable_prefix_caching, self.config.drafter_has_kv
        return PrefixCache(self.pool, cache.block_size, enabled, looks_ahead=looks_ahead)

    # ---- requests come and go ----

    def check(self, request: Request) -> None:
        """Refuse a request that could never run."""
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use: choose another")
        self.limits.check(request.num_prompt_tokens)

    def add(self, request: Request) -> None:
        """Queue a request, or refuse one that could never run."""
        self.check(request)
        request.arrival = self._num_arrivals
        wanted = request.num_prompt_tokens + request.rules.max_tokens
        request.token_limit = min(wanted, self.config.max_model_len)
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        self.waiting.push(request)

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """End a request, waiting or running. Results still in flight will be ignored."""
        if request.finished:
            return
        was_running = request.status is RequestStatus.RUNNING
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.status = RequestStatus.FINISHED
        if was_running:
            self.running.remove(request)
            self._vacate(request)
        else:
            self.waiting.remove(request)
        self.stats.num_finished += 1
        del self._requests[request.request_id]

    def abort(self, request_id: str) -> Request | None:
        """End a request early; None if there is no such request."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, "abort")
        return request

    @property
    def open_requests(self) -> list[str]:
        """Ids of the requests that are waiting or running."""
        return list(self._requests)

    def knows(self, request_id: str) -> bool:
        """Whether this request is waiting or running."""
        return request_id in self._requests

    def restart(self, request_ids: Iterable[str]) -> None:
        """Forget everything but these requests, which wait again with the tokens they have.

        An exception may have interrupted any method, this one too: nothing is read but the table
        of requests, replaced first and in one piece. Their KV is computed again.
        """
        self._requests = {name: self._requests[name] for name in request_ids}
        self.pool.reset()
        self.prefix_cache.reset()
        self.running.clear()
        self._free_slots[:] = reversed(range(self.config.max_num_seqs))
        self.waiting = RequestQueue()
        for request in self._requests.values():
            request.leave_slot()
            request.status = RequestStatus.WAITING
            self.waiting.push(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # ---- a step ----

    def schedule(self, *, results_pending: bool = False) -> StepPlan | None:
        """The next step; None if nothing can be done before the next result is known."""
        if self.redraft:
            if results_pending:
                return None
            self._compute_again(self.undrafted)
            self.redraft = False
        todo = self._order_running()
        if results_pending and self._lacks_blocks(todo):
            return None
        plan = PlanBuilder(self.config.max_num_batched_tokens)
        self._continue_running(todo, plan)
        if not plan.preempted:
            self._admit_waiting(plan)
        if not plan.num_scheduled:
            return None
        return self._finish_plan(plan)

    def update(self, result: StepResult) -> list[Delta]:
        """Take in a step's results; returns what they add to the requests that are still here."""
        deltas = []
        for row in result.rows:
            request = self._requests.get(row.request_id)
            if request is None or request.epoch != row.epoch:
                continue  # it finished, was aborted or was preempted after the launch
            new_ids = self._take_tokens(request, row)
            if row.error is not None:
                self.finish(request, "error", row.error)
            deltas.append(make_delta(request, row, new_ids))
        return deltas

    def check_idle(self) -> None:
        """Without requests, no block and no slot is held. Compares counts only, to be cheap."""
        counts = (len(self.waiting), len(self.running), list(self._requests))
        assert not self.has_work and not self._requests, counts
        assert self.pool.num_free == self.pool.num_usable, (self.pool.num_free, self.pool.num_used)
        assert len(self._free_slots) == self.config.max_num_seqs

    # ---- scheduling ----

    def _order_running(self) -> list[tuple[Request, int]]:
        """The running requests that go on, and how many tokens each wants to compute.

        Decodes come first, so that a chunk of a long prompt does not delay other requests' tokens.
        """
        decodes, prefills, decode_len = [], [], self.num_places + 1
        for request in self.running:
            if request.ends_in_flight:
                continue
            computed = request.num_computed
            remaining = len(request.token_ids) + request.num_pending - computed
            if remaining == 1:
                # A decode has places for all drafts, whether it has that many or not.
                after_prompt = computed >= request.num_prompt_tokens
                decodes.append((request, decode_len if after_prompt else 1))
            else:
                prefills.append((request, remaining))
        return decodes + prefills

    def _continue_running(self, todo: list[tuple[Request, int]], plan: PlanBuilder) -> None:
        block_size, lookahead = self.block_size, self._num_lookahead
        for request, wanted in todo:
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted by an earlier request of this loop
            num_tokens = wanted if wanted <= plan.budget else plan.budget
            if not num_tokens:
                continue
            past = request.num_computed + num_tokens + lookahead
            has_room = past <= len(request.block_ids) * block_size
            if has_room or self._make_room(request, num_tokens, plan):
                plan.add(request, num_tokens)

    def _lacks_blocks(self, todo: list[tuple[Request, int]]) -> bool:
        """Whether the running requests need more blocks than are free, as far as is known now."""
        missing, most = 0, self.config.max_num_batched_tokens
        # A request needs the blocks that its tokens fill, plus one partial block.
        at_most = min(most, sum([wanted for _, wanted in todo]))
        at_most += len(todo) * (self._num_lookahead + self.block_size)
        if at_most <= self.pool.num_free * self.block_size:
            return False
        for request, wanted in todo:
            reserved = self._num_reserved(request.num_computed + min(wanted, most))
            missing += max(0, self._num_blocks(reserved) - len(request.block_ids))
        return missing > self.pool.num_free

    def _admit_waiting(self, plan: PlanBuilder) -> None:
        while self.waiting and self._free_slots and plan.budget:
            request = self.waiting.peek()
            cached = self.prefix_cache.match(request, self._needs_drafter_kv(request))
            num_cached = len(cached) * self.block_size
            num_tokens = self._first_chunk(request, num_cached)
            if num_tokens > plan.budget:
                if not self.config.enable_chunked_prefill:
                    break
                num_tokens = plan.budget
            # Ask for room for all known tokens and the next one, not only for this chunk: a
            # request that cannot finish its prompt would most likely be preempted half-way.
            wanted = self._num_blocks(self._num_reserved(request.num_tokens + 1)) - len(cached)
            if wanted > self.pool.num_free - self.pool.num_idle(cached):
                break
            self._admit(request, cached)
            plan.admitted[request] = None
            self._grow(request, num_tokens, plan)
            plan.add(request, num_tokens)

    def _needs_drafter_kv(self, request: Request) -> bool:
        """Whether a request gets drafts as soon as it decodes."""
        return request.recomputed or (self.num_drafts > 0 and request.rules.num_drafts > 0)

    def _first_chunk(self, request: Request, num_cached: int) -> int:
        """The most tokens that a request computes in the step of its admission."""
        return request.num_tokens - num_cached

    def _admit(self, request: Request, cached: list[int]) -> None:
        self.waiting.remove(request)
        insort(self.running, request, key=lambda r: r.order)
        self.pool.share(cached)
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()
        request.epoch = next(self._epochs)
        request.block_ids = list(cached)
        request.num_offered_blocks = len(cached)
        request.num_computed = len(cached) * self.block_size
        request.num_drafter_kv = self.prefix_cache.num_drafter_kv(cached)
        if request.recomputed:  # what it found are its own blocks
            request.recomputed = False
        else:
            self.prefix_cache.count(request, request.num_computed)
        if request.num_cached is None:
            request.num_cached = request.num_computed
            request.admitted = time.perf_counter()
            self.stats.num_prompt_tokens += request.num_prompt_tokens

    def _make_room(self, request: Request, num_tokens: int, plan: PlanBuilder) -> bool:
        """Get the blocks that a request lacks; preempt the last requests in order if needed."""
        while not self._grow(request, num_tokens, plan):
            victim = self.running[-1]
            self._preempt(victim)
            plan.remove(victim)
            plan.preempted = True
            if victim is request:
                return False
        return True

    def _grow(self, request: Request, num_tokens: int, plan: PlanBuilder) -> bool:
        num_held = len(request.block_ids)
        reserved = self._num_reserved(request.num_computed + num_tokens)
        missing = self._num_blocks(reserved) - num_held
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            plan.appended.setdefault(request, num_held)
            request.block_ids += self.pool.allocate(missing)
        return True

    def _preempt(self, request: Request) -> None:
        self._send_back(request)
        request.num_preemptions += 1
        self.stats.num_preemptions += 1

    def _send_back(self, request: Request) -> None:
        """Let a running request wait again, with the tokens it has."""
        self.running.remove(request)
        self._vacate(request)
        request.status = RequestStatus.WAITING
        self.waiting.push(request)

    @property
    def undrafted(self) -> list[Request]:
        """Running requests that get no drafts only since the drafter lacks KV of their last tokens.

        One that would have to wait is left as it is: behind others for a slot, or for a step that
        has room for all of its tokens.
        """
        first, config = self.waiting.peek() if self.waiting else None, self.config
        limit, most = config.drafter_max_len, config.max_model_len
        if not config.enable_chunked_prefill:
            most = config.max_num_batched_tokens - len(self.running) * (config.num_drafts + 1)
        return [
            each
            for each in self.running
            if each.num_drafter_kv is not None
            and each.may_draft(limit)
            and (first is None or each.order < first.order)
            and each.num_tokens <= most
        ]

    def _compute_again(self, requests: Iterable[Request]) -> None:
        """Compute tokens again, as after a preemption, so that the drafter sees them, too."""
        for request in requests:
            self._send_back(request)
            request.recomputed = True
            request.forget_drafts(OWN_LATER)
            self.stats.num_computed_again += 1

    def _vacate(self, request: Request) -> None:
        """Give back slot and blocks. Results in flight will be ignored."""
        self.pool.release(request.block_ids)
        self._free_slots.append(request.slot)
        request.leave_slot()

    def _finish_plan(self, plan: PlanBuilder) -> StepPlan:
        # Admissions first: they show what is computed before the rows are launched.
        admissions = [make_admission(request) for request in plan.admitted]
        scheduled = plan.num_scheduled
        made = [self._row(request, num_tokens) for request, num_tokens in scheduled.items()]
        rows = sorted(made, key=place_in_batch)
        same_rows = self._row_watch.same(rows)
        num_drafts = self.num_drafts
        no_drafts = [each.slot for each in plan.admitted if each.num_drafter_kv is not None]
        left_out = False  # whether the drafter does not see this step
        if not num_drafts and self.config.drafter_has_kv:
            left_out = not self.keeps_drafter_kv or rows[-1].decodes  # all do
            if not left_out:
                num_drafts = 1  # prompts get the drafter's KV in any case
            elif not (same_rows and self._left_out):
                no_drafts += [each.slot for each in scheduled if each.lose_drafter_kv()]
        self._left_out = left_out
        for (request, num_tokens), row in zip(scheduled.items(), made, strict=True):
            request.launch(num_tokens, self._max_new_tokens(request, row))
        self.stats.add_step(rows, same_rows, self.num_drafts, self.config.num_drafts)
        return StepPlan(
            index=self.stats.num_steps,
            rows=rows,
            num_drafts=num_drafts,
            no_drafts=no_drafts,
            admissions=admissions,
            block_appends=list(plan.block_appends()),
            blocks_to_zero=plan.new_blocks() if self._zero_new_blocks else [],
            same_rows=same_rows,
        )

    def _row(self, request: Request, num_tokens: int) -> PlannedRow:
        computed, limit = request.num_computed, self.config.max_model_len
        expected, past = len(request.token_ids) + request.num_pending, computed + num_tokens
        return PlannedRow(
            request.request_id,
            request.epoch,
            request.slot,
            num_tokens,
            computed,
            past if past < limit else limit,
            len(request.block_ids) * self.block_size,
            past >= expected,
            # One admitted with a single token left has no places, and no prompt's end is a decode.
            num_tokens == self.num_places + 1
            and expected - computed == 1
            and computed >= request.num_prompt_tokens,
            request.rules,
            request.num_prompt_tokens,
        )

    def _max_new_tokens(self, request: Request, row: PlannedRow) -> int:
        """Upper bound on the tokens this row can produce in the step.

        A decode, also one that the token budget cut short, can produce one per query token.
        """
        if row.decodes or request.decodes:
            return row.num_tokens
        return int(row.samples)

    # ---- results ----

    def _take_tokens(self, request: Request, row: RowResult) -> list[int]:
        """Append a row's tokens, up to one that ends the request; returns those appended."""
        request.land()
        new_ids = row.token_ids
        if row.failed:
            return self._fail(request, row)
        if row.num_drafts:
            self.stats.spec.add(row.num_drafts, len(new_ids) - 1)
            request.note_drafts(len(new_ids) > 1)
        known = request.token_ids
        # Most steps end no request, so look at single tokens only if this one may.
        if len(known) + len(new_ids) >= request.token_limit or not (
            request.rules.stop_ids.isdisjoint(new_ids)
        ):
            return self._take_last_tokens(request, new_ids)
        known += new_ids
        self.stats.num_generated_tokens += len(new_ids)
        # What `_settle` does, without its calls: this runs for each request of each step.
        if new_ids:
            request.num_computed = len(known) + request.num_pending - 1
        if len(known) > (request.num_offered_blocks + 1) * self.block_size:
            self._offer_blocks(request)
        return new_ids

    def _take_last_tokens(self, request: Request, new_ids: list[int]) -> list[int]:
        """As `_take_tokens`, one token at a time: any of them may end the request."""
        taken = self._append(request, new_ids)
        if not request.finished:
            self._settle(request, bool(new_ids))
        return taken

    def _append(self, request: Request, new_ids: list[int]) -> list[int]:
        """Append tokens up to one that ends the request; returns those appended."""
        for count, token in enumerate(new_ids, start=1):
            request.token_ids.append(token)
            self.stats.num_generated_tokens += 1
            self._end(request, token)
            if request.finished:
                return new_ids[:count]
        return new_ids

    def _fail(self, request: Request, row: RowResult) -> list[int]:
        """There is no next token: end the request, unless an accepted draft ended it before.

        Without another reason what it computed may be NaN, so no other request may find its blocks.
        """
        if row.num_drafts:
            self.stats.spec.add(row.num_drafts, len(row.token_ids))
        taken = self._append(request, row.token_ids)
        if not request.finished and row.error is None:
            self.prefix_cache.withdraw(request)
            self.finish(request, "error", NO_TOKEN)
        return taken

    def _settle(self, request: Request, has_new_tokens: bool) -> None:
        """A step's tokens are known. Rejected drafts were computed too, but do not count."""
        if has_new_tokens:
            request.num_computed = request.num_expected - 1
        self._offer_blocks(request)

    def _offer_blocks(self, request: Request) -> None:
        """Give full blocks to the prefix cache."""
        # Most steps fill no block.
        if len(request.token_ids) > (request.num_offered_blocks + 1) * self.block_size:
            self.prefix_cache.insert(request)

    def _end(self, request: Request, token: int) -> None:
        """End the request if its newest token does; a stop before `min_tokens` does not count."""
        rules = request.rules
        if token in rules.stop_ids and request.num_output_tokens > rules.params.min_tokens:
            reason, stop = "stop", token
        elif request.num_tokens >= request.token_limit:
            reason, stop = "length", None
        else:
            return
        # The last computed token may have filled a block: offer it before the blocks go.
        self._offer_blocks(request)
        self.finish(request, reason, stop)

    def _num_reserved(self, num_tokens: int) -> int:
        """Tokens to reserve blocks for: a drafter writes KV after those of the step."""
        return min(num_tokens + self.config.num_lookahead, self.config.max_model_len)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
