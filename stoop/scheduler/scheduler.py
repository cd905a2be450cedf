"""Who computes what in the next step.

There is no prefill phase and no decode phase: a request computes the tokens that it knows and has
not computed. A decode is the case of one such token, a prompt the case of many, a chunk a part of
them. Requests are served in order of priority, then arrival. A request that cannot get a block
takes those of the last in that order, which starts anew later (preemption by recomputation).

Steps may be planned before the results of earlier ones are known. A request then stands where it
would if those steps yielded all that they may: blocks are reserved for that much, and the device,
which knows better, uses what it needs. Nobody is preempted while results are under way.

The scheduler holds numbers only and imports no torch.
"""

import itertools
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from stoop.config.errors import RequestError
from stoop.config.schema import CacheConfig, ScheduleConfig
from stoop.core.outputs import SpecCounts
from stoop.core.request import Request, RequestStatus
from stoop.core.step import Admission, BlockAppend, PlannedRow, RowResult, StepPlan, StepResult
from stoop.scheduler.block_pool import BlockPool
from stoop.scheduler.prefix_cache import PrefixCache
from stoop.scheduler.queue import RequestQueue


@dataclass
class SchedulerStats:
    num_steps: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    spec: SpecCounts = field(default_factory=SpecCounts)


class _Draft:
    """A step's plan while it is made. A preemption may take rows out of it again."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_scheduled: dict[Request, int] = {}
        self.admitted: dict[Request, None] = {}
        self.appended: dict[Request, int] = {}  # blocks that a request held before this step
        self.preempted = False

    def put(self, request: Request, num_tokens: int) -> None:
        self.num_scheduled[request] = num_tokens
        self.budget -= num_tokens

    def drop(self, request: Request) -> None:
        self.budget += self.num_scheduled.pop(request, 0)
        self.admitted.pop(request, None)
        self.appended.pop(request, None)


class Scheduler:
    def __init__(self, config: ScheduleConfig, cache: CacheConfig, num_blocks: int) -> None:
        self.config = config
        self.block_size = cache.block_size
        self.pool = BlockPool(num_blocks)
        self.prefix_cache = PrefixCache(
            self.pool,
            cache.block_size,
            cache.enable_prefix_caching,
            looks_ahead=config.drafter_has_kv,
        )
        self.stats = SchedulerStats(spec=SpecCounts.of(config.num_drafts))
        self.waiting = RequestQueue()
        self.running: list[Request] = []  # in order
        self._requests: dict[str, Request] = {}
        self.verify_drafts = True  # whether decodes of the next step have places for drafts
        self.drafting = True  # whether steps keep the drafter's KV up to date
        self._free_slots = list(reversed(range(config.max_num_seqs)))
        self._num_arrivals = 0
        self._epochs = itertools.count()  # never repeats, whatever ids come again

    # ---- requests come and go ----

    def add(self, request: Request) -> None:
        """Queue a request, or refuse one that could never run."""
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use: choose another")
        limit = self.config.max_model_len
        if request.num_prompt_tokens >= limit:
            raise RequestError(
                f"the prompt has {request.num_prompt_tokens} tokens and max_model_len={limit} "
                "leaves no room for an answer: shorten the prompt or raise max_model_len"
            )
        capacity = self.pool.num_usable * self.block_size
        if request.num_prompt_tokens >= capacity:
            raise RequestError(
                f"the prompt has {request.num_prompt_tokens} tokens and the KV cache holds "
                f"{capacity}: shorten the prompt or raise kv_cache_memory"
            )
        request.spec = SpecCounts.of(self.config.num_drafts)
        request.arrival = self._num_arrivals
        request.token_limit = min(request.num_prompt_tokens + request.rules.max_tokens, limit)
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        self.waiting.push(request)

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """End a request wherever it stands. Its late results will be ignored."""
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
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, "abort")
        return request

    def restart(self, requests: Iterable[Request]) -> None:
        """Forget everything but these requests, which wait again with the tokens they have.

        An exception may have cut any method short, so nothing is read but the requests
        themselves. Their KV is computed again, as after a preemption.
        """
        self.pool.reset()
        self.prefix_cache.reset()
        self.running.clear()
        self._free_slots[:] = reversed(range(self.config.max_num_seqs))
        self.waiting = RequestQueue()
        self._requests = {}
        for request in requests:
            request.leave_slot()
            request.status = RequestStatus.WAITING
            self._requests[request.request_id] = request
            self.waiting.push(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # ---- a step ----

    def schedule(self, *, results_pending: bool = False) -> StepPlan | None:
        """The next step; None if there is nothing to do before the next result is known."""
        todo = self._order_running()
        if results_pending and self._lacks_blocks(todo):
            return None
        draft = _Draft(self.config.max_num_batched_tokens)
        self._continue_running(todo, draft)
        if not draft.preempted:
            self._admit_waiting(draft)
        if not draft.num_scheduled:
            return None
        return self._plan(draft)

    def update(self, result: StepResult) -> list[tuple[Request, RowResult]]:
        """Take in a step's tokens; returns the rows that still had somebody waiting for them."""
        live = []
        for row in result.rows:
            request = self._requests.get(row.request_id)
            if request is None or request.epoch != row.epoch:
                continue  # finished, aborted or preempted since: its slot may be another's now
            live.append((request, row))
            self._take_tokens(request, row)
        return live

    def check_idle(self) -> None:
        """With nothing to do, nothing may be held. Counts only: this runs whenever work ends."""
        assert not self.has_work and not self._requests, (
            len(self.waiting),
            len(self.running),
            list(self._requests),
        )
        assert self.pool.num_free == self.pool.num_usable, (self.pool.num_free, self.pool.num_used)
        assert len(self._free_slots) == self.config.max_num_seqs

    # ---- scheduling ----

    def _order_running(self) -> list[tuple[Request, int]]:
        """Who goes on, and the tokens that each wants to compute.

        Decodes first: a long prompt's chunk must not hold up everybody's next token.
        """
        ones, chunks = [], []
        for request in self.running:
            if request.ends_in_flight:
                continue
            remaining = request.num_expected - request.num_computed
            if remaining == 1:
                # A decode has places for all drafts, whether it has as many or not.
                decodes = request.num_computed >= request.num_prompt_tokens
                drafts = decodes and self.verify_drafts
                ones.append((request, self.config.query_len if drafts else 1))
            else:
                chunks.append((request, remaining))
        return ones + chunks

    def _continue_running(self, todo: list[tuple[Request, int]], draft: _Draft) -> None:
        for request, wanted in todo:
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted a moment ago
            num_tokens = min(wanted, draft.budget)
            if num_tokens and self._make_room(request, num_tokens, draft):
                draft.put(request, num_tokens)

    @staticmethod
    def _decodes(request: Request) -> bool:
        """A prompt's last token alone is not a decode."""
        computed = request.num_computed
        return request.num_expected - computed == 1 and computed >= request.num_prompt_tokens

    def _lacks_blocks(self, todo: list[tuple[Request, int]]) -> bool:
        """Whether going on would preempt somebody, as far as can be known now."""
        missing, most = 0, self.config.max_num_batched_tokens
        # Nobody lacks more than his tokens fill, and one block that they begin.
        at_most = sum(min(wanted, most) for _, wanted in todo)
        at_most += len(todo) * (self.config.num_lookahead + self.block_size)
        if at_most <= self.pool.num_free * self.block_size:
            return False
        for request, wanted in todo:
            reserved = self._num_reserved(request.num_computed + min(wanted, most))
            missing += max(0, self._num_blocks(reserved) - len(request.block_ids))
        return missing > self.pool.num_free

    def _admit_waiting(self, draft: _Draft) -> None:
        while self.waiting and self._free_slots and draft.budget:
            request = self.waiting.peek()
            cached = self.prefix_cache.match(request)
            num_cached = len(cached) * self.block_size
            num_tokens = request.num_tokens - num_cached
            if num_tokens > draft.budget:
                if not self.config.enable_chunked_prefill:
                    break
                num_tokens = draft.budget
            # Room for all known tokens and the next one, not only for this chunk: most requests
            # that could not finish their prompt would be preempted half-way.
            wanted = self._num_blocks(self._num_reserved(request.num_tokens + 1)) - len(cached)
            if wanted > self.pool.num_free - self.pool.num_idle(cached):
                break
            self._admit(request, cached)
            draft.admitted[request] = None
            self._grow(request, num_tokens, draft)
            draft.put(request, num_tokens)

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
        self.prefix_cache.count(request, request.num_computed)
        if request.num_cached is None:
            request.num_cached = request.num_computed
            self.stats.num_prompt_tokens += request.num_prompt_tokens

    def _make_room(self, request: Request, num_tokens: int, draft: _Draft) -> bool:
        """Get blocks for a running request, taking them from the last in order if need be."""
        past = request.num_computed + num_tokens + self.config.num_lookahead
        if past <= len(request.block_ids) * self.block_size:
            return True
        while not self._grow(request, num_tokens, draft):
            victim = self.running[-1]
            self._preempt(victim)
            draft.drop(victim)
            draft.preempted = True
            if victim is request:
                return False
        return True

    def _grow(self, request: Request, num_tokens: int, draft: _Draft) -> bool:
        num_held = len(request.block_ids)
        reserved = self._num_reserved(request.num_computed + num_tokens)
        missing = self._num_blocks(reserved) - num_held
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            draft.appended.setdefault(request, num_held)
            request.block_ids += self.pool.allocate(missing)
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._vacate(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.push(request)

    def _vacate(self, request: Request) -> None:
        """Give back slot and blocks; results still under way are now late."""
        self.pool.release(request.block_ids)
        self._free_slots.append(request.slot)
        request.leave_slot()

    def _plan(self, draft: _Draft) -> StepPlan:
        # Before rows are launched: what was computed until now counts.
        admissions = [self._admission(request) for request in draft.admitted]
        rows = []
        for request, num_tokens in draft.num_scheduled.items():
            row = self._row(request, num_tokens)
            request.launch(num_tokens, self._most_tokens(request, row))
            rows.append(row)
        # Decodes lead, of like lengths together: backends cut the batch into tiles in this order.
        # Of those in slots' order: a batch that goes on as it is keeps its rows.
        rows.sort(key=lambda row: (not row.decodes, row.num_tokens, row.seq_len >> 8, row.slot))
        self.stats.num_steps += 1
        return StepPlan(
            index=self.stats.num_steps,
            rows=rows,
            admissions=admissions,
            block_appends=list(self._block_appends(draft)),
        )

    def _row(self, request: Request, num_tokens: int) -> PlannedRow:
        past = request.num_computed + num_tokens
        return PlannedRow(
            request.request_id,
            request.epoch,
            request.slot,
            num_tokens,
            request.num_computed,
            min(past, self.config.max_model_len),
            len(request.block_ids) * self.block_size,
            past >= request.num_expected,
            # One admitted with a single token left has no places for drafts.
            num_tokens == self.config.query_len and self._decodes(request),
            request.rules,
            request.num_prompt_tokens,
        )

    def _most_tokens(self, request: Request, row: PlannedRow) -> int:
        """That the row may yield: of a decode, cut short or not, as many as it has places."""
        if row.decodes or self._decodes(request):
            return row.num_tokens
        return int(row.samples)

    @staticmethod
    def _admission(request: Request) -> Admission:
        return Admission(
            slot=request.slot,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed=request.num_computed,
            rules=request.rules,
        )

    @staticmethod
    def _block_appends(draft: _Draft) -> Iterable[BlockAppend]:
        for request in draft.admitted:
            yield BlockAppend(request.slot, 0, list(request.block_ids))
        for request, start in draft.appended.items():
            if request not in draft.admitted:
                yield BlockAppend(request.slot, start, request.block_ids[start:])

    # ---- results ----

    def _take_tokens(self, request: Request, row: RowResult) -> None:
        """A run of tokens ends where one of them ends the request."""
        request.land()
        if row.num_drafts:
            for counts in (self.stats.spec, request.spec):
                counts.add(row.num_drafts, len(row.token_ids) - 1)
        known, stop_ids = request.token_ids, request.rules.stop_ids
        if stop_ids.isdisjoint(row.token_ids) and (
            len(known) + len(row.token_ids) < request.token_limit
        ):
            known += row.token_ids  # as in most steps: nothing ends here
            self.stats.num_generated_tokens += len(row.token_ids)
        else:
            for token in row.token_ids:
                known.append(token)
                self.stats.num_generated_tokens += 1
                if token in stop_ids or len(known) >= request.token_limit:
                    self._end(request, token)
                    if request.finished:
                        return
        if row.token_ids:
            # Rejected drafts were computed too: what counts is what is known.
            request.num_computed = request.num_expected - 1
        self._offer_blocks(request)

    def _offer_blocks(self, request: Request) -> None:
        """To the prefix cache, unless they lack the drafter's KV."""
        if self.drafting:
            self.prefix_cache.insert(request)

    def _end(self, request: Request, token: int) -> None:
        """Unless a token that would stop it came too early."""
        rules = request.rules
        if token in rules.stop_ids and request.num_output_tokens > rules.params.min_tokens:
            reason, stop = "stop", token
        elif request.num_tokens >= request.token_limit:
            reason, stop = "length", None
        else:
            return
        # The block of the last computed token may be full: let others find it.
        self._offer_blocks(request)
        self.finish(request, reason, stop)

    def _num_reserved(self, num_tokens: int) -> int:
        """Tokens to have blocks for: a drafter writes KV behind those of the step."""
        return min(num_tokens + self.config.num_lookahead, self.config.max_model_len)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
