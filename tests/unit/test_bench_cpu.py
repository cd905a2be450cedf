"""The arithmetic of `stoop bench cpu`, with engines that reply by script."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoop.bench import cpu as bench
from stoop.bench.cpu_process import (
    BUSY_CORES,
    LLAMA_CPP,
    STOOP,
    EngineFailed,
    EngineSpec,
    Watch,
)
from stoop.bench.cpu_report import print_cpu, warnings
from stoop.cli.bench.cpu import _print
from stoop.worker.core_usage import seconds_used

MIB = 1 << 20
WORK = bench.Work.of([[1, 2, 3], [4, 5]], prompt_len=7, num_tokens=5)
SETTING = {"model": "m", "questions": None, "num_questions": 2, "max_tokens": 5}
SETTING |= {"prompt_len": 7, "rounds": 1}


class ScriptedEngine:
    """Takes `prefill` seconds for each prompt token and `gap` for each step of `run` tokens."""

    def __init__(
        self, name: str, *, gap: float = 0.1, run: int = 1, drafts: int = 0, shift: int = 0
    ) -> None:
        self.spec = EngineSpec(name, STOOP, "m", asked=name != LLAMA_CPP)
        self.gap, self.run, self.drafts, self.shift = gap, run, drafts, shift
        self.prefill = 0.01
        self.cpu_s, self.import_s, self.load_s = 0.0, 1.5, 0.25
        self.version, self.threads = "9.9", 2
        self.asked: list[tuple[list[int], int]] = []
        self.num_closed = 0

    def ask(self, **request: Any) -> dict[str, Any]:
        num_tokens = request["num_tokens"]
        if request["do"] == "together":
            every = [self._reply(prompt, num_tokens) for prompt in request["prompts"]]
            self.cpu_s += 2.0
            return {key: [each[key] for each in every] for key in ("tokens", "times", "steps")}
        self.asked.append((request["prompt"], num_tokens))
        self.cpu_s += 0.5
        return self._reply(request["prompt"], num_tokens)

    def _reply(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        steps = -(-(num_tokens - 1) // self.run)
        first = self.prefill * len(prompt)
        place = [0, *(1 + number // self.run for number in range(num_tokens - 1))]
        return {
            "tokens": [prompt[0] + number + self.shift for number in range(num_tokens)],
            "times": [first + step * self.gap for step in place],
            "steps": steps,
            "memory": {"rss": 30 * MIB, "file": 20 * MIB, "anon": 10 * MIB},
        }

    def close(self) -> None:
        self.num_closed += 1


Start = Callable[..., tuple[ScriptedEngine, float | None]]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, ScriptedEngine]:
    """Engines by name; those that are not there cannot be started."""
    known: dict[str, ScriptedEngine] = {}

    def start(spec: EngineSpec, context: int, threads: int | None, watch: Watch) -> Any:
        assert context == 7 + 5
        if spec.name not in known:
            raise EngineFailed(f"{spec.name}: its process was ended by SIGILL")
        engine = known[spec.name]
        engine.spec, engine.threads = spec, threads or 2
        return engine, 0.0

    monkeypatch.setattr(bench, "start_engine", start)
    monkeypatch.setattr(bench.Plan, "watch", Watch(busy=lambda: None))
    return known


def spec(name: str, **more: Any) -> EngineSpec:
    return EngineSpec(name, STOOP, "m", **more)


def silent(*stage: object) -> None:
    """Shows no progress."""


# ---- figures ----


def test_the_long_prompt_repeats_the_questions() -> None:
    assert list(WORK.prompt) == [1, 2, 3, 4, 5, 1, 2] and WORK.context == 12


def test_a_round_counts_decoding_and_the_prompt_apart() -> None:
    engine = ScriptedEngine("stoop", gap=0.1, run=2, drafts=3)
    found, own = bench.run_round(engine, WORK)
    # 4 tokens after the first come in 2 steps of 0.1 s.
    assert found.decode_tokens_per_s == pytest.approx(2 * 4 / (2 * 0.2))
    assert found.tokens_per_step == 2.0
    assert found.ttft_s == pytest.approx(0.07)
    assert found.answers == [[1, 2, 3, 4, 5], [4, 5, 6, 7, 8]]
    assert own == 3 * 0.5
    assert engine.asked == [([1, 2, 3], 5), ([4, 5], 5), (list(WORK.prompt), 1)]


def test_a_slow_engine_answers_fewer_questions() -> None:
    engine = ScriptedEngine("transformers")
    engine.spec = spec("transformers", max_questions=1)
    assert bench.run_round(engine, WORK)[0].answers == [[1, 2, 3, 4, 5]]


def test_an_engine_that_ends_early_is_refused() -> None:
    engine = ScriptedEngine("short")
    reply = engine._reply
    engine._reply = lambda prompt, num_tokens: reply(prompt, 3)  # type: ignore[method-assign]
    with pytest.raises(EngineFailed, match="short generated 3 tokens instead of 5"):
        bench.run_round(engine, WORK)


def test_tokens_of_requests_at_once() -> None:
    engine = ScriptedEngine("stoop")
    (speed, decoding), own = bench.run_together(engine, 3, WORK)
    # The prompts are questions 1, 2 and 1 again; the longest takes 0.03 + 4 * 0.1 s.
    assert speed == pytest.approx(15 / 0.43) and own == 2.0
    assert decoding == pytest.approx(12 / 0.4)  # from 0.03 s on, when all have a token


# ---- rounds ----


def test_rounds_alternate_and_the_first_does_not_count(engines: dict[str, ScriptedEngine]) -> None:
    order: list[str] = []
    for name, gap in (("stoop", 0.05), (LLAMA_CPP, 0.1)):
        engine = engines[name] = ScriptedEngine(name, gap=gap)
        ask = engine.ask
        engine.ask = lambda ask=ask, name=name, **request: order.append(name) or ask(**request)  # type: ignore[method-assign]
    found = bench.measure_cpu([spec("stoop"), spec(LLAMA_CPP)], bench.Plan(WORK, 2), silent)
    assert order == (["stoop"] * 3 + [LLAMA_CPP] * 3) * 3
    assert [len(each.rounds) for each in found.engines] == [2, 2]
    decode, prefill = found.ratios(found.engines[0]) or (0, 0)
    assert (decode, prefill) == (pytest.approx(2.0), pytest.approx(1.0))
    assert found.ratios(found.engines[1]) is None
    assert found.engines[0].prefill_tokens_per_s == pytest.approx(100)
    assert [engine.num_closed for engine in engines.values()] == [1, 1]


def test_others_get_the_threads_that_stoop_chose(engines: dict[str, ScriptedEngine]) -> None:
    engines["stoop"], engines[LLAMA_CPP] = ScriptedEngine("stoop"), ScriptedEngine(LLAMA_CPP)
    specs = [spec("stoop"), spec(LLAMA_CPP)]
    found = bench.measure_cpu(specs, bench.Plan(WORK, 1, threads=7), silent)
    assert [each.threads for each in found.engines] == [7, 7]
    found = bench.measure_cpu(specs, bench.Plan(WORK, 1), silent)
    assert [each.threads for each in found.engines] == [2, 2]


def test_a_peer_that_fails_is_a_note_unless_it_was_asked_for(
    engines: dict[str, ScriptedEngine],
) -> None:
    engines["stoop"] = ScriptedEngine("stoop")
    specs = [spec("stoop"), spec(LLAMA_CPP, asked=False)]
    found = bench.measure_cpu(specs, bench.Plan(WORK, 1), silent)
    assert "SIGILL" in found.missing[LLAMA_CPP] and len(found.engines) == 1
    with pytest.raises(EngineFailed, match="SIGILL"):
        bench.measure_cpu([spec("stoop"), spec(LLAMA_CPP)], bench.Plan(WORK, 1), silent)
    assert engines["stoop"].num_closed == 2


def test_a_model_without_a_head_has_no_row_with_drafts(engines: dict[str, ScriptedEngine]) -> None:
    engines |= {name: ScriptedEngine(name) for name in (bench.PLAIN, bench.DRAFTED)}
    specs = [spec(bench.PLAIN), spec(bench.DRAFTED)]
    found = bench.measure_cpu(specs, bench.Plan(WORK, 1), silent)
    assert found.find(bench.DRAFTED) is None and "no head" in found.missing[bench.DRAFTED]
    assert engines[bench.DRAFTED].num_closed >= 1 and engines[bench.DRAFTED].asked == []
    engines[bench.DRAFTED].drafts = 3
    found = bench.measure_cpu(specs, bench.Plan(WORK, 1), silent)
    assert found.find(bench.DRAFTED) is not None and found.missing == {}


def test_drafts_that_change_answers_fail_the_command(
    engines: dict[str, ScriptedEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    import typer

    engines[bench.PLAIN] = ScriptedEngine(bench.PLAIN)
    drafted = engines[bench.DRAFTED] = ScriptedEngine(bench.DRAFTED, run=2, drafts=3)
    plan = bench.Plan(WORK, 1)
    specs = [spec(bench.PLAIN), spec(bench.DRAFTED)]
    found = bench.measure_cpu(specs, plan, silent)
    assert found.equal_share(bench.DRAFTED) == 1.0 and found.equal_share(bench.PLAIN) is None
    _print(found, plan, {"model": "m", "questions": None}, None)
    drafted.shift = 1
    found = bench.measure_cpu(specs, plan, silent)
    assert found.equal_share(bench.DRAFTED) == 0.0
    with pytest.raises(typer.Exit) as left:
        _print(found, plan, {"model": "m", "questions": None}, None)
    assert left.value.exit_code == 1
    assert "drafts changed 100% of the answers" in capsys.readouterr().err


def test_requests_at_once_are_measured_for_each_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[ScriptedEngine] = []

    def start(spec: EngineSpec, context: int, threads: int | None) -> ScriptedEngine:
        made.append(ScriptedEngine(spec.name))
        return made[-1]

    monkeypatch.setattr(bench, "EngineProcess", start)
    monkeypatch.setattr(bench.Plan, "watch", Watch(busy=lambda: None))
    specs = [spec(bench.PLAIN), spec(bench.DRAFTED)]
    found = bench.measure_together(specs, [1, 3], bench.Plan(WORK, 2), silent)
    assert [(each.name, each.num_requests, len(each.tokens_per_s)) for each in found] == [
        (bench.PLAIN, 1, 2),
        (bench.DRAFTED, 1, 2),
        (bench.PLAIN, 3, 2),
        (bench.DRAFTED, 3, 2),
    ]
    assert [each.num_closed for each in made] == [1, 1]


# ---- other processes ----


class Machine:
    """Every measurement takes 2 s, of which the engine computes 3 core seconds."""

    def __init__(self, others: list[float]) -> None:
        """others: cores that other processes use in each measurement"""
        self.others = list(others)
        self.busy_s, self.now, self.num_runs, self.pauses = 100.0, 0.0, 0, 0

    def measure(self) -> tuple[int, float]:
        self.busy_s += 3.0 + 2.0 * self.others[self.num_runs]
        self.now += 2.0
        self.num_runs += 1
        return self.num_runs, 3.0

    def pause(self, seconds: float) -> None:
        self.pauses += 1
        self.now += seconds

    def watch(self, retries: int) -> Watch:
        return Watch(lambda: self.busy_s, lambda: self.now, self.pause, retries)


@pytest.mark.parametrize(
    ("others", "chosen", "cores", "num_runs"),
    [
        ([0.1], 1, 0.1, 1),
        ([0.9, 0.0], 2, 0.0, 2),
        ([0.9, 0.3, 0.5], 2, 0.3, 3),
        ([-0.2], 1, 0.0, 1),  # the kernel counts in ticks
    ],
)
def test_a_disturbed_measurement_is_repeated(
    others: list[float], chosen: int, cores: float, num_runs: int
) -> None:
    """And the least disturbed one is kept."""
    machine = Machine(others)
    found, used = machine.watch(retries=2).calmly(machine.measure)
    assert (found, machine.num_runs, machine.pauses) == (chosen, num_runs, num_runs - 1)
    assert used == pytest.approx(cores)


def test_without_the_kernels_counters_nothing_is_repeated() -> None:
    machine = Machine([9.0])
    assert Watch(busy=lambda: None, retries=5).calmly(machine.measure) == (1, None)


def test_work_is_summed_over_our_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  9 9 9 9 9 9 9 9 9 9\n"
        "cpu0 100 20 30 7000 800 4 5 6 0 0\n"
        "cpu1 900 0 0 1 1 0 0 0 0 0\n"
        "cpu2 1 0 0 5000 1 0 0 0 0 0\n"
        "intr 12\n"
    )
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 2})
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    assert seconds_used(stat=stat) == pytest.approx((100 + 20 + 30 + 4 + 5 + 6 + 1) / 100)
    assert seconds_used(stat=tmp_path / "nothing") is None
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {7})
    assert seconds_used(stat=stat) is None


# ---- output ----


def result(name: str, *speeds: float, others: list[float | None] | None = None) -> Any:
    rounds = [bench.Round([[1, 2]], speed, None, 0.5, None) for speed in speeds]
    made = bench.EngineResult(name, "9.9", 0, 2, 1.0, 0.5, 0.0, 7, rounds)
    made.others = others or [0.0] * len(rounds)
    return made


def test_medians_and_the_json_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench.CpuReport(
        [result(bench.PLAIN, 30, 10, 26), result(LLAMA_CPP, 13, 14, 12)],
        {"transformers": "not measured: this Python has no transformers"},
        [bench.Together(bench.PLAIN, 4, [50.0, 70.0, 60.0], [80.0, 90.0, 85.0], [0.0] * 3)],
    )
    print_cpu(report, SETTING, silent, tmp_path / "out.json")
    captured = capsys.readouterr()
    record = json.loads(captured.out.splitlines()[-1])
    assert record == json.loads((tmp_path / "out.json").read_text())
    ours, theirs = record["engines"]
    assert ours["engine"] == "stoop" and ours["decode_tokens_per_s"] == 26
    assert ours["decode_tokens_per_s_by_round"] == [30, 10, 26]
    assert ours["decode_of_llama_cpp"] == 2.0 and theirs["decode_of_llama_cpp"] is None
    assert ours["ttft_ms"] == 500 and ours["prefill_tokens_per_s"] == 14
    assert ours["memory_mib"] == {"rss": None, "file": None, "anon": None}
    assert theirs["equal_share"] == 1.0
    assert record["concurrency"][0]["tokens_per_s"] == 60
    assert record["concurrency"][0]["decode_tokens_per_s"] == 85 and "85.0" in captured.err
    assert record["bench"] == "cpu" and record["threads"] == 2
    assert "this Python has no transformers" in captured.err
    assert "10.0-30.0" in captured.err and "2.00x" in captured.err and "*" not in captured.err


def test_ratios_leave_disturbed_rounds_of_either_side_out() -> None:
    ours = result(bench.PLAIN, 30, 10, 40, others=[0.0, 0.0, 0.9])
    theirs = result(LLAMA_CPP, 20, 1, 10, others=[0.0, 0.9, 0.0])
    report = bench.CpuReport([ours, theirs], {})
    assert report.ratios(ours) == (1.5, 1.0)
    theirs.others[0] = 0.9
    assert report.ratios(ours) is None
    ours.others, theirs.others = [None] * 3, [None] * 3  # unknown
    assert report.ratios(ours) == (3.0, 1.0)


def test_disturbed_rounds_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    report = bench.CpuReport([result(bench.PLAIN, 30, 10, others=[BUSY_CORES, 0.8])], {})
    assert report.engines[0].disturbed == [2]
    (line,) = warnings(report)
    assert line.startswith("stoop: other processes used up to 0.80 cores in 1 of 2 rounds")
    report.engines[0].start_others = 0.5
    assert "while 'stoop' started" in warnings(report)[0]
    said: list[str] = []
    print_cpu(report, SETTING, said.append)
    captured = capsys.readouterr()
    assert said == warnings(report) and "stoop*" in captured.err
    assert json.loads(captured.out)["engines"][0]["disturbed_rounds"] == [2]


def test_a_machine_without_proc_has_no_memory_figures() -> None:
    assert result(bench.PLAIN, 1.0).memory("rss") is None
    with_memory = result(bench.PLAIN, 1.0)
    with_memory.rounds = [SimpleNamespace(memory={"rss": size}) for size in (3, 9, 5)]
    assert with_memory.memory("rss") == 5
