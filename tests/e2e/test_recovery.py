"""AsyncLLM when its core hangs, when a restart goes wrong, and what the core's process prints."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from stoop import AsyncLLM, CoreDied, SamplingParams
from stoop.engine.wire import Ready, Stop, encode
from support.engines import SMALL

LONG = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)
SHORT = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
PROMPT = [5, 6, 7]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen in time"
        await asyncio.sleep(0.02)


def test_a_hung_core_is_restarted(text_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def freeze() -> None:
        async with await AsyncLLM.start(str(text_model), stall_timeout=2.0, **SMALL) as engine:
            pid = engine.metrics()["core_pid"]
            stream = engine.stream(PROMPT, LONG)
            await anext(stream)
            os.kill(pid, signal.SIGSTOP)
            frozen = time.monotonic()
            with pytest.raises(CoreDied, match="hung"):
                async for _ in stream:
                    pass
            assert time.monotonic() - frozen >= 1.5
            assert engine.state == "restarting"
            late = await engine.generate(PROMPT, SHORT)  # waits for the new process
            assert len(late.outputs[0].token_ids) == 4
            found = engine.metrics()
            assert found["core_pid"] != pid and found["num_restarts"] == 1
            assert not Path(f"/proc/{pid}").exists()
            assert f"the engine's process {pid} said nothing for 2 s" in caplog.text
            # One that has nothing to do is found, too.
            os.kill(found["core_pid"], signal.SIGSTOP)
            await until(lambda: engine.metrics()["num_restarts"] == 2)
            await until(lambda: engine.healthy)

    run(freeze())


def test_hung_cores_use_up_the_restarts(text_model: Path) -> None:
    async def freeze() -> None:
        options = {**SMALL, "stall_timeout": 1.0, "max_restarts": 0}
        async with await AsyncLLM.start(str(text_model), **options) as engine:
            os.kill(engine.metrics()["core_pid"], signal.SIGSTOP)
            with pytest.raises(CoreDied):
                await engine.generate(PROMPT, LONG)
            await until(lambda: engine.state == "dead")

    run(freeze())


def test_a_restart_that_hangs_is_tried_again(
    text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start may be silent for as long as the first one took, so that is made short here."""

    async def freeze() -> None:
        async with await AsyncLLM.start(str(text_model), stall_timeout=8.0, **SMALL) as engine:
            client = engine._client
            client._first_start = 0.0
            spawn, spawned = client._spawn, []

            async def stop_first(fd: int) -> Any:
                process = await spawn(fd)
                spawned.append(process.pid)
                if len(spawned) == 1:
                    os.kill(process.pid, signal.SIGSTOP)
                return process

            monkeypatch.setattr(client, "_spawn", stop_first)
            os.kill(engine.metrics()["core_pid"], signal.SIGKILL)
            await until(lambda: len(spawned) == 2)
            assert (await engine.generate(PROMPT, SHORT)).finished
            assert engine.metrics()["num_restarts"] == 2

    run(freeze())


def test_a_front_end_that_fails_on_the_new_core(
    text_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The restart is logged as failed and tried again; requests that waited go on waiting."""

    async def crash() -> None:
        async with await AsyncLLM.start(str(text_model), **SMALL) as engine:
            works, calls = engine.on_restarted, 0

            def fail_once(ready: Ready) -> None:
                nonlocal calls
                calls += 1
                if calls == 1:
                    raise ZeroDivisionError("a bug")
                works(ready)

            monkeypatch.setattr(engine, "on_restarted", fail_once)
            os.kill(engine.metrics()["core_pid"], signal.SIGKILL)
            await until(lambda: engine.state == "restarting")
            answer = await engine.generate(PROMPT, SHORT)
            assert answer.finished and calls == 2
            assert engine.healthy and engine.metrics()["num_restarts"] == 2
            assert "ZeroDivisionError: a bug" in caplog.text

    with caplog.at_level(logging.ERROR):
        run(crash())


@pytest.mark.parametrize("broken", ["on_died", "on_dead"])
def test_a_front_end_that_fails_on_a_death(
    text_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: str,
) -> None:
    async def crash() -> None:
        async with await AsyncLLM.start(str(text_model), max_restarts=0, **SMALL) as engine:

            def fail(error: CoreDied) -> None:
                raise ZeroDivisionError("a bug")

            monkeypatch.setattr(engine, broken, fail)
            os.kill(engine.metrics()["core_pid"], signal.SIGKILL)
            await until(lambda: engine.state == "dead")
            assert "ZeroDivisionError: a bug" in caplog.text
            with pytest.raises(CoreDied, match="too often"):
                engine.stream(PROMPT)

    run(crash())


def test_what_the_core_prints_can_be_taken(text_model: Path, capfd: Any) -> None:
    lines: list[str] = []

    async def fail() -> None:
        engine = await AsyncLLM.start(str(text_model), on_printed=lines.append, **SMALL)
        # A message that the core cannot read ends it with a traceback.
        frame = encode(Stop())
        engine._client._connection.write(frame[:4] + b"x" * len(frame[4:]))  # type: ignore
        await until(lambda: engine.state != "ready")
        await engine.shutdown()

    run(fail())
    assert lines[0] == "Traceback (most recent call last):"
    assert all(line and "\n" not in line for line in lines)
    assert capfd.readouterr().err == ""
