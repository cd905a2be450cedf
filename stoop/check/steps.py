"""Counts what the host does for each step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from stoop.check.mutants.base import Patch
from stoop.core.step import StepPlan
from stoop.llm import LLM
from stoop.model_state.base import ModelState
from stoop.worker.output import LaunchedStep


@dataclass
class StepWork:
    """The host's work for one step. Under the sanitizer, its eager twin is counted too."""

    target_builds: int = 0  # of the target's attention metadata: one serves its pass and prefill
    draft_builds: int = 0  # of the metadata of draft decodes
    build_seconds: float = 0.0  # of the host's thread, for all of these builds
    seconds: float = 0.0  # on a GPU the device may still be at work


@contextmanager
def watch_steps(llm: LLM) -> Iterator[list[StepWork]]:
    """Yield a list that grows by one entry for each step."""
    runner = llm.engine.runner
    steps: list[StepWork] = []
    launch = runner.launch

    def timed(plan: StepPlan) -> LaunchedStep:
        steps.append(StepWork())
        started = time.perf_counter()
        launched = launch(plan)
        steps[-1].seconds = time.perf_counter() - started
        return launched

    def count(state: ModelState, name: str) -> None:
        prepare = state.prepare_attn

        def counted(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            metadata = prepare(*args, **kwargs)
            if steps:
                setattr(steps[-1], name, getattr(steps[-1], name) + 1)
                steps[-1].build_seconds += time.thread_time() - started
            return metadata

        patch.setattr(state, "prepare_attn", counted)

    with Patch() as patch:
        patch.setattr(runner, "launch", timed)
        count(runner.target.model_state, "target_builds")
        if runner.config.spec is not None:
            count(runner.draft_state, "draft_builds")
        yield steps
