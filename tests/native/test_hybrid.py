"""Hybrid models with packed weights: products by the kernels, recurrences by torch."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from transformers import PreTrainedModel

from stoop import LLM
from stoop.ops.packed import Packed
from support.checkpoints import ARCHITECTURES, make_model
from support.engines import make_llm
from support.huggingface import greedy_params, make_prompt
from support.hybrid_gguf_files import write_hybrid_gguf

pytestmark = pytest.mark.usefixtures("native")

PROMPTS = [make_prompt(length) for length in (1, 5, 40, 150)]
Q8, Q4 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOOP_CACHE", str(tmp_path / "cache"))


def mixed(name: str) -> gguf.GGMLQuantizationType:
    return Q4 if "ffn" in name or "ssm_out" in name or "in_proj" in name else Q8


def packed_matrices(llm: LLM) -> set[str]:
    modules = llm.engine.runner.model.named_modules()
    return {name for name, module in modules if isinstance(getattr(module, "scheme", None), Packed)}


def scores(llm: LLM, tokens: list[list[int]]) -> np.ndarray:
    """Log-probabilities of given tokens: of prompts, so that both engines see the same text."""
    params = greedy_params(1, prompt_logprobs=0)
    outputs = llm.generate(tokens, params, use_tqdm=False)
    rows = [
        entry[token].logprob
        for output, prompt in zip(outputs, tokens, strict=True)
        for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    ]
    return np.array(rows)


@pytest.mark.parametrize("name", ["lfm2", "granite-hybrid"])
def test_packed_logits_are_near_dense_ones(tmp_path: Path, name: str) -> None:
    model: PreTrainedModel = make_model(name, 0).float()
    file = write_hybrid_gguf(tmp_path / "m.gguf", model, kind_of=mixed)
    settings = {"dtype": "float32", "max_model_len": 192, "max_num_batched_tokens": 48}
    packed = make_llm(file, weights="packed", **settings)
    dense = make_llm(file, weights="dense", **settings)
    assert packed_matrices(dense) == set()
    found = packed_matrices(packed)
    num_layers = ARCHITECTURES[name].config().num_hidden_layers
    assert len(found) >= 3 * num_layers, found
    answers = packed.generate(PROMPTS, greedy_params(24), use_tqdm=False)
    texts = [[*p, *a.outputs[0].token_ids] for p, a in zip(PROMPTS, answers, strict=True)]
    np.testing.assert_allclose(scores(packed, texts), scores(dense, texts), atol=2e-2)


@pytest.mark.parametrize("name", ["lfm2", "granite-hybrid"])
def test_a_text_does_not_depend_on_its_batch(tmp_path: Path, name: str) -> None:
    file = write_hybrid_gguf(tmp_path / "m.gguf", make_model(name, 0).float(), kind_of=mixed)
    settings = {"dtype": "float32", "max_model_len": 192, "weights": "packed"}
    together = make_llm(file, **settings).generate(PROMPTS, greedy_params(24), use_tqdm=False)
    chunked = make_llm(file, max_num_batched_tokens=16, **settings)
    for prompt, whole in zip(PROMPTS, together, strict=True):
        alone = chunked.generate([prompt], greedy_params(24), use_tqdm=False)[0]
        assert alone.outputs[0].token_ids == whole.outputs[0].token_ids
