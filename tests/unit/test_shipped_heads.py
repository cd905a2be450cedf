"""Heads that come with stoop: how one is put there, and that those that are there fit."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from stoop.checkpoint import shipped
from stoop.checkpoint.shipped import SHIPPED, acceptance_lengths, shipped_head

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import ship_head


def row(
    k: int, length: float, temperature: float = 0, questions: str = "a.jsonl"
) -> dict[str, Any]:
    rates = [(length - 1) / k] * k
    return {
        **{"questions": questions, "temperature": temperature, "k": k},
        **{"mean_acceptance_length": length, "acceptance_rates": rates},
    }


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A head as `train-draft` leaves it, and what was measured."""
    head = tmp_path / "head"
    head.mkdir()
    (head / "model.safetensors").write_bytes(b"weights")
    (head / "config.json").write_text("{}")
    (head / "README.md").write_text("# A head\n")
    return tmp_path


def measure(folder: Path, rows: list[dict[str, Any]]) -> Path:
    record = {
        **{"dtype": "bfloat16", "device": "a GPU", "max_tokens": 256, "rows": rows},
        "speculative_config": {"draft_sample_method": "coupled"},
    }
    path = folder / "acceptance.json"
    path.write_text(json.dumps(record))
    return path


def test_a_head_is_shipped(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(k, 1 + k / 4, questions=name) for name in ("a", "b") for k in (1, 2, 3, 4)]
    rows += [row(2, 2.5, questions="c"), row(1, 9.0, temperature=1)]
    folder = ship_head.ship(made / "head", made / "heads", "small", [measure(made, rows)])
    monkeypatch.setitem(shipped.SHIPPED, "small", made / "heads" / "small")
    assert shipped_head("small") == folder
    assert acceptance_lengths(folder) == [
        1.25,
        pytest.approx((1.5 + 1.5 + 2.5) / 3, abs=1e-3),
        1.75,
    ]
    card = (folder / "README.md").read_text()
    assert card.startswith("# A head") and "| c | 0 | 2 | 2.50 | 0.75 0.75 |" in card


def test_what_is_not_measured_is_not_shipped(made: Path) -> None:
    with pytest.raises(SystemExit, match="K = 2, 3 are missing"):
        ship_head.ship(made / "head", made / "heads", "small", [measure(made, [row(1, 1.5)])])
    (made / "head" / "model.safetensors").write_bytes(bytes(ship_head.MAX_BYTES + 1))
    rows = [row(k, 1.5) for k in (1, 2, 3)]
    with pytest.raises(SystemExit, match="larger than 25 MB"):
        ship_head.ship(made / "head", made / "heads", "small", [measure(made, rows)])


@pytest.mark.parametrize("name", [name for name in SHIPPED if SHIPPED[name].exists()])
def test_what_is_there_is_whole(name: str) -> None:
    folder = shipped_head(name)
    assert folder is not None, "files are missing"
    assert (folder / "model.safetensors").stat().st_size <= ship_head.MAX_BYTES
    assert (folder / "README.md").is_file()
    lengths = acceptance_lengths(folder)
    assert len(lengths) == 3 and 1 < lengths[0] < lengths[1] < lengths[2] < 4
