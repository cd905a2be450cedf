"""A tiny model with a real tokenizer: one token a byte, and a chat template."""

from pathlib import Path

import pytest
import torch
from byte_tokenizer import write_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from stoop import LLM


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=256,
        eos_token_id=257,
    )
    folder = tmp_path_factory.mktemp("text-model")
    LlamaForCausalLM(config).double().save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def llm(text_model: Path) -> LLM:
    return LLM(str(text_model), dtype="float64", device="cpu", max_num_seqs=4)
