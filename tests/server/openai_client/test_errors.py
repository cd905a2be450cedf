"""What OpenAI's client is told when a request cannot be served."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from support.openai_client import CHAT, until_idle
from support.server import SMALL_ENGINE, ServerProcess


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
