"""The command line: in processes of its own where that matters, else in this one."""

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoop import LLM, __version__
from stoop.check.mutants import harness
from stoop.check.mutants.base import Mutant
from stoop.cli.main import main
from stoop.engine.engine import Engine
from support.terminal import Terminal

STOOP = [sys.executable, "-c", "from stoop.cli.main import main; main()"]
QUICK = ["--dtype", "float64", "--device", "cpu"]
Stoop = Callable[..., tuple[int, str, str]]  # the fixture: a command in this process


def run(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    env = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
    return subprocess.run(
        [*STOOP, *args], input=stdin, capture_output=True, text=True, env=env, timeout=300
    )


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"stoop {__version__}")


def test_generate_prints_text_and_speed(text_model: Path) -> None:
    args = ["--prompt", "hello", "--max-tokens", "8", "--ignore-eos", *QUICK]
    done = run("generate", str(text_model), *args)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert re.search(r"8 tokens in [\d.]+ s: [\d.]+ tokens/s", done.stderr)
    assert "KV cache" in done.stderr


NGRAM = ["-sc", '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}']


def test_generate_beside_plain(stoop: Stoop, text_model: Path) -> None:
    args = [
        "--prompt",
        "hello hello",
        "--max-tokens",
        "8",
        "--ignore-eos",
        "--beside-plain",
        *QUICK,
    ]
    code, answer, told = stoop("generate", str(text_model), *args, *NGRAM)
    assert code == 0, told
    found = re.search(r"without drafts ([\d.]+) tokens/s, (.*): ([\d.]+)x the speed", told)
    assert found is not None and found[2] == "the same answer"
    assert float(found[1]) > 0 and float(found[3]) > 0
    # Without drafts there is nothing to compare.
    code, plain_answer, told = stoop("generate", str(text_model), *args, "-sc", "none")
    assert code == 0 and "without drafts" not in told
    assert "there were no drafts" in told
    assert answer == plain_answer, "an answer is shown once"
    code, _, told = stoop("generate", str(text_model), *args, "--json")
    assert code == 2 and "leave out --json" in told


def test_beside_plain_changes_no_answer(stoop: Stoop, text_model: Path) -> None:
    """Neither engine's first use nor drafts of the other kind take part in it."""
    args = ["--prompt", "hello", "--max-tokens", "8", "--temperature", "1", *QUICK, *NGRAM]
    args += ["--num-speculative-tokens", "1", "--ignore-eos"]
    code, compared, told = stoop("generate", str(text_model), *args, "--beside-plain")
    assert code == 0 and "the same answer" in told, told
    assert (0, compared) == stoop("generate", str(text_model), *args)[:2]


def test_tokens_per_step_are_those_of_all_steps(stoop: Stoop, text_model: Path) -> None:
    """Not only of those that had drafts, which a lookup finds now and then."""
    args = ["--prompt", "abababab", "--max-tokens", "40", "--ignore-eos", *QUICK, *NGRAM]
    code, _, told = stoop("generate", str(text_model), *args)
    assert code == 0, told
    (row,) = [line for line in told.splitlines() if line.startswith("│ accepted")]
    every, share, drafted = [cell.strip() for cell in row.split("│")[-4:-1]]
    code, shown, _ = stoop("generate", str(text_model), *args, "--json")
    record, last = map(json.loads, shown.splitlines())
    (answer,), metrics = record["outputs"], last["metrics"]
    assert answer["num_decode_steps"] == metrics["num_steps"] - 1  # the prompt's
    num_drafted = answer["spec_decode_num_drafts"]
    assert 0 < num_drafted < answer["num_decode_steps"]
    assert every == f"{39 / answer['num_decode_steps']:.2f}" < drafted
    assert share == f"{num_drafted / answer['num_decode_steps']:.0%}"
    assert drafted == f"{metrics['spec_decode_mean_acceptance_length']:.2f}"


def test_chat_counts_the_steps_of_all_turns(
    stoop: Stoop, text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\nhi\n"))
    args = ["--max-tokens", "5", "--ignore-eos", "--num-speculative-tokens", "0", *QUICK, *NGRAM]
    code, _, told = stoop("chat", str(text_model), *args)
    assert code == 0 and told.endswith("no drafts were made in 8 steps\n"), told


def test_what_is_logged_comes_after_the_speed(
    stoop: Stoop, text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would stand between an answer and its statistics."""
    step, log = Engine.step, logging.getLogger("stoop.test")

    def noisy(self: Engine) -> Any:
        log.warning("the cores are busy")
        return step(self)

    monkeypatch.setattr(Engine, "step", noisy)
    for args in (["generate", "-p", "hi"], ["chat", "--seed", "1"]):
        monkeypatch.setattr(logging.root, "handlers", [])  # else the command adds none
        monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
        options = ["--max-tokens", "3", "--ignore-eos", *QUICK]
        code, _, told = stoop(args[0], str(text_model), *args[1:], *options)
        assert code == 0
        assert told.index(" tokens/s") < told.index("the cores are busy"), told


def test_generate_json_is_json(stoop: Stoop, text_model: Path) -> None:
    args = ["-p", "hello", "-p", "other", "-n", "2", "--temperature", "1", "--seed", "3", "--json"]
    args += ["--logprobs", "1", "--max-tokens", "4", *QUICK]
    code, answer, told = stoop("generate", str(text_model), *args)
    assert code == 0, told
    *records, last = [json.loads(line) for line in answer.splitlines()]
    assert [record["prompt"] for record in records] == ["hello", "other"]
    assert [len(record["outputs"]) for record in records] == [2, 2]
    assert records[0]["outputs"][0]["logprobs"]
    assert records[0]["ttft_s"] > 0
    assert last["tokens"] == sum(
        len(answer["token_ids"]) for record in records for answer in record["outputs"]
    )
    assert last["tokens_per_s"] > 0
    assert last["metrics"]["num_requests_finished"] == 4


def test_generate_reads_standard_input_and_applies_the_chat_template(text_model: Path) -> None:
    args = ["-p", "-", "--chat", "--json", "--max-tokens", "2", *QUICK]
    done = run("generate", str(text_model), *args, stdin="hi\n")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["prompt"] == "<s>user: hi</s><s>assistant: "


@pytest.mark.parametrize("bench", ["throughput", "latency"])
def test_benchmarks_end_with_a_json_line(stoop: Stoop, bench: str, text_model: Path) -> None:
    sizes = ["--num-prompts", "3"] if bench == "throughput" else ["--batch-size", "1,2"]
    args = [*sizes, "--input-len", "8", "--output-len", "6", *QUICK]
    code, shown, told = stoop("bench", bench, str(text_model), *args)
    assert code == 0, told
    record = json.loads(shown.splitlines()[-1])
    assert record["bench"] == bench
    first = record if bench == "throughput" else record["results"][0]
    assert first["tokens_per_s"] > 0
    assert set(first["ttft_ms"]) == set(first["itl_ms"]) == {"p50", "p90", "p99"}
    assert first["ttft_ms"]["p50"] <= first["ttft_ms"]["p99"]


def test_latency_beside_transformers(stoop: Stoop, text_model: Path) -> None:
    args = ["--batch-size", "1", "--input-len", "8", "--output-len", "6", "--repeat", "1"]
    args += ["--peer", "transformers", *QUICK]
    code, shown, told = stoop("bench", "latency", str(text_model), *args)
    assert code == 0, told
    (result,) = json.loads(shown.splitlines()[-1])["results"]
    assert result["ratio"] == pytest.approx(
        result["tokens_per_s"] / result["transformers_tokens_per_s"], rel=1e-3
    )


def test_chat_streams_and_survives_ctrl_c(text_model: Path, tmp_path: Path) -> None:
    args = ["--max-tokens", "200", "--ignore-eos", "--seed", "1", *QUICK]
    terminal = Terminal([*STOOP, "chat", str(text_model), *args], STOOP_CACHE=str(tmp_path))
    try:
        terminal.wait_for("> ")
        terminal.type("hello\n")
        terminal.wait_for("hello\r\n")
        terminal.wait_for_any()
        os.killpg(terminal.process.pid, signal.SIGINT)
        terminal.wait_for("[stopped]")
        terminal.wait_for("tokens/s]")
        terminal.wait_for("> ")
        terminal.type("/reset\n")
        terminal.wait_for("> ")
        terminal.type("/exit\n")
        assert terminal.process.wait(timeout=60) == 0
    finally:
        terminal.close()


def test_chat_keeps_history(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stoop.cli.chat.start_llm", lambda *_: llm)

    def chat(typed: str) -> str:
        args = ["--max-tokens", "5", "--ignore-eos", "--temperature", "0"]
        monkeypatch.setattr(sys, "argv", ["stoop", "chat", *args])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 0
        return capsys.readouterr().out

    once, twice, reset = chat("hi\n"), chat("hi\nhi\n"), chat("hi\n/reset\nhi\n")
    assert twice.startswith(once)
    assert reset == once * 2
    assert twice != reset


def test_check_proves_graphs_equal_and_ends_with_json(stoop: Stoop) -> None:
    code, shown, told = stoop("check", "--modes", "piecewise", "--backends", "hostplan")
    assert code == 0, told
    assert "equal" in shown
    record = json.loads(shown.splitlines()[-1])
    assert record == {"cases": 25, "failed": 0, "failures": []}


@pytest.mark.parametrize(
    ("model", "drafter"),
    [
        ("tiny", {"method": "eagle3", "model": "tiny"}),
        ("tiny-lfm2", {"method": "ngram"}),
        ("tiny-qwen3.5", {"method": "mtp"}),
        ("tiny-granite-h", {"method": "eagle3", "model": "tiny"}),
    ],
)
def test_check_proves_the_graphs_of_a_drafter(
    stoop: Stoop, model: str, drafter: dict[str, str]
) -> None:
    """All of them are used, whatever is accepted."""
    given = json.dumps(drafter | {"num_speculative_tokens": 2})
    code, shown, _ = stoop(
        "check", model, "--modes", "step", "--backends", "reference", "-sc", given
    )
    assert code == 0, shown
    assert json.loads(shown.splitlines()[-1])["cases"] == 25


def check_mutants(monkeypatch: pytest.MonkeyPatch, *args: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["stoop", "check", "--mutants", "--device", "cpu", *args])
    with pytest.raises(SystemExit) as left:
        main()
    return left.value.code


def test_check_puts_bugs_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert check_mutants(monkeypatch, "--only", "Index pointers") == 0
    output = capsys.readouterr()
    assert "left out" not in output.err
    lines = output.out.splitlines()
    (row,) = (line for line in lines if "index pointers unpadded (full, hostplan)" in line)
    assert "`page_indptr`" in row and "ok" in row
    assert json.loads(lines[-1]) == {"mutants": 1, "failed": 0, "failures": []}


def test_mutants_are_chosen_by_label_and_report() -> None:
    chosen, left_out = harness.choose_mutants("unpadded (Full, hostplan)", "cpu")
    names = ["index pointers unpadded", "lengths unpadded", "offsets unpadded"]
    assert [mutant.name for mutant in chosen] == names and left_out == ""
    chosen, left_out = harness.choose_mutants("39773", "cpu")
    assert len(chosen) == 2 and {mutant.report for mutant in chosen} == {39773}
    assert left_out == "1 left out: needs flashinfer, which does not run on cpu"
    every, left_out = harness.choose_mutants("", "cpu")
    assert len(every) == len(harness.MUTANTS) - 4 and left_out.startswith("4 left out: need flash")
    chosen, left_out = harness.choose_mutants("40410", "cuda:0")
    assert chosen and {(mutant.report, mutant.backend) for mutant in chosen} == {(40410, "triton")}
    asked = [mutant for mutant in harness.MUTANTS if mutant.report == 40410]
    assert left_out == f"{len(asked) - len(chosen)} left out: do not run on cuda:0"
    assert harness.choose_mutants("triton)", "cuda:0")[1] == ""


def test_check_fails_when_a_bug_is_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mutant that says it would be caught, and is not."""
    monkeypatch.setattr(harness, "MUTANTS", (Mutant("harmless", lambda patch: None, "full"),))
    assert check_mutants(monkeypatch, "--json") == 1
    (line,) = capsys.readouterr().out.splitlines()
    record = json.loads(line)
    assert (record["mutants"], record["failed"]) == (1, 2)
    assert record["failures"] == [
        "harmless (full, reference): missed by equality",
        "harmless (full, reference): missed by the sanitizer",
    ]
    assert [found["mutant"] for found in record["findings"]] == ["no bug", "harmless"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--only", "xyzzy"], "in no mutant's name or report number: leave it out to see them all"),
        (["--only", "idex ponters"], "report number: did you mean index pointers unpadded?"),
        (["--modes", "full", "--dtype", "float32"], "leave --modes, --dtype out"),
        (["smollm2-135m"], "--mutants has engines of its own: leave MODEL out"),
        (["--only", "flash"], "none of these mutants runs on cpu (4 left out: need flashinfer,"),
    ],
)
def test_check_refuses_what_mutants_have_not(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    message: str,
) -> None:
    assert check_mutants(monkeypatch, *args) != 0
    assert message in capsys.readouterr().err


def test_only_needs_mutants(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["stoop", "check", "--only", "padding"])
    with pytest.raises(SystemExit):
        main()
    message = "--only 'padding' chooses among mutants: add --mutants"
    assert message in capsys.readouterr().err


def test_check_fails_when_a_graph_is_wrong() -> None:
    """A phase left out of the graph: exit code 1, and a failure that names the buffer."""
    broken = (
        "from dataclasses import replace\n"
        "from stoop.worker.executor import PhaseExecutor\n"
        "run = PhaseExecutor._run_captured\n"
        "def without_update(self, manager, segment, descriptor, states):\n"
        "    kept = tuple(phase for phase in segment.phases if phase.name != 'U')\n"
        "    run(self, manager, replace(segment, phases=kept), descriptor, states)\n"
        "PhaseExecutor._run_captured = without_update\n"
        "from stoop.cli.main import main; main()"
    )
    args = ["check", "--modes", "step", "--backends", "reference", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", broken, *args], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["failed"] > 0
    assert "differs from the eager twin" in record["failures"][0]
