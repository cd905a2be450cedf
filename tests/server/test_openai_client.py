"""OpenAI's own Python client drives every feature of the API, on a real server process.

The engine of the same model in this process is the twin: answers must be its answers.
"""

import asyncio
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from stoop import LLM, SamplingParams
from support.engines import make_llm
from support.server import SMALL_ENGINE, ServerProcess, write_served_model

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
TEMPLATE = (
    "{% if tools %}<s>tools: {{ tools | tojson }} in <tool_call></s>{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}{% if not (continue_final_message and loop.last) %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
PROMPT = "abab abab"
CHAT: Any = [{"role": "user", "content": "abab abab"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "set_light",
        "description": "switches",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}, "room": {"enum": ["hall", "bath"]}},
            "required": ["on", "room"],
            "additionalProperties": False,
        },
    },
}
NAMED: Any = {"type": "function", "function": {"name": "set_light"}}
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "size": {"enum": ["small", "large"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["ok", "size", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("served") / "tiny", TEMPLATE)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(folder, "-sc", json.dumps(DRAFTS)) as running:
        yield running


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    """The twin."""
    return make_llm(folder, speculative_config=DRAFTS)


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.api, api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def chat(client: OpenAI) -> Callable[..., Any]:
    """A greedy chat completion."""

    def ask(**options: Any) -> Any:
        defaults = {"model": "tiny", "messages": CHAT, "max_tokens": 24, "temperature": 0}
        return client.chat.completions.create(**{**defaults, **options})

    return ask


@pytest.fixture(scope="module")
def complete(client: OpenAI) -> Callable[..., Any]:
    """A greedy text completion."""

    def ask(**options: Any) -> Any:
        defaults = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
        return client.completions.create(**{**defaults, **options})

    return ask


def stats(server: ServerProcess) -> dict[str, Any]:
    return dict(httpx.get(f"{server.url}/stats").json())


def chat_texts(stream: Any, num_choices: int = 1) -> tuple[list[str], list[Any]]:
    """The texts of a stream by choice, and its chunks."""
    texts, chunks = [""] * num_choices, []
    for chunk in stream:
        chunks.append(chunk)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    return texts, chunks


# ---- models ----


def test_models(client: OpenAI, folder: Path) -> None:
    names = [model.id for model in client.models.list()]
    assert names == ["tiny", str(folder)]
    assert client.models.retrieve("tiny").owned_by == "stoop"
    with pytest.raises(openai.NotFoundError, match="`gpt-9` is not served here: use tiny"):
        client.models.retrieve("gpt-9")


# ---- chat ----


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


# ---- sampling ----

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


# ---- text completions ----


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


# ---- responses ----


def test_a_response_is_a_chat(client: OpenAI, chat: Callable) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": CHAT[0]["content"], "temperature": 0}
    answer = client.responses.create(**asked, max_output_tokens=24)
    assert answer.output_text == chat().choices[0].message.content
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 24
    assert answer.usage.total_tokens == 24 + answer.usage.input_tokens
    told = client.responses.create(
        **{**asked, "input": CHAT}, instructions="be brief", max_output_tokens=4, store=False
    )
    system = [{"role": "system", "content": "be brief"}, *CHAT]
    assert told.output_text == chat(messages=system, max_tokens=4).choices[0].message.content


def test_a_streamed_response(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "abab", "temperature": 0}
    whole = client.responses.create(**asked, max_output_tokens=20)
    events = list(client.responses.create(**asked, max_output_tokens=20, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == 20
    # The client's helper takes complete answers only: this one ends by itself.
    ends: dict[str, Any] = {"extra_body": {"logit_bias": {"257": 100}, "min_tokens": 6}}
    with client.responses.stream(**asked, **ends) as stream:
        final = stream.get_final_response()
    assert final.status == "completed" and final.usage.output_tokens == 7
    assert final.output_text == client.responses.create(**asked, **ends).output_text


def test_a_response_in_json_and_with_tools(client: OpenAI) -> None:
    form: Any = {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}
    for seed in range(3):
        answer = client.responses.create(
            model="tiny", input="abab", text={"format": form}, extra_body={"seed": seed}
        )
        assert answer.status == "completed"
        jsonschema.validate(json.loads(answer.output_text), SCHEMA)
    tool: Any = {"type": "function", **TOOL["function"], "strict": True}
    answer = client.responses.create(
        model="tiny", input="abab", tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = answer.output
    assert call.type == "function_call" and call.name == "set_light" and call.call_id
    jsonschema.validate(json.loads(call.arguments), TOOL["function"]["parameters"])
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    again: Any = [{"role": "user", "content": "abab"}, call.model_dump(), output]
    assert client.responses.create(model="tiny", input=again, max_output_tokens=3).output_text


def test_what_responses_lack_is_named(client: OpenAI) -> None:
    for more, sentence in (
        ({"previous_response_id": "resp_1"}, "send the whole conversation as `input`"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"background": True}, "background"),
    ):
        with pytest.raises(openai.BadRequestError, match=sentence):
            client.responses.create(model="tiny", input="a", **more)  # type: ignore[call-overload]


# ---- structure ----


def test_json_objects(chat: Callable) -> None:
    for seed in range(4):
        answer = chat(
            response_format={"type": "json_object"}, seed=seed, temperature=0.5, max_tokens=400
        ).choices[0]
        if answer.finish_reason == "stop":
            assert isinstance(json.loads(answer.message.content), dict)
        else:
            assert answer.message.content.lstrip().startswith("{")


def test_json_by_schema(chat: Callable) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
    found = []
    for seed in range(4):
        whole = chat(response_format=form, seed=seed, temperature=1, max_tokens=200)
        assert whole.choices[0].finish_reason == "stop"
        found.append(json.loads(whole.choices[0].message.content))
        jsonschema.validate(found[-1], SCHEMA)
    assert len({json.dumps(each, sort_keys=True) for each in found}) > 1
    (streamed,), _ = chat_texts(
        chat(response_format=form, seed=3, temperature=1, max_tokens=200, stream=True)
    )
    assert json.loads(streamed) == found[-1]


def test_drafts_do_not_change_json(chat: Callable) -> None:
    """Greedy, so that both must be the same text."""
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    options = {"response_format": form, "max_tokens": 200}
    drafted = chat(**options)
    plain = chat(**options, extra_body={"num_speculative_tokens": 0})
    assert drafted.choices[0].message.content == plain.choices[0].message.content
    details = drafted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0


class Room(BaseModel):
    name: Literal["hall", "bath"]
    lit: bool


def test_the_clients_parser(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(model="tiny", messages=CHAT, response_format=Room)
    assert isinstance(parsed.choices[0].message.parsed, Room)
    parsed = client.responses.parse(model="tiny", input="abab", text_format=Room)
    assert isinstance(parsed.output_parsed, Room)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        ({"regex": "[ab]{2,6}c"}, "[ab]{2,6}c"),
        ({"choice": ["yes", "no", "perhaps"]}, "yes|no|perhaps"),
        ({"grammar": 'root ::= ("x" | "y") root | "z"'}, "[xy]*z"),
        ({"json": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}}, r"\[[\s,12]*\]"),
    ],
)
def test_structured_outputs(
    structure: dict[str, Any], pattern: str, stream: bool, chat: Callable
) -> None:
    body = {"structured_outputs": structure}
    answer = chat(extra_body=body, temperature=0.8, seed=1, max_tokens=300, stream=stream)
    text = chat_texts(answer)[0][0] if stream else answer.choices[0].message.content
    assert re.fullmatch(pattern, text)


def test_structures_that_cannot_be_are_refused(chat: Callable, server: ServerProcess) -> None:
    for structure in ({"regex": "(a"}, {"grammar": "no"}, {"json": {"type": 7}}, {}, {"regx": "a"}):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(extra_body={"structured_outputs": structure})
        assert len(caught.value.message) > 20
    assert chat().choices and stats(server)["state"] == "ready"


# ---- tools ----


def calls_of(stream: Any) -> tuple[list[dict[str, str]], str | None]:
    """Streamed calls put together as a client does, and the last finish_reason."""
    calls: dict[int, dict[str, str]] = {}
    reason = None
    for chunk in stream:
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or ():
                kept = calls.setdefault(call.index, {"name": "", "arguments": "", "id": ""})
                kept["id"] += call.id or ""
                kept["name"] += call.function.name or ""
                kept["arguments"] += call.function.arguments or ""
    return [calls[index] for index in sorted(calls)], reason


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_calls(choice: Any, chat: Callable) -> None:
    options = {"tools": [TOOL], "tool_choice": choice, "seed": 2, "temperature": 1}
    options |= {"parallel_tool_calls": False, "max_tokens": 200}
    whole = chat(**options).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.message.content is None
    assert call.type == "function" and call.function.name == "set_light"
    jsonschema.validate(json.loads(call.function.arguments), TOOL["function"]["parameters"])
    assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop")
    calls, reason = calls_of(chat(**options, stream=True))
    assert reason == whole.finish_reason
    assert [(c["name"], c["arguments"]) for c in calls] == [("set_light", call.function.arguments)]
    assert calls[0]["id"].startswith("call_")


def test_calls_by_the_models_choice(chat: Callable) -> None:
    """The answer is a call or JSON; a bias on the first character decides."""
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    options = {"tools": [TOOL], "response_format": form, "max_tokens": 200, "temperature": 1}
    options |= {"parallel_tool_calls": False, "tool_choice": "auto"}
    for bias, calls in (({"27": 50}, True), ({"90": 50}, False)):  # < and {
        for seed in range(9):  # some are cut short: JSON may have any number of spaces
            answer = chat(**options, logit_bias=bias, seed=seed).choices[0]
            if answer.finish_reason == "length":
                continue
            assert answer.finish_reason == ("tool_calls" if calls else "stop")
            if calls:
                (call,) = answer.message.tool_calls
                assert call.function.name == "set_light"
                jsonschema.validate(
                    json.loads(call.function.arguments), TOOL["function"]["parameters"]
                )
            else:
                jsonschema.validate(json.loads(answer.message.content), SCHEMA)
            break
        else:
            raise AssertionError("every answer was cut short")


def test_tools_that_are_not_to_be_called(chat: Callable) -> None:
    none = chat(tools=[TOOL], tool_choice="none").choices[0].message
    assert none.tool_calls is None and none.content == chat().choices[0].message.content
    free = chat(tools=[TOOL]).choices[0].message  # auto: the model writes what it likes
    assert free.content != none.content  # and sees the tool in its prompt


def test_results_of_tools_go_back(chat: Callable) -> None:
    call = {"id": "call_1", "type": "function"}
    function = {"name": "set_light", "arguments": '{"on": true, "room": "hall"}'}
    messages = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [{**call, "function": function}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    assert chat(messages=messages, tools=[TOOL]).choices[0].message.content


def test_a_message_can_be_continued(chat: Callable, complete: Callable) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "and so"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    answer = chat(messages=messages, extra_body=options).choices[0].message.content
    prompt = f"<s>user: {CHAT[0]['content']}</s><s>assistant: and so"
    assert answer == complete(prompt=prompt).choices[0].text
    parts = [{"type": "text", "text": CHAT[0]["content"]}]
    split = chat(messages=[{"role": "user", "content": parts}])
    assert split.usage.completion_tokens == 24


# ---- errors ----


@pytest.mark.parametrize(
    ("options", "error", "pattern", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "`temperature`", "temperature"),
        ({"n": 0}, openai.BadRequestError, "`n`", "n"),
        ({"logprobs": True, "top_logprobs": 99}, openai.BadRequestError, "top_logprobs", None),
        ({"messages": []}, openai.BadRequestError, "`messages`", "messages"),
        ({"model": "gpt-9"}, openai.NotFoundError, "is not served here", "model"),
        ({"extra_body": {"frobnicate": 1}}, openai.BadRequestError, "`frobnicate`", "frobnicate"),
        ({"store": True}, openai.BadRequestError, "`store`", "store"),
        ({"audio": {"voice": "x", "format": "mp3"}}, openai.BadRequestError, "`audio`", "audio"),
        ({"functions": [{"name": "f"}]}, openai.BadRequestError, "use tools", "functions"),
        ({"logit_bias": {"99999": 1}}, openai.BadRequestError, "99999", None),
        ({"tool_choice": "required"}, openai.BadRequestError, "needs `tools`", "tool_choice"),
        ({"extra_body": {"num_speculative_tokens": 9}}, openai.BadRequestError, "at most 3", None),
        ({"extra_body": {"stop_token_ids": ["a"]}}, openai.BadRequestError, "stop_token_i", None),
    ],
)
def test_errors_say_what_is_wrong(
    options: dict[str, Any], error: type, pattern: str, param: str | None, chat: Callable
) -> None:
    for stream in (False, True):
        with pytest.raises(error, match=pattern) as caught:
            chat(**options, stream=stream)
        assert param is None or caught.value.param == param
        assert caught.value.type == "invalid_request_error"


def test_images_are_refused(chat: Callable) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,xx"}}
    with pytest.raises(openai.BadRequestError, match="image_url"):
        chat(messages=[{"role": "user", "content": [image]}])


def test_a_context_that_is_too_long(chat: Callable, complete: Callable) -> None:
    long = [{"role": "user", "content": "x" * 600}]
    for ask in (lambda: chat(messages=long), lambda: complete(prompt="x" * 600)):
        with pytest.raises(openai.BadRequestError, match="512") as caught:
            ask()
        assert caught.value.code == "context_length_exceeded"
    # Without a limit the answer ends where the context does.
    rest = complete(prompt="x" * 500, max_tokens=100, extra_body={"ignore_eos": True})
    assert rest.choices[0].finish_reason == "length"


def test_raw_headers(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=CHAT, max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse().id == "chatcmpl-mine-1"


# ---- many clients at once ----


def test_many_async_streams(server: ServerProcess, llm: LLM) -> None:
    prompts = [f"prompt number {number}" for number in range(24)]

    async def one(client: AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=20, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def every() -> list[str]:
        async with AsyncOpenAI(base_url=server.api, api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    assert asyncio.run(every()) == [output.outputs[0].text for output in outputs]


def until_idle(server: ServerProcess, headers: dict[str, str] | None = None) -> float:
    """Seconds until no request runs and no block is used."""
    started = time.monotonic()
    while time.monotonic() < started + 20:
        found = httpx.get(f"{server.url}/stats", headers=headers).json()
        if not found["num_requests_running"] and not found["kv_cache_usage"]:
            return time.monotonic() - started
        time.sleep(0.01)
    raise AssertionError(found)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(stream: bool, server: ServerProcess) -> None:
    async def leave() -> None:
        async with AsyncOpenAI(base_url=server.api, api_key="x", max_retries=0) as client:
            asked = client.completions.create(
                model="tiny",
                prompt=["a", "b"],
                n=2,
                max_tokens=500,
                stream=stream,
                extra_body={"ignore_eos": True},
            )
            if stream:
                answers = await asked
                async for _ in answers:
                    break
                await answers.close()
            else:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(asked, 0.2)

    def num_steps() -> int:
        time.sleep(0.5)  # counters are up to a quarter of a second old
        return int(stats(server)["num_steps"])

    until_idle(server)
    before = num_steps()
    asyncio.run(leave())
    at_once = num_steps()
    until_idle(server)
    assert 0 < at_once - before < 300  # it was cut short,
    assert num_steps() == at_once  # and nothing ran on


# ---- keys and queues ----


@pytest.fixture(scope="module")
def strict(folder: Path) -> Iterator[ServerProcess]:
    """A server with a key, and room for one request."""
    flags = ("--api-key", "secret", "--max-num-seqs", "1", "--max-queue", "0")
    with ServerProcess(folder, *flags, engine=SMALL_ENGINE) as running:
        yield running


def test_keys(strict: ServerProcess) -> None:
    with OpenAI(base_url=strict.api, api_key="secret", max_retries=0) as client:
        assert client.models.list().data
    with (
        OpenAI(base_url=strict.api, api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="API key is missing or wrong") as caught,
    ):
        client.models.list()
    assert caught.value.code == "invalid_api_key"
    assert httpx.get(f"{strict.url}/health").status_code == 200  # for probes
    assert httpx.get(f"{strict.url}/stats").status_code == 401
    assert "secret" not in strict.log


def test_a_full_queue_is_429_and_the_client_tries_again(strict: ServerProcess) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "a", "extra_body": {"ignore_eos": True}}
    with OpenAI(base_url=strict.api, api_key="secret", max_retries=0) as client:
        running = client.completions.create(**asked, max_tokens=500, stream=True)
        next(iter(running))
        with pytest.raises(openai.RateLimitError, match="queue is full") as caught:
            client.completions.create(**asked, max_tokens=1)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert caught.value.code == "queue_full"
        running.close()
    until_idle(strict, {"authorization": "Bearer secret"})
    with OpenAI(base_url=strict.api, api_key="secret", max_retries=5) as client:
        running = client.completions.create(**asked, max_tokens=100, stream=True)
        next(iter(running))
        assert client.completions.create(**asked, max_tokens=1).choices  # after a wait
        running.close()
