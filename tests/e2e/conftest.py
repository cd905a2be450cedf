"""A tiny model with a real tokenizer (one token a byte, and a chat template), and the commands."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stoop import LLM
from stoop.cli.main import main
from support.byte_tokenizer import write_tokenizer
from support.checkpoints import write_llama
from support.engines import make_llm


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text-model")
    write_llama(folder, seed=11, vocab_size=260, bos_token_id=256, eos_token_id=257)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def llm(text_model: Path) -> LLM:
    return make_llm(text_model, max_num_seqs=4)


@pytest.fixture
def stoop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process; its exit code and what it wrote."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["stoop", *args])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code, *capsys.readouterr()

    return run
