"""A small table of draft acceptance."""

import sys
from collections.abc import Iterable

from stoop.core.outputs import DecodeSteps, RequestOutput, SpecCounts


def print_acceptance(outputs: Iterable[RequestOutput], num_positions: int) -> None:
    """Print the acceptance table to standard error; without a drafter, print nothing.

    num_positions: the most drafts of a step
    """
    if not num_positions:
        return
    outputs = list(outputs)
    counts, steps = SpecCounts.sum(outputs, num_positions), DecodeSteps.of(outputs)
    if not counts.num_drafts:
        print(f"no drafts were made in {steps.num_steps} steps", file=sys.stderr)
        return
    from rich.console import Console
    from rich.table import Table

    rates = counts.acceptance_rates
    table = Table(title="accepted drafts")
    table.add_column("position")
    for position in range(len(rates)):
        table.add_column(str(position + 1), justify="right")
    for column in ("tokens\nper step", "steps with\ndrafts", "tokens per\nsuch step"):
        table.add_column(column, justify="right")
    made = counts.num_draft_tokens_per_pos
    cells = [f"{rate:.0%}" if count else "-" for rate, count in zip(rates, made, strict=True)]
    table.add_row(
        "accepted",
        *cells,
        f"{steps.tokens_per_step or 1:.2f}",
        f"{steps.share_with_drafts or 0:.0%}",
        f"{counts.mean_acceptance_length:.2f}",
    )
    Console(stderr=True, file=sys.stderr).print(table)
