"""Keys, sizes, queues, timeouts, disconnects, draining, logs."""

import asyncio
import json
import logging
from types import SimpleNamespace

import pytest

from stoop.config.errors import ConfigError
from stoop.server.settings import ServerSettings, environment_keys
from support.fake_llm import FakeLLM
from support.http import USER, Connection, LogLines, call, events, make_server, post, refusal

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = {"messages": USER}
LONG = ["x"] * 1000


# ---- keys ----


def test_keys():
    app, _ = make_server(api_keys=("one", "two"))
    for key in ("one", "two"):
        for scheme in ("Bearer", "bearer"):
            headers = {"authorization": f"{scheme} {key}"}
            assert post(app, CHAT, ASK, headers=headers).status_code == 200
    for given in ("Bearer three", "Bearer", "one", "Basic one", "Bearer on", "Bearer onee", ""):
        found = post(app, CHAT, ASK, headers={"authorization": given})
        assert refusal(found, 401)["code"] == "invalid_api_key"
        assert found.headers["www-authenticate"] == "Bearer"
    refusal(post(app, CHAT, ASK), 401)
    for path in ("/v1/models", "/stats", "/openapi.json", "/nope"):
        refusal(call(app, "GET", path), 401)
    for path in ("/health", "/metrics", "/version"):
        assert call(app, "GET", path).status_code == 200


def test_keys_are_compared_in_constant_time(monkeypatch):
    compared = []

    def compare(one, other):
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("hmac.compare_digest", compare)
    app, _ = make_server(api_keys=("one", "two"))
    assert post(app, CHAT, ASK, headers={"authorization": "Bearer one"}).status_code == 200
    assert compared == [(b"one", b"one"), (b"one", b"two")]  # also after a match


def test_keys_of_the_environment(monkeypatch):
    monkeypatch.setenv("STOOP_API_KEY", "a,b")
    assert environment_keys() == ("a", "b")
    monkeypatch.delenv("STOOP_API_KEY")
    assert environment_keys() == ()


def test_other_origins_are_refused_unless_named():
    ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
    app, _ = make_server()
    assert "access-control-allow-origin" not in call(app, "OPTIONS", CHAT, headers=ask).headers
    app, _ = make_server(allow_origins=("https://a.example",), api_keys=("k",))
    preflight = call(app, "OPTIONS", CHAT, headers=ask)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    found = post(app, CHAT, ASK, headers={"origin": "https://a.example"})
    refusal(found, 401)
    assert found.headers["access-control-allow-origin"] == "https://a.example"
    key = {"authorization": "Bearer k", "origin": "https://a.example"}
    streamed = post(app, CHAT, {**ASK, "stream": True}, headers=key)
    assert streamed.headers["access-control-allow-origin"] == "https://a.example"


# ---- sizes ----


def test_large_bodies():
    app, _ = make_server(max_body_bytes=1000)
    body = {"messages": [{"role": "user", "content": "x" * 1000}]}
    assert refusal(post(app, CHAT, body), 413)["code"] == "body_too_large"

    async def parts():
        for _ in range(20):
            yield b" " * 100

    headers = {"content-type": "application/json"}
    refusal(call(app, "POST", CHAT, content=parts(), headers=headers), 413)


def test_a_body_that_never_arrives(monkeypatch):
    monkeypatch.setattr("stoop.server.gate.BODY_SECONDS", 0.1)
    app, _ = make_server()

    async def run():
        connection = Connection(app, CHAT, ASK)
        connection._to_app.get_nowait()
        connection._to_app.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
        await connection.task
        assert connection.status == 408

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/", "/health", CHAT])
def test_no_body_is_read_without_a_key(path):
    async def run():
        app, _ = make_server(api_keys=("one",))
        connection = Connection(app, path, {})
        connection._to_app.get_nowait()  # nothing arrives
        async with asyncio.timeout(5):
            await connection.task
        assert connection.status == (401 if path == CHAT else 405)

    asyncio.run(run())


def test_too_many_answers():
    app, _ = make_server(max_answers=6)
    assert post(app, TEXT, {"prompt": ["a"] * 3, "n": 2}).status_code == 200
    refusal(post(app, TEXT, {"prompt": ["a"] * 7}), 400, "at most 6")
    refusal(post(app, CHAT, {**ASK, "n": 7}), 400, "at most 6")


def test_a_full_queue():
    """Four run, one waits, the sixth is refused; the next one after an end is taken."""

    async def run():
        llm = FakeLLM(LONG, pause=0.01)
        app, service = make_server(llm, max_queue=1)
        body = {**ASK, "stream": True}
        open_ones = [Connection(app, CHAT, body) for _ in range(5)]
        for each in open_ones:
            await each.wait_for(b"content")
        assert service.num_open == 5
        for stream in (True, False):
            refused = Connection(app, CHAT, {**ASK, "stream": stream})
            await refused.task
            assert refused.status == 429
            assert json.loads(refused.body)["error"]["code"] == "queue_full"
        open_ones[0].cut()
        await open_ones[0].task
        again = Connection(app, CHAT, body)
        await again.wait_for(b"content")
        for each in [*open_ones[1:], again]:
            each.cut()
            await each.task
        assert service.num_open == llm.num_open == 0

    asyncio.run(run())


def test_a_refusal_says_when_to_come_back():
    app, service = make_server(FakeLLM(max_num_seqs=2), max_queue=2)
    service.num_open = 4
    found = post(app, CHAT, ASK)
    refusal(found, 429)
    assert found.headers["retry-after"] == "1"


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses"])
@pytest.mark.parametrize("state", ["full", "restarting"])
def test_a_refused_request_costs_no_prompt(monkeypatch, path, state):
    """Otherwise a burst of them would keep the template's threads from those that run."""
    llm = FakeLLM(max_num_seqs=2)
    app, service = make_server(llm, max_queue=2)
    if state == "full":
        service.num_open = 4
    else:
        llm.state = state
    for name in ("render", "encode"):
        monkeypatch.setattr(service.prompts, name, lambda *given, **more: pytest.fail("work"))
    body = {CHAT: ASK, TEXT: {"prompt": "a"}}.get(path, {"input": "a"})
    error = refusal(post(app, path, body), 429 if state == "full" else 503)
    assert error["message"] and not llm.num_open


# ---- disconnects and timeouts ----


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_aborts_the_request_at_once(stream):
    async def run():
        llm = FakeLLM(LONG, pause=0.01)
        app, service = make_server(llm)
        with LogLines() as log:
            connection = Connection(app, CHAT, {**ASK, "stream": stream})
            while not llm.open:
                await asyncio.sleep(0)
            if stream:
                await connection.wait_for(b"content")
            connection.cut()
            async with asyncio.timeout(1):
                await connection.task
        assert not llm.open and len(llm.aborted) == 1
        assert service.num_open == service.num_requests == 0
        assert "finish=disconnect" in log.lines[0]

    asyncio.run(run())


def test_a_disconnect_aborts_every_prompt():
    async def run():
        llm = FakeLLM(LONG, pause=0.01)
        app, _ = make_server(llm)
        connection = Connection(app, TEXT, {"prompt": ["a", "b"], "stream": True})
        await connection.wait_for(b'"index":1')
        connection.cut()
        await connection.task
        assert not llm.open and len(llm.aborted) == 2

    asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_takes_too_long(stream):
    llm = FakeLLM(LONG, pause=0.02)
    app, _ = make_server(llm, request_timeout=0.2)
    found = post(app, CHAT, {**ASK, "stream": stream})
    if stream:
        *_, error, done = events(found.text)
        assert found.status_code == 200 and done == "[DONE]"
        assert error["error"]["code"] == "request_timeout"
    else:
        assert refusal(found, 504)["code"] == "request_timeout"
    assert not llm.open and len(llm.aborted) == 1


def test_a_client_that_stops_reading_cannot_keep_its_request(monkeypatch):
    monkeypatch.setattr("stoop.server.transport.ERROR_SECONDS", 0.1)
    llm = FakeLLM(LONG, pause=0.01)
    app, service = make_server(llm, request_timeout=0.2)

    async def run():
        connection = Connection(app, CHAT, {**ASK, "stream": True})
        await connection.wait_for(b"content")
        connection.full = True
        async with asyncio.timeout(5):
            await connection.task
        assert not llm.open and not service.num_open and service.idle.is_set()

    asyncio.run(run())


def test_a_quiet_stream_is_kept_alive():
    app, _ = make_server(FakeLLM(["a", "b"], pause=0.35), keep_alive=0.1)
    text = post(app, CHAT, {**ASK, "stream": True}).text
    assert text.startswith(": keep-alive\n\n") and text.count("keep-alive") >= 4
    assert events(text)[-1] == "[DONE]"
    steady, _ = make_server(FakeLLM(["a"] * 40, pause=0.01), keep_alive=0.1)
    assert "keep-alive" not in post(steady, CHAT, {**ASK, "stream": True}).text


# ---- failures of the engine ----


@pytest.mark.parametrize("stream", [True, False])
def test_the_core_dies_before_the_first_token(stream):
    app, _ = make_server(FakeLLM(fail_after=0))
    found = post(app, CHAT, {**ASK, "stream": stream})
    refusal(found, 503, "restarting")
    assert found.headers["retry-after"] == "5"


def test_the_core_dies_in_mid_stream():
    app, _ = make_server(FakeLLM(fail_after=2))
    *chunks, error, done = events(post(app, CHAT, {**ASK, "stream": True}).text)
    assert chunks[-1]["choices"][0]["delta"]["content"] == " there"
    assert error["error"]["type"] == "service_unavailable_error" and done == "[DONE]"


@pytest.mark.parametrize("state", ["restarting", "dead", "stopped"])
def test_no_engine(state):
    llm = FakeLLM()
    app, _ = make_server(llm)
    llm.state = state
    for stream in (True, False):
        found = post(app, CHAT, {**ASK, "stream": stream})
        assert refusal(found, 503)["code"] == f"engine_{state}"
        assert "retry-after" in found.headers
    health = call(app, "GET", "/health")
    assert health.status_code == 503 and health.json()["status"] == state
    assert not llm.seen


def test_a_restarted_engine_may_have_other_limits():
    llm = FakeLLM()
    app, service = make_server(llm, max_queue=3)
    assert service.capacity == 7 and service.num_drafts == 2
    llm.config.schedule = SimpleNamespace(max_model_len=16, max_num_seqs=2, num_drafts=0)
    assert service.capacity == 5 and service.num_drafts == 0
    (card,) = call(app, "GET", "/v1/models").json()["data"]
    assert card["max_model_len"] == 16
    found = post(app, CHAT, ASK)
    assert refusal(found, 400, "the model takes 16")["code"] == "context_length_exceeded"


def test_health_needs_a_loop_that_turns():
    llm = FakeLLM()
    app, _ = make_server(llm)
    assert call(app, "GET", "/health").json() == {"status": "ready"}
    llm.healthy = False
    assert call(app, "GET", "/health").json()["status"] == "stalled"


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_fails(stream):
    app, _ = make_server(FakeLLM(["a", "b"], ends="error"))
    found = post(app, CHAT, {**ASK, "stream": stream})
    if stream:
        assert events(found.text)[-2]["error"]["message"] == "the logits were not finite"
    else:
        refusal(found, 500, "the logits were not finite")


@pytest.mark.parametrize("stream", [True, False])
def test_a_bug_is_logged_and_answered(stream, caplog):
    def broken(ids, params, index):
        raise ZeroDivisionError("secret")

    app, service = make_server(FakeLLM(broken))
    with caplog.at_level(logging.ERROR):
        found = post(app, CHAT, {**ASK, "stream": stream})
    assert refusal(found, 500)["code"] == "internal_error"
    assert "secret" not in found.text and "ZeroDivisionError" in caplog.text
    assert service.num_open == service.num_requests == 0


def test_a_bad_request_in_a_batch_refuses_all_of_it():
    llm = FakeLLM()
    app, service = make_server(llm)
    for stream in (True, False):
        refusal(post(app, TEXT, {"prompt": ["a", "x" * 600], "stream": stream}), 400)
    assert not llm.open and service.num_open == 0


# ---- draining ----


def test_draining():
    async def run():
        llm = FakeLLM(["a"] * 20, pause=0.01)
        app, service = make_server(llm)
        running = Connection(app, CHAT, {**ASK, "stream": True})
        await running.wait_for(b"content")
        service.draining = True
        late = Connection(app, CHAT, ASK)
        await late.task
        assert late.status == 503 and b"shutting down" in late.body
        await service.idle.wait()
        await running.task
        assert running.body.endswith(b"data: [DONE]\n\n")

    asyncio.run(run())


def test_health_while_draining():
    app, service = make_server()
    service.draining = True
    assert call(app, "GET", "/health").json()["status"] == "draining"


# ---- ids and logs ----


def test_request_ids():
    app, _ = make_server()
    found = post(app, CHAT, ASK, headers={"x-request-id": "abc-1.2:3"})
    assert found.headers["x-request-id"] == "abc-1.2:3"
    assert found.json()["id"] == "chatcmpl-abc-1.2:3"
    assert len(post(app, CHAT, ASK).headers["x-request-id"]) == 32
    for wrong in ("a b", "x" * 129, "a\tb", ""):
        refusal(post(app, CHAT, ASK, headers={"x-request-id": wrong}), 400, "X-Request-Id")
    streamed = post(app, CHAT, {**ASK, "stream": True}, headers={"x-request-id": "s"})
    assert streamed.headers["x-request-id"] == "s"


def test_requests_may_share_an_id():
    async def run():
        app, _ = make_server(FakeLLM(pause=0.05))
        same = {"x-request-id": "same"}
        both = [Connection(app, CHAT, {**ASK, "stream": True}, same) for _ in range(2)]
        for each in both:
            await each.task
            assert each.status == 200 and b"[DONE]" in each.body

    asyncio.run(run())


def test_log_lines():
    app, _ = make_server()
    with LogLines() as log:
        post(app, CHAT, {**ASK, "stream": True}, headers={"x-request-id": "r1"})
        post(app, CHAT, {"messages": []})
        call(app, "GET", "/health")
    fine, refused = log.lines  # /health is not there
    assert fine.startswith(f"id=r1 route={CHAT} status=200 tokens_in=22 ")
    for part in ("tokens_out=12", "finish=stop", "ttft_ms=", "duration_ms="):
        assert part in fine
    assert "status=400" in refused
    assert "hi" not in fine.split() and "Hello" not in fine


def test_json_lines_and_prompts():
    app, _ = make_server(log_format="json", log_prompts=True)
    with LogLines() as log:
        post(app, CHAT, ASK)
    line = json.loads(log.lines[0])
    assert line["status"] == 200 and line["tokens_in"] == 22
    assert line["prompt"] == "<s>user: hi</s><s>assistant: "
    quiet, _ = make_server(log_requests=False)
    with LogLines() as log:
        post(quiet, CHAT, ASK)
    assert log.lines == []


# ---- settings ----


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": -1},
        {"port": 70000},
        {"max_queue": -1},
        {"max_answers": 0},
        {"request_timeout": float("nan")},
        {"tool_call_parser": "x"},
        {"reasoning_parser": "x"},
        {"log_format": "xml"},
        {"metrics_names": "x"},
        {"api_keys": (" a",)},
        {"model_names": ("",)},
    ],
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ConfigError, match="--"):
        ServerSettings(**wrong)
