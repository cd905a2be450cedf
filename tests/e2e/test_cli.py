"""The command line, run as a user runs it."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stoop import __version__

STOOP = [sys.executable, "-c", "from stoop.cli.main import main; main()"]
QUICK = ["--dtype", "float64", "--device", "cpu"]


def run(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    env = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
    return subprocess.run(
        [*STOOP, *args], input=stdin, capture_output=True, text=True, env=env, timeout=300
    )


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"stoop {__version__}")


def test_help_names_every_command() -> None:
    done = run("--help")
    assert done.returncode == 0
    for command in ("generate", "chat", "pull", "bench", "check", "compare", "tune"):
        assert command in done.stdout


@pytest.mark.parametrize("command", [["generate"], ["chat"], ["bench", "throughput"], ["pull"]])
def test_help_explains_options(command: list[str]) -> None:
    done = run(*command, "--help")
    assert done.returncode == 0
    assert len(done.stdout) > 300
    if command != ["pull"]:
        assert "--max-model-len" in done.stdout
        assert "--kv-cache-memory" in done.stdout


def test_generate_prints_text_and_speed(text_model: Path) -> None:
    args = ["--prompt", "hello", "--max-tokens", "8", "--ignore-eos", *QUICK]
    done = run("generate", str(text_model), *args)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert re.search(r"8 tokens in [\d.]+ s: [\d.]+ tokens/s", done.stderr)
    assert "KV cache" in done.stderr


NGRAM = ["-sc", '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}']


def test_generate_beside_plain(text_model: Path) -> None:
    args = [
        "--prompt",
        "hello hello",
        "--max-tokens",
        "8",
        "--ignore-eos",
        "--beside-plain",
        *QUICK,
    ]
    done = run("generate", str(text_model), *args, *NGRAM)
    assert done.returncode == 0, done.stderr
    found = re.search(r"without drafts ([\d.]+) tokens/s, (.*): .* ([\d.]+) times", done.stderr)
    assert found is not None and found[2] == "the same answer"
    assert float(found[1]) > 0 and float(found[3]) > 0
    # Without drafts there is nothing to compare.
    plain = run("generate", str(text_model), *args, "-sc", "none")
    assert plain.returncode == 0 and "without drafts" not in plain.stderr
    assert "there were no drafts" in plain.stderr
    assert done.stdout == plain.stdout, "an answer is shown once"
    refused = run("generate", str(text_model), *args, "--json")
    assert refused.returncode == 2 and "leave out --json" in refused.stderr


def test_beside_plain_changes_no_answer(text_model: Path) -> None:
    """Neither engine's first use nor drafts of the other kind take part in it."""
    args = ["--prompt", "hello", "--max-tokens", "8", "--temperature", "1", *QUICK, *NGRAM]
    args += ["--num-speculative-tokens", "1", "--ignore-eos"]
    compared = run("generate", str(text_model), *args, "--beside-plain")
    assert compared.returncode == 0 and "the same answer" in compared.stderr, compared.stderr
    assert compared.stdout == run("generate", str(text_model), *args).stdout


def test_generate_json_is_json(text_model: Path) -> None:
    args = ["-p", "hello", "-p", "other", "-n", "2", "--temperature", "1", "--seed", "3", "--json"]
    done = run("generate", str(text_model), *args, "--logprobs", "1", "--max-tokens", "4", *QUICK)
    assert done.returncode == 0, done.stderr
    *records, last = [json.loads(line) for line in done.stdout.splitlines()]
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


@pytest.mark.parametrize(
    ("args", "pattern"),
    [
        (["generate", "--prompt", "x", "/no/such/model"], "/no/such/model"),
        (["generate", "--prompt", "x", "--top-p", "7"], "top_p=7.0: use a number above 0"),
        (["generate", "--prompt", "x", "--logit-bias", "{"], "not JSON"),
        (["generate"], "--prompt"),
        (["generate", "--prompt", "x", "--logprobs", "2"], "add --json"),
        (["chat", "-n", "2"], "one answer"),
        (["pull", "no-such-model"], "smollm2-135m"),
        (["bench", "latency", "--batch-size", "a"], "such as 1,8"),
        (["bench", "latency", "--peer", "vllm"], "transformers"),
    ],
)
def test_errors_are_one_sentence(args: list[str], pattern: str) -> None:
    done = run(*args)
    assert done.returncode == 2
    (line,) = [text for text in done.stderr.splitlines() if text != "starting ..."]
    assert line.startswith("error: ")
    assert pattern in line


def test_unknown_flags_are_refused(text_model: Path) -> None:
    done = run("generate", str(text_model), "--prompt", "x", "--graph-modus", "full")
    assert done.returncode == 2
    assert "--graph-modus" in done.stderr


@pytest.mark.parametrize("bench", ["throughput", "latency"])
def test_benchmarks_end_with_a_json_line(bench: str, text_model: Path) -> None:
    sizes = ["--num-prompts", "3"] if bench == "throughput" else ["--batch-size", "1,2"]
    args = [*sizes, "--input-len", "8", "--output-len", "6", *QUICK]
    done = run("bench", bench, str(text_model), *args)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["bench"] == bench
    first = record if bench == "throughput" else record["results"][0]
    assert first["tokens_per_s"] > 0
    assert set(first["ttft_ms"]) == set(first["itl_ms"]) == {"p50", "p90", "p99"}
    assert first["ttft_ms"]["p50"] <= first["ttft_ms"]["p99"]


def test_latency_beside_transformers(text_model: Path) -> None:
    args = ["--batch-size", "1", "--input-len", "8", "--output-len", "6", "--repeat", "1"]
    done = run("bench", "latency", str(text_model), *args, "--peer", "transformers", *QUICK)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout.splitlines()[-1])["results"]
    assert result["ratio"] == pytest.approx(
        result["tokens_per_s"] / result["transformers_tokens_per_s"], rel=1e-3
    )


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, *args: str) -> None:
        self.parent, child = pty.openpty()
        env = os.environ | {"TERM": "dumb", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [*STOOP, *args],
            stdin=child,
            stdout=child,
            stderr=child,
            env=env,
            start_new_session=True,
        )
        os.close(child)
        os.set_blocking(self.parent, False)
        self.seen = ""

    def wait_for(self, text: str) -> None:
        """Read on until the text has come, and forget what came before it."""
        self._read_until(lambda: text in self.seen)
        assert text in self.seen, self.seen
        self.seen = self.seen.split(text, 1)[1]

    def wait_for_any(self) -> None:
        self._read_until(lambda: bool(self.seen))

    def _read_until(self, done: Callable[[], bool], timeout: float = 120) -> None:
        deadline = time.monotonic() + timeout
        while not done():
            assert time.monotonic() < deadline, f"nothing more after {self.seen!r}"
            try:
                self.seen += os.read(self.parent, 65536).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                return

    def type(self, text: str) -> None:
        os.write(self.parent, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.parent)


def test_chat_streams_and_survives_ctrl_c(text_model: Path) -> None:
    args = ["--max-tokens", "200", "--ignore-eos", "--seed", "1", *QUICK]
    terminal = Terminal("chat", str(text_model), *args)
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


def test_chat_keeps_history(text_model: Path) -> None:
    args = ["--max-tokens", "5", "--ignore-eos", "--temperature", "0", *QUICK]
    once = run("chat", str(text_model), *args, stdin="hi\n")
    twice = run("chat", str(text_model), *args, stdin="hi\nhi\n")
    reset = run("chat", str(text_model), *args, stdin="hi\n/reset\nhi\n")
    assert once.returncode == twice.returncode == reset.returncode == 0, once.stderr
    assert twice.stdout.startswith(once.stdout)
    assert reset.stdout == once.stdout * 2
    assert twice.stdout != reset.stdout


def test_check_proves_graphs_equal_and_ends_with_json() -> None:
    done = run("check", "--modes", "piecewise", "--backends", "hostplan")
    assert done.returncode == 0, done.stderr
    assert "equal" in done.stdout
    record = json.loads(done.stdout.splitlines()[-1])
    assert record == {"cases": 25, "failed": 0, "failures": []}


def test_check_proves_the_graphs_of_a_head() -> None:
    """All of them are used, whatever is accepted."""
    head = '{"method": "eagle3", "model": "tiny", "num_speculative_tokens": 3}'
    done = run("check", "--modes", "step", "--backends", "reference", "-sc", head)
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["cases"] == 25


def test_check_fails_when_a_graph_is_wrong() -> None:
    """A phase left out of the graph: exit code 1, and a failure that names the buffer."""
    broken = (
        "from stoop.worker.runner import ModelRunner; from stoop.worker.graphs import StepGraphs\n"
        "run = StepGraphs.run\n"
        "def without_update(self, descriptor, state):\n"
        "    update, self.runner.update = self.runner.update, lambda: None\n"
        "    run(self, descriptor, state)\n"
        "    self.runner.update = update\n"
        "StepGraphs.run = without_update\n"
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


def test_check_refuses_unknown_modes() -> None:
    done = run("check", "--modes", "fastest")
    assert done.returncode == 2
    assert "piecewise" in done.stderr


def test_compare_needs_a_drafter() -> None:
    done = run("compare", "smollm2-135m", "-sc", "none")
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "error: compare needs a drafter to compare with: give one with -sc"
    )


def test_tune_is_for_gpus() -> None:
    done = run("tune", "smollm2-135m", "--tokens", "0,8")
    assert done.returncode == 2 and "--tokens 0,8: use numbers from 1 to 128" in done.stderr
    done = run("tune", "smollm2-135m", "--device", "cpu", "--max-model-len", "64")
    assert done.returncode == 2 and "tune measures a GPU" in done.stderr
