"""A request on the host, from arrival to finish."""

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


@dataclass(eq=False)
class Request:
    request_id: str
    prompt_token_ids: tuple[int, ...]
    rules: TokenRules
    priority: int = 0  # lower is served first
    arrival: int = 0  # order of arrival, given by the scheduler

    # Progress.
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)  # prompt, then output
    num_computed: int = 0  # tokens whose KV is written; an upper bound while a step is in flight
    num_cached: int | None = None  # prompt tokens that the prefix cache spared at first
    num_preemptions: int = 0
    finish_reason: str | None = None  # stop, length or abort
    stop_reason: int | str | None = None  # the token or the string that stopped it
    spec: SpecCounts = field(default_factory=SpecCounts)  # how its drafts fared

    # What it holds while running.
    slot: int = -1
    epoch: int = -1  # of its stay in a slot, so that a late result is told from a live one
    block_ids: list[int] = field(default_factory=list)
    num_offered_blocks: int = 0  # full blocks that the prefix cache knows of
    prefix_nodes: list[PrefixNode] = field(default_factory=list)  # of full blocks, in order

    def __post_init__(self) -> None:
        assert self.prompt_token_ids, "a request needs at least one prompt token"
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: priority, then arrival."""
        return (self.priority, self.arrival)
