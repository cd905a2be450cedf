"""One HTTP request's answers while they are generated: streams, counts, times."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stoop.core.deltas import AnswerDelta, RequestDelta
from stoop.core.outputs import Logprob, RequestOutput, RequestTimes
from stoop.core.sampling_params import SamplingParams
from stoop.server.errors import (
    CLIENT_GONE,
    INTERNAL,
    ApiError,
    as_api_error,
    timed_out,
    unavailable,
)
from stoop.server.hooks import NO_TRACE, RequestTrace
from stoop.server.prompts import EncodedPrompt
from stoop.server.reading import AnswerReader
from stoop.server.service import Service

if TYPE_CHECKING:
    from stoop.async_llm import DeltaStream


@dataclass
class WholeAnswer:
    """One answer, once it is complete."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    draft_positions: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Generation:
    """The answers to one or more prompts. Choices are numbered across the prompts."""

    def __init__(
        self,
        service: Service,
        request_id: str,
        prompts: Sequence[EncodedPrompt],
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival: float,
        record: dict[str, Any] | None = None,
        trace: RequestTrace = NO_TRACE,
    ) -> None:
        """arrival: by `time.perf_counter`. record: what the log line of the request will have"""
        self.service = service
        self.prompts = prompts
        self.params = params
        self.priority = priority
        self.record = {} if record is None else record
        self.trace = trace
        self.ids = [f"{request_id}-{place}" for place in range(len(prompts))]
        self.first_choice = {each: place * params.n for place, each in enumerate(self.ids)}
        self.num_prompt = sum(len(prompt.token_ids) for prompt in prompts)
        self.num_output = 0
        self._num_handed_out: dict[str, int] = {}  # of these, by prompt
        self.num_cached = 0
        self.num_drafted = 0  # draft tokens that were verified
        self.num_accepted = 0
        self.splits_reasoning = False  # from the rest of the answers
        self.readers: list[AnswerReader] = []  # those that split it
        self.finish_reason = "abort"
        self.is_late: Callable[[], bool] = lambda: False  # it is cut short since its time is up
        self.prompt_logprobs: dict[str, list[dict[int, Logprob] | None]] = {}
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.admitted: float | None = None
        self.arrival = arrival
        self.arrival_time = time.time() - (time.perf_counter() - arrival)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    # ---- running ----

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Admit the request; tell metrics, the trace and the log how it ended."""
        try:
            with self.service.admitted(self.num_choices):
                self.service.metrics.request_arrived()
                yield
        except BaseException as error:
            found = self._as_told(error)
            code = found.status_code if found else CLIENT_GONE
            self.trace.fail(code, found.message if found else "the client has gone")
            # Otherwise it was refused before it began.
            if found is None or code >= 500 or self.finish_reason == "error":
                self._end()
            raise
        self._end()
        self.trace.end(
            self._times(),
            num_prompt=self.num_prompt,
            num_cached=self.num_cached,
            num_output=self.num_output,
            finish_reasons=[self.finish_reason],
        )

    def _as_told(self, error: BaseException) -> ApiError | None:
        """What the client is told of an error; None if it has gone, which ends us likewise."""
        if isinstance(error, Exception):
            return as_api_error(error, self.service.llm.state) or ApiError(500, INTERNAL)
        return timed_out(self.service.settings.request_timeout) if self.is_late() else None

    async def deltas(self, final_only: bool = False) -> AsyncGenerator[RequestDelta, None]:
        """What is new, of all prompts in the order in which it comes.

        With `final_only`, the engine wakes us once for each prompt, when its answers are complete.
        Raises `ApiError` if an answer does not end as one should.
        """
        with self._running():
            streams: dict[str, DeltaStream] = {}
            try:
                # The engine checks every request here, so refusals come before any output.
                for prompt, request_id in zip(self.prompts, self.ids, strict=True):
                    streams[request_id] = self.service.llm.stream(
                        prompt.engine_prompt,
                        self.params,
                        request_id=request_id,
                        priority=self.priority,
                        final_only=final_only,
                    )
                source: AsyncIterator[RequestDelta]
                source = next(iter(streams.values())) if len(streams) == 1 else _merged(streams)
                async for delta in source:
                    if final_only:
                        self._count(delta)
                    else:
                        self.note(delta)
                    if delta.finished:
                        output = streams.pop(delta.request_id).output()
                        self._count_drafts(output)
                        if final_only:
                            self._take_times(output.times)
                    yield delta
            finally:
                for stream in streams.values():
                    await stream.aclose()
                    self._count_unfinished(stream.output())

    async def whole(self) -> list[WholeAnswer]:
        """All answers, complete, by choice."""
        answers = [WholeAnswer(place) for place in range(self.num_choices)]
        async with contextlib.aclosing(self.deltas(final_only=True)) as deltas:
            async for delta in deltas:
                self._join(answers, delta)
        return answers

    def _join(self, answers: list[WholeAnswer], delta: RequestDelta) -> None:
        first = self.first_choice[delta.request_id]
        for new in delta.answers:
            answer = answers[first + new.index]
            answer.text += new.text
            answer.token_ids += new.token_ids
            answer.draft_positions += new.draft_positions
            if new.logprobs is not None:
                answer.logprobs = (answer.logprobs or []) + new.logprobs
            if new.finish_reason is not None:
                answer.finish_reason, answer.stop_reason = new.finish_reason, new.stop_reason

    def _check_end(self, answer: AnswerDelta) -> None:
        """Raise what a client is told if an answer did not end as one should."""
        if answer.finish_reason == "error":
            reason = answer.stop_reason or "the answer could not be completed"
            # A request that rules out tokens may rule out all of them.
            theirs = self.params.structured_outputs is not None or self.params.bad_words
            raise ApiError(400 if theirs else 500, f"{reason}", code="generation_failed")
        if answer.finish_reason == "abort":
            raise unavailable("stopped")

    # ---- counts ----

    def note(self, delta: RequestDelta) -> None:
        """Count what came, and when."""
        now, before = time.perf_counter(), self.num_output
        self._count(delta)
        new = self.num_output - before
        if not new:
            return
        metrics = self.service.metrics
        if self.first_token is None:
            self.first_token = now
            metrics.first_token(now - self.arrival)
            new -= 1
        if new and self.last_token is not None:
            metrics.inter_token(now - self.last_token, new)
        self.last_token = now

    def _take_times(self, times: RequestTimes) -> None:
        """Of an answer that was not streamed."""
        if times.first_token is not None and self.first_token is None:
            self.first_token = times.first_token
            self.service.metrics.first_token(times.first_token - self.arrival)
        self.last_token = times.last_token or self.last_token

    def _count_drafts(self, output: RequestOutput) -> None:
        self.num_drafted += sum(a.spec.num_draft_tokens for a in output.outputs if a.spec)

    def _count_unfinished(self, output: RequestOutput) -> None:
        """What was generated of a request that was cut short, and not handed out."""
        num_tokens = sum(len(answer.token_ids) for answer in output.outputs)
        self.num_output += num_tokens - self._num_handed_out.get(output.request_id, 0)
        self.num_cached += output.num_cached_tokens or 0
        if self.admitted is None:
            self.admitted = output.times.admitted
        self._take_times(output.times)
        self._count_drafts(output)

    def _count(self, delta: RequestDelta) -> None:
        if self.admitted is None:
            self.admitted = delta.admitted  # of the first prompt that started
        num_tokens = sum(len(answer.token_ids) for answer in delta.answers)
        self.num_output += num_tokens
        before = self._num_handed_out.get(delta.request_id, 0)
        self._num_handed_out[delta.request_id] = before + num_tokens
        for answer in delta.answers:
            if answer.finish_reason is not None:
                self.finish_reason = answer.finish_reason
                self._check_end(answer)
            positions = answer.draft_positions
            self.num_accepted += len(positions) - positions.count(0)
        if delta.finished:
            self.num_cached += delta.num_cached_tokens or 0
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs[delta.request_id] = delta.prompt_logprobs

    @property
    def num_reasoning(self) -> int:
        return sum(reader.num_reasoning for reader in self.readers)

    def usage(self) -> dict[str, Any]:
        details = {
            "accepted_prediction_tokens": self.num_accepted,
            "rejected_prediction_tokens": max(self.num_drafted - self.num_accepted, 0),
        }
        if self.splits_reasoning:
            details["reasoning_tokens"] = self.num_reasoning
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_output,
            "total_tokens": self.num_prompt + self.num_output,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
            "completion_tokens_details": details,
        }

    def _times(self) -> RequestTimes:
        now = time.perf_counter()
        return RequestTimes(
            self.arrival,
            self.first_token,
            now,
            self.last_token,
            self.arrival_time,
            self.admitted,
        )

    def _end(self) -> None:
        self.service.metrics.observe(
            self._times(),
            num_prompt=self.num_prompt,
            num_cached=self.num_cached,
            num_output=self.num_output,
            finish_reason=self.finish_reason,
            n=self.params.n,
            max_tokens=self.params.max_tokens,
        )
        self.record |= {
            "tokens_in": self.num_prompt,
            "tokens_cached": self.num_cached,
            "tokens_out": self.num_output,
            "finish": self.finish_reason,
        }
        if self.first_token is not None:
            self.record["ttft_ms"] = round((self.first_token - self.arrival) * 1000, 1)


async def _merged(
    streams: Mapping[str, AsyncIterator[RequestDelta]],
) -> AsyncIterator[RequestDelta]:
    """Items of several streams. Each has at most one item here, so that a slow reader's wait in
    the engine."""
    waiting = {asyncio.ensure_future(anext(stream)): stream for stream in streams.values()}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = waiting.pop(task)
                try:
                    delta = task.result()
                except StopAsyncIteration:
                    continue
                yield delta
                waiting[asyncio.ensure_future(anext(stream))] = stream
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
