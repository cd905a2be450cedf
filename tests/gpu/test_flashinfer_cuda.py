"""FlashInfer on a CUDA device: right for awkward lengths, and in graphs what it is outside them.

One precision and one head size, since each pair is compiled when it is first used.
"""

import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stoop import LLM, SamplingParams
from stoop.attention.base import AttentionSetup, AttentionShape
from stoop.attention.flashinfer import FlashInferBackend
from stoop.attention.reference import ReferenceBackend
from stoop.attention.traits import FLASHINFER
from stoop.batch.input_batch import InputBatch, InputBuffers
from stoop.batch.request_state import RequestState
from stoop.check import graphs as check
from stoop.config.resolve import GRAPH_MODES
from stoop.core.step import PlannedRow
from stoop.graph.descriptor import RunMode
from stoop.scheduler.plan import PlanBuilder
from support.attention_cases import POISON_BLOCK, Heads, Row, attend_densely, make_case
from support.device_waits import forbid_waits
from support.poisoned_blocks import poison_before_each_step

pytest.importorskip("flashinfer")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE, DTYPE = torch.device("cuda", 0), torch.bfloat16
HEADS = Heads(3, 3, 64)  # SmolLM2's: three queries a group
CONTEXTS = (0, 1, 7, 15, 16, 17, 63, 64, 65, 511, 512, 1000, 4097)
MAX_LEN = 4160
CLOSE = {"rtol": 2e-2, "atol": 2e-2}


class Bench:
    """The backend, and rows of a case as the engine would plan them."""

    def __init__(
        self, rows: list[Row], block_size: int, query_len: int = 1, max_len: int = MAX_LEN
    ) -> None:
        torch.manual_seed(0)
        # Stale keys and values are large, but finite; only the null block is zero.
        self.case = case = make_case(rows, HEADS, block_size, DTYPE, device=DEVICE)
        case.cache.nan_to_num_(nan=50.0)[:, 0] = 0
        case.block_table[case.block_table == POISON_BLOCK] = 1
        num_slots, num_pages = case.block_table.shape
        self.max_reqs = len(rows) + 3
        slots = RequestState(num_slots - 1, max_len, block_size, DEVICE).tensors
        width = min(num_pages, slots.block_table.shape[1])
        slots.block_table[:, :width] = case.block_table[:, :width]
        self.max_len = max_len
        self.shapes = {
            window: AttentionShape(9, 3, 64, 64**-0.5, window) for window in (None, *WINDOWS)
        }
        shapes = tuple(self.shapes.values())
        setup = AttentionSetup(
            DEVICE, block_size, self.max_reqs, max_len, slots, DTYPE, shapes, query_len
        )
        self.setup = setup
        self.backend, self.reference = FlashInferBackend(setup), ReferenceBackend(setup)
        self.buffers = InputBuffers(self.max_reqs, max(self.max_reqs * query_len, 8192), DEVICE)

    def load(self, rows: list[Row], *padded: int | None) -> InputBatch:
        """padded: requests, tokens, and the query length of a graph"""
        slots = self.case.row_slots.tolist()
        batch = self.buffers.load_rows(
            [self._plan(r, s) for r, s in zip(rows, slots, strict=False)], *padded
        )
        live = len(rows)
        batch.step.row_slots.fill_(self.case.block_table.shape[0] - 1)[:live] = self.case.row_slots[
            :live
        ]
        for name in ("context_lens", "seq_lens"):
            values = [row.context if name == "context_lens" else row.seq_len for row in rows]
            getattr(batch.step, name).zero_()[:live] = torch.tensor(values)
        return batch

    def _plan(self, row: Row, slot: int) -> PlannedRow:
        past = row.context + row.query_len
        end = min(past, self.max_len)
        numbers = (slot, row.query_len, row.context, end, end)
        rules: Any = None
        return PlannedRow("", 0, *numbers, samples=True, decodes=True, rules=rules,
                          num_prompt_tokens=0)  # fmt: skip

    def attend(self, batch: InputBatch, q: Tensor, window: int | None = None) -> Tensor:
        metadata = self.backend.build(batch)
        return self.backend.forward(self.shapes[window], q, self.case.cache, metadata)


# Windows are another kernel to compile.
WINDOWS = (20, 300) if os.environ.get("STOOP_TEST_ALL") else ()


def live_tokens(rows: list[Row]) -> Tensor:
    """[tokens] bool, without those of padding."""
    alive = [n < row.query_len - row.dead for row in rows for n in range(row.query_len)]
    return torch.tensor(alive, device=DEVICE)


def assert_right(bench: Bench, rows: list[Row], out: Tensor, window: int | None = None) -> None:
    """Live tokens attend as dense attention has it, dead ones are finite, padding is zero."""
    live, num_tokens = live_tokens(rows), sum(row.query_len for row in rows)
    dense = attend_densely(bench.case, window or 0)
    torch.testing.assert_close(out[:num_tokens][live], dense[:num_tokens][live], **CLOSE)
    assert out.isfinite().all() and not out[num_tokens:].any()


@pytest.mark.parametrize("block_size", FLASHINFER.block_sizes or ())
@pytest.mark.parametrize("window", [None, *WINDOWS])
def test_prompts_and_decodes_in_one_batch(block_size: int, window: int | None) -> None:
    rows = [Row(n, 1) for n in CONTEXTS] + [Row(n, 4, n % 4) for n in CONTEXTS]
    rows += [Row(0, 1), Row(0, 300), Row(77, 129), Row(64, 64), Row(1000, 700), Row(33, 31)]
    bench = Bench(rows, block_size)
    q = torch.cat((bench.case.q, torch.zeros_like(bench.case.q[:45])))
    batch = bench.load(rows, None, q.shape[0])
    out = bench.attend(batch, q, window)
    assert_right(bench, rows, out, window)
    reference = bench.reference
    theirs = reference.forward(bench.shapes[window], q, bench.case.cache, reference.build(batch))
    live = live_tokens(rows)
    torch.testing.assert_close(out[: len(live)][live], theirs[: len(live)][live], **CLOSE)


def test_a_prompt_alone() -> None:
    for context, query_len in itertools.product((0, 1, 16, 100, 2000), (1, 15, 16, 17, 333)):
        rows = [Row(context, query_len)]
        bench = Bench(rows, 16)
        assert_right(bench, rows, bench.attend(bench.load(rows), bench.case.q))


@pytest.mark.parametrize("window", [None, *WINDOWS])
@pytest.mark.parametrize("query_len", [1, 4, 9])
@pytest.mark.parametrize("block_size", FLASHINFER.block_sizes or ())
def test_a_graph_follows_its_plan(block_size: int, query_len: int, window: int | None) -> None:
    """Captured on padding, replayed on mixes of lengths: not a bit from what eager gives."""
    every = [Row(n, query_len, n % query_len) for n in CONTEXTS]
    bench = Bench(list(every), block_size, query_len)
    num_reqs, shape, cache = bench.max_reqs, bench.shapes[window], bench.case.cache
    padded = (num_reqs, num_reqs * query_len, query_len)
    q = torch.zeros(num_reqs * query_len, 9, 64, dtype=DTYPE, device=DEVICE)
    metadata = bench.backend.build(bench.load([], *padded), for_capture=True)
    assert not bench.backend.forward(shape, q, cache, metadata).any()
    metadata = bench.backend.build(bench.load([], *padded), for_capture=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = bench.backend.forward(shape, q, cache, metadata)
    for live in (len(every), 5, 1, len(every), 12):
        rows = every[:live]
        bench.case.rows[:] = rows
        num_tokens = live * query_len
        q.zero_()[:num_tokens] = bench.case.q[:num_tokens]
        batch = bench.load(rows, *padded)
        bench.backend.build(batch)
        graph.replay()
        assert_right(bench, rows, out, window)
        assert torch.equal(out, bench.attend(batch, q, window))


@pytest.mark.parametrize("window", [None, *WINDOWS])
@pytest.mark.parametrize("block_size", FLASHINFER.block_sizes or ())
def test_a_plan_of_bounds_serves_lengths_of_the_device(block_size: int, window: int | None) -> None:
    """Draft decodes: one plan, captured and eager, for lengths that are up to 40 keys shorter."""
    every = [Row(n, 1) for n in CONTEXTS]
    bench = Bench(list(every), block_size)
    backend = FlashInferBackend(replace(bench.setup, device_lengths=True, query_len=1))
    num_reqs, shape, cache = bench.max_reqs, bench.shapes[window], bench.case.cache
    q = torch.zeros(num_reqs, 9, 64, dtype=DTYPE, device=DEVICE)
    padded = (num_reqs, num_reqs, 1)
    backend.forward(shape, q, cache, backend.build(bench.load([], *padded), for_capture=True))
    metadata = backend.build(bench.load([], *padded), for_capture=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.forward(shape, q, cache, metadata)
        backend.advance(metadata)
        again = backend.forward(shape, q, cache, metadata)
    for live, slack in ((len(every), 40), (5, 1), (1, 0), (len(every), 17), (12, 7)):
        rows = every[:live]
        bench.case.rows[:] = rows
        q.zero_()[:live] = bench.case.q[:live]
        batch = bench.load(rows, *padded)
        more = np.arange(live) * slack // max(live - 1, 1)
        bounds = np.minimum(batch.seq_lens_cpu_upper_bound + more, bench.max_len)
        batch = replace(batch, seq_lens_cpu_upper_bound=bounds)
        fresh = backend.build(batch)
        graph.replay()
        assert_right(bench, rows, out, window)
        assert torch.equal(out, again)
        assert torch.equal(out, backend.forward(shape, q, cache, fresh))
        alone = replace(bench.load(rows), query_len=1, seq_lens_cpu_upper_bound=bounds)
        eager = backend.forward(shape, q[:live], cache, backend.build(alone))
        assert_right(bench, rows, eager, window)


def test_dead_tokens_past_the_models_limit() -> None:
    """Keys end with the queries, not with the model: the block table has no page for the last."""
    for block_size, dead in ((8, 3), (16, 7), (64, 8)):
        rows = [Row(640 - 9 + dead, 9, dead), Row(100, 9, 0)]
        bench = Bench(rows, block_size, query_len=9, max_len=640)
        out = bench.attend(bench.load(rows), bench.case.q)
        assert_right(bench, rows, out)


# ---- the engine ----


@pytest.fixture
def _heads_of_64(monkeypatch: pytest.MonkeyPatch) -> None:
    for config in (check.TINY_CONFIG, *check.TINY_HEADS.values()):
        monkeypatch.setitem(config, "head_dim", 64)


def tiny_engine(method: str | None) -> dict[str, Any]:
    engine: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16"}
    if method is not None:
        engine["speculative_config"] = {"method": method, "num_speculative_tokens": 3}
    if method in ("eagle", "eagle3"):
        engine["speculative_config"]["model"] = "tiny"
    return engine


@pytest.mark.parametrize("method", [None, "eagle", "eagle3", "ngram"])
@pytest.mark.usefixtures("_heads_of_64")
def test_every_mode_equals_eager_under_the_sanitizer(method: str | None) -> None:
    with check.tiny_model(check.TINY, tiny_engine(method)) as (folder, options):
        runs = check.run_checks(folder, GRAPH_MODES[1:], ("flashinfer",), options, lambda *_: None)
        cases = list(runs)
    assert [failure for case in cases for failure in case.failures] == []
    assert [case.mode for case in cases] == list(GRAPH_MODES[1:])
    assert all(case.num_used == case.num_graphs > 0 for case in cases)


@pytest.mark.usefixtures("_heads_of_64")
def test_scores_are_the_references(tmp_path: Path) -> None:
    """Of a prompt in chunks, and of what is generated for as long as tokens are the same."""
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=0, prompt_logprobs=0)
    prompts = [[(7 * n * n + 3 * n) % 256 for n in range(length)] for length in (150, 17, 33)]
    settings = {"max_model_len": 192, "max_num_batched_tokens": 64, "num_kv_blocks": 64}
    found = []
    with check.tiny_model(check.TINY, tiny_engine(None)) as (folder, options):
        for backend in ("reference", "flashinfer"):
            names = {"attention_backend": backend, "skip_tokenizer_init": True}
            llm = LLM(folder, max_num_seqs=4, **settings, **names, **options)
            found.append(llm.generate(prompts, params, use_tqdm=False))
    for theirs, ours in zip(*found, strict=True):
        prompt = zip(
            ours.prompt_token_ids[1:],
            ours.prompt_logprobs[1:],
            theirs.prompt_logprobs[1:],
            strict=True,
        )
        mine, others = ours.outputs[0], theirs.outputs[0]
        answer = zip(mine.token_ids, mine.logprobs, others.logprobs, strict=True)
        scored = [*prompt, *itertools.takewhile(lambda step: step[0] in step[2], answer)]
        assert len(scored) >= len(ours.prompt_token_ids)  # the first generated token, at least
        for token, one, other in scored:
            assert abs(one[token].logprob - other[token].logprob) < 0.1


@pytest.mark.parametrize("mode", ["none", "step"])
@pytest.mark.usefixtures("_heads_of_64")
def test_nan_in_reused_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """With chunks, preemption and drafts: new blocks are zeroed before they are used. If they are
    not, masked values spoil the answers."""
    prompts = [[(7 * n * n + 3 * n) % 256 for n in range(length)] for length in (150, 17, 33, 90)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    settings = {"max_model_len": 192, "max_num_batched_tokens": 64, "num_kv_blocks": 16}
    names = {"attention_backend": "flashinfer", "skip_tokenizer_init": True, "graph_mode": mode}
    found = []
    with check.tiny_model(check.TINY, tiny_engine("eagle3")) as (folder, options):
        for case in ("clean", "poisoned", "not zeroed"):
            if case == "not zeroed":
                monkeypatch.setattr(PlanBuilder, "new_blocks", lambda plan: [])
            llm = LLM(folder, max_num_seqs=4, **settings, **names, **options)
            if case != "clean":
                poison_before_each_step(llm)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            assert case == "not zeroed" or llm.metrics()["num_preemptions"] > 0
    clean, poisoned, spoiled = found
    assert poisoned == clean
    assert spoiled != clean


@pytest.mark.parametrize("mode", ["full", "step"])
@pytest.mark.usefixtures("_heads_of_64")
def test_a_replayed_step_waits_for_nobody(mode: str) -> None:
    """From the inputs to the last draft; the plan is made before."""
    with check.tiny_model(check.TINY, tiny_engine("eagle3")) as (folder, options):
        settings = {"max_num_seqs": 4, "num_kv_blocks": 256, "max_model_len": 192}
        names = {"attention_backend": "flashinfer", "skip_tokenizer_init": True}
        llm = LLM(folder, graph_mode=mode, **settings, **names, **options)
    seen = forbid_waits(llm, decodes_only=True)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    llm.generate([[5], [6, 7]], params, use_tqdm=False)
    assert set(seen) == {RunMode.STEP if mode == "step" else RunMode.FULL}
