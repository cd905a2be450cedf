"""Requests, schedulers, and steps with a worker that always answers."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from stoop.config.schema import CacheConfig, ScheduleConfig
from stoop.core.request import Request, TokenRules
from stoop.core.sampling_params import SamplingParams
from stoop.core.step import RowResult, StepPlan, StepResult
from stoop.scheduler.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


def make_rules(
    max_tokens: int = 8,
    params: SamplingParams = GREEDY,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    num_drafts: int = 0,
) -> TokenRules:
    return TokenRules(
        params,
        seed,
        max_tokens,
        num_drafts=num_drafts,
        stop_ids=frozenset(stop_ids),
        bad_words=tuple(tuple(word) for word in bad_words),
    )


def make_request(
    request_id: str, prompt: Sequence[int], max_tokens: int = 8, priority: int = 0, **rules: Any
) -> Request:
    return Request(request_id, tuple(prompt), make_rules(max_tokens, **rules), priority)


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 64,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    chunked: bool = True,
    prefix_caching: bool = True,
    num_drafts: int = 0,
    drafter_has_kv: bool = False,
    drafter_max_len: int = sys.maxsize,
    zero_new_blocks: bool = False,
) -> Scheduler:
    config = ScheduleConfig(
        max_model_len,
        max_num_seqs,
        max_num_batched_tokens,
        chunked,
        num_drafts=num_drafts,
        drafter_has_kv=drafter_has_kv,
        drafter_max_len=drafter_max_len,
    )
    cache = CacheConfig(
        block_size=block_size,
        enable_prefix_caching=prefix_caching,
        zero_new_blocks=zero_new_blocks,
    )
    return Scheduler(config, cache, num_blocks)


def result_of(plan: StepPlan, token: int | Callable[[str], int] = 7) -> StepResult:
    """A worker's answer: `token` for every row that samples."""
    rows = []
    for row in plan.rows:
        value = token(row.request_id) if callable(token) else token
        rows.append(RowResult(row.request_id, row.epoch, [value] if row.samples else []))
    return StepResult(plan.index, rows)


def step(scheduler: Scheduler, token: int | Callable[[str], int] = 7) -> StepPlan:
    """One whole step with a worker that always answers."""
    plan = scheduler.schedule()
    scheduler.update(result_of(plan, token))
    return plan


def rows_of(plan: StepPlan) -> dict[str, tuple[int, int]]:
    """{request id: (tokens before, tokens of this step)}"""
    return {row.request_id: (row.num_computed, row.num_tokens) for row in plan.rows}


def two_that_outgrow_the_pool() -> tuple:
    """Six usable blocks of two tokens: each of two requests wants four in the end."""
    scheduler = make_scheduler(num_blocks=7, block_size=2, max_model_len=12, prefix_caching=False)
    first, second = make_request("first", [1, 2, 3]), make_request("second", [4, 5, 6])
    scheduler.add(first)
    scheduler.add(second)
    return scheduler, first, second
