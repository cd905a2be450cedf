"""Commands and flags of vLLM's that stoop lacks are named, with what to do instead."""

import sys
from typing import Any

import pytest
import typer

from stoop.cli import main
from stoop.config.errors import ConfigError
from stoop.config.resolve import make_options

generate = sys.modules["stoop.cli.generate"]  # the package has the command by the same name


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (
            ["generate", "--tensor-parallel-size", "2"],
            "there is no option --tensor-parallel-size, which is vLLM's: stoop runs a model on one "
            "device: leave it out",
        ),
        (["bench", "throughput", "--max-tokens", "8"], "--max-tokens: use --output-len (see"),
        (["serve", "--temperature", "0"], "a sampling option, and every request has its own"),
        (["generate", "--swap-space", "4"], "it changes nothing in stoop, so leave it out"),
        (
            ["bench", "step", "--enforce-eager"],
            "there is no option --enforce-eager: use --graph-mode none",
        ),
        (["bench", "step", "--cudagraph-mode", "FULL"], "--cudagraph-mode: use --graph-mode"),
        (["bench", "accuracy", "--enforce-eager"], "--enforce-eager: use --modes none (see"),
        (["bench", "accuracy", "--graph-mode", "full"], "--graph-mode: use --modes (see"),
        (["bench", "accuracy", "-cc.x=1"], "there is no option -c: use --modes (see"),
        (["check", "-O3"], "so leave it out or use --modes (see"),
        (["check", "--enforce-eager"], "graphs with an eager engine, so leave it out"),
        (["bench", "harm", "--enforce-eager"], "graphs with an eager engine, so leave it out"),
        (["check", "--cudagraph-capture-sizes", "1"], "this command has no use for it, so leave"),
        (["pull", "--enforce-eager"], "--enforce-eager: this command has no use for it"),
        (["generate", "--graph-mode", "FUL"], "graph_mode='FUL': use auto, none"),
        (["bench", "accuracy", "--questions", "x.jsonl", "--modes", "FUL"], "--modes has 'FUL'"),
        (["bench", "accuracy", "--questions", "x.jsonl", "--modes", "FULL,Auto"], "x.jsonl does"),
        (["bench", "harm", "--questions", "x.jsonl", "--modes", "Ful"], "--modes has 'Ful'"),
        (["bench", "harm", "--questions", "x.jsonl", "--modes", "Full"], "x.jsonl does not exist"),
        (["check", "--modes", "FUL"], "--modes has 'FUL': use piecewise"),
        (["generate", "--cudagraph-mode"], "'--cudagraph-mode' requires an argument"),
        (["generate", "-O3"], "there is no option -O: stoop compiles nothing but graphs"),
        (["generate", "-cc.cudagraph_mode=FULL"], "or -cc with JSON"),
        (["generate", "--cudagraph-capture-sizes", "1", "2"], "use --capture-sizes with commas"),
        (["generate", "--max-cudagraph-capture-size", "8"], "use --max-capture-size"),
        (["generate", "--cudagraph-mode", "fast"], "cudagraph_mode='fast': use NONE, PIECEWISE"),
        (
            ["generate", "--enforce-eager", "--graph-mode", "FULL"],
            "enforce_eager and graph_mode='full' disagree",
        ),
        (
            ["generate", "-cc", '{"cudagraph_mode": "FULL"}', "--graph-mode", "step"],
            "compilation_config.cudagraph_mode='FULL' and graph_mode='step' disagree",
        ),
        (["generate", "--temprature", "1"], "did you mean --temperature?"),
    ],
)
def test_what_vllm_has_is_refused_by_name(
    args: list[str], told: str, capsys: pytest.CaptureFixture
) -> None:
    assert main._run(args) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        ([], "auto"),
        (["--graph-mode", "FULL"], "full"),
        (["--enforce-eager"], "none"),
        (["--no-enforce-eager"], "auto"),
        (["--cudagraph-mode", "Full_Decode_Only"], "full_decode_only"),
        (["--compilation-config", '{"cudagraph_mode": "PIECEWISE"}'], "piecewise"),
        (["-cc", '{"cudagraph_capture_sizes": [1, 2], "level": 3}'], "auto"),
        (["-cc", "3"], "auto"),
    ],
)
def test_what_vllm_has_for_graphs_is_taken(
    flags: list[str], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []

    def stop(model: str, engine: dict[str, Any]) -> None:
        made.append(engine)
        raise ConfigError("enough")

    monkeypatch.setattr(generate, "check_engine", stop)
    assert main._run(["generate", "--prompt", "x", *flags]) == 2
    options = make_options("x", made[0])
    assert options.graph_mode == mode
    assert options.capture_sizes == ([1, 2] if "capture_sizes" in str(flags) else None)
    used = {"enforce_eager", "cudagraph_mode", "compilation_config"} & made[0].keys()
    assert len(used) == (flags[:1] not in ([], ["--graph-mode"], ["--no-enforce-eager"]))


def test_an_interrupted_question_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def ask(args: list[str]) -> int:
        raise typer.Abort

    monkeypatch.setattr(main, "_invoke", ask)
    assert main._run([]) == 130
    assert capsys.readouterr().err == "\n"
