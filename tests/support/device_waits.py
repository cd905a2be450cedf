"""Checks that nothing in a step makes the host wait."""

from typing import Any

import torch

from stoop import LLM
from stoop.graph.descriptor import RunMode


def forbid_waits(llm: LLM, *, decodes_only: bool = False) -> list[RunMode]:
    """Make every wait inside a step's phases an error; returns a list that collects the modes of
    these steps."""
    runner, seen = llm.engine.runner, []
    run = runner.run

    def strict(step: Any) -> Any:
        if decodes_only and step.descriptor.query_len is None:
            return run(step)
        seen.append(step.descriptor.mode)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner.run = strict  # type: ignore[method-assign]
    return seen
