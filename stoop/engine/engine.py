"""The loop: schedule, launch, take in the results.

With `run_ahead` the host launches that many steps beyond the one whose result it reads, so that the
device never waits for it; with 0 it is the plain loop.
"""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoop.checkpoint.fetch import resolve_model
from stoop.checkpoint.report import Report
from stoop.config.errors import ConfigError, RequestError
from stoop.config.resolve import resolve
from stoop.config.schema import Config, EngineOptions
from stoop.config.speculation import asks_for_auto
from stoop.core.outputs import RequestOutput
from stoop.core.request import Request
from stoop.core.sampling_params import SamplingParams
from stoop.core.step import StepPlan, StepResult
from stoop.engine.drafter import Drafter, find_drafter
from stoop.engine.inputs import InputProcessor, Prepared, Prompt, check_priority
from stoop.engine.outputs import Answer, AnswerError, RequestGroup
from stoop.models.hf_config import read_model_spec
from stoop.scheduler.scheduler import Scheduler
from stoop.text.tokenizer import Tokenizer
from stoop.worker.device import exempt_from_collection, find_device
from stoop.worker.output import LaunchedStep
from stoop.worker.runner import ModelRunner

log = logging.getLogger(__name__)


class Engine:
    """Requests in, outputs out, one step at a time."""

    def __init__(
        self, config: Config, tokenizer: Tokenizer | None, seed: int, report: Report | None = None
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.inputs = InputProcessor(config, tokenizer, seed)
        self.runner = ModelRunner(config, report)
        self.scheduler = Scheduler(config.schedule, config.cache, self.runner.num_blocks)
        self.inputs.capacity = self.scheduler.pool.num_usable * self.scheduler.block_size
        self._in_flight: deque[tuple[StepPlan, LaunchedStep]] = deque()
        self._groups: dict[str, RequestGroup] = {}
        self._answers: dict[str, tuple[RequestGroup, Answer]] = {}
        if config.device.device != "cpu":
            exempt_from_collection(self)

    # ---- requests ----

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | Prepared,
        params: SamplingParams,
        priority: int = 0,
        *,
        final_only: bool = False,
    ) -> None:
        """Queue a request; one that cannot be served as asked is refused whole.

        With `final_only` a step returns its output when it is finished, and not before. A prompt
        that `inputs.prepare` has checked already brings its own parameters.
        """
        if request_id in self._groups:
            raise RequestError(f"request id {request_id!r} is in use: choose another")
        check_priority(priority)
        prepared = prompt
        if not isinstance(prepared, Prepared):
            prepared = self.inputs.prepare(prepared, params)
        requests = [
            Request(f"{request_id}/{index}", tuple(prepared.token_ids), rules, priority)
            for index, rules in enumerate(self.inputs.rules(prepared))
        ]
        for request in requests:
            self.scheduler.add(request)
        group = RequestGroup(request_id, prepared.text, requests, self.tokenizer, final_only)
        self._groups[request_id] = group
        for answer in group.answers:
            self._answers[answer.request.request_id] = (group, answer)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Stop a request; what it generated so far is returned."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        for answer in group.answers:
            self.scheduler.finish(answer.request, "abort")
            answer.finish()
        group.note_times(finished=True)
        return self._output(group, finished=True)

    def is_open(self, request_id: str) -> bool:
        return request_id in self._groups

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    # ---- one step ----

    def step(self) -> list[RequestOutput]:
        """Launch steps as far ahead as allowed, then read the oldest result; returns the requests
        that it changed."""
        if not self.has_work:
            return []
        while self._may_launch():
            plan = self.scheduler.schedule(results_pending=bool(self._in_flight))
            if plan is None:
                break
            with self._losing_only(plan):
                self._in_flight.append((plan, self.runner.launch(plan)))
        assert self._in_flight, "there is work, yet nothing could be scheduled"
        plan, launched = self._in_flight[0]
        with self._losing_only(plan):
            try:
                result = launched.result()
            finally:
                self._in_flight.popleft()
            return self._take(result)

    def _may_launch(self) -> bool:
        """Log-probabilities are made of hidden states, which the next step would write over."""
        if self._in_flight and self._in_flight[-1][1].wants_scores:
            return False
        return len(self._in_flight) <= self.config.schedule.run_ahead

    @contextmanager
    def _losing_only(self, plan: StepPlan) -> Iterator[None]:
        """Half a step may have happened to the plan's requests; nobody else is touched."""
        try:
            yield
        except BaseException:
            for row in plan.rows:
                if row.request_id in self._answers:
                    self.abort_request(self._answers[row.request_id][0].request_id)
            raise

    def _take(self, result: StepResult) -> list[RequestOutput]:
        """Results to their requests: tokens, text, stop strings."""
        changed: dict[RequestGroup, None] = {}
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
                # What came behind the stop string in the same run was not generated for anybody.
                self.scheduler.stats.num_generated_tokens -= num_tokens - request.num_tokens
            changed[group] = None
        outputs = []
        for group in changed:
            finished = group.finished
            group.note_times(finished)
            if finished or not group.final_only:
                outputs.append(self._output(group, finished))
        if not self.has_work:
            self.scheduler.check_idle()
        return outputs

    def _end(self, request: Request, reason: str, stop_reason: str) -> None:
        """For a reason that lies in the text, which the scheduler does not see."""
        if request.finished:  # by its length in the same step: what the text says came first
            request.finish_reason, request.stop_reason = reason, stop_reason
        else:
            self.scheduler.finish(request, reason, stop_reason)

    def _output(self, group: RequestGroup, finished: bool) -> RequestOutput:
        if finished:
            del self._groups[group.request_id]
            for answer in group.answers:
                del self._answers[answer.request.request_id]
        return group.output(finished)

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


def build_engine(options: EngineOptions, report: Report | None = None) -> Engine:
    """Find the model, settle the configuration, load."""
    device = find_device(options.device)
    folder = resolve_model(options.model, revision=options.revision, report=report)
    model = read_model_spec(folder)
    drafter = find_drafter(options, model, device, build_engine, report)

    def build(drafter: Drafter) -> Engine:
        config = resolve(options, model, str(folder), device, drafter.spec)
        tokenizer = None
        if not options.skip_tokenizer_init:
            source = Path(options.tokenizer) if options.tokenizer else folder
            tokenizer = Tokenizer.from_folder(source)
        config = replace(config, draft_note=drafter.note)
        return Engine(config, tokenizer, options.seed, report)

    if drafter.spec is None or not asks_for_auto(options.speculative_config):
        return build(drafter)
    try:
        return build(drafter)
    except ConfigError as error:
        # A drafter that nobody asked for gives way to options that it does not fit.
        note = f"its head does not fit the other options ({error})"
    return build(Drafter(None, note))
