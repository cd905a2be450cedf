"""The engine core: schedule, launch, take in results. It knows tokens and no text.

With `run_ahead` the core launches that many steps beyond the one whose result it reads, so that the
device never waits for the host. With 0 it launches one step, waits, and reads the result.

Requests and deltas are plain data (`stoop.core.messages`), so that a core can run in a process of
its own.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from stoop.config.schema import CacheConfig, ScheduleConfig
from stoop.core.messages import Delta, EngineRequest
from stoop.core.request import PromptLimits, Request
from stoop.core.step import StepPlan
from stoop.engine.compiling import CompilingRequests
from stoop.engine.draft_policy import DraftPolicy
from stoop.engine.executor import Executor, StepHandle
from stoop.engine.step_costs import StepTime
from stoop.scheduler.hybrid import HybridScheduler
from stoop.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)


class EngineCore:
    """Requests in, deltas out, one step at a time.

    An exception may interrupt any method, Ctrl-C at any line included. The caller then asks for
    the requests of the step at hand (`at_hand`), gives them up, and calls `restart` with the
    requests that go on.
    """

    def __init__(self, schedule: ScheduleConfig, cache: CacheConfig, executor: Executor) -> None:
        self.executor = executor
        self.scheduler = _make_scheduler(schedule, cache, executor)
        self.compiling = CompilingRequests(executor)
        self.drafts: DraftPolicy | None = None  # chooses how many drafts each step makes
        self._run_ahead = schedule.run_ahead
        self._in_flight: deque[tuple[StepPlan, StepHandle]] = deque()
        self._at_hand: StepPlan | None = None
        self._step_seconds = 0.0  # in all steps since the start
        self._landed: float | None = None  # when the last result came, if there is work since

    # ---- requests ----

    @property
    def limits(self) -> PromptLimits:
        """How long prompts may be; longer ones are refused."""
        return self.scheduler.limits

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.compiling)

    def add(self, requests: Iterable[EngineRequest]) -> None:
        """Queue requests. One with a grammar waits until it is compiled."""
        for each in requests:
            request = Request(each.request_id, each.prompt_token_ids, each.rules, each.priority)
            self.scheduler.check(request)
            if not self.compiling.holds(request):
                self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[Delta]:
        """End requests early; returns a last delta of each. Unknown ids are ignored."""
        deltas = []
        for request_id in request_ids:
            if self.compiling.drop([request_id]):
                deltas.append(Delta(request_id, [], "abort"))
            request = self.scheduler.abort(request_id)
            if request is not None:
                delta = Delta(request_id, [], request.finish_reason, num_cached=request.num_cached)
                deltas.append(delta)
        self._check_idle()
        if self._at_hand is None and not self.scheduler.has_work:
            self.executor.note_idle()
        return deltas

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; does nothing and returns False while there are requests."""
        if self.has_work:
            return False
        self.restart([])
        return True

    # ---- one step ----

    def step(self) -> list[Delta]:
        """Launch steps as far ahead as allowed, then read the oldest result.

        The step stays at hand until the caller acknowledges the deltas.
        """
        failed = self._admit_compiled()
        if failed or not self.scheduler.has_work:
            self._check_idle()
            return failed
        started = time.perf_counter()
        while self._may_launch():
            if self.drafts is not None:
                self.drafts.choose(self.scheduler)
            plan = self.scheduler.schedule(results_pending=bool(self._in_flight))
            if plan is None:
                break
            self._at_hand = plan
            self._in_flight.append((plan, self.executor.launch(plan)))
        assert self._in_flight, "there is work, yet nothing could be scheduled"
        self._at_hand, launched = self._in_flight[0]
        waited = self.executor.waited
        result = launched.result()
        self._in_flight.popleft()
        if self.drafts is not None:
            taken = self._time_step(started, self.executor.waited - waited)
            self.drafts.note(self._at_hand, result, taken)
        deltas = self.scheduler.update(result)
        self._check_idle()
        self._step_seconds += time.perf_counter() - started
        return deltas

    def _time_step(self, started: float, waited: float) -> StepTime:
        """The time since the result before, of which the host waited so long."""
        before, now, executor = self._landed, time.perf_counter(), self.executor
        self._landed = now
        seconds = None if before is None else now - before
        return StepTime(seconds, waited, now - started, executor.draft_seconds, executor.busy)

    def _admit_compiled(self) -> list[Delta]:
        """Queue the requests whose grammar is compiled; returns the deltas of those that failed.

        Without anything else to do, wait a moment for one.
        """
        if not self.compiling:
            return []
        if not self.scheduler.has_work:
            self.compiling.wait()
        for request in self.compiling.take_ready():
            if not self.scheduler.knows(request.request_id):  # an interrupt came in between
                self.scheduler.add(request)
            self.compiling.drop([request.request_id])
        return self.compiling.take_failed()

    def acknowledge(self) -> None:
        """The caller has taken in the deltas of the last step, and aborted what they ended."""
        self._at_hand = None
        self.executor.end_step()
        if not self.scheduler.has_work:
            self.executor.note_idle()

    def _may_launch(self) -> bool:
        """Log-probabilities are computed from hidden states, which the next step overwrites."""
        if self._in_flight and self._in_flight[-1][1].wants_scores:
            return False
        return len(self._in_flight) <= self._run_ahead

    def _check_idle(self) -> None:
        if not self.scheduler.has_work:  # to wait for grammars is no part of a step, either
            self._landed = None
        if not self.has_work:
            self.scheduler.check_idle()
            if self.drafts is not None:
                self.drafts.note_idle()

    # ---- after an exception ----

    @property
    def at_hand(self) -> Sequence[str]:
        """Ids of the requests in the step at hand, which may be half done."""
        return [row.request_id for row in self._at_hand.rows] if self._at_hand else []

    @property
    def open_requests(self) -> list[str]:
        """Ids of the requests that are waiting, for their grammar too, or running."""
        return list(dict.fromkeys((*self.scheduler.open_requests, *self.compiling)))

    def knows(self, request_id: str) -> bool:
        """Whether this request is waiting, for its grammar too, or running."""
        return request_id in self.compiling or self.scheduler.knows(request_id)

    def restart(self, request_ids: Iterable[str]) -> None:
        """Forget everything but these requests, which go on from the tokens they have.

        May be interrupted and repeated.
        """
        self._at_hand = self._landed = None
        self._in_flight.clear()
        self.executor.forget_rows()
        request_ids = list(request_ids)
        self.compiling.keep(request_ids)
        self.scheduler.restart([name for name in request_ids if self.scheduler.knows(name)])
        if not self.scheduler.has_work:
            self.executor.note_idle()
        if self.drafts is not None and not self.has_work:
            self.drafts.note_idle()

    # ---- numbers ----

    def metrics(self) -> dict[str, Any]:
        """Counters since the start, and the state of queues and cache now."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        cache, stats, snapshots = scheduler.prefix_cache, scheduler.stats, scheduler.snapshots
        return {
            "num_requests_waiting": len(scheduler.waiting) + len(self.compiling),
            "num_requests_running": len(scheduler.running),
            "num_requests_finished": stats.num_finished,
            "num_steps": stats.num_steps,
            "step_seconds_total": self._step_seconds,
            **self.executor.metrics(),
            "drafting": self.scheduler.num_drafts > 0,
            "num_prompt_tokens": stats.num_prompt_tokens,
            "num_generated_tokens": stats.num_generated_tokens,
            "num_preemptions": stats.num_preemptions,
            "num_computed_again": stats.num_computed_again,
            "prefix_cache_queried_tokens": cache.num_queried_tokens,
            "prefix_cache_hit_tokens": cache.num_hit_tokens,
            "state_cache_snapshots": snapshots.num_snapshots,
            "state_cache_snapshots_held": snapshots.num_held,
            "state_cache_snapshots_taken": snapshots.num_taken,
            "state_cache_snapshots_restored": snapshots.num_restored,
            **stats.spec.as_metrics(),
            "num_steps_by_drafts": dict(stats.num_steps_by_drafts),
            "num_drafts_not_made": stats.num_drafts_not_made,
            **(self.drafts.metrics() if self.drafts else {}),
            "max_num_seqs": scheduler.config.max_num_seqs,
            "kv_cache_usage": pool.num_used / pool.num_usable,
            "kv_cache_blocks": pool.num_usable,
            "kv_cache_tokens": self.limits.kv_tokens,
            "kv_cache_bytes": pool.num_blocks * self.executor.block_bytes,
        }


def _make_scheduler(schedule: ScheduleConfig, cache: CacheConfig, executor: Executor) -> Scheduler:
    """With recurrent state, a prefix cache needs snapshots of it."""
    if not cache.enable_prefix_caching or executor.caches_prefixes:
        return Scheduler(schedule, cache, executor.num_blocks)
    if executor.num_snapshots:
        return HybridScheduler(schedule, cache, executor.num_blocks, executor.num_snapshots)
    log.info(
        "prefix caching is off: the model's layers have recurrent state; state_cache_memory, such "
        "as 1GiB, turns it on"
    )
    cache = replace(cache, enable_prefix_caching=False)
    return Scheduler(schedule, cache, executor.num_blocks)
