"""`/v1/completions` and `/v1/responses`."""

import json
import threading

import pytest

from support.fake_llm import FakeLLM
from support.http import events, make_server, post, refusal

TEXT, RESPONSES = "/v1/completions", "/v1/responses"


def echo_script(ids, params, index):
    """Says the prompt's last token and the number of the answer."""
    return ["<", f"{ids[-1]}.{index}", ">"]


def by_index(text):
    texts, ends = {}, {}
    for chunk in events(text)[:-1]:
        for choice in chunk["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + choice["text"]
            ends[index] = choice["finish_reason"] or ends.get(index)
    return texts, ends


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [("a", [64]), (["a", "b"], [64, 65]), ([64, 65], [65]), ([[64], [65], [66]], [64, 65, 66])],
)
@pytest.mark.parametrize("n", [1, 2])
def test_prompts(prompt, ids, n):
    app, service = make_server(FakeLLM(echo_script), max_queue=10)
    wanted = [f"<{token}.{index}>" for token in ids for index in range(n)]
    found = post(app, TEXT, {"prompt": prompt, "n": n}).json()
    assert found["object"] == "text_completion"
    assert [choice["text"] for choice in found["choices"]] == wanted
    assert [choice["index"] for choice in found["choices"]] == list(range(len(wanted)))
    streamed = post(app, TEXT, {"prompt": prompt, "n": n, "stream": True})
    texts, ends = by_index(streamed.text)
    assert [texts[index] for index in range(len(wanted))] == wanted
    assert set(ends.values()) == {"stop"}
    assert service.num_open == 0


@pytest.mark.parametrize("length", [1, 2000])
def test_prompts_that_are_long_together_are_encoded_in_a_thread(monkeypatch, length):
    prompts = [letter * length for letter in "abc"]
    llm = FakeLLM(["x"], max_model_len=8192)
    app, _ = make_server(llm)
    encode, on_the_loop = llm.tokenizer.encode, []

    def noting(text, *more, **options):
        if text in prompts:
            on_the_loop.append(threading.current_thread() is threading.main_thread())
        return encode(text, *more, **options)

    monkeypatch.setattr(llm.tokenizer, "encode", noting)
    assert post(app, TEXT, {"prompt": prompts}).status_code == 200
    assert [prompt["prompt"] for prompt, *_ in llm.seen] == prompts
    assert on_the_loop == [length == 1] * 3


def test_echo_and_logprobs():
    app, _ = make_server(FakeLLM(["xy"]))
    body = {"prompt": "ab", "echo": True, "logprobs": 2}
    (choice,) = post(app, TEXT, body).json()["choices"]
    assert choice["text"] == "abxy"
    scores = choice["logprobs"]
    assert scores["tokens"] == ["a", "b", "x", "y"]
    assert scores["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert scores["text_offset"] == [0, 1, 2, 3]
    assert scores["top_logprobs"][0] is None and scores["top_logprobs"][2]["y"] == -9999.0
    chunks = events(post(app, TEXT, {**body, "stream": True}).text)[:-1]
    joined = {name: [] for name in scores}
    for chunk in chunks:
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            joined[name] += values
    assert joined == scores


def test_scoring_a_prompt_without_an_answer():
    app, _ = make_server(FakeLLM(["xy"]))
    body = {"prompt": [64, 65], "echo": True, "logprobs": 0, "max_tokens": 0}
    found = post(app, TEXT, body).json()
    (choice,) = found["choices"]
    assert choice["text"] == "ab" and choice["logprobs"]["token_logprobs"] == [None, -0.5]
    assert choice["logprobs"]["top_logprobs"] is None
    assert found["usage"]["completion_tokens"] == 0


def test_prompt_logprobs():
    app, _ = make_server(FakeLLM(["x"]))
    (choice,) = post(app, TEXT, {"prompt": "ab", "prompt_logprobs": 1}).json()["choices"]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["65"]["decoded_token"] == "b"


def test_usage_is_the_sum_over_prompts():
    app, _ = make_server(FakeLLM(["xy"]))
    usage = post(app, TEXT, {"prompt": ["a", "bc"], "n": 2}).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 8)
    body = {"prompt": ["a", "bc"], "n": 2, "stream": True, "stream_options": {"include_usage": 1}}
    refusal(post(app, TEXT, body), 400)  # 1 is not true
    body["stream_options"] = {"include_usage": True}
    last = events(post(app, TEXT, body).text)[-2]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 8


# ---- /v1/responses ----

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def test_a_response():
    app, _ = make_server(FakeLLM(["Hel", "lo"]))
    found = post(app, RESPONSES, {"input": "hi", "metadata": {"a": "b"}}).json()
    assert (found["object"], found["status"], found["metadata"]) == (
        "response",
        "completed",
        {"a": "b"},
    )
    (item,) = found["output"]
    assert item["type"] == "message" and item["status"] == "completed"
    assert item["content"][0]["text"] == "Hello"
    assert found["usage"]["output_tokens"] == 5


def test_the_events_of_a_response():
    app, _ = make_server(FakeLLM(["Hel", "lo"]))
    text = post(app, RESPONSES, {"input": "hi", "stream": True}).text
    found = events(text)
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in found] == list(range(10))
    assert "".join(e["delta"] for e in found if e["type"].endswith("text.delta")) == "Hello"
    assert found[0]["response"]["status"] == "in_progress"
    assert found[0]["response"]["output"] == []
    assert found[3]["part"]["text"] == "" and found[2]["item"]["content"] == []
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == "Hello"
    assert found[-1]["response"]["usage"]["output_tokens"] == 5
    names = [line.removeprefix("event: ") for line in text.splitlines() if line[:6] == "event:"]
    assert names == [event["type"] for event in found]


def test_logprobs_of_a_response():
    app, _ = make_server(FakeLLM(["Hel", "lo"]))
    body = {"input": "hi", "stream": True, "include": ["message.output_text.logprobs"]}
    found = events(post(app, RESPONSES, body).text)
    counts = {}
    for event in found:
        given = event.get("part", event).get("logprobs")
        if given is not None:
            counts.setdefault(event["type"], []).append(len(given))
    assert counts == {
        "response.content_part.added": [0],
        "response.output_text.delta": [3, 2],
        "response.output_text.done": [5],
        "response.content_part.done": [5],
    }


def test_a_response_that_is_cut_short():
    app, _ = make_server(FakeLLM(["Hel"], ends="length"))
    found = post(app, RESPONSES, {"input": "hi"}).json()
    assert found["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events(post(app, RESPONSES, {"input": "hi", "stream": True}).text)[-1]["type"] == (
        "response.incomplete"
    )


def test_function_calls_of_a_response():
    llm = FakeLLM([*f"Hm.{CALL}"], chat_template=TEMPLATE)
    app, _ = make_server(llm)
    body = {"input": "hi", "tools": [FUNCTION]}
    message, call = post(app, RESPONSES, body).json()["output"]
    assert message["content"][0]["text"] == "Hm."
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", '{"x": 1}')
    found = events(post(app, RESPONSES, {**body, "stream": True}).text)
    deltas = [e["delta"] for e in found if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == '{"x": 1}' and len(deltas) > 1
    (done,) = [e for e in found if e["type"] == "response.function_call_arguments.done"]
    assert done["arguments"] == '{"x": 1}' and done["output_index"] == 1
    assert '"name": "f"' in llm.seen[0][0]["prompt"]


def test_items_of_a_conversation():
    llm = FakeLLM(chat_template=TEMPLATE)
    app, _ = make_server(llm)
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Rain."}],
        },
        {"role": "user", "content": "thanks"},
    ]
    assert post(app, RESPONSES, {"input": items, "instructions": "Be brief."}).status_code == 200
    assert llm.seen[0][0]["prompt"] == (
        "system: Be brief.\nuser: weather?\nassistant: \ntool: rain\nassistant: Rain.\n"
        "user: thanks\n"
    )


def test_a_response_that_fails_in_mid_stream():
    app, _ = make_server(FakeLLM(["a", "b"], fail_after=1))
    last = events(post(app, RESPONSES, {"input": "hi", "stream": True}).text)[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert "restarting" in json.dumps(last["response"]["error"])
