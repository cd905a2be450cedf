"""What becomes of each request's tokens: text, log-probabilities, and the user's output."""

import time
from collections.abc import Sequence

from stoop.core.outputs import CompletionOutput, Logprob, RequestOutput, RequestTimes
from stoop.core.request import Request, RequestStatus
from stoop.core.sampling_params import SamplingParams
from stoop.core.step import RowResult, TokenScores
from stoop.text.detokenize import TextStream
from stoop.text.tokenizer import Tokenizer


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
        self._stream: TextStream | None = None
        if tokenizer is not None and params.detokenize:
            self._stream = TextStream(
                tokenizer,
                params.stop,
                skip_special_tokens=params.skip_special_tokens,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )

    @property
    def text(self) -> str:
        return self._stream.text if self._stream else ""

    def take(self, row: RowResult) -> str | None:
        """Read new tokens into text; returns the stop string that they completed, if any."""
        if self._stream is None and self.logprobs is None:
            return None
        new_ids = self.request.token_ids[self.request.num_prompt_tokens + self._num_taken :]
        self._num_taken += len(new_ids)
        if self.logprobs is not None:
            for scores in row.scores[: len(new_ids)]:
                self.logprobs.append(decode_scores(scores, self.tokenizer))
                self.cumulative_logprob += scores.logprobs[0]
        if self._stream is None:
            return None
        self._stream.append(self._without_stop_token(new_ids))
        if self._stream.stopped is not None:
            self._drop_after_stop()
            return self._stream.stopped
        if self.request.finished:
            self._stream.finish()
        return None

    def finish(self) -> None:
        """Release text that was held back, when the request ends from outside."""
        if self._stream is not None:
            self._stream.finish()

    def output(self) -> CompletionOutput:
        request = self.request
        return CompletionOutput(
            self.index,
            self._stream.text if self._stream else "",
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
        self.times = RequestTimes(time.perf_counter())

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
        for scores in row.prompt_scores[max(known, 0) :]:
            self.prompt_logprobs.append(decode_scores(scores, self.tokenizer))

    def note_times(self, finished: bool) -> None:
        times = self.times
        if times.first_token is not None and not finished:
            return
        now = time.perf_counter()
        started = any(answer.request.num_output_tokens for answer in self.answers)
        first = times.first_token or (now if started else None)
        self.times = RequestTimes(times.arrival, first, now if finished else None)

    def output(self, finished: bool) -> RequestOutput:
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            [answer.output() for answer in self.answers],
            finished,
            None if self.prompt_logprobs is None else list(self.prompt_logprobs),
            self.answers[0].request.num_cached,
            self.times,
        )


def decode_scores(scores: TokenScores, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The token itself first; the best follow in order of rank."""
    entries: dict[int, Logprob] = {}
    for place, (token, logprob) in enumerate(zip(scores.token_ids, scores.logprobs, strict=True)):
        if token not in entries:
            text = None if tokenizer is None else tokenizer.decode([token], False)
            entries[token] = Logprob(logprob, place or scores.rank, text)
    return entries
