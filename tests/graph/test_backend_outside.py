"""An attention backend outside of stoop, which registers itself, answers as those inside do."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import stoop
from stoop.attention import registry
from stoop.attention.hostplan import HostPlanBackend
from stoop.attention.traits import HOSTPLAN
from stoop.config import backends
from stoop.config.backends import BackendTraits
from stoop.config.errors import ConfigError
from support.checkpoints import CheckpointStore
from support.graph_workload import make_graph_llm, run


class MyBackend(HostPlanBackend):
    name = "mine"


TRAITS = BackendTraits("mine", devices=("cpu",), head_sizes=(16, 64))


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """For these tests only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "BACKENDS", dict(registry.BACKENDS))
        patch.setattr(backends, "_TRAITS", dict(backends._TRAITS))
        stoop.register_backend(TRAITS, MyBackend)
        yield


@pytest.fixture(scope="module")
def folder(checkpoints: CheckpointStore) -> Path:
    return checkpoints.get("llama3", dtype="float64")


@pytest.mark.parametrize("mode", ["piecewise", "step"])
def test_it_serves_a_model(folder: Path, mode: str) -> None:
    llm = make_graph_llm(folder, attention_backend="mine", graph_mode=mode, sanitize=True)
    assert isinstance(llm.engine.runner.target.model_state.backend, MyBackend)
    assert run(llm).token_ids == run(make_graph_llm(folder)).token_ids


@pytest.mark.parametrize("name", ["mine", "hostplan", "auto"])
def test_a_name_is_registered_once(name: str) -> None:
    before = dict(registry.BACKENDS)
    with pytest.raises(ConfigError, match=f"backend named '{name}' already exists"):
        stoop.register_backend(BackendTraits(name), MyBackend)
    assert before == registry.BACKENDS


def test_an_unknown_name_is_told_of_registered_ones(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"hostplan.*mine"):
        make_graph_llm(folder, attention_backend="theirs")


def test_it_is_chosen_by_what_it_declares() -> None:
    assert "mine" in backends.serving_backends("cpu", "float32", [64])
    assert "mine" not in backends.serving_backends("cpu", "float32", [64], "bfloat16")
    assert "mine" not in backends.serving_backends("cpu", "float32", [32])
    assert "mine" not in backends.serving_backends("cuda", "float32", [64])


def test_ours_are_declared_without_importing_them() -> None:
    assert backends.backend_traits("hostplan") is HOSTPLAN
