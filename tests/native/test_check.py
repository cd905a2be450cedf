"""`stoop check` on a model with packed weights."""

from pathlib import Path
from typing import Any

import pytest

from stoop.check import graphs
from stoop.check.graphs import run_checks
from support.drafters import write_random_head
from support.packed_models import Sizes, write_packable_gguf

SMALL = Sizes(num_layers=2)
pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STOOP_CACHE", str(tmp_path / "cache"))
    return write_packable_gguf(tmp_path / "model.gguf", sizes=SMALL)


def test_graphs_with_drafts_are_proved(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = write_random_head(tmp_path / "head", "eagle3", {"intermediate_size": 96})
    spec = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    engine: dict[str, Any] = {"device": "cpu", "weights": "packed", "speculative_config": spec}
    cases = list(run_checks(str(file), ("step",), ("native",), engine, lambda *_: None))
    assert [(case.backend, case.mode, case.failures) for case in cases] == [("native", "step", ())]
    assert cases[0].num_graphs == cases[0].num_used > 10


def test_native_is_checked_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    from stoop.config.schema import DeviceConfig

    device = DeviceConfig("cpu", "float32", "float32", "float32")
    assert "native" in graphs._usable_backends(device, [16])
    assert "native" not in graphs._usable_backends(device, [24])
    monkeypatch.setattr(graphs, "find_native", lambda: None)
    assert graphs._usable_backends(device, [16]) == ["reference", "hostplan"]
