"""The loop: schedule, launch, take in the results.

With `run_ahead` the host launches that many steps beyond the one whose result it reads, so that the
device never waits for it; with 0 it is the plain loop.
"""

import logging
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from stoop.checkpoint.fetch import resolve_model
from stoop.checkpoint.report import Report
from stoop.config.check import check_options
from stoop.config.errors import ConfigError, RequestError
from stoop.config.resolve import resolve
from stoop.config.schema import Config, EngineOptions
from stoop.config.speculation import asks_for_auto
from stoop.core.outputs import RequestOutput
from stoop.core.request import Request
from stoop.core.sampling_params import SamplingParams
from stoop.core.step import StepPlan, StepResult
from stoop.engine import draft_trial
from stoop.engine.draft_trial import DraftTrial
from stoop.engine.drafter import Drafter, find_drafter
from stoop.engine.inputs import InputProcessor, Prepared, Prompt, check_priority
from stoop.engine.outputs import Answer, AnswerError, RequestGroup
from stoop.models.registry import read_model_spec
from stoop.scheduler.scheduler import Scheduler
from stoop.text.tokenizer import Tokenizer
from stoop.worker.device import exempt_from_collection, find_device
from stoop.worker.output import LaunchedStep
from stoop.worker.runner import ModelRunner
from stoop.worker.spinning import share_cores

log = logging.getLogger(__name__)


class Engine:
    """Requests in, outputs out, one step at a time.

    One thread at a time may use it (`SharedEngine` lets many). An exception may cut any method
    short, Ctrl-C at any line among them: what was half done is mended before anything else
    happens. That loses the requests of the step at hand; all others go on.
    """

    def __init__(
        self, config: Config, tokenizer: Tokenizer | None, seed: int, report: Report | None = None
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.inputs = InputProcessor(config, tokenizer, seed)
        # Before the runner: loading is parallel too.
        self._spin_control = share_cores() if config.device.device == "cpu" else None
        self.runner = ModelRunner(config, report)
        self.scheduler = Scheduler(config.schedule, config.cache, self.runner.num_blocks)
        self.inputs.capacity = self.scheduler.pool.num_usable * self.scheduler.block_size
        self._in_flight: deque[tuple[StepPlan, LaunchedStep]] = deque()
        self._groups: dict[str, RequestGroup] = {}
        self._answers: dict[str, tuple[RequestGroup, Answer]] = {}
        self._lost: dict[str, BaseException | None] = {}  # ids of requests that an error ended
        self._working: StepPlan | None = None  # the step at hand
        self._whole = _Whole(self)
        self.trial: DraftTrial | None = None  # where it is open whether drafts pay
        if config.device.device != "cpu":
            exempt_from_collection(self)

    # ---- requests ----

    def make_group(
        self, request_id: str, prepared: Prepared, priority: int = 0, *, final_only: bool = False
    ) -> RequestGroup:
        """A checked request with its seed, to be queued. Any thread may call this.

        With `final_only` a step returns its output when it is finished, and not before.
        """
        requests = [
            Request(f"{request_id}/{index}", tuple(prepared.token_ids), rules, priority)
            for index, rules in enumerate(self.inputs.rules(prepared))
        ]
        return RequestGroup(request_id, prepared.text, requests, self.tokenizer, final_only)

    def add_groups(self, groups: Sequence[RequestGroup]) -> None:
        """Queue all of them or none."""
        for group in groups:
            self._check_id(group.request_id)
        with self._whole:
            try:
                for group in groups:
                    self._groups[group.request_id] = group
                    for answer in group.answers:
                        self._answers[answer.request.request_id] = (group, answer)
                        self.scheduler.add(answer.request)
            except BaseException:
                for group in groups:
                    self._groups.pop(group.request_id, None)
                raise

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        *,
        final_only: bool = False,
    ) -> None:
        """Check and queue one request; one that cannot be served as asked is refused whole."""
        self._check_id(request_id)
        check_priority(priority)
        prepared = self.inputs.prepare(prompt, params)
        self.add_groups([self.make_group(request_id, prepared, priority, final_only=final_only)])

    def _check_id(self, request_id: str) -> None:
        if request_id in self._groups:
            raise RequestError(f"request id {request_id!r} is in use: choose another")

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Stop a request; what it generated so far is returned."""
        with self._whole:
            group = self._groups.pop(request_id, None)  # from here on it is gone in any case
            if group is None:
                return None
            for answer in group.answers:
                self.scheduler.finish(answer.request, "abort")
                answer.finish()
            self._close(group)
            group.ended = time.perf_counter()
            return group.output(finished=True)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False, and nothing happens, while there are requests."""
        with self._whole:
            if self.has_work:
                return False
            self._in_flight.clear()  # results of requests that were aborted
            self.scheduler.restart([])
            return True

    def is_open(self, request_id: str) -> bool:
        return request_id in self._groups

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def take_lost(self) -> dict[str, BaseException | None]:
        """Requests that an error ended since the last call, with that error if it is known."""
        lost, self._lost = self._lost, {}
        return lost

    # ---- one step ----

    def step(self) -> list[RequestOutput]:
        """Launch steps as far ahead as allowed, then read the oldest result; returns the requests
        that it changed."""
        with self._whole:
            if not self.has_work:
                return []
            if self.trial is not None:
                self.scheduler.verify_drafts = not self.trial.wants_plain()
                self.scheduler.drafting = self.runner.drafting = self.trial.pays
            started = time.perf_counter()
            while self._may_launch():
                plan = self.scheduler.schedule(results_pending=bool(self._in_flight))
                if plan is None:
                    break
                self._working = plan
                self._in_flight.append((plan, self.runner.launch(plan)))
            assert self._in_flight, "there is work, yet nothing could be scheduled"
            self._working, launched = self._in_flight[0]
            result = launched.result()
            self._in_flight.popleft()
            if self.trial is not None:
                self._note_trial(self.trial, self._working, result, time.perf_counter() - started)
            outputs = self._take(result)
            self._working = None
        if self._spin_control is not None:
            self._spin_control.note_step()
        return outputs

    def _note_trial(
        self, trial: DraftTrial, plan: StepPlan, result: StepResult, seconds: float
    ) -> None:
        """A decode of one request shows what drafts cost."""
        if len(plan.rows) != 1 or plan.rows[0].num_computed < plan.rows[0].num_prompt_tokens:
            return
        (row,) = result.rows
        if row.num_drafts == self.config.schedule.num_drafts:
            trial.note_drafted(seconds, len(row.token_ids))
        elif plan.rows[0].num_tokens == 1:
            busy = self._spin_control is not None and self._spin_control.busy
            trial.note_plain(seconds - self.runner.draft_seconds, busy)

    def _may_launch(self) -> bool:
        """Log-probabilities are made of hidden states, which the next step would write over."""
        if self._in_flight and self._in_flight[-1][1].wants_scores:
            return False
        return len(self._in_flight) <= self.config.schedule.run_ahead

    def _take(self, result: StepResult) -> list[RequestOutput]:
        """Results to their requests: tokens, text, stop strings."""
        changed: dict[RequestGroup, None] = {}
        now = time.perf_counter()
        for request, row in self.scheduler.update(result):
            group, answer = self._answers[request.request_id]
            num_tokens = request.num_tokens
            try:
                group.take_prompt_scores(answer, row)
                stop = answer.take(row)
            except AnswerError as error:
                log.error("request %s: %s", group.request_id, error)
                self._end(request, "error", str(error))
                stop = None
            if stop is not None:
                self._end(request, "stop", stop)
                # Tokens after the stop string, in the same step, do not count.
                self.scheduler.stats.num_generated_tokens -= num_tokens - request.num_tokens
            if row.token_ids:
                group.note_tokens(now)
            changed[group] = None
        outputs = []
        for group in changed:
            finished = group.finished
            if finished:
                group.ended = now
                self._close(group)
            if finished or not group.final_only:
                outputs.append(group.output(finished))
        if not self.has_work:
            self.scheduler.check_idle()
            if self.trial is not None:
                self.trial.note_idle()
        return outputs

    def _end(self, request: Request, reason: str, stop_reason: str) -> None:
        """For a reason that lies in the text, which the scheduler does not see."""
        if request.finished:  # by its length in the same step: what the text says came first
            request.finish_reason, request.stop_reason = reason, stop_reason
        else:
            self.scheduler.finish(request, reason, stop_reason)

    def _close(self, group: RequestGroup) -> None:
        self._groups.pop(group.request_id, None)
        for answer in group.answers:
            del self._answers[answer.request.request_id]

    def _mend(self, error: BaseException | None) -> None:
        """Bring everything in line with `_groups`, after an exception that may have come anywhere.

        The requests of the step at hand are lost: half of it may have happened to them. All others
        wait again and go on from the tokens that they have. May itself be cut short and repeated.
        """
        for row in self._working.rows if self._working else ():
            found = self._answers.get(row.request_id)
            if found is not None and found[0].request_id in self._groups:
                lost = found[0].request_id
                self._lost.setdefault(lost, error)
                del self._groups[lost]
        self._working = None
        self._in_flight.clear()
        self.runner.forget_rows()
        self._answers = {
            answer.request.request_id: (group, answer)
            for group in self._groups.values()
            for answer in group.answers
        }
        requests = [answer.request for _, answer in self._answers.values()]
        self.scheduler.restart(request for request in requests if not request.finished)

    # ---- numbers ----

    def metrics(self) -> dict[str, Any]:
        scheduler, pool = self.scheduler, self.scheduler.pool
        cache, stats = scheduler.prefix_cache, scheduler.stats
        return {
            "num_requests_waiting": len(scheduler.waiting),
            "num_requests_running": len(scheduler.running),
            "num_requests_finished": stats.num_finished,
            "num_steps": stats.num_steps,
            "num_prompt_tokens": stats.num_prompt_tokens,
            "num_generated_tokens": stats.num_generated_tokens,
            "num_preemptions": stats.num_preemptions,
            "prefix_cache_queried_tokens": cache.num_queried_tokens,
            "prefix_cache_hit_tokens": cache.num_hit_tokens,
            **stats.spec.as_metrics(),
            "kv_cache_usage": pool.num_used / pool.num_usable,
            "kv_cache_blocks": pool.num_usable,
            "kv_cache_tokens": pool.num_usable * scheduler.block_size,
            "kv_cache_bytes": pool.num_blocks * self.runner.kv_layout.block_bytes,
        }


def _make_trial(engine: Engine, drafter: Drafter) -> DraftTrial | None:
    """Only steps that run eagerly, one at a time, can do without drafts now and then."""
    config = engine.config
    if drafter.spec is None or drafter.store is None:
        return None
    if config.graph.mode != "none" or config.schedule.run_ahead:
        return None
    trial = DraftTrial(drafter.spec.num_tokens, drafter.usual_tokens, drafter.store.add)
    if drafter.costs_known:
        trial.early_gap = draft_trial.KNOWN_GAP
    return trial


class _Whole:
    """Around every change: one that an exception cuts short is mended, now or before the next.

    The mark that something is half done is set first and cleared last, so that an exception in
    the midst of mending, or before it begins, leaves it set.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)  # no cycle: an engine goes as soon as it is dropped
        self._half_done = False

    def _mend(self, error: BaseException | None) -> None:
        engine = self._engine()
        assert engine is not None
        engine._mend(error)

    def __enter__(self) -> None:
        if self._half_done:
            self._mend(None)
        self._half_done = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._mend(error)
        self._half_done = False


def build_engine(options: EngineOptions, report: Report | None = None) -> Engine:
    """Find the model, settle the configuration, load."""
    check_options(options)  # before anything is fetched
    device = find_device(options.device)
    folder = resolve_model(options.model, revision=options.revision, report=report)
    model = read_model_spec(folder)
    resolve(options, model, str(folder), device)  # refuse before a drafter is read
    drafter = find_drafter(options, model, folder, device, report)

    def build(drafter: Drafter) -> Engine:
        config = resolve(options, model, str(folder), device, drafter.spec)
        tokenizer = None
        if not options.skip_tokenizer_init:
            source = Path(options.tokenizer) if options.tokenizer else folder
            tokenizer = Tokenizer.from_folder(source)
        config = replace(config, draft_note=drafter.note)
        engine = Engine(config, tokenizer, options.seed, report)
        engine.trial = _make_trial(engine, drafter)
        return engine

    if drafter.spec is None or not asks_for_auto(options.speculative_config):
        return build(drafter)
    try:
        return build(drafter)
    except ConfigError as error:
        # A drafter that the user did not ask for gives way to options that it does not fit.
        note = f"the model's head does not fit the other options ({error})"
    return build(Drafter(None, note))
