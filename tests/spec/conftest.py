"""The traces that drafts are compared with."""

import functools
from collections.abc import Callable

import pytest

from support.drafters import DrafterStore, Trace, make_spec_llm, run


@pytest.fixture(scope="module")
def eager(drafters: DrafterStore) -> Callable[[str, int], Trace]:
    """Eager steps of the reference backend; `num_tokens` 0 for plain decoding."""

    @functools.lru_cache
    def trace(name: str, num_tokens: int) -> Trace:
        return run(make_spec_llm(drafters.get(name), num_tokens), num_tokens)

    return trace
