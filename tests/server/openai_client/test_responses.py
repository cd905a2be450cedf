"""The Responses API with OpenAI's client."""

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI

from support.openai_client import CHAT, SCHEMA, TOOL


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
        model="tiny",
        input="abab",
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        extra_body={"seed": 0},  # some are cut short: JSON may have any number of spaces
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
