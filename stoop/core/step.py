"""What passes between the scheduler and the worker: a plan in, a result out."""

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


@dataclass(frozen=True)
class PlannedRow:
    """One request's share of a step."""

    request_id: str
    epoch: int
    slot: int
    num_tokens: int  # query tokens of this step
    num_computed: int  # tokens before them; an upper bound when steps are in flight
    samples: bool  # whether the last of them is the newest known token
    rules: TokenRules
    num_prompt_tokens: int

    @property
    def seq_len(self) -> int:
        return self.num_computed + self.num_tokens

    @property
    def decodes(self) -> bool:
        """One new token behind the prompt. A prompt's last token alone is not a decode."""
        return self.num_tokens == 1 and self.samples and self.num_computed >= self.num_prompt_tokens


@dataclass(frozen=True)
class StepPlan:
    index: int
    rows: list[PlannedRow]  # decodes (one token) lead
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


@dataclass(frozen=True)
class RowResult:
    request_id: str
    epoch: int
    token_ids: list[int]  # empty for a chunk that does not reach the prompt's end
    scores: list[TokenScores] = field(default_factory=list)  # one a token, if asked for
    prompt_scores: list[TokenScores] = field(default_factory=list)  # of this chunk, if asked for
    prompt_scores_start: int = 0  # the prompt token that the first of them scores


@dataclass(frozen=True)
class StepResult:
    index: int
    rows: list[RowResult]
