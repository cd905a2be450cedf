"""Text completions and sampling with OpenAI's client."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from stoop import LLM, SamplingParams
from support.openai_client import PROMPT


def test_a_completion_and_its_stream(complete: Callable) -> None:
    whole = complete()
    chunks = list(complete(stream=True, stream_options={"include_usage": True}))
    assert whole.object == "text_completion" and whole.choices[0].finish_reason == "length"
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens == 24 + len(PROMPT)


def test_echo(complete: Callable) -> None:
    text = complete().choices[0].text
    assert complete(echo=True).choices[0].text == PROMPT + text
    streamed = "".join(chunk.choices[0].text for chunk in complete(echo=True, stream=True))
    assert streamed == PROMPT + text
    scored = complete(echo=True, max_tokens=0, logprobs=1)
    assert scored.choices[0].text == PROMPT
    assert scored.choices[0].logprobs.tokens == list(PROMPT)
    assert scored.choices[0].logprobs.token_logprobs[0] is None
    assert all(score < 0 for score in scored.choices[0].logprobs.token_logprobs[1:])


def test_prompts_of_token_ids(complete: Callable, llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPT)
    assert complete(prompt=ids).choices[0].text == complete().choices[0].text
    pair = complete(prompt=[ids, ids[:3]])
    assert pair.choices[0].text == complete().choices[0].text
    assert pair.choices[1].text == complete(prompt=PROMPT[:3]).choices[0].text


def test_batches_of_prompts(complete: Callable) -> None:
    prompts = [PROMPT, "another", "third one"]
    single = [complete(prompt=prompt).choices[0].text for prompt in prompts]
    batch = complete(prompt=prompts)
    assert [choice.index for choice in batch.choices] == [0, 1, 2]
    assert [choice.text for choice in batch.choices] == single
    assert batch.usage.completion_tokens == 72
    texts: dict[int, str] = defaultdict(str)
    for chunk in complete(prompt=prompts, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [texts[place] for place in range(3)] == single
    several = complete(prompt=prompts[:2], n=2, temperature=1, seed=1)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]


def test_logprobs_of_a_completion(complete: Callable) -> None:
    scores = complete(logprobs=2).choices[0].logprobs
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.text_offset) == 24
    assert scores.text_offset[0] == 0 and scores.text_offset == sorted(scores.text_offset)
    for token, score, top in zip(
        scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True
    ):
        assert 1 <= len(top) <= 3  # tokens of half a character may look alike
        assert max(top.values()) == pytest.approx(score), token
    assert complete(logprobs=0).choices[0].logprobs.token_logprobs == pytest.approx(
        scores.token_logprobs
    )


def test_scores_of_the_prompt(complete: Callable, llm: LLM) -> None:
    answer = complete(extra_body={"prompt_logprobs": 1, "priority": 2}).choices[0]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (offline,) = llm.generate([PROMPT], params, use_tqdm=False)
    ids, expected = offline.prompt_token_ids, offline.prompt_logprobs
    assert len(answer.prompt_logprobs) == len(ids) and answer.prompt_logprobs[0] is None
    for token, found, wanted in list(zip(ids, answer.prompt_logprobs, expected, strict=True))[1:]:
        assert found[str(token)]["logprob"] == pytest.approx(wanted[token].logprob, abs=1e-6)


# Fields, and whether OpenAI's client knows the name or needs extra_body.
FIELDS: list[tuple[dict[str, Any], bool]] = [
    ({"temperature": 0.5}, True),
    ({"top_p": 0.3}, True),
    ({"presence_penalty": 1.5}, True),
    ({"frequency_penalty": 2.0}, True),
    ({"logit_bias": {"65": 100.0}}, True),
    ({"logit_bias": {"65": 4.0, "66": -100.0}}, True),
    ({"stop": ["a", "b", "c", "d", "e"]}, True),
    ({"max_tokens": 5}, True),
    ({"seed": 99}, True),
    ({"top_k": 2}, False),
    ({"min_p": 0.3}, False),
    ({"repetition_penalty": 1.8}, False),
    ({"stop_token_ids": list(range(60, 120))}, False),
    ({"bad_words": list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")}, False),
    ({"num_speculative_tokens": 0}, False),
]


def test_every_sampling_field_arrives(complete: Callable, llm: LLM) -> None:
    """With each, the answer is the twin's; and not the answer without it."""
    base: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 40}
    without = complete(**base).choices[0]
    for fields, known in FIELDS:
        body = {**base, **fields} if known else {**base, "extra_body": fields}
        answer = complete(**body).choices[0]
        bias = {int(k): v for k, v in fields.get("logit_bias", {}).items()} or None
        params = SamplingParams(**{**base, **fields, "logit_bias": bias})
        (offline,) = llm.generate([PROMPT], params, use_tqdm=False)
        expected = offline.outputs[0]
        assert (answer.text, answer.finish_reason) == (expected.text, expected.finish_reason), (
            fields
        )
        assert answer.text != without.text or "num_speculative_tokens" in fields, fields


def test_the_end_of_text_can_be_ignored_or_put_off(complete: Callable) -> None:
    end = {"257": 100}
    assert complete(logit_bias=end).usage.completion_tokens == 1
    assert complete(logit_bias=end).choices[0].finish_reason == "stop"
    longer = complete(logit_bias=end, extra_body={"ignore_eos": True})
    assert longer.usage.completion_tokens == 24
    later = complete(logit_bias=end, extra_body={"min_tokens": 5})
    assert later.usage.completion_tokens == 6
    shown = complete(
        logit_bias=end, max_tokens=2, extra_body={"ignore_eos": True, "skip_special_tokens": False}
    )
    assert shown.choices[0].text == "</s></s>"


def test_fewer_drafts_and_their_positions(complete: Callable) -> None:
    # The model is made to repeat itself, so that drafts from the prompt are right.
    repeat = {"prompt": "AAAAAAAA", "logit_bias": {"32": 100}, "max_tokens": 20}
    plain = complete(**repeat, extra_body={"num_speculative_tokens": 0})
    details = plain.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == details.rejected_prediction_tokens == 0
    drafted = complete(**repeat, extra_body={"return_draft_positions": True})
    assert drafted.choices[0].text == plain.choices[0].text == "A" * 20
    accepted = drafted.usage.completion_tokens_details.accepted_prediction_tokens
    tokens = drafted.choices[0].tokens
    assert "".join(token["text"] for token in tokens) == "A" * 20
    assert {token["draft"] for token in tokens} == {0, 1, 2, 3}
    assert accepted == sum(token["draft"] > 0 for token in tokens) > 10
    streamed = []
    for chunk in complete(**repeat, stream=True, extra_body={"return_draft_positions": True}):
        streamed += getattr(chunk.choices[0], "tokens", None) or []
    assert streamed == tokens
