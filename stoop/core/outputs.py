"""What a user gets back."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability and its rank among all tokens, 1 being the most likely."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class SpecCounts:
    """How many drafts were verified and accepted."""

    num_positions: int = 0
    # By the number of drafts that steps verified: how many steps accepted 0, 1, 2, ... of them.
    steps: dict[int, list[int]] = field(default_factory=dict)

    def add(self, num_drafts: int, num_accepted: int, times: int = 1) -> None:
        """Count steps that verified `num_drafts` drafts. The sums are made when they are read."""
        by_accepted = self.steps.get(num_drafts)
        if by_accepted is None:
            by_accepted = self.steps[num_drafts] = [0] * (num_drafts + 1)
        by_accepted[num_accepted] += times

    @staticmethod
    def sum(outputs: "Iterable[RequestOutput]", num_positions: int) -> "SpecCounts":
        """The sum over all answers, for the first `num_positions` positions: an engine may have
        places for more drafts than a request asked for."""
        total = SpecCounts(num_positions)
        for counts in (answer.spec for output in outputs for answer in output.outputs):
            if counts is not None:
                for drafts, accepted, times in counts.listed():
                    total.add(drafts, accepted, times)
        return total

    def listed(self) -> list[tuple[int, int, int]]:
        """Drafts verified, drafts accepted, and how many steps. Other threads may go on adding."""
        return [
            (drafts, accepted, times)
            for drafts, by_accepted in list(self.steps.items())
            for accepted, times in enumerate(by_accepted)
        ]

    def copy(self) -> "SpecCounts":
        return SpecCounts(self.num_positions, {k: list(each) for k, each in self.steps.items()})

    @property
    def num_drafts(self) -> int:
        """Steps that verified drafts."""
        return sum(times for _, _, times in self.listed())

    @property
    def num_draft_tokens(self) -> int:
        return sum(drafts * times for drafts, _, times in self.listed())

    @property
    def num_accepted_tokens(self) -> int:
        return sum(accepted * times for _, accepted, times in self.listed())

    @property
    def num_draft_tokens_per_pos(self) -> list[int]:
        every, places = self.listed(), range(self.num_positions)
        return [sum(times for drafts, _, times in every if drafts > place) for place in places]

    @property
    def num_accepted_tokens_per_pos(self) -> list[int]:
        every, places = self.listed(), range(self.num_positions)
        return [sum(times for _, accepted, times in every if accepted > place) for place in places]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per step that verified drafts: the accepted ones and the one after them."""
        return 1 + self.num_accepted_tokens / max(self.num_drafts, 1)

    @property
    def acceptance_rates(self) -> list[float]:
        """By position, the share of drafts that were accepted. Steps may have fewer than others."""
        counts = zip(self.num_accepted_tokens_per_pos, self.num_draft_tokens_per_pos, strict=True)
        return [accepted / max(drafted, 1) for accepted, drafted in counts]

    def as_metrics(self) -> dict[str, Any]:
        """The counts under vLLM's names, in which a draft is all draft tokens of one step."""
        return {
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_num_draft_tokens": self.num_draft_tokens,
            "spec_decode_num_accepted_tokens": self.num_accepted_tokens,
            "spec_decode_num_accepted_tokens_per_pos": list(self.num_accepted_tokens_per_pos),
            "spec_decode_num_draft_tokens_per_pos": list(self.num_draft_tokens_per_pos),
            "spec_decode_mean_acceptance_length": self.mean_acceptance_length,
        }


@dataclass(frozen=True)
class DecodeSteps:
    """Steps of requests after their prompts, whether these had drafts or not."""

    num_steps: int = 0
    num_tokens: int = 0  # that these steps added to the answers
    num_with_drafts: int = 0  # steps that verified drafts

    @staticmethod
    def of(outputs: "Iterable[RequestOutput]") -> "DecodeSteps":
        """The sum over all answers. The step that ends a prompt brings the first token."""
        answers = [answer for output in outputs for answer in output.outputs]
        return DecodeSteps(
            sum(answer.num_decode_steps for answer in answers),
            sum(max(len(answer.token_ids) - 1, 0) for answer in answers),
            sum(answer.spec.num_drafts for answer in answers if answer.spec is not None),
        )

    @staticmethod
    def sum(parts: "Iterable[DecodeSteps]") -> "DecodeSteps":
        found = [(each.num_steps, each.num_tokens, each.num_with_drafts) for each in parts]
        return DecodeSteps(*map(sum, zip(*found, strict=True)))

    @property
    def tokens_per_step(self) -> float | None:
        """None without steps."""
        return self.num_tokens / self.num_steps if self.num_steps else None

    @property
    def share_with_drafts(self) -> float | None:
        return self.num_with_drafts / self.num_steps if self.num_steps else None


class DeferredFields:
    """Lets an output compute some of its fields when they are first read.

    Each output of a stream shows the whole answer so far. If every step copied it, the work would
    grow with the square of the answer's length, for readers that may look at the last output only.
    """

    _deferred: dict[str, Callable[[], Any]]

    @classmethod
    def defer(cls, deferred: dict[str, Callable[[], Any]], **fields: Any) -> Self:
        """An output with these fields, and functions that compute the others."""
        output = cls.__new__(cls)
        output.__dict__.update(fields, _deferred=deferred)
        return output

    if not TYPE_CHECKING:  # type checkers would accept every name

        def __getattr__(self, name: str) -> Any:
            """Python calls this for attributes that are not there yet."""
            compute = self.__dict__.get("_deferred", {}).get(name)
            if compute is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            value = self.__dict__[name] = compute()
            return value

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which get all fields."""
        for name in self.__dict__.get("_deferred", ()):
            getattr(self, name)
        return {name: value for name, value in self.__dict__.items() if name != "_deferred"}


# A field that may be deferred has no default on its class, where it would be found instead.
def _unset() -> None:
    return None


@dataclass
class CompletionOutput(DeferredFields):
    """One answer, complete or so far."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = field(default_factory=_unset)  # one per token
    # stop, length, abort, or error: stop_reason says what failed.
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    spec: SpecCounts | None = None  # of this answer; None if the engine does not speculate
    num_decode_steps: int = 0  # steps after the one that ended the prompt

    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestTimes:
    """Seconds on the clock of `time.perf_counter`, except for `arrival_time`."""

    arrival: float
    first_token: float | None = None
    finished: float | None = None
    last_token: float | None = None
    arrival_time: float = 0.0  # on the clock of `time.time`
    admitted: float | None = None  # the scheduler gave it a slot; before that it waited


@dataclass(frozen=True)
class RequestMetrics:
    """A request's times under vLLM's names.

    Names that end in `_time` are on the clock of `time.time`, those in `_ts` on the clock of
    `time.perf_counter`. None: it has not happened yet.
    """

    arrival_time: float
    first_token_time: float | None
    last_token_time: float | None
    finished_time: float | None
    queued_ts: float
    first_token_ts: float | None
    last_token_ts: float | None
    first_token_latency: float | None  # seconds
    num_generation_tokens: int  # of all answers


@dataclass
class RequestOutput(DeferredFields):
    """A request's answers, complete or so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    # One per prompt token; None for the first, which nothing predicts.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = field(default_factory=_unset)
    num_cached_tokens: int | None = None
    times: RequestTimes = field(default_factory=lambda: RequestTimes(0.0))

    @property
    def metrics(self) -> RequestMetrics:
        """The request's times under vLLM's names."""
        times = self.times

        def on_wall_clock(moment: float | None) -> float | None:
            return None if moment is None else times.arrival_time + moment - times.arrival

        return RequestMetrics(
            arrival_time=times.arrival_time,
            first_token_time=on_wall_clock(times.first_token),
            last_token_time=on_wall_clock(times.last_token),
            finished_time=on_wall_clock(times.finished),
            queued_ts=times.arrival,
            first_token_ts=times.first_token,
            last_token_ts=times.last_token,
            first_token_latency=(
                None if times.first_token is None else times.first_token - times.arrival
            ),
            num_generation_tokens=sum(len(answer.token_ids) for answer in self.outputs),
        )
