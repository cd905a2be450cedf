"""A KV cache in fewer bits than computation: the same as rounding what goes into it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stoop import SamplingParams
from stoop.config.errors import ConfigError
from stoop.core.state import DTYPE_BYTES
from stoop.ops import rope
from stoop.ops.library import register
from support.checkpoints import CheckpointStore
from support.engines import generate_ids
from support.graph_workload import make_graph_llm, prompts

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def folder(checkpoints: CheckpointStore) -> Path:
    return checkpoints.get("llama3", dtype="float32")


@register("store_rounded(Tensor k, Tensor v, Tensor(a!) cache, Tensor slot_mapping) -> ()")
def store_rounded(k: Tensor, v: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    rounded = (x.to(torch.bfloat16).to(x.dtype) for x in (k, v))
    _store(*rounded, cache, slot_mapping)


_store = rope.store_kv


def make(folder: Path, **options: Any) -> Any:
    return make_graph_llm(folder, dtype="float32", **options)


@pytest.fixture(scope="module")
def rounded(folder: Path) -> list[list[int]]:
    """The slow twin: a cache of float32, with values rounded on their way into it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rope, "store_kv", store_rounded)
        return generate_ids(make(folder), prompts(), GREEDY)


@pytest.mark.parametrize("backend", ["reference", "hostplan"])
@pytest.mark.parametrize(
    ("mode", "spec"), [("none", None), ("piecewise", None), ("step", None), ("step", NGRAM)]
)
def test_answers_are_those_of_rounded_keys_and_values(
    folder: Path, rounded: list[list[int]], backend: str, mode: str, spec: Any
) -> None:
    llm = make(
        folder,
        kv_cache_dtype="bfloat16",
        attention_backend=backend,
        graph_mode=mode,
        speculative_config=spec,
        sanitize=mode != "none",
    )
    assert {cache.dtype for cache in llm.engine.runner.kv_caches} == {torch.bfloat16}
    assert generate_ids(llm, prompts(), GREEDY) == rounded


def test_the_cache_takes_half_the_memory(folder: Path) -> None:
    full, half = (make(folder, kv_cache_dtype=dtype) for dtype in ("auto", "bfloat16"))
    sizes = [llm.metrics()["kv_cache_bytes"] for llm in (full, half)]
    assert sizes[0] == 2 * sizes[1]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_wider_cache_than_computation_is_refused(folder: Path, dtype: str) -> None:
    asked = {"dtype": "bfloat16", "kv_cache_dtype": dtype}
    with pytest.raises(ConfigError, match=f"kv_cache_dtype={dtype} is wider than dtype=bfloat16"):
        make_graph_llm(folder, **asked)
    assert DTYPE_BYTES[dtype] > 2
