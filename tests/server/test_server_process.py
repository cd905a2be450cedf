"""A real `stoop serve` process on the loopback, driven by OpenAI's client."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import httpx
import jsonschema
import openai
import pytest

from stoop import LLM, SamplingParams
from support.engines import make_llm
from support.server import SMALL_ENGINE, ServerProcess, write_served_model

NGRAM = ("-sc", '{"method": "ngram", "num_speculative_tokens": 3}')
MESSAGES = [{"role": "user", "content": "once upon a time, once upon"}]
GREEDY = {"temperature": 0.0, "max_tokens": 40, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(folder, "--api-key", "key", engine=(*SMALL_ENGINE, *NGRAM)) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.api, api_key="key", max_retries=0)


@pytest.fixture(scope="module")
def offline(folder: Path) -> LLM:
    return make_llm(folder)


def offline_chat(llm: LLM, **changes: object) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True).replace(**changes)
    return llm.chat(MESSAGES, params, use_tqdm=False)[0].outputs[0].text


def test_models(client):
    assert next(iter(client.models.list())).id == "tiny"
    assert client.models.retrieve("tiny").owned_by == "stoop"
    wrong = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_the_first_line_says_how_many_drafts_a_step_may_make(server, folder):
    assert f"at {server.api}, chat page at {server.url}/, 3 drafts a step; Ctrl-C" in server.log
    varied = NGRAM[1].replace("3}", '3, "adaptive": true}')
    with ServerProcess(folder, "-sc", varied) as adaptive:
        assert "/, up to 3 drafts a step; Ctrl-C stops" in adaptive.log


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_a_server_has_loaded_the_library_of_grammars_when_it_is_ready(folder):
    """Otherwise the first grammar waits for it, in both processes."""
    pytest.importorskip("xgrammar")
    for flags, wanted in (((), True), (("--no-capture-structured",), False)):
        with ServerProcess(folder, *flags) as server:
            core = httpx.get(f"{server.url}/stats").json()["core_pid"]
            maps = [Path(f"/proc/{pid}/maps").read_text() for pid in (server.process.pid, core)]
            assert ["libxgrammar" in each for each in maps] == [wanted] * 2, flags


def test_a_streamed_answer_equals_the_offline_one(client, offline):
    """Drafts on here and off there: greedy answers do not depend on them."""
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, **GREEDY)
    text, end, usage = "", None, None
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            end = choice.finish_reason or end
    assert text == whole.choices[0].message.content == offline_chat(offline)
    assert end == whole.choices[0].finish_reason == "length"
    assert usage.completion_tokens == whole.usage.completion_tokens == 40
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens >= 0 and details.rejected_prediction_tokens >= 0


def test_sampled_answers_equal_the_offline_ones_token_for_token(client, offline):
    body = {"prompt": "abcabc", "temperature": 1.0, "seed": 11, "max_tokens": 24, "logprobs": 0}
    params = SamplingParams(
        temperature=1.0, seed=11, max_tokens=24, n=2, logprobs=0, ignore_eos=True
    )
    (wanted,) = offline.generate(["abcabc"], params, use_tqdm=False)
    extra = {"ignore_eos": True, "num_speculative_tokens": 0}
    tokens, texts = {0: [], 1: []}, {0: "", 1: ""}
    for chunk in client.completions.create(
        model="tiny", stream=True, n=2, extra_body=extra, **body
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs:
                tokens[choice.index] += choice.logprobs.token_logprobs
    for answer in wanted.outputs:
        assert texts[answer.index] == answer.text
        scores = [
            entry[token].logprob
            for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)
        ]
        assert tokens[answer.index] == pytest.approx(scores)


def test_batches_of_token_ids(client, offline):
    prompts = [[5, 6, 7], [9] * 20]
    found = client.completions.create(model="tiny", prompt=prompts, **GREEDY)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    wanted = offline.generate(prompts, params, use_tqdm=False)
    assert [choice.text for choice in found.choices] == [each.outputs[0].text for each in wanted]


def test_responses(client, offline):
    with client.responses.stream(
        model="tiny", input=MESSAGES, temperature=0, max_output_tokens=40,
        extra_body={"ignore_eos": True},
    ) as stream:  # fmt: skip
        received = list(stream)
    assert received[0].type == "response.created"
    assert received[-1].type == "response.incomplete"  # for its length
    final = received[-1].response
    assert final.output_text == offline_chat(offline)
    assert final.usage.output_tokens == 40


def test_many_streams_at_once(server, offline):
    """Each of 16 clients gets its own answer."""

    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.completions.create(
            model="tiny", prompt="a", seed=seed, max_tokens=12, stream=True
        )
        return "".join([c.choices[0].text async for c in stream if c.choices])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.api, api_key="key") as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(16)))

    params = [SamplingParams(seed=seed, max_tokens=12) for seed in range(16)]
    wanted = offline.generate(["a"] * 16, params, use_tqdm=False)
    assert asyncio.run(run()) == [each.outputs[0].text for each in wanted]


def test_a_disconnect_frees_the_request(server):
    headers = {"authorization": "Bearer key"}
    body = {"prompt": "a", "max_tokens": 480, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(base_url=server.url, headers=headers, timeout=30) as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        next(response.iter_lines())
    server.wait_for_log("finish=disconnect")
    deadline = time.monotonic() + 10
    while True:
        stats = httpx.get(f"{server.url}/stats", headers=headers).json()
        if not stats["num_requests_running"] and not stats["num_requests_waiting"]:
            break
        assert time.monotonic() < deadline, stats
        time.sleep(0.05)


def test_refusals(client):
    for change, text in (
        ({"logit_bias": {"999": 1}}, "token id 999"),
        ({"max_tokens": 3, "extra_body": {"min_tokens": 5}}, "min_tokens"),
        ({"extra_body": {"num_speculative_tokens": 9}}, "num_speculative_tokens"),
        ({"extra_body": {"nope": 1}}, "`nope`"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=text):
                client.completions.create(model="tiny", prompt="a", stream=stream, **change)
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.completions.create(model="other", prompt="a")


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x"]}},
    "required": ["n", "b"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("choice", [None, "required", NAMED], ids=["format", "required", "named"])
def test_structured_answers_always_parse(tool_server, choice):
    """A model with random weights writes nothing by chance."""
    client = openai.OpenAI(base_url=tool_server.api, api_key="x", max_retries=0)
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
    asked = {"response_format": form} if choice is None else {"tools": TOOLS}
    if choice is not None:
        asked |= {"tool_choice": choice, "parallel_tool_calls": False}
    for seed in range(2):
        body = {"model": "tools", "messages": MESSAGES, "seed": seed, "max_tokens": 250, **asked}
        (whole,) = client.chat.completions.create(**body).choices
        text = whole.message.content
        if choice is not None:
            (call,) = whole.message.tool_calls
            assert call.function.name == "f"
            text = call.function.arguments
        jsonschema.validate(json.loads(text), SCHEMA)
        streamed = ""
        for chunk in client.chat.completions.create(stream=True, **body):
            for part in (each.delta for each in chunk.choices):
                streamed += part.content or ""
                for new in part.tool_calls or ():
                    streamed += new.function.arguments
        assert json.loads(streamed) == json.loads(text)


@pytest.fixture(scope="module")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    template = (
        "{% for t in tools or [] %}<tool_call>{{ t | tojson }}{% endfor %}"
        "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}<s>assistant: "
    )
    folder = write_served_model(tmp_path_factory.mktemp("served") / "tools", template)
    with ServerProcess(folder, engine=(*SMALL_ENGINE, *NGRAM)) as started:
        yield started


def test_state(server):
    assert httpx.get(f"{server.url}/health").json() == {"status": "ready"}
    assert httpx.get(f"{server.url}/metrics").status_code == 200
    stats = httpx.get(f"{server.url}/stats", headers={"authorization": "Bearer key"}).json()
    assert stats["model"] == "tiny" and stats["num_drafts"] == 3


def test_a_port_in_use_is_one_sentence(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "stoop", "serve", str(folder), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.strip() == (
        f"error: port {port} of 127.0.0.1 is in use: choose another with --port, or 0 for any "
        "free one"
    )


def test_a_signal_ends_the_start(folder):
    command = [sys.executable, "-m", "stoop", "serve", str(folder), "--port", "0", *SMALL_ENGINE]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr.readline() == "starting ...\n"
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=30)
            assert process.returncode == 128 + signal.SIGTERM
            assert "Traceback" not in errors
        finally:
            process.kill()


class OpenStream:
    """A stream that a thread reads, once it has begun."""

    BODY: ClassVar = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}

    def __init__(self, http: httpx.Client) -> None:
        self.lines: list[str] = []
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(http,))
        self._thread.start()
        assert self._begun.wait(30)

    def _read(self, http: httpx.Client) -> None:
        with http.stream("POST", "/v1/completions", json=self.BODY, timeout=60) as response:
            for line in response.iter_lines():
                self.lines.append(line)
                self._begun.set()

    def read_to_end(self) -> list[str]:
        self._thread.join(60)
        return self.lines


def test_a_killed_core_is_restarted_and_sigterm_drains(folder):
    with ServerProcess(folder) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        kill_core(http, server)
        stream = OpenStream(http)
        server.signal(signal.SIGTERM)
        server.wait_for_log("waiting up to 30 s for 1 open requests")
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        assert http.get("/health").json()["status"] == "draining"
        lines = stream.read_to_end()
        assert server.wait() == 0
        assert lines[-2] == "data: [DONE]" and not any('"error"' in line for line in lines)


def kill_core(http: httpx.Client, server: ServerProcess) -> None:
    """503 while it restarts, then answers again."""
    stats = http.get("/stats").json()
    subprocess.run(["kill", "-9", str(stats["core_pid"])], check=True)
    seen, deadline = set(), time.monotonic() + 60
    while True:
        found = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 4})
        seen.add(found.status_code)
        if found.status_code == 200 and 503 in seen:
            break
        assert found.status_code in (200, 503)
        assert time.monotonic() < deadline, server.log
        time.sleep(0.05)
    assert http.get("/health").status_code == 200
    assert http.get("/stats").json()["num_restarts"] == 1


def test_a_second_signal_stops_at_once_on_a_unix_socket(folder, tmp_path):
    path = tmp_path / "socket"
    command = [sys.executable, "-m", "stoop", "serve", str(folder), "--uds", str(path)]
    with subprocess.Popen([*command, *SMALL_ENGINE], stderr=subprocess.PIPE, text=True) as process:
        try:
            while not (line := process.stderr.readline()).startswith("serving"):
                assert line
            assert f"unix:{path}/v1" in line
            transport = httpx.HTTPTransport(uds=str(path))
            with httpx.Client(transport=transport, base_url="http://test") as http:
                stream = OpenStream(http)
                process.send_signal(signal.SIGTERM)
                while "shutting down" not in process.stderr.readline():
                    pass
                process.send_signal(signal.SIGINT)
                lines = stream.read_to_end()
            assert lines[-2] == "data: [DONE]"
            assert "service_unavailable_error" in lines[-4]
            assert process.wait(30) == 1
            assert not path.exists()
        finally:
            process.kill()
