"""What steps take, measured when an engine starts."""

import pytest
import torch

from stoop.worker import profiling


@pytest.mark.parametrize(("device", "waited_for"), [("cuda:1", "cuda:1"), ("cpu", None)])
def test_times_wait_for_the_engines_own_device(
    monkeypatch: pytest.MonkeyPatch, device: str, waited_for: str | None
) -> None:
    """A CPU engine leaves GPUs alone: to wait for one would create a context on it."""
    waits: list[str] = []
    runs: list[None] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waits.append(str(device)))
    assert profiling._time(lambda: runs.append(None), torch.device(device)) >= 0
    assert len(runs) == 1 + profiling.TIMED_RUNS
    assert waits == ([waited_for] * 2 if waited_for else [])
