"""Structured answers and tool calls with OpenAI's client."""

import json
import re
from collections.abc import Callable
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from support.openai_client import CHAT, NAMED, SCHEMA, TOOL, chat_texts, stats
from support.server import ServerProcess


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
    parsed = client.chat.completions.parse(
        model="tiny", messages=CHAT, response_format=Room, seed=0
    )
    assert isinstance(parsed.choices[0].message.parsed, Room)
    parsed = client.responses.parse(
        model="tiny", input="abab", text_format=Room, extra_body={"seed": 0}
    )
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
