"""Engines and references."""

from pathlib import Path
from typing import Any

import pytest

from stoop import LLM
from stoop.worker.device import prepare_device
from support.checkpoints import CheckpointStore
from support.engines import MakeEngine, make_llm
from support.huggingface import ReferenceStore


@pytest.fixture(scope="session")
def references(checkpoints: CheckpointStore) -> ReferenceStore:
    return ReferenceStore(checkpoints)


@pytest.fixture(scope="session")
def make_engine(checkpoints: CheckpointStore) -> MakeEngine:
    """A new engine, so that its counters start at zero; a tiny one takes 20 ms."""

    def make(model: str | Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> LLM:
        folder = model if isinstance(model, Path) else checkpoints.get(model, seed, dtype)
        return make_llm(folder, dtype=dtype, **options)

    return make


@pytest.fixture(scope="session", autouse=True)
def _safe_half_precision() -> None:
    """transformers runs half precision too, before any engine has made it safe."""
    prepare_device("cpu", "bfloat16")
