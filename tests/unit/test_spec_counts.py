"""How many drafts were accepted, where steps make different numbers of drafts."""

from types import SimpleNamespace

import pytest

from stoop.cli.acceptance import print_acceptance
from stoop.core.outputs import SpecCounts


def varied() -> SpecCounts:
    """Half of the steps make 3 drafts, the others 1; all are right but some at position 3."""
    counts = SpecCounts.of(4)
    for step in range(100):
        wanted = 3 if step % 2 else 1
        counts.add(wanted, min(wanted, 2 if step % 4 == 1 else 3))
    return counts


def test_rates_are_shares_of_the_drafts_at_a_position() -> None:
    counts = varied()
    assert counts.num_draft_tokens_per_pos == [100, 50, 50, 0]
    assert counts.num_accepted_tokens_per_pos == [100, 50, 25, 0]
    assert counts.acceptance_rates == [1.0, 1.0, 0.5, 0.0]
    assert counts.mean_acceptance_length == 1 + 175 / 100
    assert sum(counts.num_draft_tokens_per_pos) == counts.num_draft_tokens
    assert counts.as_metrics()["spec_decode_num_draft_tokens_per_pos"] == [100, 50, 50, 0]


def test_copies_and_sums_keep_all_counts() -> None:
    counts = varied()
    copy = counts.copy()
    counts.add(4, 4)
    assert copy == varied() != counts
    answers = [SimpleNamespace(spec=varied()), SimpleNamespace(spec=None)]
    total = SpecCounts.sum([SimpleNamespace(outputs=answers)] * 2, 3)  # type: ignore[list-item]
    assert total.num_draft_tokens_per_pos == [200, 100, 100]
    assert total.acceptance_rates == [1.0, 1.0, 0.5]


def test_the_table_has_no_rate_where_no_drafts_were_made(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_acceptance(varied())
    (row,) = [line for line in capsys.readouterr().err.splitlines() if "2.75" in line]
    assert [cell.strip() for cell in row.split("│")[2:-1]] == ["100%", "100%", "50%", "-", "2.75"]
