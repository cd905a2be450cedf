"""What metrics, traces and the log are told of a request, however it ends."""

import asyncio

import pytest

from stoop.server.hooks import Tracer
from support.fake_llm import FakeLLM
from support.http import USER, Connection, LogLines, make_server, post, refusal

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASK = {"messages": USER}
BODIES = {CHAT: ASK, TEXT: {"prompt": "a"}, RESPONSES: {"input": "a"}}
LONG = ["x"] * 1000  # a token each


class Recorder:
    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args, **fields: self.calls.append((name, args, fields))


def test_metrics_are_told():
    llm = FakeLLM()
    app, service = make_server(llm)
    service.metrics = metrics = Recorder()
    post(app, CHAT, {**ASK, "stream": True})
    names = [name for name, _, _ in metrics.calls]
    assert names == ["request_arrived", "first_token", "inter_token", "inter_token", "observe"]
    _, (times,), counts = metrics.calls[-1]
    assert times.arrival <= times.first_token <= times.last_token <= times.finished
    assert counts["num_prompt"] == 22 and counts["num_output"] == 12
    assert counts["finish_reason"] == "stop" and counts["num_cached"] == 2
    metrics.calls.clear()
    post(app, CHAT, {"messages": []})
    assert metrics.calls == [("refused", (400,), {})]
    metrics.calls.clear()
    post(app, CHAT, {**ASK, "n": 5, "logprobs": True})
    service.num_open = service.capacity
    post(app, CHAT, ASK)
    assert [name for name, _, _ in metrics.calls][-2:] == ["observe", "refused"]


def observed(metrics):
    """How the one request ended."""
    (counts,) = [fields for name, _, fields in metrics.calls if name == "observe"]
    return counts


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("end", ["gone", "late"])
def test_what_was_generated_is_counted_if_no_one_reads_it(path, stream, end):
    llm = FakeLLM(LONG, pause=0.01)
    app, service = make_server(llm, request_timeout=0.3 if end == "late" else 60)
    service.metrics = metrics = Recorder()

    async def run():
        connection = Connection(app, path, {**BODIES[path], "stream": stream})
        if end == "gone":
            await asyncio.sleep(0.3)
            connection.cut()
        async with asyncio.timeout(10):
            await connection.task

    with LogLines() as log:
        asyncio.run(run())
    counts = observed(metrics)
    assert counts["finish_reason"] == "abort" and counts["num_cached"] == 2
    assert 2 <= counts["num_output"] < len(LONG)
    assert f"tokens_out={counts['num_output']}" in log.lines[0]


def test_every_prompt_of_a_batch_is_counted():
    """One has ended, the other not."""
    llm = FakeLLM(lambda ids, params, index: LONG if ids == [1] else ["ab"], pause=0.01)
    app, service = make_server(llm, request_timeout=0.3)
    service.metrics = metrics = Recorder()
    refusal(post(app, TEXT, {"prompt": [[1], [2]]}), 504)
    assert observed(metrics)["num_output"] >= 2 + 2


def test_an_answer_that_its_own_grammar_ended_is_counted():
    app, service = make_server(FakeLLM(["ab"], ends="error"))
    service.metrics = metrics = Recorder()
    refusal(post(app, TEXT, {"prompt": "a", "bad_words": ["z"]}), 400, "not finite")
    counts = observed(metrics)
    assert counts["finish_reason"] == "error" and counts["num_output"] == 2


class Failures(Tracer):
    """Keeps the codes of failed requests."""

    def __init__(self):
        self.codes = []

    def start(self, *given):
        return self

    def fail(self, code, message):
        self.codes.append(code)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("code", [499, 500, 504])
def test_a_trace_says_how_a_request_failed(path, stream, code):
    llm = FakeLLM(ends="error") if code == 500 else FakeLLM(LONG, pause=0.01)
    app, service = make_server(llm, request_timeout=0.2 if code == 504 else 60)
    service.tracer = tracer = Failures()

    async def run():
        connection = Connection(app, path, {**BODIES[path], "stream": stream})
        if code == 499:
            await asyncio.sleep(0.1)
            connection.cut()
        async with asyncio.timeout(10):
            await connection.task

    asyncio.run(run())
    assert tracer.codes == [code]


def test_a_reader_that_stopped_is_traced_as_late(monkeypatch):
    """Time runs out while a chunk waits to be written."""
    monkeypatch.setattr("stoop.server.transport.ERROR_SECONDS", 0.1)
    app, service = make_server(FakeLLM(LONG, pause=0.01), request_timeout=0.3)
    service.tracer = tracer = Failures()

    async def run():
        connection = Connection(app, CHAT, {**ASK, "stream": True})
        await connection.wait_for(b"content")
        connection.full = True
        async with asyncio.timeout(10):
            await connection.task

    asyncio.run(run())
    assert tracer.codes == [504]


@pytest.mark.parametrize("stream", [True, False])
def test_the_log_says_that_a_client_went_before_the_first_byte(stream):
    app, _ = make_server(FakeLLM(pause=10))

    async def run():
        connection = Connection(app, CHAT, {**ASK, "stream": stream})
        await asyncio.sleep(0.1)
        connection.cut()
        async with asyncio.timeout(10):
            await connection.task

    with LogLines() as log:
        asyncio.run(run())
    assert "status=499" in log.lines[0] and "finish=disconnect" in log.lines[0]


def test_a_request_arrives_before_its_prompt_is_made(monkeypatch):
    """A template takes time, and waits for others: clients wait for that too."""
    app, service = make_server()
    service.metrics = metrics = Recorder()
    render = service.prompts.render

    async def slow(*given, **more):
        await asyncio.sleep(0.2)
        return await render(*given, **more)

    monkeypatch.setattr(service.prompts, "render", slow)
    with LogLines() as log:
        post(app, CHAT, {**ASK, "stream": True})
    (first,) = [args[0] for name, args, _ in metrics.calls if name == "first_token"]
    assert first >= 0.2
    assert float(log.lines[0].partition("ttft_ms=")[2].split()[0]) >= 200


def test_an_error_in_a_stream_is_counted():
    """Its status was 200 when it began."""
    app, service = make_server(FakeLLM(fail_after=2))
    service.metrics = metrics = Recorder()
    found = post(app, CHAT, {**ASK, "stream": True})
    assert found.status_code == 200
    assert [args for name, args, _ in metrics.calls if name == "refused"] == [(503,)]
    metrics.calls.clear()
    service.llm.fail_after = 0
    refusal(post(app, CHAT, {**ASK, "stream": True}), 503)
    assert [args for name, args, _ in metrics.calls if name == "refused"] == [(503,)]
