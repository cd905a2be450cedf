"""Engines and references."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import CheckpointStore

from parity.reference import HuggingFace
from stoop import LLM
from stoop.worker.device import prepare_device

MakeEngine = Callable[..., LLM]


class ReferenceStore:
    """Hugging Face models, each loaded once, with their remembered answers."""

    def __init__(self, checkpoints: CheckpointStore) -> None:
        self.checkpoints = checkpoints
        self._models: dict[tuple[str, int, str], HuggingFace] = {}

    def get(self, name: str, seed: int = 0, dtype: str = "float32") -> HuggingFace:
        key = (name, seed, dtype)
        if key not in self._models:
            self._models[key] = HuggingFace(self.checkpoints.get(*key), dtype)
        return self._models[key]

    def exact(self, name: str, seed: int = 0, dtype: str = "float64") -> HuggingFace:
        """The checkpoint of this dtype, computed in float64 throughout."""
        key = (name, seed, f"{dtype} exact")
        if key not in self._models:
            self._models[key] = HuggingFace.exact(self.checkpoints.get(name, seed, dtype))
        return self._models[key]


@pytest.fixture(scope="session")
def references(checkpoints: CheckpointStore) -> ReferenceStore:
    return ReferenceStore(checkpoints)


@pytest.fixture(scope="session")
def make_engine(checkpoints: CheckpointStore) -> MakeEngine:
    """A new engine, so that its counters start at zero; a tiny one takes 20 ms."""

    def make(model: str | Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> LLM:
        folder = model if isinstance(model, Path) else checkpoints.get(model, seed, dtype)
        # Room for ten thousand tokens and more; the default is gigabytes, made for real models.
        options.setdefault("kv_cache_memory", "16MiB")
        return LLM(str(folder), device="cpu", dtype=dtype, skip_tokenizer_init=True, **options)

    return make


@pytest.fixture(scope="session", autouse=True)
def _safe_half_precision() -> None:
    """transformers runs half precision too, before any engine has made it safe."""
    prepare_device("cpu", "bfloat16")
