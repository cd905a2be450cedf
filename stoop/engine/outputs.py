"""What becomes of each request's tokens: text, log-probabilities, and the user's output."""

import time
from collections.abc import Sequence

from stoop.config.errors import RequestError
from stoop.core.outputs import CompletionOutput, Logprob, RequestOutput, RequestTimes
from stoop.core.request import Request, RequestStatus
from stoop.core.sampling_params import SamplingParams
from stoop.core.step import RowResult, TokenScores
from stoop.text.detokenize import TextStream
from stoop.text.tokenizer import Tokenizer


class AnswerError(RequestError):
    """The text of one answer could not be made. Only this answer is lost."""


class Answer:
    """One of a request's `n` answers while it grows."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer | None) -> None:
        self.index = index
        self.request = request
        self.tokenizer = tokenizer
        params = request.rules.params
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self._num_taken = 0
        self._has_text = tokenizer is not None and params.detokenize
        self._stream: TextStream | None = None  # made for the first tokens

    @property
    def text(self) -> str:
        return self._stream.text if self._stream else ""

    def take(self, row: RowResult) -> str | None:
        """Read new tokens into text; returns the stop string that they completed, if any.

        Raises `AnswerError` if the tokenizer fails. The answer then keeps the text that it has,
        and the caller ends its request.
        """
        if not self._has_text and self.logprobs is None:
            return None
        try:
            return self._take(row)
        except BaseException as error:
            if not _is_tokenizer_failure(error):
                raise
            raise self.failed(error) from error

    def _take(self, row: RowResult) -> str | None:
        new_ids = self.request.token_ids[self.request.num_prompt_tokens + self._num_taken :]
        self._num_taken += len(new_ids)
        if self.logprobs is not None:
            for scores in row.scores[: len(new_ids)]:
                self.logprobs.append(decode_scores(scores, self.tokenizer))
                self.cumulative_logprob += scores.logprobs[0]
        if not self._has_text:
            return None
        if self._stream is None:
            self._stream = self._make_stream()
        self._stream.append(self._without_stop_token(new_ids))
        if self._stream.stopped is not None:
            self._drop_after_stop()
            return self._stream.stopped
        if self.request.finished:
            self._stream.finish()
        return None

    def finish(self) -> None:
        """Release text that was held back, when the request ends from outside."""
        try:
            if self._stream is not None:
                self._stream.finish()
        except BaseException as error:
            # The request ends in any case, with the text that it has.
            if not _is_tokenizer_failure(error):
                raise

    def _make_stream(self) -> TextStream:
        assert self.tokenizer is not None
        params = self.request.rules.params
        return TextStream(
            self.tokenizer,
            params.stop,
            prompt_ids=self.request.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def failed(self, error: BaseException) -> AnswerError:
        """Release what there is, and say what happened."""
        self.finish()
        return AnswerError(
            f"the tokenizer failed on this answer ({_one_line(error)}): use its token ids"
        )

    def output(self) -> CompletionOutput:
        request = self.request
        return CompletionOutput(
            self.index,
            self.text,
            request.token_ids[request.num_prompt_tokens :],
            None if self.logprobs is None else self.cumulative_logprob,
            None if self.logprobs is None else list(self.logprobs),
            request.finish_reason,
            request.stop_reason,
            request.spec.copy() if request.spec.num_accepted_tokens_per_pos else None,
        )

    def _without_stop_token(self, new_ids: Sequence[int]) -> Sequence[int]:
        """A token that stops is in the ids but not in the text, unless asked for."""
        request = self.request
        stopped = request.finish_reason == "stop" and isinstance(request.stop_reason, int)
        if stopped and not request.rules.params.include_stop_str_in_output:
            return new_ids[:-1]
        return new_ids

    def _drop_after_stop(self) -> None:
        """A step may bring tokens past the one that completed a stop string."""
        assert self._stream is not None
        extra = self.request.num_output_tokens - self._stream.num_tokens
        if extra > 0:
            del self.request.token_ids[-extra:]
            if self.logprobs is not None:
                del self.logprobs[-extra:]
                kept = zip(self.request.output_token_ids, self.logprobs, strict=True)
                self.cumulative_logprob = sum(entry[token].logprob for token, entry in kept)


class RequestGroup:
    """A user's request: one prompt, `n` answers, each a `Request` of its own below."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        requests: Sequence[Request],
        tokenizer: Tokenizer | None,
        final_only: bool = False,
    ) -> None:
        self.request_id = request_id
        self.final_only = final_only
        self.prompt = prompt
        self.prompt_token_ids = list(requests[0].prompt_token_ids)  # one list for all outputs
        self.answers = [Answer(i, request, tokenizer) for i, request in enumerate(requests)]
        self.tokenizer = tokenizer
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
        self.arrival_time = time.time()
        self.arrival = time.perf_counter()
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.ended: float | None = None

    @property
    def params(self) -> SamplingParams:
        return self.answers[0].request.rules.params

    @property
    def finished(self) -> bool:
        first = self.answers[0]  # most often the only one
        if first.request.status is not RequestStatus.FINISHED:
            return False
        return all(answer.request.finished for answer in self.answers)

    def take_prompt_scores(self, answer: Answer, row: RowResult) -> None:
        """The first answer's pass over the prompt speaks for all."""
        if self.prompt_logprobs is None or answer.index:
            return
        # After a preemption the prompt is scored again from its beginning.
        known = len(self.prompt_logprobs) - row.prompt_scores_start
        try:
            for scores in row.prompt_scores[max(known, 0) :]:
                self.prompt_logprobs.append(decode_scores(scores, self.tokenizer))
        except BaseException as error:
            if not _is_tokenizer_failure(error):
                raise
            raise answer.failed(error) from error

    def note_tokens(self, now: float) -> None:
        """A step brought tokens."""
        self.last_token = now
        if self.first_token is None:
            self.first_token = now

    def output(self, finished: bool) -> RequestOutput:
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            [answer.output() for answer in self.answers],
            finished,
            None if self.prompt_logprobs is None else list(self.prompt_logprobs),
            self.answers[0].request.num_cached,
            RequestTimes(
                self.arrival, self.first_token, self.ended, self.last_token, self.arrival_time
            ),
        )


def decode_scores(scores: TokenScores, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The token itself first; the best follow in order of rank."""
    entries: dict[int, Logprob] = {}
    for place, (token, logprob) in enumerate(zip(scores.token_ids, scores.logprobs, strict=True)):
        if token not in entries:
            text = None if tokenizer is None else tokenizer.decode([token], False)
            entries[token] = Logprob(logprob, place or scores.rank, text)
    return entries


def _is_tokenizer_failure(error: BaseException) -> bool:
    """Whether to blame this answer's text. A panic in the tokenizers library is no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
