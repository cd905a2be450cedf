"""OpenAI's own Python client drives every feature of the API, on a real server process.

The engine of the same model in this process is the twin: answers must be its answers. Both are
started once for all files here.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from stoop import LLM
from support.engines import make_llm
from support.openai_client import CHAT, DRAFTS, PROMPT, TEMPLATE
from support.server import ServerProcess, write_served_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("served") / "tiny", TEMPLATE)


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(folder, "-sc", json.dumps(DRAFTS)) as running:
        yield running


@pytest.fixture(scope="session")
def llm(folder: Path) -> LLM:
    """The twin."""
    return make_llm(folder, speculative_config=DRAFTS)


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.api, api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="session")
def chat(client: OpenAI) -> Callable[..., Any]:
    """A greedy chat completion."""

    def ask(**options: Any) -> Any:
        defaults = {"model": "tiny", "messages": CHAT, "max_tokens": 24, "temperature": 0}
        return client.chat.completions.create(**{**defaults, **options})

    return ask


@pytest.fixture(scope="session")
def complete(client: OpenAI) -> Callable[..., Any]:
    """A greedy text completion."""

    def ask(**options: Any) -> Any:
        defaults = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
        return client.completions.create(**{**defaults, **options})

    return ask
