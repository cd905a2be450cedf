"""What a user gets back."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # one a token
    finish_reason: str | None = None  # stop, length or abort
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestTimes:
    """Seconds on the clock of `time.perf_counter`."""

    arrival: float
    first_token: float | None = None
    finished: float | None = None


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # None for the first token
    num_cached_tokens: int | None = None
    times: RequestTimes = field(default_factory=lambda: RequestTimes(0.0))
