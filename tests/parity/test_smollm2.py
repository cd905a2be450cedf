"""The embedded model answers as recorded from Hugging Face transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from stoop import LLM
from support.huggingface import answer_ids, greedy_params, run_greedy

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "smollm2-greedy.json").read_text()
)["cases"]
# A difference would be excused where the best two logits lie closer than this; they never do.
TIE_GAP = 1e-3

pytestmark = pytest.mark.model

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case["prompt"][:24])


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        "smollm2-135m", dtype="float32", device="cpu", max_model_len=512, speculative_config=None
    )


@pytest.fixture(scope="module")
def small_steps_llm() -> LLM:
    """Chunked prompts, no reuse, and blocks for one request of full length."""
    return LLM(
        "smollm2-135m",
        dtype="float32",
        device="cpu",
        max_model_len=112,
        max_num_batched_tokens=24,
        block_size=8,
        num_kv_blocks=112 // 8 + 1,
        enable_prefix_caching=False,
        speculative_config=None,
    )


def test_file_is_as_described() -> None:
    assert len(CASES) == 3
    for case in CASES:
        assert len(case["output_ids"]) == len(case["gap"]) == 64
        assert min(case["gap"]) >= TIE_GAP


def test_alone(llm: LLM) -> None:
    case = CASES[0]
    assert run_greedy(llm, [case["prompt_ids"]], 64) == [case["output_ids"]]


def test_chunked_and_preempted(small_steps_llm: LLM) -> None:
    found = run_greedy(small_steps_llm, [case["prompt_ids"] for case in CASES], 32)
    assert found == [case["output_ids"][:32] for case in CASES]
    assert small_steps_llm.metrics()["num_preemptions"] > 0


@each_case
def test_text_is_encoded_as_recorded(llm: LLM, case: dict[str, Any]) -> None:
    assert llm.get_tokenizer().encode(case["text"]) == case["prompt_ids"]


def test_chat(llm: LLM) -> None:
    """Through template and tokenizer, and back to text; no recorded answer ends early."""
    conversations = [[{"role": "user", "content": case["prompt"]}] for case in CASES]
    outputs = llm.chat(conversations, greedy_params(64, ignore_eos=False), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [c["prompt_ids"] for c in CASES]
    assert answer_ids(outputs) == [case["output_ids"] for case in CASES]
    assert [output.outputs[0].text for output in outputs] == [c["output_text"] for c in CASES]
    assert not set(llm.config.model.eos_token_ids) & {t for c in CASES for t in c["output_ids"]}
