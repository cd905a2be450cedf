"""Chats with OpenAI's client."""

from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from stoop import LLM, SamplingParams
from support.openai_client import CHAT, chat_texts


def test_models(client: OpenAI, folder: Path) -> None:
    names = [model.id for model in client.models.list()]
    assert names == ["tiny", str(folder)]
    assert client.models.retrieve("tiny").owned_by == "stoop"
    with pytest.raises(openai.NotFoundError, match="`gpt-9` is not served here: use tiny"):
        client.models.retrieve("gpt-9")


def test_a_chat_is_the_offline_answer(chat: Callable, llm: LLM) -> None:
    answer = chat()
    (offline,) = llm.chat([CHAT], SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    assert answer.choices[0].message.content == offline.outputs[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == offline.outputs[0].finish_reason == "length"
    assert answer.object == "chat.completion" and answer.model == "tiny" and answer.id
    assert answer.usage.prompt_tokens == len(offline.prompt_token_ids)
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == 24 + len(offline.prompt_token_ids)


def test_a_stream_is_the_whole_answer_in_pieces(chat: Callable) -> None:
    whole = chat()
    (text,), chunks = chat_texts(chat(stream=True))
    assert text == whole.choices[0].message.content
    assert len(chunks) > 5 and chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_of_a_stream(chat: Callable) -> None:
    whole = chat()
    _, chunks = chat_texts(chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    drafts = chunks[-1].usage.completion_tokens_details
    assert drafts.accepted_prediction_tokens + drafts.rejected_prediction_tokens > 0


def test_a_repeated_prompt_is_cached(chat: Callable) -> None:
    messages = [{"role": "user", "content": "a prompt of more than sixteen tokens"}]
    chat(messages=messages)
    assert chat(messages=messages).usage.prompt_tokens_details.cached_tokens >= 16


def test_several_answers(chat: Callable) -> None:
    options = {"n": 3, "temperature": 1, "seed": 5}
    whole = chat(**options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    assert whole.usage.completion_tokens <= 72
    streamed, _ = chat_texts(chat(**options, stream=True), 3)
    assert streamed == texts


def test_a_seed_repeats_an_answer(chat: Callable) -> None:
    texts = [chat(temperature=1, seed=seed).choices[0].message.content for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


def test_stop_texts(chat: Callable) -> None:
    text = chat().choices[0].message.content
    place = next(i for i in range(4, len(text)) if text[i].isascii() and text[i] not in text[:i])
    stopped = chat(stop=text[place])
    assert stopped.choices[0].message.content == text[:place]
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].stop_reason == text[place]
    (streamed,), chunks = chat_texts(chat(stop=["never", text[place]], stream=True))
    assert streamed == text[:place] and chunks[-1].choices[0].finish_reason == "stop"
    kept = chat(stop=text[place], extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == text[: place + 1]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_limits(name: str, chat: Callable) -> None:
    answer = chat(**{"max_tokens": None, name: 3})
    assert answer.usage.completion_tokens == 3 and answer.choices[0].finish_reason == "length"


def test_logprobs_of_a_chat(chat: Callable, llm: LLM) -> None:
    answer = chat(logprobs=True, top_logprobs=3).choices[0]
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=3)
    (offline,) = llm.chat([CHAT], params, use_tqdm=False)
    scores, expected = answer.logprobs.content, offline.outputs[0]
    assert len(scores) == len(expected.token_ids) == 24
    for score, token, found in zip(scores, expected.token_ids, expected.logprobs, strict=True):
        assert score.logprob == pytest.approx(found[token].logprob, abs=1e-6)
        top = [each.logprob for each in score.top_logprobs]
        assert len(top) == 3 and top == sorted(top, reverse=True)
        assert score.logprob == pytest.approx(top[0])
    streamed = []
    for chunk in chat(logprobs=True, top_logprobs=3, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert [each.logprob for each in streamed] == pytest.approx([s.logprob for s in scores])


def test_the_bytes_of_tokens_are_those_of_the_text(chat: Callable) -> None:
    answer = chat(logprobs=True).choices[0]
    data = b"".join(bytes(each.bytes) for each in answer.logprobs.content)
    assert data.decode("utf-8", errors="replace") == answer.message.content


def test_a_message_can_be_continued(chat: Callable, complete: Callable) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "and so"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    answer = chat(messages=messages, extra_body=options).choices[0].message.content
    prompt = f"<s>user: {CHAT[0]['content']}</s><s>assistant: and so"
    assert answer == complete(prompt=prompt).choices[0].text
    parts = [{"type": "text", "text": CHAT[0]["content"]}]
    split = chat(messages=[{"role": "user", "content": parts}])
    assert split.usage.completion_tokens == 24
