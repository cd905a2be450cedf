"""`stoop bench step`, `profile` and `latency --shape`: figures by hand, fields, refusals."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoop.bench.profile import DeviceTimes
from stoop.bench.shape_configs import SHAPES, ShapeHead
from stoop.bench.shapes import open_shape
from stoop.bench.step import (
    Span,
    StepBytes,
    StepLoad,
    StepRow,
    decoding,
    measure_steps,
    read_bandwidth,
    start_shaped,
    step_bytes,
)
from stoop.llm import LLM
from stoop.worker.memory import weight_bytes
from support.tiny_shapes import TINY, TINY_QWEN

ENGINE = {"device": "cpu", "dtype": "float32", "block_size": 16, "max_num_batched_tokens": 64}
FLAGS = ["--device", "cpu", "--dtype", "float32", "--max-num-batched-tokens", "64"]
QUICK = [*FLAGS, "--capture-sizes", "1,2"]
STEP_FIELDS = {
    *("batch", "live_length", "ms_per_step", "ms_per_step_all", "floor_ms", "ratio", "tb_per_s"),
    *("bytes", "tokens_per_step", "kernels_per_step", "busy_ms", "paused_ms"),
    *("idle_ms", "host_ms"),
}


def start(model: str, options: dict[str, Any]) -> LLM:
    return LLM(model, **options)


@pytest.fixture(autouse=True)
def _tiny_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setitem(SHAPES, "tied", TINY | {"tie_word_embeddings": True})
    monkeypatch.setitem(SHAPES, "tiny-qwen", TINY_QWEN)
    monkeypatch.setattr("stoop.bench.step.READ_BYTES", {"cpu": 1 << 22})


@pytest.fixture
def stoop(stoop: Callable) -> Callable:
    """Runs a command; its record, or the sentence that refused it."""

    def run(*args: str) -> Any:
        code, out, err = stoop(*args)
        if code == 0:
            return json.loads(out.splitlines()[-1])
        assert code == 2
        (line,) = [text for text in err.splitlines() if text.startswith("error: ")]
        return line

    return run


# Elements of a target layer: qkv, o, gate and up, down, two norms.
LAYER = 64 * 32 + 32 * 32 + 2 * 48 * 32 + 32 * 48 + 2 * 32
TARGET = 2 * LAYER + 32 + 96 * 32  # final norm, LM head
# A pass of the head: qkv over embedding and feature, three norms and a final one, its LM head.
PASS = 64 * 64 + 32 * 32 + 2 * 48 * 32 + 32 * 48 + 4 * 32 + 96 * 32
KV = 2 * 2 * 8  # of a token in one layer: keys and values, two heads of eight


@pytest.mark.parametrize("shape", ["tiny", "tied"])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_the_floor_is_what_is_counted_by_hand(shape: str, k: int) -> None:
    llm = start_shaped(shape, k, [StepLoad(3, 8, False, 4)], ENGINE, start)
    found = step_bytes(llm, batch=3, live_length=10)
    assert found.target == 4 * TARGET == 74368
    assert found.head == (4 * (3 * 32 * 32 + k * PASS) if k else 0)
    assert found.kv == 4 * 3 * 10 * (2 + k) * KV
    assert found.total == found.target + found.head + found.kv
    modules = [llm.engine.runner.model, *([llm.engine.runner.speculator.head] if k else [])]
    loaded = sum(4 * p.numel() for module in modules for p in module.parameters())
    assert 0.7 * loaded < weight_bytes(llm.config) <= loaded, "what is refused would not have fit"


# A pass of an MTP head: fc, qkv with a gate, o, gate and up, down, two norms of heads and five of
# the stream, and the LM head, which is the target's embedding.
MTP_PASS = 64 * 32 + 96 * 32 + 32 * 32 + 2 * 48 * 32 + 32 * 48 + 2 * 8 + 5 * 32 + 96 * 32


def test_the_floor_with_the_models_own_head() -> None:
    load = StepLoad(batch=2, length=8, planted=False, steps=4)
    report = measure_steps("tiny-qwen", 3, [load], 1, ENGINE, start, ShapeHead("mtp"))
    found = step_bytes(report.llm, batch=2, live_length=10)
    assert found.head == 4 * 3 * MTP_PASS
    few = start_shaped("tiny-qwen", 3, [load], ENGINE, start, ShapeHead("mtp", 32))
    assert step_bytes(few, 2, 10).head == 4 * 3 * (MTP_PASS - (96 - 32) * 32)
    plain = step_bytes(start_shaped("tiny-qwen", 0, [load], ENGINE, start), 2, 10)
    assert found.target == plain.target and found.kv - plain.kv >= 4 * 2 * 10 * 3 * KV
    assert report.llm.config.spec is not None and report.llm.config.spec.method == "mtp"
    numbers = report.llm.metrics()
    assert numbers["spec_decode_num_draft_tokens"] > 0
    assert numbers["spec_decode_num_accepted_tokens"] == 0


def test_a_step_yields_one_token_and_finds_no_prefix() -> None:
    load = StepLoad(batch=2, length=40, planted=False, steps=6)
    report = measure_steps("tiny", 3, [load], 2, ENGINE, start)
    (row,) = report.rows
    assert [(span.steps, span.tokens) for span in row.spans] == [(6, 12)] * 2
    assert load.live_length == 40 + 4 + 3.5
    numbers = report.llm.metrics()
    assert numbers["prefix_cache_hit_tokens"] == 0
    assert numbers["spec_decode_num_draft_tokens"] > 0
    assert numbers["spec_decode_num_accepted_tokens"] == 0
    assert numbers["num_requests_running"] == numbers["num_preemptions"] == 0
    assert row.floor_ms == pytest.approx(row.bytes.total / report.bandwidth * 1000)


def test_a_device_is_idle_for_what_a_step_takes_beyond_its_launches() -> None:
    """The host waits for 4 of 10 ms in ten steps; the device has work for 0.8 of a step's 1.0."""
    span = Span(seconds=0.010, steps=10, tokens=10, waited=0.004)
    load, size = StepLoad(1, 8, False, 10), StepBytes(10, 0, 0.0)
    row = StepRow(load, [span], size, 1e9, DeviceTimes(5, busy_ms=0.7, paused_ms=0.1))
    assert (row.ms_per_step, row.host_ms) == (pytest.approx(1.0), pytest.approx(0.6))
    assert row.idle_ms == pytest.approx(0.2)
    busier = replace(row, device=DeviceTimes(5, busy_ms=1.0, paused_ms=0.1))
    assert busier.idle_ms == 0  # noise, not less than none


def test_the_bandwidth_is_that_of_a_machine() -> None:
    assert 1e8 < read_bandwidth("cpu") < 1e13


def plans_of(k: int, length: int, planted: bool, monkeypatch: pytest.MonkeyPatch) -> list[list]:
    """What each step is asked to compute, the context planted, or computed by an earlier run."""
    load = StepLoad(batch=2, length=length, planted=planted, steps=4)
    llm = start_shaped("tiny", k, [load], ENGINE, start)
    prompts = [[7 + row] * length for row in range(load.batch)]
    monkeypatch.setattr("stoop.bench.step.random_prompts", lambda *_: prompts)
    if not planted:
        with decoding(llm, load):
            pass
    plans, schedule = [], llm.engine.scheduler.schedule

    def spy(**pending: bool) -> Any:
        plan = schedule(**pending)
        names = ("num_tokens", "num_computed", "seq_len", "samples", "decodes")
        plans.append([tuple(getattr(row, name) for name in names) for row in plan.rows])
        return plan

    monkeypatch.setattr(llm.engine.scheduler, "schedule", spy)
    with decoding(llm, load) as run:
        run.advance(3)
        slots = llm.engine.runner.target.state.tensors
        known, computed = slots.num_tokens[:2].tolist(), slots.num_computed[:2].tolist()
    assert min(known) >= length + 4 and known == [count + 1 for count in computed]
    return plans


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("length", [1, 16, 33, 48])
def test_a_planted_context_is_planned_as_one_that_was_computed(
    k: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted, computed = (plans_of(k, length, each, monkeypatch) for each in (True, False))
    hits = (length - 1) // 16 * 16
    assert planted[0] == [(length - hits, hits, length, True, False)] * 2
    assert all(row[0] == k + 1 and row[4] for plan in planted[1:] for row in plan)
    assert planted == computed


def test_planted_kv_is_finite_and_used() -> None:
    load = StepLoad(batch=1, length=64, planted=True, steps=4)
    llm = start_shaped("tiny", 2, [load], ENGINE, start)
    for cache in llm.engine.runner.kv_caches:
        cache[:, 1:] = float("nan")
    with decoding(llm, load) as run:
        run.advance(4)
        assert llm.metrics()["prefix_cache_hit_tokens"] == 48
        assert llm.engine.runner.target.hidden[:3].isfinite().all()


def test_every_repeat_finds_its_planted_context() -> None:
    """The KV cache is only just large enough, so blocks of earlier repeats have to go."""
    loads = [StepLoad(batch, 40, True, steps=3) for batch in (1, 3)]
    report = measure_steps("tiny", 2, loads, 4, ENGINE, start)
    num_requests = 1 + 4 * 1 + 4 * 3
    assert report.llm.metrics()["prefix_cache_hit_tokens"] == num_requests * 32
    assert all(span.steps == 3 for row in report.rows for span in row.spans)


@pytest.mark.parametrize("context", [False, True])
def test_step_prints_a_row_for_each_batch(context: bool, stoop: Callable) -> None:
    size = ["--context", "50"] if context else ["--prompt-len", "20"]
    args = ["--batch", "1,2", "--steps", "3", "--repeat", "2", *size, *QUICK]
    record = stoop("bench", "step", "--shape", "tiny", "--k", "2", *args)
    assert (record["bench"], record["k"], record["graph_mode"]) == ("step", 2, "step")
    assert (record["head"], record["draft_vocab_size"]) == ("eagle3", 96)
    assert (record["prompt_len"], record["context"]) == ((None, 50) if context else (20, None))
    assert [row["batch"] for row in record["rows"]] == [1, 2]
    assert record["start_s"] > 0 and record["first_token_s"] > 0
    for row in record["rows"]:
        assert set(row) == STEP_FIELDS
        assert row["tokens_per_step"] == 1
        assert len(row["ms_per_step_all"]) == 2
        assert row["ratio"] == pytest.approx(row["ms_per_step"] / row["floor_ms"], rel=1e-3)
        assert row["kernels_per_step"] is row["idle_ms"] is None  # on a CPU
        assert row["host_ms"] == pytest.approx(row["ms_per_step"])  # it waits for nobody


@pytest.mark.parametrize(
    ("args", "head", "size"),
    [
        (["--k", "2", "--head", "mtp", "--draft-vocab-size", "48"], "mtp", 48),
        (["--k", "2", "--head", "mtp"], "mtp", 96),
        (["--k", "0"], None, None),
    ],
)
def test_step_records_what_drafted(
    args: list[str], head: str | None, size: int | None, stoop: Callable
) -> None:
    load = ["--batch", "1", "--prompt-len", "8", "--steps", "2", "--repeat", "1"]
    eager = ["--graph-mode", "none", *FLAGS]
    record = stoop("bench", "step", "--shape", "tiny-qwen", *args, *load, *eager)
    assert (record["head"], record["draft_vocab_size"]) == (head, size)


def test_a_path_has_its_own_weights(text_model: Path, stoop: Callable) -> None:
    import torch
    from safetensors.torch import load_file

    stored = load_file(text_model / "model.safetensors")["model.norm.weight"]
    with open_shape(str(text_model), 2, 64) as (model, options):
        llm = start(model, {"device": "cpu", "max_num_seqs": 1, "max_model_len": 64, **options})
    assert torch.equal(llm.engine.runner.model.norm.weight, stored)
    args = ["--batch", "1", "--prompt-len", "8", "--steps", "2", "--repeat", "1", *FLAGS]
    shape = ["--shape", str(text_model), "--k", "2", "--graph-mode", "none"]
    record = stoop("bench", "step", *shape, *args)
    assert record["rows"][0]["tokens_per_step"] == 1
    assert record["graph_mode"] == "none"


@pytest.mark.parametrize(
    ("args", "pattern"),
    [
        (["step", "--shape", "llama-9b"], "llama-8b, llama-1b"),
        (["step", "--shape", "tiny", "--k", "17"], "1 to 16"),
        (["step", "--shape", "tiny", "--k", "-1"], "1 to 16"),
        (["step", "--shape", "tiny", "--batch", "1,x"], "such as 1,8"),
        (["step", "--shape", "tiny", "--head", "medusa"], "--head medusa: use eagle3 or mtp"),
        (["step", "--shape", "tiny", "--draft-vocab-size", "9"], "use --head mtp"),
        (["step", "--k", "0", "--head", "eagle3"], "--k 0 makes none: leave them out"),
        (["step", "--k", "0", "--draft-vocab-size", "9"], "--k 0 makes none: leave them out"),
        (["profile", "--k", "0", "--head", "mtp"], "--k 0 makes none: leave them out"),
        (
            ["step", "--shape", "tiny", "--head", "mtp", "--device", "cpu"],
            "stoop has no MTP heads for LlamaForCausalLM",
        ),
        (["step", "--shape", "tiny", "--graph-mode", "fast"], "full_and_piecewise"),
        (["step", "--shape", "tiny", "--max-num-batched-tokens", "64"], "at least 512"),
        (["step", "--shape", "tiny", "--block-size", "0"], "block_size=0"),
        (["profile", "--shape", "nowhere"], "--shape nowhere"),
        (["profile", "--shape", "tiny", "--out", "/no/such/folder/t.json"], "does not exist"),
        (["latency", "--shape", "llama-9b"], "llama-8b"),
        (["latency", "--k", "2"], "--shape"),
        (["latency", "some/model", "--shape", "tiny"], "leave out"),
        (["latency", "--shape", "tiny", "--k", "2", "-sc", "{}"], "leave out"),
        (["latency", "--input-len", "a"], "such as 1,8"),
    ],
)
def test_what_cannot_be_measured_is_refused(args: list[str], pattern: str, stoop: Callable) -> None:
    assert pattern in stoop("bench", *args)


def test_a_path_is_asked_for_no_more_positions_than_it_has(
    text_model: Path, stoop: Callable
) -> None:
    shape = ["--shape", str(text_model), "--k", "0", "--batch", "1", "--context", "4096"]
    assert "256 positions" in stoop("bench", "step", *shape, *FLAGS)


def test_profile_writes_a_trace_and_a_table(tmp_path: Path, stoop: Callable) -> None:
    out = tmp_path / "trace.json"
    args = ["--k", "2", "--batch", "2", "--prompt-len", "8", "--out", str(out), *QUICK]
    record = stoop("bench", "profile", "--shape", "tiny", *args)
    names = {entry["name"] for entry in json.loads(out.read_text())["traceEvents"]}
    assert {row["name"] for row in record["kernels"]} <= names
    assert sum(row["share"] for row in record["kernels"]) == pytest.approx(1, abs=1e-3)
    assert all(row["calls"] > 0 and row["us"] >= 0 for row in record["kernels"])
    assert [row["us"] for row in record["kernels"]] == sorted(
        (row["us"] for row in record["kernels"]), reverse=True
    )


def test_latency_of_a_shape_by_prompt_length(stoop: Callable) -> None:
    args = ["--batch-size", "1,2", "--input-len", "8,24", "--output-len", "4", "--repeat", "1"]
    record = stoop("bench", "latency", "--shape", "tiny", "--k", "2", *args, *FLAGS)
    sizes = [(row["input_len"], row["batch_size"]) for row in record["results"]]
    assert sizes == [(8, 1), (8, 2), (24, 1), (24, 2)]
    assert all(row["ttft_ms"]["p50"] > 0 < row["itl_ms"]["p50"] for row in record["results"])
    assert [row["speedup_over_batch_1"] for row in record["results"]][::2] == [1, 1]


@pytest.mark.parametrize(
    ("free", "pattern"),
    [
        (4 << 30, "the weights take 15.7 GiB in bfloat16, more than the 4.0 GiB"),
        (17 << 30, "and the KV cache 6.7 GiB, together more than the 17.0 GiB"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_before_it_is_made(
    free: int, pattern: str, stoop: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_model(*_: Any) -> None:
        raise AssertionError("memory was taken")

    monkeypatch.setattr("stoop.worker.runner.load_model", load_model)
    monkeypatch.setattr("stoop.worker.memory._meminfo", lambda: {"MemAvailable": free})
    sentence = stoop("bench", "step", "--shape", "llama-8b", "--device", "cpu")
    assert pattern in sentence and "lower --batch, --prompt-len or --context" in sentence
