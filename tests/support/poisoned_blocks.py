"""KV blocks that hold NaN until the engine writes or zeroes them."""

import math

import torch

from stoop import LLM
from stoop.core.step import StepPlan
from stoop.worker.new_blocks import fill_blocks
from stoop.worker.output import LaunchedStep


def poison_before_each_step(llm: LLM) -> list[int]:
    """NaN in all blocks that no request holds and the prefix cache cannot find, and in those that
    the plan hands out; returns the number of shared blocks of each admission, as they come."""
    runner, pool, size = llm.engine.runner, llm.engine.scheduler.pool, llm.config.cache.block_size
    launch, hits = runner.launch, list[int]()

    def poisoned(plan: StepPlan) -> LaunchedStep:
        shared = {each.slot: each.num_computed // size for each in plan.admissions}
        hits.extend(shared.values())
        dirty = [b for b in range(1, pool.num_blocks) if not pool.refs(b) and b not in pool._cached]
        for append in plan.block_appends:
            dirty += append.block_ids[shared.get(append.slot, 0) :]
        blocks = torch.tensor(dirty, dtype=torch.int64, device=runner.device)
        fill_blocks(runner.kv_caches, blocks, math.nan)
        return launch(plan)

    runner.launch = poisoned  # type: ignore[method-assign]
    return hits
