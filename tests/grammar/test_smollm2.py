"""SmolLM2 and its head: drafts are accepted inside JSON, and change nothing."""

import json
from typing import Any

import jsonschema
import pytest

from stoop import LLM, SamplingParams

pytestmark = pytest.mark.model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 30},
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 30}, "maxItems": 3},
    },
    "required": ["name", "age", "city", "hobbies"],
}
QUESTIONS = (
    "Describe a nurse from Lisbon as JSON with name, age, city and hobbies.",
    "Give me a person as JSON. Their name is Ada and they live in London.",
)


def answers(**options: Any) -> list[Any]:
    settings = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "256MiB"}
    llm = LLM("smollm2-135m", max_model_len=512, max_num_seqs=4, **settings | options)
    asked = {"json": PERSON, "disable_any_whitespace": True}
    params = SamplingParams(temperature=0, max_tokens=120, structured_outputs=asked)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [output.outputs[0] for output in llm.chat(chats, params, use_tqdm=False)]


def test_drafts_are_accepted_inside_json(capsys: pytest.CaptureFixture[str]) -> None:
    plain = answers(speculative_config=None)
    drafted = answers(speculative_config={"num_speculative_tokens": 3})
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    for each in plain:
        assert each.finish_reason == "stop", each.text
        jsonschema.validate(json.loads(each.text), PERSON)
    counts = [each.spec for each in drafted]
    accepted = sum(each.num_accepted_tokens for each in counts)
    steps = sum(each.num_drafts for each in counts)
    tried = sum(each.num_draft_tokens for each in counts)
    with capsys.disabled():
        print(
            f"\ninside JSON: {accepted} of {tried} drafts accepted ({accepted / tried:.0%}), "
            f"{1 + accepted / steps:.2f} tokens per step"
        )
    assert accepted > 0.15 * tried
