"""Tests of the CPU kernels skip themselves where there is no C++ compiler."""

import pytest

from stoop.ops.native.library import Native, find_native, native_problem


@pytest.fixture(scope="session")
def native() -> Native:
    found = find_native()
    if found is None:
        pytest.skip(f"no CPU kernels: {native_problem()}")
    return found
