"""The flashinfer backend without FlashInfer: what it refuses, and what it plans.

A stand-in in plain torch attends by the plan alone, so wrong or stale plans give wrong answers.
"""

import functools
import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from stoop.attention.base import AttentionSetup, AttentionShape
from stoop.attention.flashinfer import DeviceLengths, FlashInferBackend, RowLengths
from stoop.batch.input_batch import InputBatch
from stoop.batch.request_state import RequestState
from stoop.check.mutants.planned import leave_before_last_unpadded, skip_the_plan
from stoop.config.backends import serving_backends
from stoop.config.errors import ConfigError
from stoop.graph.descriptor import RunMode
from stoop.graph.sanitizer import SanitizerError
from stoop.spec.decode_lane import DraftDecodeLane
from support import fake_flashinfer
from support.checkpoints import CheckpointStore
from support.drafters import MODES, DrafterStore, Trace, make_spec_llm, run
from support.graph_workload import Answers, make_graph_llm
from support.graph_workload import run as run_plain

Patch = pytest.MonkeyPatch
CPU = torch.device("cpu")
FLASHINFER = {"attention_backend": "flashinfer"}


@pytest.fixture
def _fake(monkeypatch: Patch) -> None:
    fake_flashinfer.install(monkeypatch)


# ---- refusals ----


def make_backend(
    device: str = "cuda", block_size: int = 16, head_dim: int = 64, dtype: str = "bfloat16"
) -> FlashInferBackend:
    slots = RequestState(4, 64, block_size, CPU).tensors
    shapes = tuple(AttentionShape(4, 2, size, 0.1) for size in (128, head_dim))
    where = torch.device(device)
    return FlashInferBackend(
        AttentionSetup(where, block_size, 4, 64, slots, getattr(torch, dtype), shapes)
    )


REFUSALS = [
    ({"device": "cpu"}, "does not run on cpu: use a CUDA device"),
    ({"device": "xpu"}, "does not run on xpu: use a CUDA device"),
    ({"dtype": "float32"}, "has no kernels for float32: use dtype=bfloat16 or float16"),
    ({"dtype": "float64"}, "has no kernels for float64: use dtype=bfloat16 or float16"),
    ({"head_dim": 80}, "has kernels for heads of 64, 128, 256, none for 80"),
    ({"block_size": 4}, "does not take block_size=4: use one of 8, 16, 32, 64"),
]


@pytest.mark.parametrize(("options", "pattern"), REFUSALS)
def test_what_it_cannot_do_is_refused(options: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern) as caught:
        make_backend(**options)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(", or attention_backend=auto")


def test_a_missing_library_is_refused(monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"pip install 'stoop\[flashinfer\]'") as caught:
        make_backend()
    assert "\n" not in str(caught.value)


def test_steps_in_flight_are_refused(checkpoints: CheckpointStore) -> None:
    with pytest.raises(ConfigError, match="run_ahead=1: attention_backend=flashinfer plans"):
        make_graph_llm(checkpoints.get("llama3", dtype="float64"), run_ahead=1, **FLASHINFER)


def test_check_leaves_it_out_where_it_cannot_run(monkeypatch: Patch) -> None:
    found = [True]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found[0] or None)
    assert "flashinfer" in serving_backends("cuda", "bfloat16", [64])
    assert "flashinfer" not in serving_backends("cuda", "float32", [64])
    assert "flashinfer" not in serving_backends("cuda", "bfloat16", [80])
    assert serving_backends("cpu", "bfloat16", [64]) == ["reference", "hostplan"]
    found[0] = False
    assert serving_backends("cuda:0", "float16", [64]) == ["reference", "hostplan", "triton"]


# ---- answers ----

EVERY = bool(os.environ.get("STOOP_TEST_ALL"))


@pytest.fixture(scope="module")
def plain(checkpoints: CheckpointStore) -> Callable[[str], Answers]:
    """Eager steps of the reference backend, by model."""

    @functools.cache
    def answers(model: str) -> Answers:
        folder = checkpoints.get(model, dtype="float64")
        return run_plain(make_graph_llm(folder, attention_backend="reference"))

    return answers


@pytest.mark.parametrize(
    ("model", "mode"),
    itertools.product(("llama3", "qwen2-window"), MODES)  # the second has two windows
    if EVERY
    else [(("llama3", "qwen2-window")[number % 2], mode) for number, mode in enumerate(MODES)],
)
@pytest.mark.usefixtures("_fake")
def test_every_mode_answers_as_the_reference(
    checkpoints: CheckpointStore, plain: Callable[[str], Answers], model: str, mode: str
) -> None:
    """Tokens and scores of unpadded eager steps; replays are compared with their eager twins."""
    folder = checkpoints.get(model, dtype="float64")
    expected = plain(model)
    llm = make_graph_llm(folder, graph_mode=mode, sanitize=mode != "none", **FLASHINFER)
    answers = run_plain(llm)
    assert answers.token_ids == expected.token_ids
    for ours, theirs in zip(answers.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-10)
    assert llm.metrics()["num_preemptions"] > 0


CASES = [
    ("eagle3-noisy", 3, "full"),
    ("eagle3-variant", 2, "step"),  # heads of its own
    ("eagle-noisy", 5, "full_decode_only"),
    ("eagle-right", 1, "none"),
    ("ngram-right", 3, "step"),
    *([("eagle-right", 1, "step")] if EVERY else []),
    *(("eagle3-noisy", 3, mode) for mode in MODES if EVERY and mode != "full"),
]


@pytest.mark.parametrize(("name", "num_tokens", "mode"), CASES)
@pytest.mark.usefixtures("_fake")
def test_speculation_answers_as_plain_decoding(
    drafters: DrafterStore,
    eager: Callable[[str, int], Trace],
    name: str,
    num_tokens: int,
    mode: str,
) -> None:
    """And drafts as the reference does, place by place. Some requests run into the model's limit,
    with dead tokens past it; some have fewer drafts than places."""
    options = {"graph_mode": mode, "sanitize": mode != "none", **FLASHINFER}
    llm = make_spec_llm(drafters.get(name), num_tokens, **options)
    trace = run(llm, num_tokens)
    expected = eager(name, num_tokens)
    assert trace.answers == eager(name, 0).answers
    assert trace.drafts == expected.drafts
    assert trace.per_position == expected.per_position
    assert max(known for _, known in trace.drafts) == 72  # the model's limit


# ---- graphs ----


@pytest.mark.usefixtures("_fake")
def test_graphs_are_those_that_it_declares(drafters: DrafterStore) -> None:
    """Whole steps with all their drafting, mixed batches in pieces; one set of wrappers a size."""
    llm = make_spec_llm(drafters.get("eagle3-noisy"), 3, graph_mode="step", **FLASHINFER)
    runner = llm.engine.runner
    modes = {d.mode for d in runner.lane.descriptors}
    assert modes == {RunMode.STEP, RunMode.PIECEWISE}
    assert runner.executor.managers.keys() == {"C", "P", "ICVUPD", "D"}
    backend = runner.target.model_state.backend
    assert isinstance(backend, FlashInferBackend)
    assert set(backend.captured) == {(1, 4), (2, 4), (4, 4)}
    backend = runner.draft_state.backend
    assert isinstance(backend, FlashInferBackend) and backend is not runner.target.model_state
    assert set(backend.captured) == {(1, 1), (2, 1), (4, 1)}


@pytest.mark.parametrize("mode", ["full", "step"])
@pytest.mark.usefixtures("_fake")
def test_a_step_is_planned_once_and_draft_decodes_when_a_row_outgrows_its_pages(
    drafters: DrafterStore, monkeypatch: Patch, mode: str
) -> None:
    monkeypatch.setattr("stoop.attention.flashinfer.KEYS_AHEAD", 16)
    llm = make_spec_llm(drafters.get("eagle3-noisy"), 5, graph_mode=mode, **FLASHINFER)
    planned: list[list[bool]] = []
    plan, prepare = FlashInferBackend._plan_wrappers, llm.engine.runner.prepare

    def counted(self: FlashInferBackend, *args: Any) -> None:
        planned[-1].append(self.setup.device_lengths)
        plan(self, *args)

    def begin(step_plan: Any) -> Any:
        planned.append([])
        return prepare(step_plan)

    monkeypatch.setattr(FlashInferBackend, "_plan_wrappers", counted)
    monkeypatch.setattr(llm.engine.runner, "prepare", begin)
    run(llm, 5)
    assert {tuple(each) for each in planned} == {(False,), (False, True)}


class Older:
    """A library of before `uniform_q_len`."""

    def plan(self, qo_indptr: Any) -> None: ...


@pytest.mark.usefixtures("_fake")
def test_an_older_library_is_refused(checkpoints: CheckpointStore, monkeypatch: Patch) -> None:
    monkeypatch.setattr(fake_flashinfer, "BatchPrefillWithPagedKVCacheWrapper", Older)
    with pytest.raises(ConfigError, match=r"needs FlashInfer 0\.7\.2\.post1 or newer"):
        make_graph_llm(checkpoints.get("llama3", dtype="float64"), **FLASHINFER)


class HostLengths(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
    """A library that attends by the lengths of the plan, not by those on the device."""

    def plan(self, *args: Any, uniform_q_len: int | None, **options: Any) -> None:
        super().plan(*args, uniform_q_len=uniform_q_len, **options)
        self.buffers = [buffer.clone() for buffer in self.buffers]


@pytest.mark.usefixtures("_fake")
def test_a_library_that_cannot_serve_draft_decodes_is_refused(
    drafters: DrafterStore, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(fake_flashinfer, "BatchPrefillWithPagedKVCacheWrapper", HostLengths)
    with pytest.raises(ConfigError, match="does not read lengths on the device") as caught:
        make_spec_llm(drafters.get("eagle3-noisy"), 3, **FLASHINFER)
    assert "attention_backend=triton" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.usefixtures("_fake")
def test_what_nobody_wrote_is_zero(checkpoints: CheckpointStore) -> None:
    llm = make_graph_llm(checkpoints.get("llama3", dtype="float64"), **FLASHINFER)
    assert not any(cache.any() for cache in llm.engine.runner.kv_caches)


# ---- bugs put back ----


def keep_the_first_lengths(patch: Patch) -> None:
    """Every draft decode attends to the keys of the first."""
    patch.setattr("stoop.attention.flashinfer._forget_lengths", lambda metadata: None)


def attend_to_the_bounds(patch: Patch) -> None:
    """Draft decodes see keys that rejected drafts left."""
    patch.setattr(DeviceLengths, "write", lambda self: None)


def keep_every_plan(patch: Patch) -> None:
    """A row has outgrown the pages of its plan."""
    patch.setattr(np, "array_equal", lambda a, b: True)


def keep_the_blocks(patch: Patch) -> None:
    """A row has got another block, or its slot another request."""
    find = FlashInferBackend._find_pages

    def stale(self: FlashInferBackend, places: Any, num_owned: Any, batch: InputBatch) -> Any:
        known = [pages for pages in self.known.values() if pages.places is places]
        return known[0].page_indices if known else find(self, places, num_owned, batch)

    patch.setattr(FlashInferBackend, "_find_pages", stale)


def plan_for_the_first_decode(patch: Patch) -> None:
    """Pages of the first draft decode's bounds serve all of a step."""
    patch.setattr("stoop.attention.flashinfer.KEYS_AHEAD", 1)
    build = DraftDecodeLane._build_draft_attn_metadata

    def short(self: DraftDecodeLane, target: InputBatch, descriptor: Any, number: int) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self, "num_drafts", 2)
            return build(self, target, descriptor, number)

    patch.setattr(DraftDecodeLane, "_build_draft_attn_metadata", short)


def change_lengths(**change: Callable[[InputBatch, RowLengths], np.ndarray]) -> Any:
    lengths = FlashInferBackend._lengths

    def changed(self: FlashInferBackend, batch: InputBatch, query_len: int | None) -> RowLengths:
        rows = lengths(self, batch, query_len)
        values = {name: edit(batch, rows) for name, edit in change.items()}
        keys = values.get("keys", rows.keys)
        pages = -(-keys // self.setup.block_size)
        return RowLengths(rows.queries, keys, pages, values.get("num_owned", rows.num_owned))

    return lambda patch: patch.setattr(FlashInferBackend, "_lengths", changed)


def cut_keys_at_the_limit(batch: InputBatch, rows: RowLengths) -> np.ndarray:
    """Queries are the last of the keys: if the keys are truncated, they move into the past."""
    return np.maximum(np.minimum(rows.keys, 72), rows.queries)


def count_a_key_less(batch: InputBatch, rows: RowLengths) -> np.ndarray:
    return np.maximum(rows.keys - 1, rows.queries)


def own_every_page(batch: InputBatch, rows: RowLengths) -> np.ndarray:
    """Pages past the model's limit, and those of padding, are looked up in block tables."""
    return rows.num_pages


def leave_pages_unpadded(patch: Patch) -> None:
    """Pages of a larger batch remain after the pages of this one."""
    plan = FlashInferBackend._plan

    def unpadded(self: FlashInferBackend, batch: InputBatch, *args: Any) -> None:
        before = self.page_indices.clone()
        plan(self, batch, *args)
        end = int(self.page_indptr[batch.num_reqs_padded])
        self.page_indices[end:] = before[end:]

    patch.setattr(FlashInferBackend, "_plan", unpadded)


NUM_TOKENS = 4


@dataclass(frozen=True)
class Mutant:
    name: str
    apply: Callable[[Patch], None]
    mode: str
    by_drafts: bool = True  # answers or drafts differ, or an index is in no table
    buffer: str | None = None  # that the sanitizer must name
    drafter: str = "eagle3-random"


MUTANTS = [
    Mutant("plan not refreshed", skip_the_plan(False), "step", buffer="query_indptr"),
    Mutant("plan of drafts not refreshed", skip_the_plan(True), "full", True, "draft query_indptr"),
    Mutant("lengths of the first decode", keep_the_first_lengths, "step", buffer="kv_cache 3"),
    Mutant("keys up to the bounds", attend_to_the_bounds, "none"),
    Mutant("a plan that a row has outgrown", keep_every_plan, "step"),
    Mutant("a plan with blocks of before", keep_the_blocks, "step"),
    Mutant("pages of the first decode", plan_for_the_first_decode, "step", drafter="eagle3-noisy"),
    Mutant("offsets unpadded", leave_before_last_unpadded, "full", buffer="draft before_last"),
    Mutant("keys cut at the limit", change_lengths(keys=cut_keys_at_the_limit), "full"),
    Mutant("a key too few", change_lengths(keys=count_a_key_less), "none"),
    Mutant("pages of no owner", change_lengths(num_owned=own_every_page), "full"),
    # Kernels stop at the last page.
    Mutant("pages unpadded", leave_pages_unpadded, "full", False, "draft page_indices"),
]
if EVERY:
    MUTANTS += [
        Mutant("plan of a graph", skip_the_plan(False), "full", buffer="query_indptr"),
        Mutant("plan of a step", skip_the_plan(True), "step", True, "draft query_indptr"),
    ]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.usefixtures("_fake")
def test_mutant_is_caught(
    drafters: DrafterStore,
    eager: Callable[[str, int], Trace],
    monkeypatch: Patch,
    mutant: Mutant,
) -> None:
    """By answers or drafts of its own, or an index that no table has; stale plans by name."""
    mutant.apply(monkeypatch)
    drafter, options = drafters.get(mutant.drafter), {"graph_mode": mutant.mode, **FLASHINFER}
    expected = eager(mutant.drafter, NUM_TOKENS)
    try:
        trace = run(make_spec_llm(drafter, NUM_TOKENS, **options), NUM_TOKENS)
        caught = (trace.answers, trace.drafts) != (expected.answers, expected.drafts)
    except (IndexError, RuntimeError, AssertionError):
        caught = True
    assert caught == mutant.by_drafts
    if mutant.buffer is not None:
        with pytest.raises(SanitizerError) as error:
            run(make_spec_llm(drafter, NUM_TOKENS, sanitize=True, **options), NUM_TOKENS)
        assert getattr(error.value, "buffer", None) == mutant.buffer
