"""Fixtures for the tests of the tape."""

from collections.abc import Iterator

import pytest
from torch import Tensor

from stoop.graph.tape import TapeBackend
from support.tapes import ORIGINAL_READS


@pytest.fixture(autouse=True)
def _host_reads_are_whole() -> Iterator[None]:
    """Check that no test leaves `Tensor.tolist` refusing, which would break the others."""
    yield
    for name, original in ORIGINAL_READS.items():
        setattr(Tensor, name, original)


@pytest.fixture
def backend() -> TapeBackend:
    return TapeBackend()
