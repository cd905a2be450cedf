"""Fixtures for every kind of test."""

import pytest
from fakes import CheckpointStore


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    """Tiny checkpoints by (name, seed, dtype)."""
    return CheckpointStore(tmp_path_factory.mktemp("checkpoints"))
