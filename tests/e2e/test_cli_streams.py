"""Standard streams that are full, closed, or of another encoding than the answer's."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoop import LLM, __version__
from stoop.bench.report import print_json
from stoop.cli.main import main
from stoop.config.errors import ConfigError

STOOP = [sys.executable, "-c", "from stoop.cli.main import main; main()"]
FULL = "error: cannot write to standard output: No space left on device"
# Text as this machine would get it: nothing set up for it, and output that is buffered.
PLAIN = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}


@pytest.fixture
def stoop(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> Callable[..., Any]:
    """Runs a command on streams of its own, with an engine that is there already."""
    monkeypatch.setattr("stoop.cli.generate.start_llm", lambda *_: llm)
    monkeypatch.setattr("stoop.cli.chat.start_llm", lambda *_: llm)

    def run(*args: str, stdout: Any, stderr: Any = None, stdin: str = "") -> Any:
        monkeypatch.setattr(sys, "argv", ["stoop", *args])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "stderr", stderr or io.StringIO())
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code

    return run


def in_process(*args: str, shell: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """shell: where the streams go, as a shell says it"""
    return subprocess.run(
        ["bash", "-c", f'exec "$@" {shell}', "bash", *STOOP, *args],
        capture_output=True,
        text=True,
        env=PLAIN | environment,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )


GENERATE = ["generate", "-p", "hello", "--max-tokens", "4", "--ignore-eos"]


@pytest.mark.parametrize(
    "args", [GENERATE, [*GENERATE, "--json"], ["chat", "--max-tokens", "4"], ["bench", "--help"]]
)
def test_a_full_disk_is_one_sentence(args: list[str], stoop: Callable) -> None:
    errors = io.StringIO()
    with open("/dev/full", "w") as full:
        assert stoop(*args, stdout=full, stderr=errors, stdin="hi\n") == 2
    assert errors.getvalue().splitlines()[-1] == FULL


@pytest.mark.parametrize("args", [["--version"], ["generate", "--help"]])
def test_a_full_disk_is_seen_before_the_program_ends(args: list[str]) -> None:
    """Output that is buffered is written at the very end."""
    done = in_process(*args, shell=">/dev/full")
    assert (done.returncode, done.stderr.splitlines()) == (2, [FULL])


def test_a_full_disk_is_one_sentence_in_a_process(text_model: Path) -> None:
    done = in_process(*GENERATE, str(text_model), "--device", "cpu", shell=">/dev/full")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and done.stderr.splitlines()[-1] == FULL


def test_a_file_that_cannot_be_written_costs_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--out /dev/full cannot be written: No space left"):
        print_json({"bench": "step"}, Path("/dev/full"))
    assert json.loads(capsys.readouterr().out) == {"bench": "step"}


def test_a_standard_error_that_is_full_costs_no_answer(stoop: Callable) -> None:
    answer = io.StringIO()
    with open("/dev/full", "w", buffering=1) as full:
        assert stoop(*GENERATE, stdout=answer, stderr=full) == 0
    assert answer.getvalue().strip()
    done = in_process("generate", shell="2>/dev/full")
    assert done.returncode == 2, "the refusal cannot be shown; the exit code tells"


@pytest.mark.parametrize(
    ("shell", "args", "code", "output", "errors"),
    [
        (">&-", ["--version"], 2, "", "error: standard output is closed"),
        (">&- 2>&-", ["--version"], 2, "", ""),
        ("2>&-", ["--version"], 0, f"stoop {__version__}\n", ""),
        ("2>&-", ["generate"], 2, "", ""),  # a refusal must not go to standard output instead
        ("<&-", ["generate"], 2, "", "error: there is no prompt"),
        ("<&- >&-", ["generate"], 2, "", "error: standard output is closed"),
    ],
)
def test_closed_streams(shell: str, args: list[str], code: int, output: str, errors: str) -> None:
    done = in_process(*args, shell=shell)
    assert (done.returncode, done.stdout) == (code, output)
    assert done.stderr.startswith(errors) and done.stderr.count("\n") == bool(errors)


def test_a_reader_that_leaves_early_is_no_error(stoop: Callable) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    errors = io.StringIO()
    with open(writer, "w") as stdout:
        assert stoop(*GENERATE, stdout=stdout, stderr=errors) == 141
    assert "rror" not in errors.getvalue()
    done = in_process("generate", "--help", shell="| head -n 1")
    assert (done.stdout, done.stderr) == ("Usage: stoop generate [OPTIONS] [MODEL]\n", "")


def encoded(encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")


def written(stream: io.TextIOWrapper) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode(stream.encoding)  # type: ignore[attr-defined]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_what_a_terminal_cannot_show_is_escaped(encoding: str, stoop: Callable) -> None:
    stdout, stderr = encoded(encoding), encoded(encoding)
    args = ["generate", "-p", "a\N{GRINNING FACE}", "-p", "é", "--max-tokens", "4"]
    assert stoop(*args, stdout=stdout, stderr=stderr) == 0
    face, accent = ("\N{GRINNING FACE}", "é") if encoding == "utf-8" else ("\\U0001f600", "é")
    accent = "\\xe9" if encoding == "ascii" else accent
    assert f"to 'a{face}'" in written(stdout) and f"to '{accent}'" in written(stdout)
    assert "tokens/s" in written(stderr)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_json_is_json_in_any_encoding(encoding: str, stoop: Callable) -> None:
    stdout = encoded(encoding)
    prompts = ['\N{GRINNING FACE} \\ "', "é"]
    args = ["generate", "-p", prompts[0], "-p", prompts[1], "--max-tokens", "4", "--json"]
    assert stoop(*args, stdout=stdout) == 0
    *records, _ = [json.loads(line) for line in written(stdout).splitlines()]
    assert [record["prompt"] for record in records] == prompts
    assert ("\N{GRINNING FACE}" in written(stdout)) == (encoding == "utf-8")


def test_an_ascii_terminal_in_a_process(text_model: Path) -> None:
    """The prompt comes as UTF-8 though the locale says ASCII, and is understood all the same."""
    args = ["generate", str(text_model), "-p", "\N{GRINNING FACE}", "-p", "é", "--max-tokens", "2"]
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = in_process(*args, "--device", "cpu", shell="", **locale)
    assert done.returncode == 0, done.stderr
    assert "to '\\U0001f600'" in done.stdout and "to '\\xe9'" in done.stdout


def test_chat_on_an_ascii_terminal(stoop: Callable) -> None:
    stdout = encoded("ascii")
    args = ["chat", "--max-tokens", "8", "--temperature", "0", "--ignore-eos"]
    assert stoop(*args, stdout=stdout, stdin="\N{GRINNING FACE}\n") == 0
    assert written(stdout)
