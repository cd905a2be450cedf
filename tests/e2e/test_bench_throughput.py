"""`stoop bench throughput` with loads and K: figures by hand, who runs when, fields, refusals."""

import gc
import json
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoop.bench import shapes
from stoop.bench.shape_configs import SHAPES
from stoop.bench.step_drafts import StepDrafts
from stoop.bench.throughput import (
    LoadReport,
    LoadRow,
    LoadRun,
    PeerSpeeds,
    Traffic,
    _run,
    measure_loads,
    shaped_sizes,
    sized_cache,
)
from stoop.config.errors import ConfigError, MemoryShortage
from stoop.core.outputs import DecodeSteps, SpecCounts
from stoop.core.sampling_params import SamplingParams
from support.tiny_shapes import TINY, TINY_QWEN

CPU = ["--device", "cpu", "--max-num-batched-tokens", "64"]
FLAGS = [*CPU, "--dtype", "float32"]
SIZES = ["--input-len", "8", "--output-len", "6"]
Stoop = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)


def record_of(result: tuple[int, str, str]) -> dict[str, Any]:
    code, shown, told = result
    assert code == 0, told
    return json.loads(shown.splitlines()[-1])


# ---- by hand ----


class FakeEngine:
    """Ends the oldest request every second step; its answer has as many tokens as its prompt."""

    def __init__(self) -> None:
        self.running: list[tuple[str, list[int]]] = []
        self.most, self.num_steps = 0, 0
        self.by_drafts = {0: 100, 1: 40, 3: 40}
        self.started_beside: list[int] = []  # for each request: how many ran when it started

    def add_request(self, name: str, prompt: list[int], params: Any, final_only: bool) -> None:
        assert final_only
        self.started_beside.append(len(self.running))
        self.running.append((name, prompt))
        self.most = max(self.most, len(self.running))

    def metrics(self) -> dict[str, Any]:
        not_made = 7 + 2 * self.num_steps
        return {"num_steps_by_drafts": self.by_drafts, "num_drafts_not_made": not_made}

    def step(self) -> list[Any]:
        self.num_steps += 1
        self.by_drafts[1 + 2 * (self.num_steps % 2)] += 1
        if self.num_steps % 2:
            return []
        name, prompt = self.running.pop(0)
        spec = SpecCounts(2, {2: [1, 1, 0]})
        answer = SimpleNamespace(token_ids=prompt, spec=spec, num_decode_steps=5)
        return [SimpleNamespace(request_id=name, outputs=[answer])]


@pytest.mark.parametrize("in_groups", [True, False])
def test_no_more_run_than_the_load_says(in_groups: bool) -> None:
    engine = FakeEngine()
    prompts = [[1] * length for length in (1, 2, 3, 4, 5, 6, 7)]
    params = SamplingParams(max_tokens=4)
    llm: Any = SimpleNamespace(engine=engine, metrics=engine.metrics)
    done = _run(llm, prompts, params, 3, in_groups)
    assert done.num_tokens == 28 and done.counts.num_accepted_tokens == 7
    assert done.steps == DecodeSteps(num_steps=35, num_tokens=21, num_with_drafts=14)
    # Those of the run: there were 100 and 40 before it.
    assert done.made == StepDrafts({3: 7, 1: 7}, 28)
    assert engine.most == 3 and not engine.running
    # In groups, only as one of a new group; else beside two that go on.
    expected = [0, 1, 2, 0, 1, 2, 0] if in_groups else [0, 1, 2, 2, 2, 2, 2]
    assert engine.started_beside == expected


@pytest.mark.parametrize(
    ("load", "asked", "groups"),
    [
        (1, None, [1] * 4),
        (8, None, [8] * 4),
        (100, None, [100, 100]),
        (300, None, [300]),
        (4, 10, [4, 4, 2]),
        (4, 4, [4]),
    ],
)
def test_how_many_requests_a_run_has(load: int, asked: int | None, groups: list[int]) -> None:
    traffic = Traffic((load,), 8, 8, num_requests=asked)
    assert traffic.groups(load) == groups and traffic.count(load) == sum(groups)


def test_a_part_of_the_questions_is_spread_over_the_file() -> None:
    """Files sort by category, and every load should see all of them."""
    questions = [[number] for number in range(80)]
    traffic = Traffic((1,), 8, 8, questions=questions)
    llm: Any = None
    assert traffic.prompts(llm, 4, seed=1) == [[0], [20], [40], [60]]
    assert traffic.prompts(llm, 32, seed=1) == [[place * 80 // 32] for place in range(32)]
    assert traffic.prompts(llm, 80, seed=1) == questions
    assert traffic.prompts(llm, 82, seed=1) == [*questions, [0], [1]]


def test_random_prompts_are_the_same_for_every_number_of_drafts() -> None:
    """A head's drafts depend on the text: others would be compared. Each repeat has its own."""
    config = SimpleNamespace(model=SimpleNamespace(vocab_size=1000))
    llm: Any = SimpleNamespace(config=config)
    traffic = Traffic((2,), 8, 8)
    first = traffic.prompts(llm, 2, seed=1)
    assert traffic.prompts(llm, 2, seed=1) == first != traffic.prompts(llm, 2, seed=2)


def row(
    load: int, drafts: int | str, *speeds: float, accepted: int = 0, adaptive: bool = False
) -> LoadRow:
    """10 of 40 steps verify drafts."""
    steps = DecodeSteps(40, 40 + accepted, 10 if drafts else 0)
    counts, made = SpecCounts(3), StepDrafts({0: 60, 3: 20}, 5)
    for step in range(steps.num_with_drafts):
        counts.add(3, accepted // 10 + (step < accepted % 10))
    runs = [LoadRun(2.0, round(2 * speed), counts, steps, made) for speed in speeds]
    return LoadRow(load, drafts, 4 * load, runs, adaptive or drafts == "auto")


def test_ratios_are_those_of_the_same_load() -> None:
    rows = [
        row(1, 0, 100, 90, 110),
        row(8, 0, 400),
        row(1, 3, 150, 160, 140, accepted=12),
        row(8, 3, 300, accepted=12),
        row(1, "auto", 180),
        row(8, "auto", 380),
        row(8, 7, 500, adaptive=True),  # not the best fixed number: it varies
    ]
    peer = PeerSpeeds("vllm 9.9", {(1, 0): [50, 60, 40], (1, 3): [75]})
    report = LoadReport(Traffic((1, 8), 8, 8), None, rows, peer)  # type: ignore[arg-type]
    found = {(each["load"], each["k"]): each for each in report.records()}
    assert found[1, 0]["tokens_per_s"] == 100 and found[1, 0]["tokens_per_s_all"] == [100, 90, 110]
    assert [found[key]["of_plain"] for key in ((1, 0), (1, 3), (1, "auto"))] == [1, 1.5, 1.8]
    assert [found[key]["of_best_fixed"] for key in ((1, 3), (1, "auto"))] == [1, 1.2]
    assert [found[key]["of_plain"] for key in ((8, 3), (8, "auto"))] == [0.75, 0.95]
    assert found[8, "auto"]["of_best_fixed"] == 0.95  # plain is the best there
    assert found[8, 7]["of_best_fixed"] == 1.25
    assert [found[key]["adaptive"] for key in ((1, 3), (1, "auto"), (8, 7))] == [False, True, True]
    drafted, plain = found[1, 3], found[1, 0]
    assert (drafted["tokens_per_step"], drafted["share_with_drafts"]) == (1.3, 0.25)
    assert drafted["mean_acceptance_length"] == 2.2  # in those steps
    assert drafted["steps_by_drafts"] == {3: 0.25, 0: 0.75}
    assert drafted["num_drafts_not_made"] == 3 * 5
    names = ("tokens_per_step", "share_with_drafts", "mean_acceptance_length", "steps_by_drafts")
    assert {plain[name] for name in (*names, "num_drafts_not_made")} == {None}
    assert (found[1, 0]["peer_tokens_per_s"], found[1, 0]["of_peer"]) == (50, 2)
    assert found[8, 0]["of_peer"] is found[1, "auto"]["of_peer"] is None


def test_an_engine_has_room_for_the_load_and_no_more() -> None:
    sizes = {"max_model_len": None, "max_num_seqs": None, "num_kv_blocks": None}
    engine = {**sizes, "kv_cache_memory": None, "block_size": 16}
    traffic = Traffic((1, 4), 20, 10)
    found = {"max_model_len": 46, "max_num_seqs": 4, "num_kv_blocks": 13}
    assert shaped_sizes(traffic, engine) == found
    given = {**engine, "max_model_len": 99, "max_num_seqs": 6, "kv_cache_memory": "1GiB"}
    assert shaped_sizes(traffic, given) == {"max_model_len": 99, "max_num_seqs": 6}
    asked = Traffic((1, 4), 8, 10, questions=[[1] * 40, [2] * 9])  # 40 + 10 + 16 tokens
    assert sized_cache(asked, engine, 200) == {"num_kv_blocks": 4 * 5 + 1}
    assert sized_cache(asked, engine, 512) == {"num_kv_blocks": 512 // 16 + 1}
    assert sized_cache(asked, {**engine, "max_num_seqs": 64}, 200) == {"num_kv_blocks": 4 * 5 + 1}
    assert sized_cache(asked, given, 512) == {}
    assert sized_cache(asked, {**engine, "gpu_memory_utilization": 0.5}, 512) == {}


class FakeLLM:
    """Its engine answers at once."""

    def __init__(self, drafts: int | str, order: list[int | str], place: str) -> None:
        self.engine = SimpleNamespace(add_request=self.add, step=self.step)
        schedule, device = SimpleNamespace(adaptive=drafts == "auto"), SimpleNamespace(device=place)
        self.config = SimpleNamespace(schedule=schedule, spec=None, device=device)
        self.drafts, self.order, self.waiting = drafts, order, list[str]()
        self.metrics = lambda: {"num_steps_by_drafts": {}, "num_drafts_not_made": 0}

    def add(self, name: str, *_: Any, final_only: bool) -> None:
        self.waiting.append(name)

    def step(self) -> list[Any]:
        self.order.append(self.drafts)
        answer = SimpleNamespace(token_ids=[1], spec=SpecCounts(), num_decode_steps=0)
        done, self.waiting = self.waiting, []
        return [SimpleNamespace(request_id=name, outputs=[answer]) for name in done]


@pytest.mark.parametrize(("place", "fits"), [("cuda:0", True), ("cuda:0", False), ("cpu", False)])
def test_engines_take_turns_if_they_fit(
    place: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, and on a CPU, each is gone before the next starts."""
    order, told = list[int | str](), list[str]()
    alive = weakref.WeakSet[FakeLLM]()

    def start(drafts: int | str) -> Any:
        gc.collect()
        assert not alive or place != "cpu"
        if alive and not fits:
            raise MemoryShortage("the weights take 15 GiB", "buy more")
        alive.add(llm := FakeLLM(drafts, order, place))
        return llm

    monkeypatch.setattr(Traffic, "prompts", lambda self, llm, count, seed: [[1]] * count)
    traffic = Traffic((2,), 8, 8, num_requests=2)
    report = measure_loads(start, traffic, [0, 3, "auto"], 2, told.append)
    assert [row.drafts for row in report.rows] == [0, 3, "auto"]
    assert [len(row.runs) for row in report.rows] == [2, 2, 2]
    assert order == ([0, 3, "auto"] * 3 if fits else [0] * 3 + [3] * 3 + ["auto"] * 3)
    noted = [line for line in told if "one after another" in line]
    assert len(noted) == (place != "cpu" and not fits)


def test_what_is_wrong_with_a_later_engine_is_said_at_once() -> None:
    def start(drafts: int | str) -> Any:
        if drafts:
            raise ConfigError("no such head")
        return FakeLLM(drafts, [], "cuda:0")

    with pytest.raises(ConfigError, match="no such head"):
        measure_loads(start, Traffic((1,), 8, 8), [0, 3], 1, lambda line: None)


def test_an_engine_that_never_fits_is_refused() -> None:
    def start(drafts: int | str) -> Any:
        raise MemoryShortage("the weights take 15 GiB", "buy more")

    with pytest.raises(MemoryShortage, match="15 GiB: buy more"):
        measure_loads(start, Traffic((1,), 8, 8), [0, 3], 1, lambda line: None)


# ---- the command ----


def test_a_shape_by_load_and_k(stoop: Stoop) -> None:
    args = ["--k", "0,2", "--load", "1,3", "--repeat", "2", *SIZES, *FLAGS]
    record = record_of(stoop("bench", "throughput", "--shape", "tiny", *args))
    assert (record["bench"], record["shape"], record["model"]) == ("throughput", "tiny", None)
    assert (record["input_len"], record["output_len"], record["repeat"]) == (8, 6, 2)
    assert record["peer"] is record["speculative_config"] is None
    assert (record["head"], record["draft_vocab_size"]) == ("eagle3", 96)
    rows = record["rows"]
    assert [(each["load"], each["k"]) for each in rows] == [(1, 0), (1, 2), (3, 0), (3, 2)]
    assert [each["num_requests"] for each in rows] == [4, 4, 12, 12]
    for each in rows:
        assert len(each["tokens_per_s_all"]) == 2 and each["tokens_per_s"] > 0
        assert each["tokens_per_step"] == (1 if each["k"] else None)  # none is accepted
        assert each["steps_by_drafts"] == ({"2": 1} if each["k"] else None)
        assert "peer_tokens_per_s" not in each
    assert [each["of_plain"] for each in rows[::2]] == [1, 1]
    for load in (1, 3):
        assert max(each["of_best_fixed"] for each in rows if each["load"] == load) == 1


def test_a_shape_with_its_own_head(stoop: Stoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny-qwen", TINY_QWEN)
    args = ["--head", "mtp", "--draft-vocab-size", "48", "--load", "2"]
    sizes = [*SIZES, "--repeat", "1", *FLAGS]
    shape = ["bench", "throughput", "--shape", "tiny-qwen"]
    record = record_of(stoop(*shape, *args, "--k", "2", *sizes))
    assert (record["head"], record["draft_vocab_size"]) == ("mtp", 48)
    (row,) = record["rows"]
    assert (row["k"], row["tokens_per_step"], row["of_plain"]) == (2, 1, None)
    assert row["of_best_fixed"] == 1
    record = record_of(stoop(*shape, *args, *sizes))
    assert (record["head"], record["draft_vocab_size"]) == ("mtp", 48)
    assert [each["k"] for each in record["rows"]] == [0, 3]


def test_a_shape_alone_is_measured_without_drafts(stoop: Stoop) -> None:
    args = ["--load", "2", "--repeat", "1", *SIZES, *FLAGS]
    record = record_of(stoop("bench", "throughput", "--shape", "tiny", *args))
    assert [each["k"] for each in record["rows"]] == [0]
    assert record["head"] is record["draft_vocab_size"] is None


def test_the_engines_of_a_path_share_one_random_head(
    stoop: Stoop, text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    write = shapes._write_random_weights

    def spy(folder: Path, target: Path) -> None:
        written.append(folder)
        write(folder, target)

    monkeypatch.setattr(shapes, "_write_random_weights", spy)
    args = ["--k", "0,1,2", "--load", "1", "--num-prompts", "1", "--repeat", "1", *SIZES, *FLAGS]
    record = record_of(stoop("bench", "throughput", "--shape", str(text_model), *args))
    found = [(each["k"], each["tokens_per_step"]) for each in record["rows"]]
    assert found == [(0, None), (1, 1), (2, 1)]
    assert len(written) == 1 and not written[0].exists()


def test_a_model_on_questions(stoop: Stoop, text_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps({"question": text}) + "\n" for text in ("abab?", "cc?")))
    drafter = json.dumps({"method": "ngram", "num_speculative_tokens": 2})
    args = ["--questions", str(file), "--load", "2", "--num-prompts", "3", "-sc", drafter]
    sizes = ["--output-len", "8", "--repeat", "1", "--max-model-len", "64"]
    record = record_of(stoop("bench", "throughput", str(text_model), *args, *sizes, *FLAGS))
    assert (record["model"], record["questions"]) == (str(text_model), str(file))
    assert record["input_len"] is record["draft_vocab_size"] is None
    used = {"method": "ngram", "rejection_sample_method": "standard"}
    assert record["head"] == "ngram" and record["speculative_config"] == used
    rows = record["rows"]
    assert [(each["load"], each["k"], each["num_requests"]) for each in rows] == [
        (2, 0, 3),
        (2, 2, 3),
    ]
    assert rows[1]["of_plain"] == pytest.approx(
        rows[1]["tokens_per_s"] / rows[0]["tokens_per_s"], rel=1e-3
    )


Started = Callable[..., dict[str, Any]]


@pytest.fixture
def started(stoop: Stoop, monkeypatch: pytest.MonkeyPatch) -> Started:
    """Runs the command up to the first engine; the options of that engine."""
    seen: list[dict[str, Any]] = []

    def start(model: str, options: dict[str, Any]) -> None:
        seen.append(options)
        raise ConfigError("seen enough")

    def run(*args: str) -> dict[str, Any]:
        code, _, told = stoop("bench", "throughput", *args)
        assert code == 2 and "seen enough" in told, told
        return seen.pop()

    monkeypatch.setattr(sys.modules["stoop.cli.bench.throughput"], "start_llm", start)
    return run


def test_auto_goes_to_the_engine_as_it_is(started: Started) -> None:
    args = ["--k", "auto,3", "--load", "4", "--graph-mode", "step", *SIZES, *FLAGS]
    options = started("--shape", "tiny", *args, "--no-enable-prefix-caching")
    assert options["speculative_config"]["num_speculative_tokens"] == "auto"
    assert options["max_num_seqs"] == 4 and options["enable_prefix_caching"] is False


def test_a_number_from_the_drafter_adapts_if_the_drafter_says_so(
    stoop: Stoop, text_model: Path
) -> None:
    """A number alone is made in every step."""
    drafter = {"method": "ngram", "num_speculative_tokens": 2}
    args = ["--load", "1", "--num-prompts", "1", "--repeat", "1", *SIZES, *FLAGS]
    graphs = ["--graph-mode", "step", "--capture-sizes", "1,8", "--max-model-len", "64"]
    for adaptive, shown in (({"adaptive": True}, "up to 2"), ({}, "2")):
        asked = ["-sc", json.dumps(drafter | adaptive)]
        result = stoop("bench", "throughput", str(text_model), *asked, *args, *graphs)
        rows = record_of(result)["rows"]
        found = [(each["k"], each["adaptive"]) for each in rows]
        assert found == [(0, False), (2, bool(adaptive))]
        assert sum(rows[1]["steps_by_drafts"].values()) == pytest.approx(1, abs=1e-4)
        cells = [line.split("│")[2].strip() for line in result[1].splitlines() if "x │" in line]
        assert cells == ["plain", shown] and "1.000x │" in result[1]  # of the best


# ---- before anything is measured ----

NGRAM = '{"method": "ngram"}'
PIECES = ["--graph-mode", "piecewise"]


@pytest.mark.parametrize(
    ("args", "pattern"),
    [
        (["--shape", "tiny", "--k", "0,auto", *PIECES], "needs graphs of decode batches"),
        (["TEXT_MODEL", "--k", "0,auto", "-sc", NGRAM, *PIECES], "needs graphs of decode batches"),
        (["--shape", "tiny", "--k", "0,3", "--head", "mtp"], "no MTP heads for LlamaForCausalLM"),
        (
            ["--shape", "tiny-qwen", "--head", "mtp", "--k", "0,3", "--draft-vocab-size", "97"],
            "draft_vocab_size=97: the target has 96 tokens",
        ),
        (["--shape", "tiny", "--k", "0,3", "--load", "32"], "max_num_seqs=32 times 4 tokens"),
        (["TEXT_MODEL", "--k", "0,3", "-sc", NGRAM, "--load", "32"], "max_num_seqs=32 times 4"),
        (
            ["--shape", "tiny", "--k", "0,auto", "--peer", "vllm", *PIECES],
            "needs graphs of decode batches",
        ),
    ],
)
def test_no_engine_is_measured_if_a_later_one_is_refused(
    args: list[str],
    pattern: str,
    stoop: Stoop,
    text_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(*_: Any) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setitem(SHAPES, "tiny-qwen", TINY_QWEN)
    monkeypatch.setattr(sys.modules["stoop.cli.bench.throughput"], "start_llm", measure)
    monkeypatch.setattr("stoop.worker.runner.load_model", measure)
    monkeypatch.setattr("stoop.bench.peer.vllm_problem", lambda python: None)
    monkeypatch.setattr("stoop.bench.peer.measure_vllm_loads", measure)
    given = [str(text_model) if each == "TEXT_MODEL" else each for each in args]
    code, _, told = stoop("bench", "throughput", *given, *SIZES, *CPU)
    assert code == 2 and pattern in told


def test_a_peer_that_is_not_installed_is_left_out(
    stoop: Stoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    args = ["--shape", "tiny", "--peer", "vllm", "--load", "1", "--repeat", "1", *SIZES, *CPU]
    for given in ("nowhere/python", sys.executable):  # but not where one is named
        code, _, told = stoop("bench", "throughput", *args, "--python", given)
        assert code == 2 and f"error: --python {given} " in told
    code, shown, told = stoop("bench", "throughput", *args)
    assert code == 0, told
    assert "note: vllm is not measured" in told and "pip install vllm" in told
    record = json.loads(shown.splitlines()[-1])
    assert record["peer"] is None and [each["k"] for each in record["rows"]] == [0]


@pytest.mark.parametrize(
    ("args", "pattern"),
    [
        (["--shape", "llama-9b"], "llama-8b, llama-1b"),
        (["--shape", "tiny", "--k", "17"], "use numbers from 0 to 16 or auto"),
        (["--shape", "tiny", "--k", "1,x"], "use numbers from 0 to 16 or auto"),
        (["--shape", "tiny", "--load", "0"], "such as 1,8"),
        (["--shape", "tiny", "--load", "8", "--num-prompts", "4"], "at least as many"),
        (["some/model", "--shape", "tiny"], "leave out the model and -sc"),
        (["--shape", "tiny", "-sc", "none"], "leave out the model and -sc"),
        (["--shape", "tiny", "--questions", "q.jsonl"], "leave out --shape"),
        (["--questions", "q.jsonl", "--input-len", "9"], "leave out --input-len"),
        (["--questions", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["--raw"], "--raw is for --questions"),
        (["--shape", "tiny", "--peer", "sglang"], "use vllm, the only choice"),
        (["--peer", "vllm"], "add --shape with one of"),
        (["--shape", "tiny", "--python", "x"], "--python is for --peer vllm"),
        (["--k", "3", "-sc", "none"], "needs a drafter"),
        (["--head", "mtp"], "are for --shape: set a model's drafter with -sc"),
        (["--shape", "tiny", "--head", "medusa"], "--head medusa: use eagle3 or mtp"),
        (["--shape", "tiny", "--head", "mtp", "--peer", "vllm"], "leave out --head"),
        (["--shape", "tiny", "--draft-vocab-size", "64"], "use --head mtp"),
        (["--shape", "tiny", "--k", "0", "--head", "mtp"], "--k 0 makes none: leave them out"),
        (["--shape", "tiny", "--k", "0", "--draft-vocab-size", "8"], "--k 0 makes none"),
        (["--shape", "tiny", "--load", "2,64", "--max-num-seqs", "8"], "--max-num-seqs 8 is less"),
        (["--shape", "tiny", "--load-format", "auto"], "leave out --load-format"),
        (["--shape", "tiny", "--skip-tokenizer-init"], "leave out --skip-tokenizer-init"),
        (
            ["--shape", "tiny", "--tokenizer", "x", "--revision", "main"],
            "leave out --tokenizer and --revision",
        ),
        (["--shape", "tiny", "--enable-prefix-caching"], "leave out --enable-prefix-caching"),
        (["--load", "1", "--enable-prefix-caching"], "leave out --enable-prefix-caching"),
        (
            ["--k", "3", "-sc", '{"method": "ngram", "adaptive": true}'],
            "-sc has adaptive=true, but --k 3 decides that",
        ),
        (["--k", "auto", "-sc", '{"method": "ngram", "adaptive": false}'], "leave out adaptive"),
        (["--shape", "tiny", "--k", "auto", "--peer", "vllm"], "needs a fixed K"),
        (
            ["--shape", "tiny", "--peer", "vllm", "--dtype", "bfloat16", "--weight-dtype", "auto"],
            "leave out --dtype and --weight-dtype",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(args: list[str], pattern: str, stoop: Stoop) -> None:
    code, _, told = stoop("bench", "throughput", *args, "--device", "cpu")
    (line,) = [text for text in told.splitlines() if text.startswith("error: ")]
    assert code == 2 and pattern in line


def test_a_shape_that_does_not_fit_is_refused(
    stoop: Stoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoop.worker.memory._meminfo", lambda: {"MemAvailable": 4 << 30})
    code, _, told = stoop("bench", "throughput", "--shape", "llama-8b", "--device", "cpu")
    assert code == 2 and "the weights take 15.0 GiB in bfloat16" in told
    assert "lower --load, --input-len or --output-len" in told


def test_prompts_that_do_not_fit_are_refused(stoop: Stoop, text_model: Path) -> None:
    args = ["--load", "1", "--input-len", "300", "-sc", "none", *FLAGS]
    code, _, told = stoop("bench", "throughput", str(text_model), *args)
    assert code == 2 and "exceed max_model_len" in told
