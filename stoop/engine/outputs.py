"""Answers while they grow: text, log-probabilities, and the outputs that users get."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from stoop.config.errors import RequestError
from stoop.core.messages import Delta, EngineRequest
from stoop.core.outputs import CompletionOutput, Logprob, RequestOutput, RequestTimes, SpecCounts
from stoop.core.sampling_params import SamplingParams
from stoop.core.step import TokenScores
from stoop.text.detokenize import TextStream
from stoop.text.tokenizer import Tokenizer

Item = TypeVar("Item")


class AnswerError(RequestError):
    """The text of one answer could not be made. Other answers are not affected."""


class Answer:
    """One of a request's `n` answers while it grows.

    Each step appends what is new. An output of an unfinished answer refers to these lists and
    copies its part of them when it is read.
    """

    def __init__(
        self, index: int, request: EngineRequest, tokenizer: Tokenizer | None, num_drafts: int = 0
    ) -> None:
        """num_drafts: draft tokens per step, at most; 0 if the engine does not speculate"""
        self.index = index
        self.request = request
        self.tokenizer = tokenizer
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None
        if self.params.logprobs is not None:
            self.logprobs = []
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_cached: int | None = None
        self.admitted: float | None = None  # on the clock of `time.perf_counter`
        self.num_dropped = 0  # tokens that came after a stop string in the same step
        self.spec = SpecCounts(num_drafts) if num_drafts else None
        self.num_decode_steps = 0  # with drafts or without
        self.draft_positions: list[int] | None = None  # one per token; a stream keeps them
        self._has_text = tokenizer is not None and self.params.detokenize
        # Whether deltas have to be read into text or scores.
        self.has_readers = self._has_text or self.logprobs is not None
        self._stream: TextStream | None = None  # made for the first tokens

    @property
    def params(self) -> SamplingParams:
        return self.request.rules.params

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        return self._stream.text if self._stream else ""

    def prepare(self) -> None:
        """Make what the first tokens are read with. A tokenizer that fails here fails then, too."""
        if self._has_text and self._stream is None:
            try:
                self._stream = self._make_stream()
            except BaseException as error:
                if not _is_tokenizer_failure(error):
                    raise

    def extend(self, delta: Delta) -> None:
        """Add what a step brought, except for the text and the scores."""
        self.num_cached = delta.num_cached
        if delta.admitted is not None:
            self.admitted = delta.admitted
        if delta.num_drafts and self.spec is not None:
            self.spec.add(delta.num_drafts, delta.num_accepted)
        # One that found no next token had drafts, and may have brought none.
        if self.token_ids and (delta.token_ids or delta.num_drafts):
            self.num_decode_steps += 1
        self.token_ids += delta.token_ids
        if self.draft_positions is not None:
            self._note_positions(delta)
        if delta.finish_reason is not None:
            self.end(delta.finish_reason, delta.stop_reason)

    def _note_positions(self, delta: Delta) -> None:
        """A step's accepted drafts come first; the target chose the token after them."""
        assert self.draft_positions is not None
        if not delta.num_accepted:
            self.draft_positions += [0] * len(delta.token_ids)
            return
        num_drafted = min(delta.num_accepted, len(delta.token_ids))
        self.draft_positions += range(1, num_drafted + 1)
        self.draft_positions += [0] * (len(delta.token_ids) - num_drafted)

    def read(self, delta: Delta) -> None:
        """Read the new tokens into text. A stop string may end the answer before the core does.

        Raises `AnswerError` if the tokenizer fails. The answer then keeps the text that it has,
        and the caller ends it.
        """
        if not self.has_readers:
            return
        try:
            self._read(delta)
        except BaseException as error:
            if not _is_tokenizer_failure(error):
                raise
            raise self.failed(error) from error

    def end(self, reason: str, stop_reason: int | str | None = None) -> None:
        """Set why the answer ended; a reason found in the text replaces the core's."""
        self.finish_reason, self.stop_reason = reason, stop_reason

    def _read(self, delta: Delta) -> None:
        if self.logprobs is not None:
            for scores in delta.scores:
                self.logprobs.append(decode_scores(scores, self.tokenizer))
                self.cumulative_logprob += scores.logprobs[0]
        if not self._has_text:
            return
        if self._stream is None:
            self._stream = self._make_stream()
        self._stream.append(self._without_stop_token(delta))
        if self._stream.stopped is not None:
            self._drop_after_stop(delta)
            self.end("stop", self._stream.stopped)
        elif self.finished:
            self._stream.finish()

    def finish(self) -> None:
        """Release text that was held back, when the answer is ended from outside."""
        try:
            if self._stream is not None:
                self._stream.finish()
        except BaseException as error:
            # The answer ends in any case, with the text that it has.
            if not _is_tokenizer_failure(error):
                raise

    def _make_stream(self) -> TextStream:
        assert self.tokenizer is not None
        params = self.params
        return TextStream(
            self.tokenizer,
            params.stop,
            prompt_ids=self.request.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def failed(self, error: BaseException) -> AnswerError:
        """Release the text there is, and say what happened."""
        self.finish()
        return AnswerError(
            f"the tokenizer failed on this answer ({_one_line(error)}): use its token ids"
        )

    def _without_stop_token(self, delta: Delta) -> Sequence[int]:
        """A token that stops is in the ids but not in the text, unless asked for."""
        stopped = delta.finish_reason == "stop" and delta.stop_reason is not None
        if stopped and not self.params.include_stop_str_in_output:
            return delta.token_ids[:-1]
        return delta.token_ids

    def _drop_after_stop(self, delta: Delta) -> None:
        """Remove this step's tokens after the one that completed a stop string.

        Only tokens of this step go, which no output refers to yet.
        """
        assert self._stream is not None
        num_kept = self._stream.num_tokens
        self.num_dropped = len(self.token_ids) - num_kept
        if not self.num_dropped:
            return
        del self.token_ids[num_kept:]
        if self.draft_positions is not None:
            del self.draft_positions[num_kept:]
        if self.logprobs is not None:
            del self.logprobs[num_kept:]
            kept = zip(self.token_ids, self.logprobs, strict=True)
            self.cumulative_logprob = sum(entry[token].logprob for token, entry in kept)

    def text_since(self, num_parts: int) -> tuple[str, int]:
        """The text released since it had this many parts, and the number of parts now."""
        return self._stream.since(num_parts) if self._stream else ("", 0)

    def output(self) -> CompletionOutput:
        """The answer so far. A finished one is copied, an unfinished one when it is read."""
        fields: dict[str, Any] = {
            "index": self.index,
            "cumulative_logprob": None if self.logprobs is None else self.cumulative_logprob,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "spec": None if self.spec is None else self.spec.copy(),
            "num_decode_steps": self.num_decode_steps,
        }
        if self.finished:
            logprobs = None if self.logprobs is None else list(self.logprobs)
            return CompletionOutput(
                text=self.text, token_ids=list(self.token_ids), logprobs=logprobs, **fields
            )
        deferred: dict[str, Callable[[], Any]] = {
            "token_ids": partial(_beginning, self.token_ids, len(self.token_ids))
        }
        if self._stream is None:
            fields["text"] = ""
        else:
            deferred["text"] = self._stream.snapshot()
        if self.logprobs is None:
            fields["logprobs"] = None
        else:
            deferred["logprobs"] = partial(_beginning, self.logprobs, len(self.logprobs))
        return CompletionOutput.defer(deferred, **fields)


class RequestGroup:
    """A user's request: one prompt, and `n` answers that the core knows as separate requests."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        answers: Sequence[Answer],
        final_only: bool = False,
    ) -> None:
        self.request_id = request_id
        self.final_only = final_only
        self.prompt = prompt
        self.answers = answers
        self.prompt_token_ids = list(answers[0].request.prompt_token_ids)  # shared by all outputs
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if answers[0].params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
        self.arrival_time = time.time()
        self.arrival = time.perf_counter()
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.ended: float | None = None

    @property
    def finished(self) -> bool:
        if self.answers[0].finish_reason is None:  # most often the only one
            return False
        return all(answer.finished for answer in self.answers)

    def prepare(self) -> None:
        for answer in self.answers:
            answer.prepare()

    def take_prompt_scores(self, answer: Answer, delta: Delta) -> None:
        """Add log-probabilities of the prompt. Only the first answer computes them."""
        if self.prompt_logprobs is None or answer.index:
            return
        # After a preemption the prompt is scored again from its beginning.
        known = len(self.prompt_logprobs) - delta.prompt_scores_start
        try:
            for scores in delta.prompt_scores[max(known, 0) :]:
                self.prompt_logprobs.append(decode_scores(scores, answer.tokenizer))
        except BaseException as error:
            if not _is_tokenizer_failure(error):
                raise
            raise answer.failed(error) from error

    def note_tokens(self, now: float) -> None:
        """Record when a step brought tokens."""
        self.last_token = now
        if self.first_token is None:
            self.first_token = now

    def output(self) -> RequestOutput:
        """The request's answers so far, as `Answer.output` has them."""
        finished, scores = self.finished, self.prompt_logprobs
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "prompt": self.prompt,
            "prompt_token_ids": self.prompt_token_ids,
            "outputs": [answer.output() for answer in self.answers],
            "finished": finished,
            "num_cached_tokens": self.answers[0].num_cached,
            "times": RequestTimes(
                self.arrival,
                self.first_token,
                self.ended,
                self.last_token,
                self.arrival_time,
                self.answers[0].admitted,
            ),
        }
        if finished or scores is None:
            return RequestOutput(prompt_logprobs=scores and list(scores), **fields)
        copy = partial(_beginning, scores, len(scores))
        return RequestOutput.defer({"prompt_logprobs": copy}, **fields)


def _beginning(items: list[Item], length: int) -> list[Item]:
    """A copy of the first items of a list that has grown since."""
    return items[:length]


def decode_scores(scores: TokenScores, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """By token: the one at this position first, then the most likely ones in order of rank."""
    entries: dict[int, Logprob] = {}
    for place, (token, logprob) in enumerate(zip(scores.token_ids, scores.logprobs, strict=True)):
        if token not in entries:
            text = None if tokenizer is None else tokenizer.decode([token], False)
            entries[token] = Logprob(logprob, place or scores.rank, text)
    return entries


def _is_tokenizer_failure(error: BaseException) -> bool:
    """Whether the tokenizer failed. A panic in the tokenizers library is no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
