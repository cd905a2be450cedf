"""Fixtures for every kind of test."""

import gc
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.register_assert_rewrite("support")  # asserts there explain themselves as those of tests do

# Without the families no GGUF file can be converted.
import stoop.models.registry  # noqa: E402, F401
import stoop.ops.native.build as native_build  # noqa: E402
from stoop.ops.native.library import Native, find_native, limit_threads, native_problem  # noqa: E402
from support.checkpoints import CheckpointStore  # noqa: E402
from support.drafters import DrafterStore  # noqa: E402
from support.long_files import LONGEST_FILES  # noqa: E402

TESTS = Path(__file__).parent

# The compiled kernels stay in one place, whatever cache a test sets: they are compiled once.
_NATIVE_CACHE = native_build.cache_dir()
native_build.cache_dir = lambda: _NATIVE_CACHE

# A shell starts jobs in the background with Ctrl-C ignored, and tests of interrupts would wait
# forever. Processes that tests start begin with the default then.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # for fixtures of modules, too: see `_few_threads`
    config.option.loadscopereorder = False  # xdist would begin with the files of most tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers take whole files: begin with those that take longest, so that none is left to run
    alone at the end."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        ranks = {TESTS / name: rank for rank, name in enumerate(LONGEST_FILES)}
        items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


def pytest_collection_finish() -> None:
    """The garbage collector passes over what has been imported: to look through it took a fifth of
    the time of tests that make many engines."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _few_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread: those of a tiny model only wait for each other, longest on a busy machine.

    The real model has all of them, unless tests run side by side.
    """
    threads = torch.get_num_threads()
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    if request.node.get_closest_marker("model") is None or not alone:
        torch.set_num_threads(1)
    limit_threads(None)  # which an engine of an earlier test may have set
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def native() -> Native:
    """The CPU kernels; tests skip themselves where there is no C++ compiler."""
    found = find_native()
    if found is None:
        pytest.skip(f"no CPU kernels: {native_problem()}")
    return found


@pytest.fixture(autouse=True)
def _references(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations take their CPU kernels in tests that ask for `native`, and in no others, whatever
    ran before in the same process."""
    if "native" not in request.fixturenames:
        monkeypatch.setattr("stoop.ops.dispatch.loaded_native", lambda: None)


@pytest.fixture(autouse=True)
def _gradients() -> Iterator[None]:
    """On, as when a process begins, whatever earlier tests left behind."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        warnings.warn("an earlier test left gradients off", stacklevel=1)
    with torch.inference_mode(False):  # which turns gradients on
        yield


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    """Tiny checkpoints by (name, seed, dtype)."""
    return CheckpointStore(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def drafters(
    tmp_path_factory: pytest.TempPathFactory, checkpoints: CheckpointStore
) -> DrafterStore:
    """Drafters with their targets, by name."""
    return DrafterStore(tmp_path_factory.mktemp("drafters"), checkpoints)
