"""What requests may say, and how the rest is refused."""

import asyncio
import json
import threading

import pytest

from support.fake_llm import FakeLLM
from support.http import USER, Connection, call, make_server, post, refusal

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
GOOD = {CHAT: {"messages": USER}, TEXT: {"prompt": "a"}, RESPONSES: {"input": "a"}}
TOOL = CHOICE = {"type": "function", "function": {"name": "f"}}
FLAT = {"type": "function", "name": "f"}


@pytest.fixture(scope="module")
def app():
    return make_server()[0]


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
def test_unknown_fields_are_refused_by_name(app, path):
    error = refusal(post(app, path, {**GOOD[path], "foo": 1}), 400, "stoop does not know `foo`")
    assert error["param"] == "foo" and error["code"] == "unknown_parameter"


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (CHAT, "audio", {"voice": "alloy"}),
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "web_search_options", {}),
        (CHAT, "functions", [{}]),
        (CHAT, "store", True),
        (CHAT, "service_tier", "flex"),
        (CHAT, "chat_template", "{{ messages }}"),
        (CHAT, "include_reasoning", False),
        (TEXT, "suffix", "end"),
        (TEXT, "best_of", 2),
        (TEXT, "use_beam_search", True),
        (TEXT, "guided_json", {}),
        (RESPONSES, "previous_response_id", "resp_1"),
        (RESPONSES, "conversation", "conv_1"),
        (RESPONSES, "background", True),
        (RESPONSES, "truncation", "auto"),
        (RESPONSES, "tools", [{"type": "web_search"}]),
        (RESPONSES, "include", ["reasoning.encrypted_content"]),
        (RESPONSES, "prompt_logprobs", 0),
        (RESPONSES, "return_draft_positions", True),
    ],
)
def test_what_stoop_cannot_honour_is_refused_by_name(app, path, name, value):
    error = refusal(post(app, path, {**GOOD[path], name: value}), 400, f"`{name}`")
    assert error["param"] == name and error["code"] == "unsupported_parameter"


def test_a_chat_stream_has_no_place_for_scores_of_the_prompt(app):
    asked = {"messages": USER, "prompt_logprobs": 1}
    assert post(app, CHAT, asked).json()["prompt_logprobs"][0] is None
    error = refusal(post(app, CHAT, {**asked, "stream": True}), 400)
    assert error["param"] == "prompt_logprobs" and error["code"] == "unsupported_parameter"


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
def test_harmless_fields_are_taken(app, path):
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "store": False,
        "safety_identifier": "x",
        "prompt_cache_key": "y",
    }
    assert post(app, path, {**GOOD[path], **harmless}).status_code == 200


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        (CHAT, {"temperature": "1"}, "temperature"),
        (CHAT, {"temperature": -1}, "temperature"),
        (CHAT, {"temperature": 1e400}, "temperature"),
        (CHAT, {"top_p": 0}, "top_p"),
        (CHAT, {"n": 0}, "n"),
        (CHAT, {"n": True}, "n"),
        (CHAT, {"n": 10**30}, "n"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"seed": 2**64}, "seed"),
        (CHAT, {"logit_bias": {"1": 101}}, "logit_bias"),
        (CHAT, {"logit_bias": {"x": 1}}, None),
        (CHAT, {"stop": ["a"] * 65}, "stop"),
        (CHAT, {"stop": [""]}, None),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"stream": True, "stream_options": {"x": 1}}, "stream_options"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tools": [TOOL, TOOL], "tool_choice": CHOICE}, "tools"),
        (RESPONSES, {"tools": [FLAT, FLAT], "tool_choice": FLAT}, "tools"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": [1, "a"]}, "prompt"),
        (TEXT, {"prompt": [-1]}, "prompt"),
        (TEXT, {"prompt": None}, "prompt"),
        (TEXT, {"max_tokens": 0}, "max_tokens"),
        (TEXT, {"min_tokens": 9, "max_tokens": 3}, None),
        (TEXT, {"structured_outputs": {"json": "{}", "regex": "a"}}, None),
        (TEXT, {"structured_outputs": {"nope": 1}}, None),
        (TEXT, {"prompt": "\ud800"}, None),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [{"type": "image"}]}, "input"),
        (RESPONSES, {"input": [{"role": "user", "content": 3}]}, "input"),
    ],
)
def test_wrong_values_are_refused(app, path, change, param):
    content = json.dumps({**GOOD[path], **change}).replace("Infinity", "1e999")
    headers = {"content-type": "application/json"}
    error = refusal(call(app, "POST", path, content=content, headers=headers), 400)
    assert param is None or error["param"].startswith(param)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"1", b"null", b'"a"', b"{}", b"\xff\xfe", b"[" * 100_000,
        b'{"a":' * 50_000, b'{"n": ' + b"9" * 5000 + b"}",
        b'{"messages": [' + b"[" * 5000 + b"]" * 5000 + b"]}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_broken_bodies_are_refused(app, path, content):
    json_type = {"content-type": "application/json"}
    error = refusal(call(app, "POST", path, content=content, headers=json_type), 400)
    assert error["type"] == "invalid_request_error"


def test_bodies_of_another_type_are_refused(app):
    """A web page can send text/plain to any server without asking it first."""
    body = json.dumps(GOOD[CHAT]).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        found = call(app, "POST", CHAT, content=body, headers={"content-type": kind})
        assert "application/json" in refusal(found, 415)["message"]


def test_images_are_refused_by_name(app):
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    body = {"messages": [{"role": "user", "content": parts}]}
    error = refusal(post(app, CHAT, body), 400, "image_url")
    assert error["param"] == "messages.0.content"


def test_model_names():
    app, _ = make_server(model_names=("m", "other"))
    for name in ("m", "other"):
        found = post(app, CHAT, {"model": name, "messages": USER})
        assert found.json()["model"] == name
    error = refusal(post(app, CHAT, {"model": "nope", "messages": USER}), 404)
    assert error["code"] == "model_not_found"
    assert [each["id"] for each in call(app, "GET", "/v1/models").json()["data"]] == ["m", "other"]
    assert call(app, "GET", "/v1/models/other").json()["id"] == "other"
    refusal(call(app, "GET", "/v1/models/nope"), 404)


def test_long_prompts(app):
    for path, body in ((TEXT, {"prompt": "x" * 600}), (TEXT, {"prompt": [1] * 512})):
        assert refusal(post(app, path, body), 400)["code"] == "context_length_exceeded"
    long = [{"role": "user", "content": "x" * 600}]
    assert refusal(post(app, CHAT, {"messages": long}), 400)["code"] == "context_length_exceeded"


def test_unknown_paths_and_methods(app):
    assert refusal(call(app, "GET", "/nope"), 404)["message"]
    assert refusal(call(app, "GET", CHAT), 405)["message"]


def test_sampling_parameters_arrive():
    llm = FakeLLM()
    app, _ = make_server(llm)
    body = {
        "prompt": "a", "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
        "seed": 7, "stop": ["x", "y"], "stop_token_ids": [3], "presence_penalty": 0.1,
        "frequency_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {"4": -5},
        "max_tokens": 9, "min_tokens": 2, "ignore_eos": True, "skip_special_tokens": False,
        "include_stop_str_in_output": True, "bad_words": ["no"], "logprobs": 3,
        "prompt_logprobs": 1, "num_speculative_tokens": 1, "priority": -4,
    }  # fmt: skip
    assert post(app, TEXT, body).status_code == 200
    prompt, params, priority = llm.seen[-1]
    assert prompt == {"prompt": "a", "prompt_token_ids": llm.tokenizer.encode("a")}
    assert priority == -4
    assert params.logit_bias == {4: -5.0}
    for name in set(body) - {"prompt", "priority", "logit_bias"}:
        assert getattr(params, name) == body[name], name


def test_defaults_are_the_models_own():
    llm = FakeLLM()
    llm.default_params = llm.default_params.replace(temperature=0.3, top_k=11)
    app, _ = make_server(llm)
    post(app, CHAT, {"messages": USER, "temperature": 0.7})
    post(app, TEXT, {"prompt": "a"})
    chat, text = llm.seen[0][1], llm.seen[1][1]
    assert (chat.temperature, chat.top_k, chat.max_tokens) == (0.7, 11, None)
    assert (text.temperature, text.top_k, text.max_tokens) == (0.3, 11, 16)


def test_the_smaller_token_limit_counts():
    llm = FakeLLM()
    app, _ = make_server(llm)
    post(app, CHAT, {"messages": USER, "max_tokens": 9, "max_completion_tokens": 5})
    assert llm.seen[0][1].max_tokens == 5


def test_tokenize_and_detokenize(app):
    found = post(app, "/tokenize", {"prompt": "abé", "return_token_strs": True}).json()
    assert found["count"] == 4 and found["max_model_len"] == 512
    assert found["token_strs"][:2] == ["a", "b"]
    assert post(app, "/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "abé"}
    chat = post(app, "/tokenize", {"messages": USER}).json()
    text = post(app, "/detokenize", {"tokens": chat["tokens"]}).json()["prompt"]
    assert text == "<s>user: hi</s><s>assistant: "
    refusal(post(app, "/tokenize", {}), 400)
    refusal(post(app, "/detokenize", {"tokens": [100_000]}), 400)


def test_prompts_do_not_wait_for_long_texts(monkeypatch):
    llm = FakeLLM()
    app, _ = make_server(llm)
    encode, done = llm.tokenizer.encode, threading.Event()

    def slow(text, *more, **options):
        if len(text) > 4096:
            assert done.wait(20)
        return encode(text, *more, **options)

    monkeypatch.setattr(llm.tokenizer, "encode", slow)

    async def run():
        long = [Connection(app, "/tokenize", {"prompt": "x" * 5000}) for _ in range(3)]
        await asyncio.sleep(0.05)
        async with asyncio.timeout(10):
            short = Connection(app, CHAT, GOOD[CHAT])
            await short.task
            assert short.status == 200
        assert not any(each.task.done() for each in long)
        done.set()
        for each in long:
            await each.task
            assert each.status == 200

    asyncio.run(run())


def test_the_schema_is_served(app):
    paths = call(app, "GET", "/openapi.json").json()["paths"]
    assert {CHAT, TEXT, RESPONSES, "/tokenize", "/health", "/metrics"} <= set(paths)


def test_a_text_that_cannot_fit_is_not_encoded(monkeypatch):
    llm = FakeLLM()
    app, _ = make_server(llm)

    def encode(text, add_special_tokens=True):
        raise AssertionError("this would take seconds")

    monkeypatch.setattr(llm.tokenizer, "encode", encode)
    for path, body in (
        (TEXT, {"prompt": "x" * 10**6}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 10**6}]}),
    ):
        assert refusal(post(app, path, body), 400)["code"] == "context_length_exceeded"


# ---- the way past FastAPI ----


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
def test_good_requests_do_not_pass_through_fastapi(monkeypatch, path):
    """A first token would wait for it."""
    app, _ = make_server()

    async def fastapi(scope, receive, send):
        raise AssertionError("a good request came to FastAPI")

    monkeypatch.setattr(app.app, "app", fastapi)
    for stream in (False, True):
        assert post(app, path, {**GOOD[path], "stream": stream}).status_code == 200


BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"a"',
    b"\xff",
    b"[" * 100_000,
    b"{}",
    b'{"prompt": NaN, "messages": NaN, "input": NaN}',
    b'{"prompt": "a", "input": "a", "messages": [{"role": "user"}], "temperature": "1"}',
    b'{"prompt": "a", "foo": 1}',
    b'{"messages": [{"role": "user", "content": "hi"}], "best_of": 2}',
    b'{"model": "other", "messages": [{"role": "user", "content": "hi"}]}',
    b'{"prompt": [%s], "n": 128}' % b", ".join([b'"a"'] * 100),
    b'{"prompt": "%s"}' % (b"a" * 600),
    b'{"input": "a", "temperature": 0.5, "top_p": 2}',
]


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
@pytest.mark.parametrize("body", BAD_BODIES, ids=range(len(BAD_BODIES)))
def test_both_ways_refuse_with_the_same_words(path, body):
    """Through `Direct`, and through FastAPI alone."""
    direct, plain = make_server()[0], make_server()[0]
    plain.app = plain.app.app
    headers = {"content-type": "application/json", "x-request-id": "same"}
    found, expected = (
        call(app, "POST", path, content=body, headers=headers) for app in (direct, plain)
    )
    assert found.status_code >= 400
    assert (found.status_code, found.json()) == (expected.status_code, expected.json())
    assert found.headers == expected.headers


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "application/foo+json"])
def test_other_kinds_of_json_are_taken(app, kind):
    body = json.dumps(GOOD[TEXT]).encode()
    response = call(app, "POST", TEXT, content=body, headers={"content-type": kind})
    assert response.status_code == 200


@pytest.mark.parametrize("state", ["restarting", "dead"])
def test_both_ways_say_when_the_engine_is_gone(state):
    llm = FakeLLM(fail_after=0)
    direct, _ = make_server(llm)
    plain, _ = make_server(llm)
    plain.app = plain.app.app
    found, expected = (post(app, TEXT, GOOD[TEXT]) for app in (direct, plain))
    assert found.status_code == expected.status_code == 503 and found.json() == expected.json()
    llm.state = state
    found, expected = (post(app, TEXT, GOOD[TEXT]) for app in (direct, plain))
    assert found.status_code == expected.status_code == 503 and found.json() == expected.json()


def test_a_bug_is_logged_and_answered_alike_on_both_ways(monkeypatch, caplog):
    llm = FakeLLM()
    direct, plain = make_server(llm)[0], make_server(llm)[0]
    plain.app = plain.app.app

    def stream(*arguments, **options):
        raise ZeroDivisionError

    monkeypatch.setattr(llm, "stream", stream)
    for app in (direct, plain):
        caplog.clear()
        error = refusal(post(app, TEXT, GOOD[TEXT]), 500, "the server failed on this request")
        assert error["code"] == "internal_error"
        assert "ZeroDivisionError" in caplog.text
