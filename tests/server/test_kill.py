"""`kill -9` of either process, or a core that hangs: the other one notices, and says so.

`test_server_process.py` has SIGTERM and a kill of an idle core; here requests are open.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from support.server import ServerProcess, write_served_model

LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True}
SECONDS = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("served") / "tiny", max_position=8192)


def stats(server: ServerProcess) -> dict[str, Any]:
    return dict(httpx.get(f"{server.url}/stats").json())


def until(done: Callable[[], bool], server: ServerProcess) -> None:
    deadline = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < deadline, server.log
        time.sleep(0.02)


class OpenRequests:
    """A stream, a whole answer and a batch that wait while the core is killed."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.lines: list[str] = []
        self.answers: list[httpx.Response] = []
        self.started = threading.Event()
        bodies = [LONG, {**LONG, "prompt": ["a", "b"], "n": 2}]
        self.threads = [threading.Thread(target=self._stream)]
        self.threads += [threading.Thread(target=self._whole, args=(body,)) for body in bodies]
        for thread in self.threads:
            thread.start()
        assert self.started.wait(SECONDS)
        until(lambda: stats(server)["num_requests_running"] >= 5, server)

    def _stream(self) -> None:
        body = {**LONG, "stream": True}
        url = f"{self.server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=SECONDS) as response:
            for line in response.iter_lines():
                if line:
                    self.lines.append(line)
                    self.started.set()

    def _whole(self, body: dict[str, Any]) -> None:
        answer = httpx.post(f"{self.server.url}/v1/completions", json=body, timeout=SECONDS)
        self.answers.append(answer)

    def check_that_all_were_told(self, *codes: str) -> None:
        for thread in self.threads:
            thread.join(SECONDS)
            assert not thread.is_alive()
        assert self.lines[-1] == "data: [DONE]"
        error = json.loads(self.lines[-2].removeprefix("data: "))["error"]
        assert error["type"] == "service_unavailable_error" and error["code"] in codes
        assert [answer.status_code for answer in self.answers] == [503, 503]
        for answer in self.answers:
            assert answer.json()["error"]["code"] in codes
            assert int(answer.headers["retry-after"]) >= 1


def test_the_core_is_killed_under_load_until_it_stays_down(folder: Path) -> None:
    with ServerProcess(folder, "--max-restarts", "1") as server:
        first = stats(server)["core_pid"]
        requests = OpenRequests(server)
        os.kill(first, signal.SIGKILL)
        requests.check_that_all_were_told("engine_restarting")
        # A client that retries, as OpenAI's does, sees nothing but a delay.
        with openai.OpenAI(base_url=server.api, api_key="x", max_retries=8) as client:
            answer = client.completions.create(model="tiny", prompt="a", max_tokens=3)
        assert answer.usage is not None and answer.usage.completion_tokens == 3
        assert httpx.get(f"{server.url}/health").status_code == 200
        second = stats(server)["core_pid"]
        assert second != first and stats(server)["num_restarts"] == 1
        assert f"the engine's process {first} died" in server.log

        # Restarts are bounded: then every request is refused at once, and the server lives on.
        requests = OpenRequests(server)
        os.kill(second, signal.SIGKILL)
        until(lambda: "it stays down" in server.log, server)
        requests.check_that_all_were_told("engine_restarting", "engine_dead")
        started = time.monotonic()
        for stream in (False, True):
            body = {**LONG, "stream": stream}
            refused = httpx.post(f"{server.url}/v1/completions", json=body)
            assert refused.status_code == 503
            assert "restart the server" in refused.json()["error"]["message"]
        assert time.monotonic() - started < 10
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 503 and health.json()["status"] == "dead"
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        assert server.stop() == 0


def test_the_core_hangs_under_load(folder: Path) -> None:
    """It is alive and says nothing: after --stall-timeout it goes the way of one that died."""
    with ServerProcess(folder, "--stall-timeout", "3") as server:
        first = stats(server)["core_pid"]
        requests = OpenRequests(server)
        os.kill(first, signal.SIGSTOP)
        requests.check_that_all_were_told("engine_restarting")
        until(lambda: not _runs(first), server)  # clients are told first
        until(lambda: httpx.get(f"{server.url}/health").status_code == 200, server)
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 3})
        assert answer.status_code == 200
        assert stats(server)["num_restarts"] == 1 and stats(server)["core_pid"] != first
        assert f"the engine's process {first} said nothing for 3 s" in server.log
        assert server.stop() == 0


def test_the_server_is_killed_and_its_core_ends(folder: Path) -> None:
    with ServerProcess(folder) as server:
        core = stats(server)["core_pid"]
        reader = threading.Thread(target=lambda: _ignore(server))
        reader.start()
        until(lambda: stats(server)["num_requests_running"] > 0, server)
        server.signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        reader.join(SECONDS)
        until(lambda: not _runs(core), server)


def _ignore(server: ServerProcess) -> None:
    with pytest.raises(httpx.HTTPError):
        httpx.post(f"{server.url}/v1/completions", json={**LONG, "n": 8}, timeout=SECONDS)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
