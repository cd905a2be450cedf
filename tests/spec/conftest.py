"""Drafters and their targets."""

import pytest

from support.checkpoints import CheckpointStore
from support.drafters import DrafterStore


@pytest.fixture(scope="session")
def drafters(
    tmp_path_factory: pytest.TempPathFactory, checkpoints: CheckpointStore
) -> DrafterStore:
    return DrafterStore(tmp_path_factory.mktemp("drafters"), checkpoints)
