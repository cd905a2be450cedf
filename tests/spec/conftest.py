"""Drafters and their targets."""

import pytest
from fakes import CheckpointStore

from spec.drafters import DrafterStore


@pytest.fixture(scope="session")
def drafters(
    tmp_path_factory: pytest.TempPathFactory, checkpoints: CheckpointStore
) -> DrafterStore:
    return DrafterStore(tmp_path_factory.mktemp("drafters"), checkpoints)
