"""A front end and an engine core, joined in one process."""

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from stoop.config.schema import EngineOptions
from stoop.core.outputs import RequestOutput
from stoop.core.prompts import Prompt
from stoop.core.report import Report
from stoop.core.sampling_params import SamplingParams
from stoop.engine.build import BuiltCore, CoreBuilder
from stoop.engine.frontend import Frontend
from stoop.engine.inputs import check_priority
from stoop.engine.outputs import RequestGroup
from stoop.scheduler.scheduler import Scheduler
from stoop.text.tokenizer import Tokenizer
from stoop.worker.device import exempt_from_collection
from stoop.worker.runner import ModelRunner


class Engine:
    """Requests in, outputs out, one step at a time.

    One thread at a time may use it; `SharedEngine` serves several. An exception may interrupt any
    method, Ctrl-C at any line included: before anything else happens, both halves are mended.
    That loses the requests of the step at hand. All others go on.
    """

    def __init__(self, built: BuiltCore, tokenizer: Tokenizer | None, seed: int) -> None:
        self.config, self.executor, self.core = built.config, built.executor, built.core
        self.frontend = Frontend(self.config, tokenizer, seed, self.core.limits)
        self._whole = _Whole(self)
        if self.config.device.device != "cpu":
            exempt_from_collection(self)

    # ---- for benchmarks, checks and tests, which look inside ----

    @property
    def runner(self) -> ModelRunner:
        """The model runner. Only an engine in one process has it at hand."""
        return self.executor.runner

    @property
    def scheduler(self) -> Scheduler:
        """The core's scheduler. Only an engine in one process has it at hand."""
        return self.core.scheduler

    # ---- requests ----

    def add_groups(self, groups: Sequence[RequestGroup]) -> None:
        """Queue all of them or none."""
        for group in groups:
            self.frontend.check_id(group.request_id)
        with self._whole:
            try:
                self.core.add(self.frontend.open(groups))
            except BaseException:
                self.frontend.drop(groups)
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
        """Check and queue one request; raises if it cannot be served as asked."""
        self.frontend.check_id(request_id)
        check_priority(priority)
        prepared = self.frontend.inputs.prepare(prompt, params)
        group = self.frontend.make_group(request_id, prepared, priority, final_only=final_only)
        self.add_groups([group])

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request early; returns what it generated so far."""
        with self._whole:
            group = self.frontend.take_out(request_id)
            if group is None:
                return None
            deltas = self.core.abort([answer.request.request_id for answer in group.answers])
            return self.frontend.end(group, deltas)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; does nothing and returns False while there are requests."""
        with self._whole:
            return self.core.reset_prefix_cache()

    def is_open(self, request_id: str) -> bool:
        """Whether this request has not ended."""
        return self.frontend.is_open(request_id)

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return self.core.has_work

    def take_lost(self) -> dict[str, BaseException | None]:
        """Requests that an error ended since the last call, with that error if it is known."""
        return self.frontend.take_lost()

    # ---- one step ----

    def step(self) -> list[RequestOutput]:
        """One step of the core; returns outputs of the requests that it changed."""
        with self._whole:
            if not self.core.has_work:
                return []
            outputs, to_abort = self.frontend.take(self.core.step())
            if to_abort:
                self.core.abort(to_abort)
            self.core.acknowledge()
        return outputs

    def _mend(self, error: BaseException | None) -> None:
        """Bring core and front end in line after an exception that may have come anywhere.

        The requests of the step at hand are lost, since half of it may have happened to them. All
        others wait again and go on from the tokens that they have. May be interrupted and repeated.
        """
        core, frontend = self.core, self.frontend
        frontend.lose(core.at_hand, error)
        frontend.lose([name for name in frontend.open_requests if not core.knows(name)], error)
        core.restart(frontend.open_requests)

    def metrics(self) -> dict[str, Any]:
        """Counters since the start, and the state of queues and cache now."""
        found = self.core.metrics()
        found["num_generated_tokens"] -= self.frontend.num_dropped_tokens
        return found


class _Whole:
    """Around every change: one that an exception interrupts is mended, now or before the next.

    The mark that something is half done is set first and cleared last, so that an exception in
    the middle of mending, or before it begins, leaves it set.
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
    builder = CoreBuilder(options, report)
    folder = builder.tokenizer_folder
    tokenizer = None if folder is None else Tokenizer.from_folder(folder)
    return Engine(builder.build(), tokenizer, options.seed)
