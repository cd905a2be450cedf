"""A request on the host, from arrival to finish."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from stoop.core.outputs import SpecCounts
from stoop.core.sampling_params import SamplingParams


class RequestStatus(Enum):
    WAITING = "waiting"  # also after a preemption
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class TokenRules:
    """Sampling options resolved against a model: everything in token ids, nothing left open."""

    params: SamplingParams
    seed: int
    max_tokens: int
    num_drafts: int = 0  # at most, of a step
    stop_ids: frozenset[int] = frozenset()  # end-of-text tokens (unless ignored) and the user's
    bad_words: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, eq=False)
class PrefixNode:
    """One full block of a text, and all that comes before it."""

    digest: bytes
    tokens: tuple[int, ...]
    parent: "PrefixNode | None"


@dataclass(eq=False, slots=True)  # all of it is looked at in every step
class Request:
    request_id: str
    prompt_token_ids: tuple[int, ...]
    rules: TokenRules
    priority: int = 0  # lower is served first
    num_prompt_tokens: int = field(init=False)
    # Given by the scheduler.
    arrival: int = 0  # order of arrival
    token_limit: int = 0  # known tokens at which it ends at the latest

    # Progress.
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)  # prompt, then output
    num_computed: int = 0  # tokens whose KV is written; an upper bound while steps are in flight
    num_cached: int | None = None  # prompt tokens that the prefix cache spared at first
    num_preemptions: int = 0
    finish_reason: str | None = None  # stop, length or abort
    stop_reason: int | str | None = None  # the token or the string that stopped it
    spec: SpecCounts = field(default_factory=SpecCounts)  # how its drafts fared

    # What it holds while running.
    slot: int = -1
    epoch: int = -1  # of its stay in a slot, so that a late result is told from a live one
    in_flight: deque[int] = field(default_factory=deque)  # steps: tokens that each may yield
    num_pending: int = 0  # their sum
    num_due: int = 0  # how many of them must yield a token
    block_ids: list[int] = field(default_factory=list)
    num_offered_blocks: int = 0  # full blocks that the prefix cache knows of
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
        """Known tokens once every step in flight has yielded all that it may."""
        return len(self.token_ids) + self.num_pending

    def launch(self, num_tokens: int, num_yielded: int) -> None:
        """A step computes `num_tokens` of it and may yield so many, at least one unless none."""
        self.in_flight.append(num_yielded)
        self.num_pending += num_yielded
        self.num_due += num_yielded > 0
        self.num_computed += num_tokens

    def land(self) -> None:
        """The oldest step's result is here."""
        num_yielded = self.in_flight.popleft()
        self.num_pending -= num_yielded
        self.num_due -= num_yielded > 0

    def leave_slot(self) -> None:
        """Keep the tokens alone. Results of steps in flight will be late."""
        self.block_ids = []
        self.num_offered_blocks = 0
        self.num_computed = 0
        self.in_flight.clear()
        self.num_pending = self.num_due = 0
        self.slot = -1
        self.epoch = -1

    @property
    def ends_in_flight(self) -> bool:
        """Whether the steps under way are sure to reach the request's limit."""
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
        """Who goes first: priority, then arrival."""
        return (self.priority, self.arrival)
