"""Every graph mode answers as eager does: to the bit on the same buffers, and token for token."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stoop import LLM
from stoop.graph.descriptor import BatchExecutionDescriptor, RunMode
from support.checkpoints import CheckpointStore
from support.graph_workload import (
    FULL,
    GREEDY,
    NOISE,
    SETTINGS,
    Answers,
    make_graph_llm,
    prompts,
    run,
)

MODES = ("piecewise", "full", "full_decode_only", "full_and_piecewise", "step")
BACKENDS = ("reference", "hostplan")
MODELS = ("llama3", "qwen2-window")  # full attention; two windows in one model
EVERY = bool(os.environ.get("STOOP_TEST_ALL"))


def choose() -> Iterator[tuple[str, str, str]]:
    """Whole steps with every backend, other modes with one; models take turns."""
    if EVERY:
        yield from itertools.product(MODELS, MODES, BACKENDS)
        return
    for (m, mode), (b, backend) in itertools.product(enumerate(MODES), enumerate(BACKENDS)):
        if mode == "step" or m % 2 == b:
            yield MODELS[(m // 2 + b) % 2], mode, backend


@pytest.fixture(scope="module")
def folders(checkpoints: CheckpointStore) -> dict[str, Path]:
    return {name: checkpoints.get(name, dtype="float64") for name in MODELS}


@pytest.fixture(scope="module")
def eager(folders: dict[str, Path]) -> dict[str, Answers]:
    return {name: run(make_graph_llm(folder)) for name, folder in folders.items()}


def descriptors_used(llm: LLM) -> set[BatchExecutionDescriptor]:
    """The descriptors that the engine uses, filled while it runs."""
    used: set[BatchExecutionDescriptor] = set()

    def note(segment: str, descriptor: BatchExecutionDescriptor) -> None:
        if "C" in segment:
            used.add(descriptor)

    llm.engine.runner.executor.on_replay.append(note)
    return used


@pytest.mark.parametrize(("model", "mode", "backend"), list(choose()))
def test_replay_equals_eager(
    folders: dict[str, Path], eager: dict[str, Answers], model: str, mode: str, backend: str
) -> None:
    """The sanitizer compares each replay with its eager twin on the same padded buffers, bit for
    bit; tokens and scores are compared with unpadded eager steps."""
    llm = make_graph_llm(folders[model], graph_mode=mode, attention_backend=backend, sanitize=True)
    used = descriptors_used(llm)
    answers = run(llm)
    assert answers.token_ids == eager[model].token_ids
    for ours, theirs in zip(answers.logprobs, eager[model].logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-10)
    assert llm.metrics()["num_preemptions"] > 0
    assert len(used) >= 4, used


@pytest.mark.parametrize(
    ("mode", "backend"),
    itertools.product(("full", "step", "piecewise"), BACKENDS)
    if EVERY
    else [("full", "hostplan"), ("step", "reference"), ("piecewise", "hostplan")],
)
def test_every_live_size_below_every_descriptor(
    folders: dict[str, Path], mode: str, backend: str
) -> None:
    """Batches of 1 to 6 requests, the largest first, so that stale rows of a larger one remain."""
    folder = folders["llama3"]
    options = {"num_kv_blocks": 200, "sanitize": True, "attention_backend": backend}
    plain = make_graph_llm(folder, num_kv_blocks=200)
    llm = make_graph_llm(folder, graph_mode=mode, **options)
    used = descriptors_used(llm)
    for params in (GREEDY, NOISE, FULL) if mode == "step" else (GREEDY,):
        short = params.replace(max_tokens=10)
        for count in (6, 5, 4, 3, 2, 1):
            batch = prompts()[-count:]
            assert [o.outputs[0].token_ids for o in llm.generate(batch, short)] == [
                o.outputs[0].token_ids for o in plain.generate(batch, short)
            ]
    captured = set(llm.engine.runner.lane.descriptors)
    decode = {descriptor for descriptor in captured if descriptor.query_len is not None}
    assert decode <= used  # every size, and every kind of sampling
    if mode == "piecewise":
        assert {descriptor.mode for descriptor in used} == {RunMode.PIECEWISE}
    assert {d.num_tokens for d in used - decode} >= {16, 48}


def test_a_prompts_last_token_alone_is_no_decode(folders: dict[str, Path]) -> None:
    """A batch of one-token prompts has a decode's shape and must not take its graph."""
    llm = make_graph_llm(folders["llama3"], graph_mode="full_decode_only", sanitize=True)
    used = descriptors_used(llm)
    llm.generate([[5], [6], [7]], GREEDY.replace(max_tokens=1))
    assert used == set()
    llm.generate([[5], [6], [7]], GREEDY.replace(max_tokens=2))
    assert {descriptor.num_reqs for descriptor in used} == {4}


def test_modes_are_capped_by_what_the_backend_declares(folders: dict[str, Path]) -> None:
    """hostplan serves uniform batches only: mixed ones are cut into pieces."""
    llm = make_graph_llm(folders["llama3"], graph_mode="step", attention_backend="hostplan")
    modes = {d.mode for d in llm.engine.runner.lane.descriptors}
    assert modes == {RunMode.STEP, RunMode.PIECEWISE}
    llm = make_graph_llm(folders["llama3"], graph_mode="step", attention_backend="reference")
    modes = {d.mode for d in llm.engine.runner.lane.descriptors}
    assert modes == {RunMode.STEP, RunMode.FULL}


def test_capture_changes_nothing_that_lives(folders: dict[str, Path]) -> None:
    """A captured engine starts as an eager one: no block, slot or counter is touched."""
    llm = make_graph_llm(folders["llama3"], graph_mode="step")
    tensors = llm.engine.runner.target.state.tensors
    assert int(tensors.num_tokens[:-1].sum()) == 0
    assert int(tensors.num_computed[:-1].sum()) == 0
    assert int(tensors.token_ids[:-1].abs().sum()) == 0
    for cache in llm.engine.runner.kv_caches:
        assert int(cache[:, 0].count_nonzero()) == 0


def test_all_tapes_together_stay_under_twice_the_largest(folders: dict[str, Path]) -> None:
    largest = make_graph_llm(folders["llama3"], graph_mode="step", capture_sizes="6,48")
    every = make_graph_llm(folders["llama3"], graph_mode="step")
    ratio = [llm.engine.runner.executor.backend.num_bytes for llm in (every, largest)]
    assert 0 < ratio[0] < 2 * ratio[1]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("model", "mode"),
    list(itertools.product(MODELS, MODES))
    if EVERY
    else [("qwen2-window", "step"), ("llama3", "piecewise"), ("qwen2-window", "full")],
)
def test_native_attention_in_graphs(folders: dict[str, Path], model: str, mode: str) -> None:
    """In float32, which is all that it has; products of dense weights depend on padding."""
    options = {"dtype": "float32", "attention_backend": "native"}
    plain = run(make_graph_llm(folders[model], **options))
    llm = make_graph_llm(folders[model], graph_mode=mode, sanitize=True, **options)
    used, graphed = descriptors_used(llm), run(llm)
    same = [a == b for a, b in zip(plain.token_ids, graphed.token_ids, strict=True)]
    assert sum(same) >= len(same) - 1
    assert len(used) >= 4, used


def test_float32_stays_close_to_unpadded_eager(folders: dict[str, Path]) -> None:
    """The last bits of a GEMM depend on its row count, so float32 has a tolerance."""
    plain = run(make_graph_llm(folders["llama3"], dtype="float32"))
    graphed = run(
        make_graph_llm(folders["llama3"], dtype="float32", graph_mode="step", sanitize=True)
    )
    same = [a == b for a, b in zip(plain.token_ids, graphed.token_ids, strict=True)]
    assert sum(same) >= len(same) - 1
    for ours, theirs, equal in zip(graphed.logprobs, plain.logprobs, same, strict=True):
        if equal:
            np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_settings_force_what_they_claim() -> None:
    assert SETTINGS["num_kv_blocks"] * SETTINGS["block_size"] > SETTINGS["max_model_len"]
