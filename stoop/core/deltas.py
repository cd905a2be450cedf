"""What a stream yields: the part of each answer that is new since the last item."""

from dataclasses import dataclass, field

from stoop.core.outputs import Logprob


@dataclass(slots=True)
class AnswerDelta:
    """What is new in one of a request's answers. Text may lag behind its tokens: half a character,
    or the beginning of a stop string, is held back."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    # By token: 0 if the target chose it, j if it is draft j of its step and was accepted.
    draft_positions: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None  # one per token, if asked for
    finish_reason: str | None = None  # stop, length, abort or error; set once
    stop_reason: int | str | None = None  # the token or text that stopped it; of an error, why


@dataclass(slots=True)
class RequestDelta:
    """What is new in a request. A slow reader gets several steps in one item."""

    request_id: str
    answers: list[AnswerDelta]  # those that changed
    finished: bool  # the last item of the stream
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None  # None: no answer has started
    # Once complete, in one item, if asked for. The first entry is None.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    admitted: float | None = None  # when the first answer started, on `time.perf_counter`
