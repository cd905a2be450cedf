"""The script that times the host alone."""

import pytest

from bench_host import PARTS, measure


@pytest.mark.parametrize("k", [0, 2])
def test_every_part_is_timed_and_answers_end(k: int) -> None:
    record = measure(load=3, k=k, prompt_len=20, output_len=7, rounds=1)
    assert {f"{name}_us" for name in PARTS} < set(record)
    parts = sum(record[f"{name}_us"] for name in PARTS)
    assert record["step_us"] > 0 and record["prompts_ms"] > 0 and parts > 0
