"""Structured outputs on a CUDA device: the masks' kernel, the cut step, drafts for the host."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from stoop.config import speculation
from stoop.ops import sampling as reference
from stoop.spec import registry
from support import grammars
from support.grammars import make_grammar_llm, schema_params

jsonschema = pytest.importorskip("jsonschema")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KERNELS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "attention_backend": "triton"}
COUNT = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of sizes that the kernels support."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8}
    return grammars.write_model(tmp_path_factory.mktemp("grammars") / "model", **sizes)


@pytest.mark.parametrize("vocab_size", [330, 49152, 151936])
def test_masks_are_the_references(vocab_size: int) -> None:
    words = -(-vocab_size // 32)
    bits = torch.randint(-(2**31), 2**31, (64, words), device="cuda").to(torch.int32)
    rows = torch.randint(-1, 64, (48,), device="cuda")
    logits = torch.randn(48, vocab_size, device="cuda")
    expected = logits.clone()
    reference.apply_masks_.reference(expected, bits, rows)
    reference.apply_masks_.kernel(logits, bits, rows)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("mode", ["none", "full", "step"])
def test_answers_are_those_of_plain_decoding(
    model: Path, mode: str, run_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy answers of a CPU in float32; every replay is compared with its twin to the bit."""
    monkeypatch.setattr(registry, "SPECULATORS", dict(registry.SPECULATORS))
    monkeypatch.setattr(speculation, "_headless", list(speculation._headless))
    registry.register_drafter("oracle", grammars.Oracle)
    source = random.Random(1)
    prompts = [[name, *(source.randrange(256) for _ in range(name))] for name in range(COUNT)]
    schemas, params = schema_params(COUNT, 4)
    plain = make_grammar_llm(model, dtype="float32").generate(prompts, params, use_tqdm=False)
    wanted = [list(output.outputs[0].token_ids) for output in plain]
    llm = make_grammar_llm(
        model,
        graph_mode=mode,
        run_ahead=run_ahead,
        capture_structured=True,
        sanitize=mode != "none",
        speculative_config={"method": "oracle", "num_speculative_tokens": 3},
        **KERNELS,
    )
    grammars.tell(prompts, wanted, 0.3)
    found = llm.generate(prompts, params, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in found] == wanted
    assert sum(o.outputs[0].spec.num_accepted_tokens for o in found if o.outputs[0].spec) > 50
    for schema, output in zip(schemas, found, strict=True):
        if output.outputs[0].finish_reason == "stop":
            jsonschema.validate(json.loads(output.outputs[0].text), schema)
