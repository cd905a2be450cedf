"""`--help` of every command, at every width."""

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from stoop.bench.shape_configs import SHAPES
from stoop.cli.main import app
from support.terminal import Terminal

STOOP = [sys.executable, "-c", "from stoop.cli.main import main; main()"]


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


def shown(*args: str, width: int) -> str:
    done = CliRunner().invoke(app, [*args, "--help"], env={"COLUMNS": str(width)})
    assert done.exit_code == 0, done.output
    return done.output


def option_names(command: Any) -> set[str]:
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    return {"-h", "--help"}.union(*(({*p.opts, *p.secondary_opts}) for p in options))


def test_there_are_commands_to_look_at() -> None:
    paths = {" ".join(path) for path in COMMANDS}
    assert {"", "generate", "chat", "pull", "check", "compare", "tune", "bench"} <= paths
    assert {"bench step", "bench throughput", "train-draft"} <= paths
    assert "--speculative-config" in option_names(COMMANDS["generate",])


def test_chat_does_not_list_what_it_refuses() -> None:
    refused = {"-n", "--logprobs"}
    words = {name: set(shown(name, width=80).split()) for name in ("chat", "generate")}
    assert refused <= words["generate"] and not refused & words["chat"]
    hidden = {" ".join(path): p.opts for path, c in COMMANDS.items() for p in c.params if p.hidden}
    assert set(hidden) == {"chat"}


@pytest.mark.parametrize("width", [1, 40, 60, 80, 100, 250])
def test_every_name_is_there_in_full(width: int) -> None:
    for path, command in COMMANDS.items():
        text = shown(*path, width=width)
        words = set(re.findall(r"(?<!\S)[^\s,]+", text))
        assert option_names(command) <= words, path
        assert set(getattr(command, "commands", {})) <= words, path
        for param in command.params:
            if param.param_type_name == "argument":
                assert f"\n  {param.name.upper()}" in text, path


@pytest.mark.parametrize("width", [40, 80])
def test_lines_fit_but_for_names_that_cannot(width: int) -> None:
    for path in COMMANDS:
        for line in shown(*path, width=width).splitlines():
            fixed = line.startswith("  -") or len(line.split()) == 1 or line.startswith("Usage:")
            assert len(line) <= width or fixed, line


def test_a_pipe_hides_nothing() -> None:
    done = subprocess.run([*STOOP, "generate", "--help"], capture_output=True, text=True)
    assert "--speculative-config" in done.stdout and "…" not in done.stdout


def test_a_narrow_terminal_hides_nothing() -> None:
    terminal = Terminal([*STOOP, "generate", "--help"], columns=50)
    try:
        text = terminal.read_all()
    finally:
        terminal.close()
    assert option_names(COMMANDS["generate",]) <= set(re.findall(r"(?<!\S)[^\s,]+", text))
    assert max(len(line) for line in text.splitlines() if not line.startswith("  -")) <= 50


def test_options_are_in_groups_with_their_defaults() -> None:
    text = shown("generate", width=80)
    parts = dict(re.findall(r"^([A-Z][a-z ]+):\n((?:  .*\n)+)", text, flags=re.MULTILINE))
    assert list(parts) == ["Arguments", "Options", "Sampling options", "Engine options"]
    assert "--prompt" in parts["Options"] and "--prompt" not in parts["Engine options"]
    assert "--top-p" in parts["Sampling options"] and "--dtype" in parts["Engine options"]
    assert "[default: smollm2-135m]" in parts["Arguments"]
    assert re.search(r"--temperature FLOAT .*\[default: 0\.0\]", parts["Sampling options"])
    assert re.search(r"--no-ignore-eos\n[^\[]*\[default: off\]", parts["Sampling options"])
    assert re.search(
        r"--max-model-len INT [^-]*\[default: the\s+model's\]", parts["Engine options"]
    )
    assert text.count("[default: ") > 20 and "default: None" not in text and "[]" not in text


def test_a_required_option_says_so() -> None:
    text = shown("train-draft", width=80)
    assert "Usage: " in text and " TARGET\n" in text
    assert re.search(r"--out PATH .*\n? *.*\[required\]", text)


@pytest.mark.parametrize("name", ["step", "profile", "peer"])
def test_every_shape_is_named(name: str) -> None:
    words = set(re.findall(r"[^\s,()]+", shown("bench", name, width=250)))
    assert set(SHAPES) <= words


def test_a_table_of_throughput_is_described_as_it_is() -> None:
    text = " ".join(shown("bench", "throughput", width=250).split())
    assert "for a table 4 times each load, at most 256 but no fewer than the load" in text
    assert "without prefix caching" in text and "3 with --head" in text


def test_a_head_and_its_vocabulary_are_described_as_they_are() -> None:
    text = " ".join(shown("bench", "step", width=250).split())
    assert "EAGLE-3" not in text and "[default: eagle3]" in text
    assert "[default: as many as that file lists, else all]" in text
