"""What the scheduler and the worker exchange: a plan in, a result out."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from stoop.core.request import TokenRules


@dataclass(frozen=True)
class Admission:
    """A request enters a slot; all device state of the slot is rewritten."""

    slot: int
    token_ids: list[int]  # the prompt, and after a preemption the output so far
    num_prompt_tokens: int
    num_computed: int  # tokens found in the prefix cache
    rules: TokenRules
    token_limit: int  # prompt and output tokens at which the request ends


@dataclass(frozen=True)
class BlockAppend:
    """Blocks `block_ids` follow the first `start` blocks of a slot."""

    slot: int
    start: int
    block_ids: list[int]


@dataclass(slots=True)  # one per request and step: a frozen dataclass is slower to construct
class PlannedRow:
    """One request's part of a step."""

    request_id: str
    epoch: int
    slot: int
    num_tokens: int  # query tokens in this step; a decode's include places for K drafts
    num_computed: int  # tokens before them; an upper bound when steps are in flight
    seq_len: int  # tokens up to the end of the query, at most max_model_len; an upper bound
    num_reserved: int  # tokens that its blocks can hold; a drafter writes after seq_len
    samples: bool  # whether the query reaches the newest known token
    decodes: bool  # one new token after the prompt; a prompt's last token alone is not a decode
    rules: TokenRules
    num_prompt_tokens: int


@dataclass(frozen=True)
class StateCopy:
    """A slot's recurrent state is copied to a snapshot, or back."""

    slot: int
    snapshot: int


@dataclass(frozen=True)
class EndedCopy(StateCopy):
    """To a snapshot, from a slot whose request has ended."""

    pending: int  # logged tokens that count: those up to the end of a block


@dataclass(frozen=True)
class StateCopies:
    """The copies of recurrent state in a step, in this order."""

    ended: list[EndedCopy] = field(default_factory=list)  # before the slots get other requests
    restores: list[StateCopy] = field(default_factory=list)  # before the phases
    saves: list[StateCopy] = field(default_factory=list)  # after the phases


@dataclass(frozen=True)
class StepPlan:
    """One step: its rows, and the changes to slots that come first."""

    index: int
    rows: list[PlannedRow]  # decodes first
    num_drafts: int = 0  # drafts that it makes
    no_drafts: list[int] = field(default_factory=list)  # slots that get none from now on
    admissions: list[Admission] = field(default_factory=list)
    block_appends: list[BlockAppend] = field(default_factory=list)
    # Blocks that requests get in this step, less cached prefixes. Empty if none must be zeroed.
    blocks_to_zero: list[int] = field(default_factory=list)
    copies: StateCopies | None = None
    # Whether all rows but their progress are those of the plan before.
    same_rows: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities at one position: the token itself first, then the most likely tokens."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the token itself, 1 is best


@dataclass(slots=True)
class RowResult:
    """What a step found for one row."""

    request_id: str
    epoch: int
    token_ids: list[int]  # empty for a chunk that does not reach the prompt's end
    num_drafts: int = 0  # drafts that were verified; all tokens but the last are accepted drafts
    scores: Sequence[TokenScores] = ()  # one per token, if asked for
    prompt_scores: Sequence[TokenScores] = ()  # of this chunk, if asked for
    prompt_scores_start: int = 0  # index of the prompt token that the first of them scores
    error: str | None = None  # why the request cannot go on after these tokens
    failed: bool = False  # the target has no token after these, all of them accepted drafts


@dataclass(frozen=True)
class StepResult:
    """The results of a step, one per row of its plan."""

    index: int
    rows: list[RowResult]
