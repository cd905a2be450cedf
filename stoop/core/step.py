"""What passes between the scheduler and the worker: a plan in, a result out."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from stoop.core.request import TokenRules


@dataclass(frozen=True)
class Admission:
    """A request enters a slot, whose whole device state is written anew."""

    slot: int
    token_ids: list[int]  # all known tokens, generated ones too after a preemption
    num_prompt_tokens: int
    num_computed: int  # tokens found in the prefix cache
    rules: TokenRules


@dataclass(frozen=True)
class BlockAppend:
    """Blocks `block_ids` follow the first `start` blocks of a slot."""

    slot: int
    start: int
    block_ids: list[int]


@dataclass(slots=True)  # made for every request in every step: freezing would cost
class PlannedRow:
    """One request's share of a step."""

    request_id: str
    epoch: int
    slot: int
    num_tokens: int  # query tokens of this step, for a decode with K places for drafts
    num_computed: int  # tokens before them; an upper bound when steps are in flight
    seq_len: int  # with them, as far as the model's limit allows; an upper bound
    num_reserved: int  # tokens that its blocks can hold; a drafter writes behind seq_len
    samples: bool  # whether they reach the newest known token
    decodes: bool  # one new token behind the prompt; a prompt's last token alone is not a decode
    rules: TokenRules
    num_prompt_tokens: int


@dataclass(frozen=True)
class StepPlan:
    index: int
    rows: list[PlannedRow]  # decodes lead
    admissions: list[Admission] = field(default_factory=list)
    block_appends: list[BlockAppend] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities at one position: the token itself first, then the best ones."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the token itself, 1 is best


@dataclass(slots=True)
class RowResult:
    request_id: str
    epoch: int
    token_ids: list[int]  # empty for a chunk that does not reach the prompt's end
    num_drafts: int = 0  # drafts that were verified; all but one of the tokens are such
    scores: Sequence[TokenScores] = ()  # one a token, if asked for
    prompt_scores: Sequence[TokenScores] = ()  # of this chunk, if asked for
    prompt_scores_start: int = 0  # the prompt token that the first of them scores


@dataclass(frozen=True)
class StepResult:
    index: int
    rows: list[RowResult]
