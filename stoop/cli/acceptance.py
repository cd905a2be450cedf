"""A small table of draft acceptance."""

import sys

from stoop.core.outputs import SpecCounts


def print_acceptance(counts: SpecCounts) -> None:
    """Print the acceptance table to standard error; without a drafter, print nothing."""
    if not counts.num_accepted_tokens_per_pos:
        return
    if not counts.num_drafts:
        print("no drafts were made", file=sys.stderr)
        return
    from rich.console import Console
    from rich.table import Table

    rates = counts.acceptance_rates
    table = Table(title="accepted drafts")
    table.add_column("position")
    for position in range(len(rates)):
        table.add_column(str(position + 1), justify="right")
    table.add_column("tokens per step", justify="right")
    made = counts.num_draft_tokens_per_pos
    cells = [f"{rate:.0%}" if count else "-" for rate, count in zip(rates, made, strict=True)]
    table.add_row("accepted", *cells, f"{counts.mean_acceptance_length:.2f}")
    Console(stderr=True, file=sys.stderr).print(table)
