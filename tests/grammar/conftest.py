"""The model of these tests, and the drafter that is told its answers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stoop.config import speculation
from stoop.spec import registry
from support import grammars

pytest.importorskip("xgrammar")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return grammars.write_model(tmp_path_factory.mktemp("grammars") / "model")


@pytest.fixture(scope="session")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return grammars.write_head(tmp_path_factory.mktemp("grammars") / "head")


@pytest.fixture(autouse=True)
def _oracle() -> Iterator[None]:
    """Registered for these tests only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "SPECULATORS", dict(registry.SPECULATORS))
        patch.setattr(speculation, "_headless", list(speculation._headless))
        registry.register_drafter("oracle", grammars.Oracle)
        yield
