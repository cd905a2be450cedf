"""Hybrids on a CUDA device: every graph replay equals its eager twin, states too."""

from typing import Any

import pytest
import torch

from stoop.check.graphs import TINY, TINY_CONFIGS, run_checks, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HYBRIDS = [name for name in TINY_CONFIGS if name != TINY]


@pytest.mark.parametrize("method", ["eagle3", "ngram"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_kernels_in_graphs_equal_eager_under_the_sanitizer(name: str, method: str) -> None:
    spec = {"method": method, "num_speculative_tokens": 3}
    if method == "eagle3":
        spec["model"] = "tiny"
    engine: dict[str, Any] = {"device": "cuda", "speculative_config": spec}
    modes = ("piecewise", "full", "step")
    with tiny_model(name, engine) as (folder, options):
        cases = list(run_checks(folder, modes, ("triton",), options, lambda *_: None))
    assert [failure for case in cases for failure in case.failures] == []
    assert all(case.num_used == case.num_graphs > 0 for case in cases)
