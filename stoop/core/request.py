"""A request on the host, from arrival to finish."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from stoop.config.errors import RequestError
from stoop.core.sampling_params import SamplingParams

OWN_WINDOW = 64  # steps of a request whose drafts count, roughly
OWN_LATER = 1 / 8  # of what is known, once drafts resume: its text may be another kind by then


class RequestStatus(Enum):
    WAITING = "waiting"  # also after a preemption
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class TokenRules:
    """Sampling options resolved against a model: token ids instead of text, and no defaults."""

    params: SamplingParams
    seed: int
    max_tokens: int  # before the limit of max_model_len
    num_drafts: int = 0  # at most, per step
    stop_ids: frozenset[int] = frozenset()  # end-of-text tokens (unless ignored) and the user's
    bad_words: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class PromptLimits:
    """How long a prompt may be. A front end and the scheduler both refuse longer ones here."""

    max_model_len: int
    kv_tokens: int  # tokens that the KV cache can hold
    at_model_limit: bool = False  # max_model_len cannot be raised

    def check(self, num_tokens: int) -> None:
        """Refuse a prompt of this length if it leaves no room for an answer."""
        if num_tokens >= self.max_model_len:
            longer = "" if self.at_model_limit else " or raise max_model_len"
            raise RequestError(
                f"the prompt has {num_tokens} tokens and max_model_len={self.max_model_len} leaves "
                f"no room for an answer: shorten the prompt{longer}"
            )
        if num_tokens >= self.kv_tokens:
            raise RequestError(
                f"the prompt has {num_tokens} tokens and the KV cache holds {self.kv_tokens}: "
                "shorten the prompt or raise kv_cache_memory"
            )


@dataclass(frozen=True, eq=False)
class PrefixNode:
    """One full block of a token sequence, linked to the blocks before it."""

    digest: bytes
    tokens: tuple[int, ...]
    parent: "PrefixNode | None"


@dataclass(eq=False, slots=True)  # slots: most of these fields are read in every step
class Request:
    """The scheduler's record of a request."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    rules: TokenRules
    priority: int = 0  # lower is served first
    grammar: object = None  # keeps the compiled grammar in memory while the request lives
    num_prompt_tokens: int = field(init=False)
    # Set by the scheduler.
    arrival: int = 0  # order of arrival
    token_limit: int = 0  # prompt and output tokens at which the request ends

    # Progress.
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)  # prompt, then output
    num_computed: int = 0  # tokens whose KV is written; an upper bound while steps are in flight
    num_cached: int | None = None  # prompt tokens that its first admission found in the cache
    admitted: float | None = None  # when it was first admitted, until a delta has told it
    num_preemptions: int = 0
    recomputed: bool = False  # it waits only so that the drafter gets the KV it lacks
    finish_reason: str | None = None  # stop, length, abort or error
    stop_reason: int | str | None = None  # the token that stopped it; of an error, a sentence

    # What it holds while running.
    slot: int = -1
    epoch: int = -1  # new at each admission, so that results of an earlier stay are recognised
    in_flight: deque[int] = field(default_factory=deque)  # per step: most tokens it can produce
    num_pending: int = 0  # their sum
    num_due: int = 0  # how many of these steps are sure to produce a token
    block_ids: list[int] = field(default_factory=list)
    num_offered_blocks: int = 0  # full blocks already given to the prefix cache
    num_drafter_kv: int | None = None  # tokens that the drafter has KV of; None: all
    num_drafted: float = 0.0  # steps that verified drafts of it, lately, in all stays
    num_first_accepted: float = 0.0  # of these, how many accepted the first one
    prefix_nodes: list[PrefixNode] = field(default_factory=list)  # of full blocks, in order

    def __post_init__(self) -> None:
        assert self.prompt_token_ids, "a request needs at least one prompt token"
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_expected(self) -> int:
        """Tokens known after the steps in flight, if each produces as many as it can."""
        return len(self.token_ids) + self.num_pending

    def launch(self, num_tokens: int, max_new_tokens: int) -> None:
        """Record a launched step that computes `num_tokens` tokens.

        It produces at most `max_new_tokens`, and at least one unless that is 0.
        """
        self.in_flight.append(max_new_tokens)
        self.num_pending += max_new_tokens
        self.num_due += max_new_tokens > 0
        self.num_computed += num_tokens

    @property
    def decodes(self) -> bool:
        """Whether its next step decodes; a prompt's last token alone does not."""
        remaining = self.num_expected - self.num_computed
        return remaining == 1 and self.num_computed >= self.num_prompt_tokens

    def may_draft(self, drafter_max_len: int) -> bool:
        """Whether drafts may follow its known tokens, if the drafter has KV of them."""
        if not self.rules.num_drafts:
            return False
        return len(self.token_ids) < min(self.token_limit - 1, drafter_max_len)

    def wants_drafts(self, drafter_max_len: int) -> bool:
        """Whether drafts may follow its known tokens, or might have until its last one."""
        if not self.rules.num_drafts or self.token_limit - self.num_prompt_tokens <= 2:
            return False
        return len(self.token_ids) < drafter_max_len

    def note_drafts(self, accepted: bool) -> None:
        """A step verified drafts of it. accepted: the first one"""
        self.num_drafted += 1
        self.num_first_accepted += accepted
        if self.num_drafted >= OWN_WINDOW:
            self.forget_drafts(0.5)

    def forget_drafts(self, factor: float) -> None:
        """Give what is known of its drafts less weight."""
        self.num_drafted *= factor
        self.num_first_accepted *= factor

    def lose_drafter_kv(self) -> bool:
        """The next step computes its token without the drafter. Returns whether that is new."""
        if self.num_drafter_kv is not None:
            return False
        # Steps in flight are followed by the drafter: at least one token each.
        known = len(self.token_ids) + self.num_due - 1
        self.num_drafter_kv = min(known, self.num_computed)
        return True

    def lacks_drafter_kv(self, num_tokens: int) -> bool:
        """Whether the drafter has KV of fewer than its first `num_tokens` tokens."""
        return self.num_drafter_kv is not None and self.num_drafter_kv < num_tokens

    def land(self) -> None:
        """Record that the result of the oldest step in flight has arrived."""
        max_new_tokens = self.in_flight.popleft()
        self.num_pending -= max_new_tokens
        self.num_due -= max_new_tokens > 0

    def leave_slot(self) -> None:
        """Keep nothing but the tokens; results of steps in flight are ignored from here on."""
        self.block_ids = []
        self.num_offered_blocks = 0
        self.num_drafter_kv = None
        self.num_computed = 0
        self.in_flight.clear()
        self.num_pending = self.num_due = 0
        self.slot = -1
        self.epoch = -1

    @property
    def ends_in_flight(self) -> bool:
        """Whether the steps in flight are sure to reach the request's token limit."""
        return len(self.token_ids) + self.num_due >= self.token_limit

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of the queues: priority, then arrival."""
        return (self.priority, self.arrival)
