"""`/v1/chat/completions`: shapes of whole and streamed answers, tools, reasoning, formats."""

import json
import threading
import time

import pytest

from stoop.config.errors import ConfigError, RequestError
from stoop.core.structured import StructuredOutputs
from stoop.grammar.parsing import parse
from stoop.server import conversation
from stoop.server.settings import ServerSettings
from support.fake_llm import FakeLLM
from support.http import USER, events, make_server, post, refusal

CHAT = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}<tool_call>{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}{{ extra }}"
)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture
def structures(monkeypatch):
    """Records constraints, also while `SamplingParams` does not take them."""
    seen = []

    def note(params, structure):
        seen.append(None if structure is None else StructuredOutputs.of(structure))
        return params

    monkeypatch.setattr(conversation, "with_structure", note)
    return seen


def stream(app, **body):
    response = post(app, CHAT, {"messages": USER, "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = events(response.text)
    assert found[-1] == "[DONE]"
    return found[:-1]


def whole(app, **body):
    response = post(app, CHAT, {"messages": USER, **body})
    assert response.status_code == 200, response.text
    return response.json()


def joined(chunks, index=0):
    """The message and the finish reason that chunks add up to."""
    message, calls, end = {"content": ""}, [], None
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(calls):
                    assert call["id"] and call["type"] == "function"
                    calls.append(["", ""])
                calls[call["index"]][0] += call["function"].get("name", "")
                calls[call["index"]][1] += call["function"]["arguments"]
            end = choice["finish_reason"] or end
    return message, [tuple(call) for call in calls], end


def test_a_stream_adds_up_to_the_whole_answer():
    app, _ = make_server(FakeLLM(["He", 'l"lo\n', "wörld", " \u2028 <"]))
    chunks = stream(app, stream_options={"include_usage": True})
    found = whole(app)
    assert found["object"] == "chat.completion"
    (choice,) = found["choices"]
    assert choice["message"]["content"] == 'Hel"lo\nwörld \u2028 <'
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    message, _, end = joined(chunks)
    assert message["content"] == choice["message"]["content"]
    assert end == choice["finish_reason"] == "stop"
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    streamed, counted = chunks[-1]["usage"], found["usage"]
    assert streamed == counted
    assert counted["prompt_tokens_details"] == {"cached_tokens": 2}
    assert counted["completion_tokens_details"]["rejected_prediction_tokens"] == 2
    assert "usage" not in stream(app)[0]


def test_usage_in_every_chunk():
    app, _ = make_server()
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [c["usage"]["completion_tokens"] for c in stream(app, stream_options=options)]
    assert counts == sorted(counts) and counts[-1] == len("Hello there!")


def test_several_answers():
    app, _ = make_server(FakeLLM(lambda ids, params, index: ["a", str(index)]))
    chunks = stream(app, n=3)
    for index in range(3):
        assert joined(chunks, index)[0]["content"] == f"a{index}"
    texts = [choice["message"]["content"] for choice in whole(app, n=3)["choices"]]
    assert texts == ["a0", "a1", "a2"]


def test_logprobs():
    app, _ = make_server(FakeLLM(["ab", "c"]))
    found = whole(app, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in found] == ["a", "b", "c"]
    assert found[0]["logprob"] == -0.5 and found[0]["bytes"] == [97]
    assert [top["token"] for top in found[0]["top_logprobs"]] == ["a", "b"]
    assert found[0]["top_logprobs"][1]["logprob"] == -9999.0  # JSON has no infinity
    streamed = []
    for chunk in stream(app, logprobs=True, top_logprobs=2):
        for choice in chunk["choices"]:
            streamed += (choice["logprobs"] or {"content": []})["content"]
    assert streamed == found
    (choice,) = whole(app, logprobs=True)["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []


def test_draft_positions():
    app, _ = make_server(FakeLLM(["ab", "é", "!"]))
    found = whole(app, return_draft_positions=True)["choices"][0]["tokens"]
    assert "".join(each["text"] for each in found) == "abé!"
    assert [each["draft"] for each in found] == [0, 1, 0, 1, 0]
    for chunk in stream(app, return_draft_positions=True):
        (choice,) = chunk["choices"]
        if "tokens" in choice:
            texts = "".join(each["text"] for each in choice["tokens"])
            assert texts == choice["delta"]["content"]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_tool_calls(size):
    text = f"Let me see. {CALL}"
    cut = [text[place : place + size] for place in range(0, len(text), size)]
    llm = FakeLLM(cut, chat_template=TEMPLATE)
    app, _ = make_server(llm)
    (choice,) = whole(app, tools=TOOLS)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert choice["message"]["content"] == "Let me see."
    message, calls, end = joined(stream(app, tools=TOOLS))
    assert calls == [("get_weather", '{"city": "Paris"}')]
    assert message["content"] == "Let me see." and end == "tool_calls"
    assert "get_weather" in llm.seen[0][0]["prompt"]


@pytest.mark.parametrize("parallel", [True, False])
def test_one_call_at_most(parallel):
    llm = FakeLLM([*f"{CALL}{CALL.replace('Paris', 'Rome')}"], chat_template=TEMPLATE)
    app, _ = make_server(llm)
    body = {"tools": TOOLS, "parallel_tool_calls": parallel}
    (choice,) = whole(app, **body)["choices"]
    calls = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
    assert calls == ['{"city": "Paris"}', '{"city": "Rome"}'][: 2 if parallel else 1]
    assert choice["finish_reason"] == "tool_calls"
    _, streamed, end = joined(stream(app, **body))
    assert [call[1] for call in streamed] == calls and end == "tool_calls"


def test_without_a_choice_of_tools_there_are_no_calls():
    llm = FakeLLM([CALL], chat_template=TEMPLATE)
    app, _ = make_server(llm)
    (choice,) = whole(app, tools=TOOLS, tool_choice="none")["choices"]
    assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"
    assert "get_weather" not in llm.seen[0][0]["prompt"]


def test_a_call_cut_short_ends_with_length():
    llm = FakeLLM([CALL[:60]], chat_template=TEMPLATE, ends="length")
    app, _ = make_server(llm)
    (choice,) = whole(app, tools=TOOLS)["choices"]
    assert choice["finish_reason"] == "length"


def test_forced_tools(structures):
    app, _ = make_server(FakeLLM([CALL], chat_template=TEMPLATE))
    (choice,) = whole(app, tools=TOOLS, tool_choice="required")["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    form = json.loads(structures[0].structural_tag)["format"]
    assert form["at_least_one"] and not form["stop_after_first"]
    whole(app, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert json.loads(structures[1].structural_tag)["format"]["stop_after_first"]


def test_a_named_tool(structures):
    app, _ = make_server(FakeLLM(['{"city": ', '"Rome"}'], chat_template=TEMPLATE))
    named = {"type": "function", "function": {"name": "get_weather"}}
    (choice,) = whole(app, tools=TOOLS, tool_choice=named)["choices"]
    assert choice["finish_reason"] == "stop"  # as OpenAI has it
    assert choice["message"]["tool_calls"][0]["function"] == {
        "name": "get_weather",
        "arguments": '{"city": "Rome"}',
    }
    assert json.loads(structures[0].json) == TOOLS[0]["function"]["parameters"]
    _, calls, _ = joined(stream(app, tools=TOOLS, tool_choice=named))
    assert calls == [("get_weather", '{"city": "Rome"}')]
    wrong = {"type": "function", "function": {"name": "nope"}}
    refusal(
        post(app, CHAT, {"messages": USER, "tools": TOOLS, "tool_choice": wrong}), 400, "'nope'"
    )


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("form", "kind", "value"),
    [
        ({"type": "text"}, None, None),
        ({"type": "json_object"}, "json_object", True),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
            "json",
            json.dumps(SCHEMA),
        ),
    ],
)
def test_response_formats(structures, form, kind, value):
    app, _ = make_server()
    whole(app, response_format=form)
    (found,) = structures
    assert (found and found.kind) == kind
    assert kind is None or getattr(found, kind) == value


def test_structured_outputs(structures):
    app, _ = make_server()
    whole(app, structured_outputs={"regex": "a+"})
    assert structures[0].regex == "a+"
    both = {"structured_outputs": {"regex": "a+"}, "response_format": {"type": "json_object"}}
    refusal(post(app, CHAT, {"messages": USER, **both}), 400, "exclude each other")


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
def test_grammars_are_parsed_outside_the_event_loop(monkeypatch, path):
    """The first one imports xgrammar, too: streams would stand still meanwhile."""
    threads = []

    def parse(asked):
        threads.append(threading.current_thread())
        raise RequestError(f"no {asked.kind}")

    monkeypatch.setattr("stoop.server.prompts.parse", parse)
    app, _ = make_server()
    body = {"messages": USER} if path == CHAT else {"prompt": "a"}
    body = {"input": "a"} if path == "/v1/responses" else body
    refusal(post(app, path, {**body, "structured_outputs": {"regex": "a"}}), 400, "no regex")
    assert threads and threading.main_thread() not in threads


def test_a_format_with_tools_allows_both(structures):
    app, _ = make_server(FakeLLM(["{}"], chat_template=TEMPLATE))
    whole(app, tools=TOOLS, response_format={"type": "json_object"})
    form = json.loads(structures[0].structural_tag)["format"]
    assert [each["type"] for each in form["elements"]] == ["tags_with_separator", "json_schema"]
    refused = {"messages": USER, "tools": TOOLS, "tool_choice": "required"}
    refused["response_format"] = {"type": "json_object"}
    refusal(post(app, CHAT, refused), 400, "exclude each other")


@pytest.mark.parametrize(
    "asked",
    [
        {"structured_outputs": {"json": '{"type": "integer"}'}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
    ],
)
def test_a_schema_as_text_with_tools(structures, asked):
    """Structural tags take schemas as objects only."""
    pytest.importorskip("xgrammar")
    app, _ = make_server(FakeLLM(["12"], chat_template=TEMPLATE))
    (choice,) = whole(app, tools=TOOLS, **asked)["choices"]
    assert choice["message"]["content"] == "12"
    assert parse(structures[0]) is not None  # xgrammar takes it


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning(structures, opened):
    start = "" if opened else "<think>"
    cut = [*f"{start}hm</think>\n\nYes"]
    llm = FakeLLM(cut, chat_template=TEMPLATE)
    app, _ = make_server(llm, reasoning_parser="think")
    body = {"chat_template_kwargs": {"extra": "<think>" if opened else ""}}
    (choice,) = whole(app, **body, response_format={"type": "json_object"})["choices"]
    assert choice["message"]["reasoning_content"] == "hm"
    assert choice["message"]["content"] == "Yes"
    if opened:
        assert structures[0].after == "</think>"  # the grammar begins there
    else:  # the model decides, and the grammar allows both
        form = json.loads(structures[0].structural_tag)["format"]
        assert form["elements"][1] == {"type": "json_schema", "json_schema": {"type": "object"}}
    message, _, _ = joined(stream(app, **body))
    assert message == {"content": "Yes", "reasoning_content": "hm"}


def test_a_closed_block_means_no_reasoning(structures):
    app, _ = make_server(FakeLLM(["Yes"], chat_template=TEMPLATE), reasoning_parser="qwen3")
    body = {"chat_template_kwargs": {"extra": "<think>\n\n</think>\n\n"}}
    (choice,) = whole(app, **body, response_format={"type": "json_object"})["choices"]
    assert choice["message"]["content"] == "Yes" and structures[0].after is None


def test_without_a_parser_reasoning_is_content():
    app, _ = make_server(FakeLLM(["<think>hm</think>Yes"]))
    (choice,) = whole(app)["choices"]
    assert choice["message"]["content"] == "<think>hm</think>Yes"
    assert "reasoning_content" not in choice["message"]


def test_messages_reach_the_template():
    llm = FakeLLM(chat_template=TEMPLATE)
    app, _ = make_server(llm)
    arguments = json.dumps({"city": "Oslo"})
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    whole(app, messages=messages, chat_template_kwargs={"extra": "!"})
    assert llm.seen[0][0]["prompt"] == (
        "system: Be brief.\nuser: a\nb\nassistant: Oslo\ntool: rain\nassistant: !"
    )


def test_another_chat_template(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text(
        "{% for t in tools or [] %}<|python_tag|>{% endfor %}{{ messages[0].content }}?"
    )
    llm = FakeLLM(['{"name": "get_weather", "parameters": {}}'])
    app, service = make_server(llm, chat_template=str(file))
    (choice,) = whole(app, tools=TOOLS)["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert llm.seen[0][0]["prompt"] == "<|python_tag|>hi?"
    assert service.tool_format.name == "llama3_json"
    with pytest.raises(ConfigError, match="--chat-template"):
        ServerSettings(chat_template=str(tmp_path / "nope"))


def test_the_final_message_can_be_continued():
    llm = FakeLLM()
    app, _ = make_server(llm)
    messages = [*USER, {"role": "assistant", "content": "Once upon"}]
    whole(app, messages=messages, continue_final_message=True)
    assert llm.seen[0][0]["prompt"] == "<s>user: hi</s><s>assistant: Once upon"
    both = {"continue_final_message": True, "add_generation_prompt": True}
    refusal(post(app, CHAT, {"messages": messages, **both}), 400)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].nope.nope }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_that_fails_ends_its_request_alone(template):
    llm = FakeLLM(chat_template=template)
    app, _ = make_server(llm)
    refusal(post(app, CHAT, {"messages": USER}), 400, "chat template")
    assert post(app, "/v1/completions", {"prompt": "a"}).status_code == 200
    assert llm.num_open == 0


def test_a_template_that_never_ends_is_stopped(monkeypatch):
    monkeypatch.setattr("stoop.server.prompts.RENDER_SECONDS", 0.3)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    app, service = make_server(FakeLLM(chat_template=loop))
    for _ in range(3):  # more than there are threads
        refusal(post(app, CHAT, {"messages": USER}), 400, "took more than 0.3 s")
    threads = service.prompts._threads
    assert threads.submit(lambda: 7).result(timeout=10) == 7


def test_waiting_for_a_thread_is_not_the_templates_time(monkeypatch):
    monkeypatch.setattr("stoop.server.prompts.RENDER_SECONDS", 0.3)
    app, service = make_server()
    for _ in range(2):  # as many as there are threads
        service.prompts._threads.submit(time.sleep, 0.8)
    assert post(app, CHAT, {"messages": USER}).status_code == 200
