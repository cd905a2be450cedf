"""Generation for asyncio: streams of deltas, from an engine core in a process of its own."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from stoop.config.check import check_options
from stoop.config.errors import CoreDied, RequestError, RequestLost
from stoop.config.resolve import make_options
from stoop.config.schema import DEFAULT_MODEL, Config, EngineOptions
from stoop.core.deltas import RequestDelta
from stoop.core.messages import Delta
from stoop.core.outputs import RequestOutput
from stoop.core.prompts import Prompt
from stoop.core.report import Report
from stoop.core.sampling_params import SamplingParams
from stoop.engine.core_client import CoreClient
from stoop.engine.cursor import GroupCursor
from stoop.engine.frontend import Frontend
from stoop.engine.inputs import check_priority
from stoop.engine.outputs import RequestGroup
from stoop.engine.wire import Abort, Add, Ready
from stoop.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
PREPARE_SECONDS = 0.001


class AsyncLLM:
    """A model that is ready to answer, for one event loop.

    Make it with `await AsyncLLM.start(...)`. The core runs in a process of its own: this one only
    checks prompts and makes text. If that process dies or hangs, its requests end with `CoreDied`,
    and it is started again.
    """

    def __init__(
        self, options: EngineOptions, report: Report | None, timeout: float, **process: Any
    ) -> None:
        """Use `start`."""
        self.options = options
        self._opened: Frontend | None = None  # once the core is ready and the tokenizer read
        self._client = CoreClient(options, self, report, **process)
        self._heartbeat_timeout = timeout
        self._tokenizer: asyncio.Task[Tokenizer | None] | None = None
        self._mail: dict[str, _Mailbox] = {}  # of open requests
        self._held: dict[str, RequestGroup] = {}  # those that wait for a core to be ready
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._draining = False  # no new requests
        self._idle = asyncio.Event()  # no request is open
        self._idle.set()

    @classmethod
    async def start(
        cls,
        model: str = DEFAULT_MODEL,
        *,
        report: Report | None = None,
        max_restarts: int = 3,
        heartbeat_timeout: float = 20.0,
        stall_timeout: float = 600.0,
        on_printed: Callable[[str], None] | None = None,
        **options: Any,
    ) -> "AsyncLLM":
        """Start the core's process, and wait until it is ready.

        `options` are the fields of `stoop.config.schema.EngineOptions`. `report(stage, done,
        total)` is called for every slow part of the start. The process is restarted at most
        `max_restarts` times within ten minutes. `healthy` is False after `heartbeat_timeout`
        seconds without a sign of life, and after `stall_timeout` seconds the process counts as
        hung and is restarted; 0 turns that off. It must be longer than any step takes. If
        `on_printed` is given, it takes the lines that the process prints, instead of standard
        error.
        """
        made = make_options(model, options)
        check_options(made)
        llm = cls(
            made,
            report,
            heartbeat_timeout,
            max_restarts=max_restarts,
            stall_timeout=stall_timeout,
            on_printed=on_printed,
        )
        await llm._start()
        return llm

    async def _start(self) -> None:
        try:
            ready = await self._client.start()
            assert self._tokenizer is not None
            tokenizer = await self._tokenizer
        except BaseException:
            if self._tokenizer is not None:
                self._tokenizer.cancel()
            await self._client.stop()
            raise
        self._open(ready, tokenizer)

    def _open(self, ready: Ready, tokenizer: Tokenizer | None) -> None:
        self.config: Config = ready.config
        self._opened = Frontend(ready.config, tokenizer, self.options.seed, ready.limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.shutdown()

    # ---- what it is ----

    @property
    def _frontend(self) -> Frontend:
        assert self._opened is not None
        return self._opened

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        if self._frontend.tokenizer is None:
            raise RequestError("the engine was made with skip_tokenizer_init=True: no tokenizer")
        return self._frontend.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.tokenizer

    @property
    def default_params(self) -> SamplingParams:
        """What requests without `params` get. Copy it before changing it."""
        return self._frontend.inputs.default_params

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._mail)

    @property
    def state(self) -> str:
        """ready, restarting, dead (restarts used up) or stopped."""
        return "stopped" if self._draining else self._client.state

    @property
    def healthy(self) -> bool:
        """Whether the core's process lives and its loop turns."""
        return self.state == "ready" and self._client.heartbeat_age <= self._heartbeat_timeout

    def metrics(self) -> dict[str, Any]:
        """The core's counters as of its last heartbeat, and the state of its process."""
        client = self._client
        found = dict(client.metrics)
        frontend = self._frontend
        unread = frontend.num_dropped_tokens + frontend.num_late_tokens
        found["num_generated_tokens"] -= unread
        return found | {
            "core_pid": client.pid,
            "num_restarts": client.num_restarts,
            "heartbeat_age": client.heartbeat_age,
        }

    # ---- requests ----

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        final_only: bool = False,
    ) -> "DeltaStream":
        """What is new in the answers, as it comes. This call checks the request and queues it.

        With `final_only` there is one item, the whole answers once they are complete; `output`
        has what there is of them before. Closing the iterator, dropping it, or cancelling the task
        that waits for its next item aborts the request.
        """
        group = self._make_group(prompt, params, request_id, priority, final_only=final_only)
        cursor = GroupCursor(group)
        return DeltaStream(self, self._submit(group), cursor)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> RequestOutput:
        """The whole answer. Cancelling this aborts the request."""
        group = self._make_group(prompt, params, request_id, priority, final_only=True)
        box = self._submit(group)
        try:
            while not group.finished:
                await box.wait()
        finally:
            self._cancel(box)
        return group.output()

    async def abort(self, request_id: str) -> None:
        """End a request: its stream gets a last item, with finish_reason "abort".

        Nothing happens if no such request is open.
        """
        box = self._mail.get(request_id)
        if box is not None:
            self._cancel(box)
            self._frontend.cut_short(box.group)
            box.wake()

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; does nothing and returns False while there are requests."""
        return await self._client.reset_prefix_cache()

    async def shutdown(self, drain: float = 0.0) -> None:
        """Refuse new requests, wait up to `drain` seconds for the open ones, stop the core."""
        self._draining = True
        if self._mail and drain > 0:
            try:
                await asyncio.wait_for(self._idle.wait(), drain)
            except TimeoutError:
                log.warning("%d requests are still open: they are ended", self.num_open)
        self._fail_all(CoreDied("the engine was shut down before this request ended"))
        await self._client.stop()

    # ---- inside ----

    def _make_group(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        *,
        final_only: bool,
    ) -> RequestGroup:
        if self.state == "stopped":
            raise CoreDied("the engine is shutting down: send the request to another one")
        if self.state == "dead":
            raise CoreDied("the engine's process died too often: restart the engine")
        number = next(self._numbers)
        request_id = f"request-{number}" if request_id is None else request_id
        self._frontend.check_id(request_id)
        check_priority(priority)
        chosen = self.default_params if params is None else params
        prepared = self._frontend.inputs.prepare(prompt, chosen)
        return self._frontend.make_group(
            request_id, prepared, priority, final_only=final_only, core_id=str(number)
        )

    def _submit(self, group: RequestGroup) -> "_Mailbox":
        requests = self._frontend.open([group])
        box = self._mail[group.request_id] = _Mailbox(group, self._loop)
        self._idle.clear()
        if self._client.state == "ready":
            self._client.send(Add(requests))
            # While the core computes. Not at once: on few CPUs it would keep the core from waking.
            self._loop.call_later(PREPARE_SECONDS, group.prepare)
        else:
            self._held[group.request_id] = group
        return box

    def _cancel(self, box: "_Mailbox") -> None:
        """Abort a request, unless it has ended."""
        group = box.group
        if self._mail.get(group.request_id) is not box:
            return
        self._forget(group.request_id)
        self._frontend.take_out(group.request_id)
        self._abort(group)

    def _abort(self, group: RequestGroup) -> None:
        self._client.send(Abort([each.request.request_id for each in group.answers]))

    def _forget(self, request_id: str) -> "_Mailbox | None":
        box = self._mail.pop(request_id, None)
        self._held.pop(request_id, None)
        if not self._mail:
            self._idle.set()
        return box

    def _fail(self, request_ids: Sequence[str], error: Exception) -> None:
        for request_id in request_ids:
            self._frontend.take_out(request_id)
            box = self._forget(request_id)
            if box is not None:
                box.fail(type(error)(*error.args))  # each task raises its own

    def _fail_all(self, error: Exception) -> None:
        self._fail(list(self._mail), error)

    # ---- what the client tells ----

    def on_found(self, tokenizer_folder: str | None) -> None:
        """Read the tokenizer while the core loads the model; a bad one ends the start."""
        if self._tokenizer is None:
            self._tokenizer = self._loop.create_task(_read_tokenizer(tokenizer_folder))
            self._tokenizer.add_done_callback(self._check_tokenizer)

    def _check_tokenizer(self, done: asyncio.Task[Tokenizer | None]) -> None:
        error = None if done.cancelled() else done.exception()
        if isinstance(error, Exception):
            self._client.refuse(error)

    def on_restarted(self, ready: Ready) -> None:
        """Send the requests that were made meanwhile."""
        if self._opened is None:
            return
        # The new core counts from 0.
        self._frontend.num_dropped_tokens = self._frontend.num_late_tokens = 0
        if ready.config.schedule == self.config.schedule:
            self._frontend.set_limits(ready.limits)  # it may have found more or less memory
        else:
            # "auto" may decide on other drafts this time, and requests were made for the old ones.
            self._fail_all(CoreDied("the engine was restarted with other options: retry"))
            self._open(ready, self._frontend.tokenizer)
        held, self._held = self._held, {}
        for group in held.values():
            self._client.send(Add([answer.request for answer in group.answers]))

    def on_deltas(self, deltas: Sequence[Delta]) -> None:
        try:
            changed, to_abort = self._frontend.absorb(deltas)
        except Exception as error:
            log.exception("the front end failed on a step's deltas")
            names = [delta.request_id for delta in deltas]
            self.on_lost(names, f"the front end failed ({type(error).__name__}): retry")
            return
        if to_abort:
            self._client.send(Abort(to_abort))
        for group in changed:
            box = self._mail.get(group.request_id)
            if box is not None:
                if group.finished:
                    self._forget(group.request_id)
                box.wake()

    def on_lost(self, request_ids: Sequence[str], sentence: str) -> None:
        for group in self._frontend.groups_of(request_ids):
            self._fail([group.request_id], RequestLost(sentence))
            self._abort(group)  # its other answers

    def on_died(self, error: CoreDied) -> None:
        self._fail([each for each in self._mail if each not in self._held], error)

    def on_dead(self, error: CoreDied) -> None:
        self._fail_all(error)

    def __del__(self) -> None:
        client = getattr(self, "_client", None)
        if client is not None and client.state != "stopped":
            client.close()


class _Mailbox:
    """Where one request's reader waits. What there is to read is in the group itself, so a slow
    reader finds several steps in one item, and nothing queues up."""

    __slots__ = ("_error", "_loop", "_waiter", "group")

    def __init__(self, group: RequestGroup, loop: asyncio.AbstractEventLoop) -> None:
        self.group = group
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        self._error = error
        self.wake()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    async def wait(self) -> None:
        """Until there is news. Raises the error that ended the request."""
        self.check()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        self.check()


class DeltaStream:
    """The items of one request, in order. One task reads it."""

    def __init__(self, llm: AsyncLLM, box: _Mailbox, cursor: GroupCursor) -> None:
        self._llm = llm
        self._box = box
        self._cursor = cursor
        self._ended = False

    @property
    def request_id(self) -> str:
        return self._box.group.request_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestDelta:
        if self._ended:
            raise StopAsyncIteration
        try:
            self._box.check()
            while (item := self._take_new()) is None:
                await self._box.wait()
        except BaseException:
            await self.aclose()
            raise
        self._ended = item.finished
        return item

    def _take_new(self) -> RequestDelta | None:
        group = self._box.group
        return None if group.final_only and not group.finished else self._cursor.take_new()

    async def aclose(self) -> None:
        """Abort the request, unless it has ended."""
        self._ended = True
        self._llm._cancel(self._box)

    def output(self) -> RequestOutput:
        """The answers so far, as `generate` returns them."""
        return self._box.group.output()

    def __del__(self) -> None:
        # The garbage collector may run this anywhere, so the abort comes later.
        if not getattr(self, "_ended", True) and not self._llm._loop.is_closed():
            self._llm._loop.call_soon_threadsafe(self._llm._cancel, self._box)


async def _read_tokenizer(folder: str | None) -> Tokenizer | None:
    return None if folder is None else await asyncio.to_thread(Tokenizer.from_folder, Path(folder))
