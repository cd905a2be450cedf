"""What crosses the seam between a front end and an engine core.

Plain data only: numbers, strings and lists of them. The two sides may run in different processes,
and the front end may be several tasks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stoop.core.request import TokenRules
from stoop.core.step import TokenScores


@dataclass(frozen=True)
class EngineRequest:
    """One answer to generate, in token ids."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    rules: TokenRules
    priority: int = 0  # lower is served first


@dataclass(slots=True)  # one per request and step
class Delta:
    """What one step added to a request.

    The last delta of a request has a `finish_reason`. A step that computes part of a prompt adds no
    tokens, but may add prompt scores.
    """

    request_id: str
    token_ids: list[int]  # new ones; the last may be the one that ended the request
    finish_reason: str | None = None  # stop, length, abort or error
    stop_reason: int | str | None = None  # the token that stopped it; of an error, a sentence
    num_cached: int | None = None  # prompt tokens found in the prefix cache; None: not started
    num_drafts: int = 0  # drafts that this step verified
    num_accepted: int = 0  # and how many of them it accepted
    scores: Sequence[TokenScores] = ()  # one per new token, if asked for
    prompt_scores: Sequence[TokenScores] = ()  # if asked for
    prompt_scores_start: int = 0  # index of the prompt token that the first of them scores
    admitted: float | None = None  # `time.perf_counter` of the admission; in the first delta only
