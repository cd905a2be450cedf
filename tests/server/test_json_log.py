"""`--log-format json`: whatever a server writes to standard error is one object per line."""

import json
import os
import signal
import subprocess
import sys
import time

import httpx

from support.server import SMALL_ENGINE, ServerProcess, write_served_model

SET_UP = """
import logging, sys, warnings
from stoop.cli.logs import set_up_json_logging, set_up_logging
set_up_logging("INFO")
tell = set_up_json_logging()
"""


def lines_of(code: str) -> list[dict]:
    done = subprocess.run(
        [sys.executable, "-c", SET_UP + code], capture_output=True, text=True, timeout=60
    )
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_every_way_to_write_a_line():
    found = lines_of(
        "logging.getLogger('a').warning('one %d\\nline', 1)\n"
        "print('two', 3, file=sys.stderr)\n"
        "print('error: no', file=sys.stderr)\n"
        "print(file=sys.stderr)\n"
        "sys.stderr.write('half '); sys.stderr.write('and half\\n')\n"
        "warnings.warn('old')\n"
        "tell('other', 'from there')\n"
        "assert not sys.stderr.isatty()\n"
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    logging.getLogger('b').exception('bad')\n"
        "raise ValueError('a bug')\n"
    )
    messages = [line["message"] for line in found]
    assert messages[:4] == ["one 1\nline", "two 3", "error: no", "half and half"]
    assert "UserWarning: old" in messages[4]
    assert messages[5:] == ["from there", "bad", "stoop failed"]
    assert [line["level"] for line in found[:4]] == ["WARNING", "INFO", "ERROR", "INFO"]
    assert [found[0]["logger"], found[5]["logger"]] == ["a", "other"]
    assert "ZeroDivisionError" in found[6]["exception"]
    assert "ValueError: a bug" in found[7]["exception"]
    assert all(abs(line["time"] - time.time()) < 120 for line in found)


def test_a_server_from_its_start_to_its_end(tmp_path):
    """With a core that dies: its last words, the restart, requests and the drain."""
    folder = write_served_model(tmp_path / "tiny")
    # A core that prints, as libraries do, and a library that warns while it is imported.
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if any('core_process' in each for each in sys.orig_argv):\n"
        "    os.write(1, b'words of a library\\n')\n"
    )
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(hook), before]))
    try:
        with ServerProcess(folder, "--log-format", "json") as server:
            pid = httpx.get(f"{server.url}/stats").json()["core_pid"]
            body = {"prompt": "a", "max_tokens": 3}
            assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
            assert httpx.post(f"{server.url}/v1/completions", json={}).status_code == 400
            os.kill(pid, signal.SIGKILL)
            server.wait_for_log("is ready")
            assert server.stop() == 0
            log = server.log
    finally:
        os.environ["PYTHONPATH"] = before
    lines = [json.loads(line) for line in log.splitlines()]
    assert all({"time", "level", "logger"} <= line.keys() for line in lines)
    messages = [line.get("message", "") for line in lines]
    for text in ("starting ...", "serving tiny", f"process {pid} died", "is ready"):
        assert any(text in message for message in messages), (text, messages)
    core = [line["message"] for line in lines if line["logger"] == "stoop.engine.core_process"]
    assert core.count("words of a library") == 2
    requests = [line for line in lines if line["logger"] == "stoop.server.requests"]
    assert [line["status"] for line in requests] == [200, 400]


def test_a_start_that_fails(tmp_path):
    command = [sys.executable, "-m", "stoop", "serve", str(tmp_path / "none"), "--port", "0"]
    done = subprocess.run(
        [*command, *SMALL_ENGINE, "--log-format", "json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    *_, last = [json.loads(line) for line in done.stderr.splitlines()]
    assert last["level"] == "ERROR" and last["message"].startswith("error: ")
