"""Kernel tests run in two ways: compiled for a GPU that is not there, or interpreted on a CPU.

Triton decides once, when it is imported, which of the two: `make test` runs pytest a second time,
with TRITON_INTERPRET=1, for the interpreted ones.
"""

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        interpreted = item.get_closest_marker("interpreted") is not None
        if interpreted and not INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="runs under TRITON_INTERPRET=1"))


@pytest.fixture(autouse=True)
def _references_are_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations would choose kernels under the interpreter, and be compared with themselves."""
    pytest.importorskip("triton")
    monkeypatch.setattr("stoop.ops.kernels.choice.interpreted", lambda: False)
