"""Commands and flags of vLLM's that stoop lacks are named, with what to do instead."""

import pytest
import typer

from stoop.cli import main


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["serve", "smollm2-135m"], "error: stoop has no HTTP server yet"),
        (
            ["generate", "--tensor-parallel-size", "2"],
            "there is no option --tensor-parallel-size, which is vLLM's: stoop runs a model on one "
            "device: leave it out",
        ),
        (["generate", "--swap-space", "4"], "it changes nothing in stoop, so leave it out"),
        (["generate", "--enforce-eager"], "there is no option --enforce-eager: use --graph-mode"),
        (["generate", "--temprature", "1"], "did you mean --temperature?"),
    ],
)
def test_what_vllm_has_is_refused_by_name(
    args: list[str], told: str, capsys: pytest.CaptureFixture
) -> None:
    assert main._run(args) == 2
    assert told in capsys.readouterr().err


def test_an_interrupted_question_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def ask(args: list[str]) -> int:
        raise typer.Abort

    monkeypatch.setattr(main, "_invoke", ask)
    assert main._run([]) == 130
    assert capsys.readouterr().err == "\n"
