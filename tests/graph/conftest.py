"""Fixtures of the tape's tests."""

from collections.abc import Iterator

import pytest
from torch import Tensor

from stoop.graph.tape import TapeBackend
from support.tapes import ORIGINAL_READS


@pytest.fixture(autouse=True)
def _host_reads_are_whole() -> Iterator[None]:
    """A test that leaves `Tensor.tolist` refusing must not spoil the others."""
    yield
    for name, original in ORIGINAL_READS.items():
        setattr(Tensor, name, original)


@pytest.fixture
def backend() -> TapeBackend:
    return TapeBackend()
