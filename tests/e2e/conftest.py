"""A tiny model with a real tokenizer: one token a byte, and a chat template."""

from pathlib import Path

import pytest

from stoop import LLM
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
