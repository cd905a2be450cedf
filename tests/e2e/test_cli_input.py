"""Bad command lines are refused before a model is loaded; prompts come on standard input too."""

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoop import LLM
from stoop.cli import prompts

NGRAM = '{"method": "ngram", "num_speculative_tokens": 2}'
PROMPT = ["generate", "-p", "x"]

# Each is refused without torch.
REFUSALS: list[tuple[list[str], str]] = [
    (["generate"], "there is no prompt: standard input is empty; add --prompt"),
    (["generate", "-p", ""], "the prompt is empty"),
    (["generate", "-p", "a", "-p", ""], "prompt 2 is empty"),
    (["generate", "-p", "-"], "the prompt is empty"),
    (["generate", "-p", "-", "-p", "-"], "only once"),
    (["generate", "-p", "a\udcff"], "prompt 1 is not valid UTF-8"),
    ([*PROMPT, "--stop", "\udcff"], "is not valid UTF-8"),
    ([*PROMPT, "--top-p", "7"], "top_p=7.0: use a number above 0"),
    ([*PROMPT, "--logit-bias", "{"], "not JSON"),
    ([*PROMPT, "--logprobs", "2"], "add --json"),
    ([*PROMPT, "--beside-plain", "--json"], "leave out --json"),
    ([*PROMPT, "--min-tokens", "9", "--max-tokens", "3"], "min_tokens=9"),
    ([*PROMPT, "-n", "x"], "'-n'"),
    (
        [*PROMPT, "--graph-modus", "x"],
        "there is no option --graph-modus: did you mean --graph-mode",
    ),
    ([*PROMPT, "--qqq"], "there is no option --qqq (see stoop generate --help)"),
    ([*PROMPT, "--prompt"], "'--prompt' requires an argument"),
    ([*PROMPT, "-sc", "{"], "speculative_config is not JSON"),
    ([*PROMPT, "-sc", "ngram"], 'write it as {"method": "ngram", "num_speculative_tokens": 3}'),
    ([*PROMPT, "-sc", '{"method": "magic"}'], "method='magic'"),
    ([*PROMPT, "-sc", '{"modle": "x"}'], "'modle'"),
    ([*PROMPT, "--dtype", "float8"], "dtype='float8'"),
    ([*PROMPT, "--device", "tpu"], "device='tpu': use auto, cpu"),
    ([*PROMPT, "--graph-mode", "fast"], "graph_mode='fast'"),
    ([*PROMPT, "--capture-sizes", "1,x", "--graph-mode", "step"], "such as 1,2,4,8"),
    ([*PROMPT, "--capture-sizes", "1,2", "--device", "cpu"], "choose a mode"),
    ([*PROMPT, "--attention-backend", "magic"], "attention_backend='magic'"),
    ([*PROMPT, "--load-format", "pickle"], "load_format='pickle'"),
    ([*PROMPT, "--kv-cache-memory", "lots"], "2GiB"),
    ([*PROMPT, "--block-size", "24"], "power of two"),
    ([*PROMPT, "--gpu-memory-utilization", "1.5"], "gpu_memory_utilization=1.5"),
    ([*PROMPT, "--max-num-seqs", "64", "--max-num-batched-tokens", "32"], "max_num_seqs=64"),
    ([*PROMPT, "--run-ahead", "9"], "run_ahead=9"),
    (["chat", "-n", "2"], "one answer"),
    (["chat", "--logprobs", "2"], "--logprobs"),
    (["chat", "--system", "\udcff"], "--system is not valid UTF-8"),
    (["chat", "--dtype", "float8"], "dtype='float8'"),
    (["compare", "--prompts", "/no/such/file"], "/no/such/file does not exist"),
    (["compare", "-sc", "none"], "compare needs a drafter: give one with -sc"),
    (["compare", "-sc", "{"], "not JSON"),
    (["check", "--modes", "fastest"], "'fastest': use piecewise"),
    (["check", "--backends", "magic"], "'magic'"),
    (["bench", "throughput", "--dtype", "float8"], "dtype='float8'"),
    (["bench", "latency", "--batch-size", "a"], "such as 1,8"),
    (["bench", "latency", "--peer", "vllm"], "transformers"),
    (["bench", "step", "--graph-mode", "fast"], "graph_mode='fast'"),
    (["bench", "step", "--batch", "0"], "such as 1,8"),
    (["bench", "graphs", "--modes", "none,fast"], "graph_mode='fast'"),
    (["bench", "spec", "--graph-mode", "fast"], "graph_mode='fast'"),
    (["bench", "acceptance", "-sc", "{"], "not JSON"),
    (["bench", "magic"], "no such command 'magic'"),
    (["train-draft", "x"], "missing option"),
]

RUN_ALL = """
import io, json, sys
from stoop.cli.main import main

for args in json.load(sys.stdin):
    sys.argv, sys.stdin, sys.stderr = ["stoop", *args], io.StringIO(), io.StringIO()
    try:
        main()
    except SystemExit as left:
        heavy = [name for name in ("torch", "transformers") if name in sys.modules]
        print(json.dumps([left.code, sys.stderr.getvalue(), heavy]))
"""


def test_bad_command_lines_are_refused_at_once() -> None:
    """In one process that never imports torch, so none of them can have loaded a model."""
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        input=json.dumps([args for args, _ in REFUSALS]),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for (args, pattern), (code, errors, heavy) in zip(REFUSALS, answers, strict=True):
        assert (code, heavy) == (2, []), args
        assert errors.startswith("error: ") and errors.count("\n") == 1, (args, errors)
        assert pattern in errors, (args, errors)


@pytest.mark.parametrize(
    ("args", "pattern"),
    [
        ([*PROMPT, "/no/such/model"], "/no/such/model does not exist"),
        ([*PROMPT, "no-such-model"], "no model is called 'no-such-model'"),
        ([*PROMPT, "tiny-lfm2"], "'tiny-lfm2' (stoop check alone has tiny models): give one of"),
        ([*PROMPT, "TEXT_MODEL", "--max-model-len", "9999"], "use at most 256"),
        (["pull", "no-such-model"], "smollm2-135m"),
        (["tune", "--tokens", "0,8"], "--tokens 0,8: use numbers from 1 to 128"),
        (["tune", "--device", "cpu", "--max-model-len", "64"], "tune measures a GPU"),
        (["bench", "acceptance", "-sc", NGRAM, "--questions", "/no"], "/no does not exist"),
    ],
)
def test_what_takes_a_look_at_files_loads_no_weights(
    args: list[str],
    pattern: str,
    stoop: Callable,
    text_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load_model(*_: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("stoop.worker.runner.load_model", load_model)
    code, _, errors = stoop(*[str(text_model) if arg == "TEXT_MODEL" else arg for arg in args])
    (line,) = [line for line in errors.splitlines() if not line.endswith(" ...")]
    assert code == 2 and line.startswith("error: ") and pattern in line


def test_no_arguments_show_the_help(stoop: Callable) -> None:
    _, output, errors = stoop()  # which stream and code depends on typer's version
    assert "\nCommands:\n  generate " in output + errors


# ---- standard input ----


class Asked(Exception):
    """What would have been answered."""


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, stoop: Callable) -> Callable[..., Any]:
    """Runs `generate` on an input; the prompts, or the refusal."""

    def stop(llm: Any, ready: list[str], *_: Any) -> None:
        raise Asked(ready)

    monkeypatch.setattr("stoop.cli.generate.start_llm", lambda *_: None)
    monkeypatch.setattr("stoop.cli.generate._answer", stop)

    def run(stdin: Any, *args: str) -> Any:
        monkeypatch.setattr(sys, "stdin", stdin)
        try:
            code, _, errors = stoop("generate", *args)
        except Asked as asked:
            return asked.args[0]
        assert code == 2
        return errors

    return run


def piped(data: bytes, closed: bool = True) -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.write(writer, data)
    if closed:
        os.close(writer)
    return open(reader)


def test_standard_input_is_read_without_being_asked_for(ask: Callable) -> None:
    assert ask(piped("hé\n\n".encode())) == ["hé\n"]
    assert ask(piped(b"hi\n"), "-p", "-") == ["hi"]
    assert ask(piped(b"hi\n"), "-p", "a", "-p", "-") == ["a", "hi"]
    assert ask(piped(b"hi\n"), "-p", "a") == ["a"], "standard input is left alone"


def test_a_file_is_read_too(ask: Callable, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from a file\n")
    assert ask(file.open()) == ["from a file"]


@pytest.mark.parametrize("data", [b"", b"\n"])
def test_an_empty_input_is_no_prompt(data: bytes, ask: Callable) -> None:
    assert "there is no prompt: standard input is empty" in ask(piped(data))


def test_input_that_is_not_text_is_refused(ask: Callable) -> None:
    assert "standard input is not valid UTF-8" in ask(piped(b"abc\xff"))
    assert "standard input is not valid UTF-8" in ask(piped(b"\xff"), "-p", "-")


def test_a_terminal_is_not_waited_for(ask: Callable) -> None:
    parent, child = pty.openpty()
    with open(child) as terminal:
        errors = ask(terminal)
    os.close(parent)
    assert errors.startswith('error: there is no prompt: add --prompt "your text"')


def test_an_input_that_never_comes_is_not_waited_for_without_end(
    ask: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "SAY_AFTER", 0.01)
    monkeypatch.setattr(prompts, "GIVE_UP_AFTER", 0.02)
    said, refusal = ask(piped(b"", closed=False)).splitlines()
    assert said == "waiting for a prompt on standard input ..."
    assert "nothing came on standard input" in refusal and "--prompt - to wait" in refusal
    assert ask(piped(b"late\n")) == ["late"]


def test_a_piped_prompt_is_answered(
    llm: LLM, stoop: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoop.cli.generate.start_llm", lambda *_: llm)
    monkeypatch.setattr(sys, "stdin", piped(b"hello\n"))
    code, output, _ = stoop("generate", "--json", "--max-tokens", "2")
    assert code == 0 and json.loads(output.splitlines()[0])["prompt"] == "hello"
