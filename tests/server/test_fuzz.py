"""No request that anyone can send makes the server fail: no 5xx, and it answers afterwards.

schemathesis makes requests from the server's own /openapi.json, valid and broken ones, by a fixed
seed; the rest are written by hand.
"""

import http.client
import json
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode

from support.server import SMALL_ENGINE, ServerProcess, write_served_model

# Requests of each POST operation, valid ones and broken ones; and the most time for all of them.
NUM_EXAMPLES = int(os.environ.get("STOOP_FUZZ_EXAMPLES", "25"))
FUZZ_SECONDS = float(os.environ.get("STOOP_FUZZ_SECONDS", "40"))
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
POSTS = (CHAT, TEXT, "/v1/responses", "/tokenize", "/detokenize")
MAX_BODY = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_served_model(tmp_path_factory.mktemp("fuzz") / "tiny")
    flags = ("--max-body-bytes", str(MAX_BODY), "--request-timeout", "20", "--no-log-requests")
    # Answers without a limit end where the context does: short ones.
    engine = (*SMALL_ENGINE, "--max-model-len", "96", "-sc", NGRAM)
    with ServerProcess(folder, *flags, engine=engine) as running:
        yield running


@pytest.fixture(autouse=True)
def _answers_afterwards(server: ServerProcess) -> Iterator[None]:
    """Whatever a test did, the server then answers an ordinary request, and no core has died."""
    yield
    body = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}
    answer = httpx.post(f"{server.url}{TEXT}", json=body, timeout=30)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2
    stats = httpx.get(f"{server.url}/stats").json()
    assert (stats["num_restarts"], stats["state"]) == (0, "ready")
    assert "Traceback" not in server.log, server.log[-4000:]


# ---- from the schema ----


@pytest.mark.timeout(FUZZ_SECONDS + 300)
def test_requests_from_the_schema(server: ServerProcess) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    paths = {operation.path for operation in operations}
    assert {*POSTS, "/v1/models", "/health", "/metrics", "/stats", "/version"} <= paths
    statuses: Counter[int] = Counter()
    deadline = time.monotonic() + FUZZ_SECONDS

    def check(case: Any) -> None:
        if time.monotonic() > deadline:
            return
        response = case.call(timeout=30)
        statuses[response.status_code] += 1
        assert response.status_code < 500, (case.as_curl_command(), response.text)
        if response.status_code >= 400:
            error = response.json()["error"]
            assert error["message"] and error["type"], case.as_curl_command()

    # Every operation gets its share first, valid requests before broken ones.
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        for operation in operations:
            # An operation without parameters has one request.
            count = NUM_EXAMPLES if operation.method == "post" else 2
            _run(operation, mode, count, check)
    assert statuses[200] >= 20 and statuses[400] >= 20, statuses


def _run(operation: Any, mode: GenerationMode, count: int, check: Any) -> None:
    """Make `count` requests of an operation, always the same ones."""

    @hypothesis.seed(20)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def requests(case: Any) -> None:
        check(case)

    try:
        requests()
    except hypothesis.errors.Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE  # nothing in such an operation can be wrong


# ---- by hand ----

DEEP = b'{"a":' * 20_000 + b"1" + b"}" * 20_000
BODIES: dict[str, bytes] = {
    "empty": b"",
    "spaces": b"   ",
    "null": b"null",
    "a number": b"7",
    "a text": b'"text"',
    "a list": b"[]",
    "half": b'{"prompt": "a"',
    "two": b'{"prompt": "a"}{"prompt": "b"}',
    "deep objects": DEEP,
    "deep lists": b"[" * 100_000,
    "deep value": b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "temperature": Infinity, "top_p": -Infinity}',
    "overflow": b'{"prompt": "a", "temperature": 1e999}',
    "huge int": b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    "large int": b'{"prompt": "a", "seed": 123456789012345678901234567890}',
    "huge id": b'{"prompt": [18446744073709551616]}',
    "negative id": b'{"prompt": [-1]}',
    "float id": b'{"prompt": [1.5]}',
    "bool id": b'{"prompt": [true]}',
    "mixed prompt": b'{"prompt": ["a", 1]}',
    "empty prompts": b'{"prompt": [""]}',
    "not UTF-8": b'{"prompt": "\xff\xfe\xfd"}',
    "overlong UTF-8": b'{"prompt": "\xc0\xaf"}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "UTF-8 with a mark": b'\xef\xbb\xbf{"prompt": "a"}',
    "lone surrogate": b'{"prompt": "\\ud800", "stop": "\\udfff"}',
    "surrogate as stop": b'{"prompt": "a", "stop": ["\\ud800"], "max_tokens": 2}',
    "surrogate as bad word": b'{"prompt": "a", "bad_words": ["\\udcff"], "max_tokens": 2}',
    "surrogate as model": b'{"prompt": "a", "model": "\\ud800"}',
    "surrogate as name": b'{"prompt": "a", "\\ud800": 1}',
    "zero bytes": b'{"prompt": "a\\u0000b", "stop": "\\u0000", "max_tokens": 2}',
    "raw zero byte": b'{"prompt": "a\x00b"}',
    "the same name twice": b'{"prompt": "a", "prompt": 7}',
    "proto": b'{"prompt": "a", "__proto__": {}, "__class__": 1}',
    "long name": b'{"prompt": "a", "' + b"x" * 100_000 + b'": 1}',
    "many names": json.dumps({"prompt": "a", **{f"x{n}": n for n in range(5000)}}).encode(),
    "many stops": json.dumps({"prompt": "a", "stop": ["x"] * 10_000}).encode(),
    "empty stop": b'{"prompt": "a", "stop": "", "max_tokens": 2}',
    "many answers": b'{"prompt": "a", "n": 1000000}',
    "many prompts": json.dumps({"prompt": ["a"] * 5000}).encode(),
    "bias of no token": b'{"prompt": "a", "logit_bias": {"999999999999": 1}}',
    "bias of text": b'{"prompt": "a", "logit_bias": {"\xc2\xb2": 1, "1_0": 2, " 3": 1}}',
    "bias of NaN": b'{"prompt": "a", "logit_bias": {"5": NaN}}',
    "all banned": json.dumps(
        {"prompt": "a", "max_tokens": 2, "logit_bias": {str(n): -100 for n in range(258)}}
    ).encode(),
    "many logprobs": b'{"prompt": "a", "logprobs": 1000000}',
    "min above max": b'{"prompt": "a", "min_tokens": 9, "max_tokens": 2}',
    "role of text": b'{"messages": "hi"}',
    "no content": b'{"messages": [{"role": "user"}]}',
    "null content": b'{"messages": [{"role": "user", "content": null}]}',
    "odd role": b'{"messages": [{"role": "\\u0000", "content": "a"}], "max_tokens": 2}',
    "content parts": b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
    "template names": b'{"messages": [{"role": "user", "content": "{{ 7*7 }}{% for %}"}], '
    b'"max_tokens": 2}',
    "template variables": b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, '
    b'"chat_template_kwargs": {"messages": 3, "self": 1, "tools": [], "x": {"y": [1]}}}',
    "odd tool": b'{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}',
    "tool calls": b'{"messages": [{"role": "assistant", "tool_calls": [{"function": 3}]}]}',
    "tool arguments": b'{"messages": [{"role": "assistant", "tool_calls": '
    b'[{"function": {"name": "f", "arguments": "{"}}]}]}',
    "schema of nothing": b'{"prompt": "a", "response_format": {"type": "json_schema"}}',
    "recursive schema": b'{"prompt": "a", "max_tokens": 9, "structured_outputs": {"json": '
    b'{"$ref": "#"}}}',
    "far schema": b'{"prompt": "a", "max_tokens": 9, "structured_outputs": {"json": '
    b'{"$ref": "http://127.0.0.1:1/x"}}}',
    "large regex": json.dumps(
        {"prompt": "a", "max_tokens": 3, "structured_outputs": {"regex": "(a{1,99}){1,99}" * 9}}
    ).encode(),
    "bad regex": b'{"prompt": "a", "structured_outputs": {"regex": "("}}',
    "bad grammar": b'{"prompt": "a", "structured_outputs": {"grammar": "root ::= other"}}',
    "bad tag": b'{"prompt": "a", "structured_outputs": {"structural_tag": "{}"}}',
    "input": b'{"input": [{"type": "message", "role": 7, "content": []}]}',
    "input of nothing": b'{"input": []}',
    "call output": b'{"input": [{"type": "function_call_output", "output": 7}]}',
    "tokens": b'{"tokens": [99999999]}',
    "negative tokens": b'{"tokens": [-5]}',
}


@pytest.mark.parametrize("path", POSTS)
def test_nasty_bodies(path: str, server: ServerProcess) -> None:
    """Each is answered, or refused with a sentence. All, on each route: many cost little."""
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for name, body in BODIES.items():
            answer = client.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code < 500, (name, answer.text)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert error["message"] and len(error["message"]) < 1000, (name, error)


def test_streams_of_nasty_bodies(server: ServerProcess) -> None:
    """An error after the first byte of a stream cannot have a status: there must be none."""
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for name, body in BODIES.items():
            try:
                fields = json.loads(body)
            except (ValueError, RecursionError):
                continue
            if not isinstance(fields, dict) or not {"prompt", "messages"} & set(fields):
                continue
            path = TEXT if "prompt" in fields else CHAT
            data = json.dumps({**fields, "stream": True}).encode()
            answer = client.post(path, content=data, headers={"content-type": "application/json"})
            assert answer.status_code < 500, (name, answer.text)
            if answer.status_code == 200:
                assert answer.text.endswith("data: [DONE]\n\n"), (name, answer.text[-200:])
                assert '"error"' not in answer.text, (name, answer.text[-600:])


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"grammar": "root ::= root"}},
        {"structured_outputs": {"regex": "b"}, "bad_words": ["b"]},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_ruling_out_every_token_is_the_clients_error(
    fields: dict[str, Any], stream: bool, server: ServerProcess
) -> None:
    body = {"prompt": "a", "stream": stream, **fields}
    answer = httpx.post(f"{server.url}{TEXT}", json=body, timeout=30)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "generation_failed"


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "multipart/form-data", "application/x-www-form-urlencoded", "x"]
)
def test_other_content_types(kind: str | None, server: ServerProcess) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = httpx.post(f"{server.url}{TEXT}", content=b'{"prompt": "a"}', headers=headers)
    assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]


def test_an_encoding_that_the_server_does_not_read(server: ServerProcess) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = httpx.post(f"{server.url}{TEXT}", content=b"\x1f\x8b\x08\x00", headers=headers)
    assert 400 <= answer.status_code < 500


# ---- below HTTP's surface ----


def raw(server: ServerProcess, *parts: bytes, seconds: float = 20.0) -> bytes:
    """What comes back for these bytes, until the server closes or has sent a whole answer."""
    host, port = server.url.removeprefix("http://").split(":")
    with closing(socket.create_connection((host, int(port)), timeout=seconds)) as connection:
        data = b""
        try:
            for part in parts:
                connection.sendall(part)
            while block := connection.recv(65536):
                data += block
                found = re.search(rb"content-length: (\d+)\r\n.*?\r\n\r\n", data, re.S | re.I)
                if found and len(data) >= found.end() + int(found[1]):
                    break
        except (ConnectionError, TimeoutError):
            pass
        return data


def status(data: bytes) -> int:
    found = re.match(rb"HTTP/1\.1 (\d+) ", data)
    return int(found[1]) if found else 0  # 0: the connection was closed without an answer


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_a_chunked_body_over_the_limit(server: ServerProcess) -> None:
    block = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    count = MAX_BODY // 0x10000 + 4
    data = raw(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[block] * count, b"0\r\n\r\n")
    assert status(data) in (413, 0), data[:300]


def test_chunked_bodies_within_the_limit(server: ServerProcess) -> None:
    body = b'{"prompt": "a", "max_tokens": 2}'
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    data = raw(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n")
    assert status(data) == 200, data[:300]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n", {400, 413, 0}),
        (HEAD + b"Content-Length: -1\r\n\r\n", {400, 0}),
        (HEAD + b"Content-Length: x\r\n\r\n", {400, 0}),
        (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", {400, 0}),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", {400, 0}),
        (HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n", {400, 0}),
        (HEAD + b"Transfer-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", {400, 501, 0}),
        (HEAD + b"X: " + b"y" * (1 << 20) + b"\r\n\r\n", {400, 431, 0}),
        (HEAD + b"X: y\r\n" * 20_000 + b"\r\n", {400, 431, 0}),
        (HEAD + b"Content-Length: 2\r\nX-Request-Id: a\tb\x80\r\n\r\n{}", {400, 0}),
        (
            b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
            {400, 404, 414, 431, 0},
        ),
        (b"GET /%00%ff%2e%2e/etc HTTP/1.1\r\nHost: localhost\r\n\r\n", {400, 404}),
        (b"GET /v1/models/%ed%a0%80 HTTP/1.1\r\nHost: localhost\r\n\r\n", {400, 404}),
        (b"BREW /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n", {400, 405, 0}),
        (b"TRACE / HTTP/1.1\r\nHost: localhost\r\n\r\n", {400, 404, 405}),
        (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", {200, 400, 404, 405}),
        (b"CONNECT x:1 HTTP/1.1\r\nHost: localhost\r\n\r\n", {400, 404, 405, 0}),
        (b"GET / HTTP/9.9\r\n\r\n", {400, 505, 0}),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200, {400, 0}),  # TLS
        (b"\x00" * 4096, {400, 0}),
    ],
)
def test_nasty_bytes(sent: bytes, expected: set[int], server: ServerProcess) -> None:
    found = raw(server, sent, seconds=5)
    assert status(found) in expected, found[:300]


def test_requests_one_after_another_on_a_connection(server: ServerProcess) -> None:
    """Refusals do not spoil the connection for what follows."""
    host = server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=30)
    headers = {"content-type": "application/json"}
    try:
        for body, expected in (
            (b"{", 400),
            (b'{"prompt": "a", "max_tokens": 1}', 200),
            (b'{"prompt": "a", "unknown": 1}', 400),
            (b'{"prompt": "a", "max_tokens": 1, "stream": true}', 200),
            (b'{"prompt": "a", "max_tokens": 1}', 200),
        ):
            connection.request("POST", TEXT, body, headers)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == expected
    finally:
        connection.close()


def test_many_idle_connections_leave_room(server: ServerProcess) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(300)]
    try:
        for place, connection in enumerate(idle):
            connection.sendall(HEAD[: place % len(HEAD)])  # none of them complete
        assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200
    finally:
        for connection in idle:
            connection.close()


def test_a_model_folder_is_not_shown(server: ServerProcess) -> None:
    """Errors name no path of the machine."""
    answer = httpx.post(f"{server.url}{TEXT}", json={"prompt": "a", "model": "x"})
    assert answer.status_code == 404
    assert str(Path.home()) not in answer.text
