"""`stoop bench spec`: heads that are always right and useless, with fixed and chosen numbers."""

import json
from collections.abc import Callable
from typing import Any

import pytest

ARGS = ["--k", "1,2", "--layers", "2", "--output-len", "13", "--repeat", "1", "--device", "cpu"]


def results(stoop: Callable[..., tuple[int, str, str]], mode: str) -> list[dict[str, Any]]:
    code, shown, told = stoop("bench", "spec", *ARGS, "--graph-mode", mode)
    assert code == 0, told
    assert ("up to 2" in shown) == (mode == "step")
    return json.loads(shown.splitlines()[-1])["results"]


@pytest.mark.parametrize("mode", ["step", "piecewise"])
def test_every_number_and_one_that_the_engine_chooses(
    stoop: Callable[..., tuple[int, str, str]], mode: str
) -> None:
    """In a mode in which the number cannot vary, only fixed ones."""
    found = results(stoop, mode)
    keys = [(each["drafter"], each["num_drafts"], each["adaptive"]) for each in found]
    chosen = [(2, True)] if mode == "step" else []
    numbers = [(1, False), (2, False), *chosen]
    assert keys == [("none", 0, False), *((h, *n) for h in ("right", "useless") for n in numbers)]
    for each in found:
        assert each["tokens_per_s"] > 0 and each["speedup"] > 0
        shares, most = each["steps_by_drafts"], str(each["num_drafts"])
        if each["adaptive"]:
            assert set(shares) <= {"0", "1", "2"}
            assert sum(shares.values()) == pytest.approx(1, abs=1e-4)
            assert each["num_drafts_not_made"] == 0 or shares.get(most, 0) < 1
        else:
            assert shares == {most: 1} and each["num_drafts_not_made"] == 0
    by_key = dict(zip(keys, found, strict=True))
    # The first token comes with the prompt; 12 more are whole steps.
    for most in (1, 2):
        assert by_key["right", most, False]["tokens_per_step"] == most + 1
    assert by_key["none", 0, False]["tokens_per_step"] == 1
    assert by_key["none", 0, False]["share_with_drafts"] == 0
