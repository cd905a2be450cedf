"""AsyncLLM: the core in a process of its own, compared with LLM; aborts, crashes, slow readers."""

import asyncio
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoop import (
    LLM,
    AsyncLLM,
    CheckpointError,
    ConfigError,
    CoreDied,
    RequestDelta,
    RequestError,
    RequestLost,
    SamplingParams,
)
from stoop.core.outputs import CompletionOutput, Logprob, RequestOutput
from stoop.engine.core_client import CoreClient
from stoop.engine.wire import Abort, Lost, Ready
from support.engines import SMALL, make_llm

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
OPTIONS: dict[str, Any] = {**SMALL, "max_num_seqs": 4, "speculative_config": NGRAM}
LONG = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)
PROMPT = "abcabcabcabcab"

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a coroutine on the module's event loop, to which its AsyncLLM belongs."""
    with asyncio.Runner() as runner:
        yield lambda coroutine: runner.run(asyncio.wait_for(coroutine, 120))


@pytest.fixture(scope="module")
def engine(run: Run, text_model: Path) -> Iterator[AsyncLLM]:
    llm = run(AsyncLLM.start(str(text_model), max_restarts=99, **OPTIONS))
    yield llm
    run(llm.shutdown())


@pytest.fixture(scope="module")
def offline(text_model: Path) -> LLM:
    return make_llm(text_model, max_num_seqs=4, speculative_config=NGRAM)


async def read(stream: Any) -> list[RequestDelta]:
    return [item async for item in stream]


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen in time"
        await asyncio.sleep(0.02)


async def until_idle(engine: AsyncLLM) -> None:
    """The core has no request and holds no block."""

    def idle() -> bool:
        found = engine.metrics()
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage")
        return engine.state == "ready" and not any(found[name] for name in names)

    assert engine.num_open == 0
    await until(idle)


async def until_ready(engine: AsyncLLM) -> None:
    await until(lambda: engine.state == "ready" and engine.healthy)


def kill_core(engine: AsyncLLM) -> int:
    pid = engine.metrics()["core_pid"]
    os.kill(pid, signal.SIGKILL)
    return pid


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


# ---- the same answers as LLM ----


def joined(items: list[RequestDelta], index: int) -> CompletionOutput:
    """One answer of a stream, put together."""
    mine = [answer for item in items for answer in item.answers if answer.index == index]
    assert all(each.finish_reason is None for each in mine[:-1])
    assert all(len(each.draft_positions) == len(each.token_ids) for each in mine)
    logprobs = None
    if mine[0].logprobs is not None:
        assert all(len(each.logprobs or ()) == len(each.token_ids) for each in mine)
        logprobs = [entry for each in mine for entry in each.logprobs or ()]
    return CompletionOutput(
        index=index,
        text="".join(each.text for each in mine),
        token_ids=[token for each in mine for token in each.token_ids],
        logprobs=logprobs,
        finish_reason=mine[-1].finish_reason,
        stop_reason=mine[-1].stop_reason,
    )


def check_scores(found: Any, expected: Any) -> None:
    """Batches of other rows round differently, in the last digits of float64."""
    assert (found is None) == (expected is None)
    for mine, theirs in zip(found or (), expected or (), strict=True):
        if mine is None or theirs is None:
            assert mine is theirs
            continue
        assert list(mine) == list(theirs)
        for token, entry in mine.items():
            assert entry.logprob == pytest.approx(theirs[token].logprob, abs=1e-9)
            plain = Logprob(0.0, entry.rank, entry.decoded_token)
            assert plain == Logprob(0.0, theirs[token].rank, theirs[token].decoded_token)


def check_answer(found: CompletionOutput, expected: CompletionOutput) -> None:
    assert found.text == expected.text
    assert found.token_ids == expected.token_ids
    assert (found.finish_reason, found.stop_reason) == (
        expected.finish_reason,
        expected.stop_reason,
    )
    check_scores(found.logprobs, expected.logprobs)


CASES = {
    "greedy": SamplingParams(max_tokens=40, temperature=0.0),
    "several": SamplingParams(max_tokens=30, n=3, seed=5),
    "scores": SamplingParams(max_tokens=12, n=2, seed=1, logprobs=3, prompt_logprobs=2),
    "stop": SamplingParams(max_tokens=100, temperature=0.0, stop=["\x00", "r"], logprobs=0),
    "kept stop": SamplingParams(
        max_tokens=100, seed=9, stop=["A", "e", "\x10"], include_stop_str_in_output=True, n=2
    ),
    "stop token": SamplingParams(max_tokens=100, seed=2, stop_token_ids=list(range(60, 90))),
    # The only token there is, "]", is drafted too: the string ends in the middle of a step.
    "stop in a step": SamplingParams(
        max_tokens=60, temperature=0.0, logit_bias={60: 100.0}, stop="]" * 7, logprobs=1
    ),
    "no text": SamplingParams(max_tokens=9, temperature=0.0, detokenize=False),
}


@pytest.mark.parametrize("case", CASES)
def test_streams_and_answers_equal_the_offline_ones(
    run: Run, engine: AsyncLLM, offline: LLM, case: str
) -> None:
    """Random weights over bytes write half characters all the time."""
    params = CASES[case]
    (expected,) = offline.generate(PROMPT, params, use_tqdm=False)
    if "stop" in case:
        assert {answer.finish_reason for answer in expected.outputs} == {"stop"}
    items = run(read(engine.stream(PROMPT, params)))
    answer: RequestOutput = run(engine.generate(PROMPT, params))
    assert [item.finished for item in items] == [False] * (len(items) - 1) + [True]
    assert items[0].num_prompt_tokens == len(expected.prompt_token_ids)
    assert answer.num_cached_tokens == 0 and answer.times.finished is not None
    scored = [item.prompt_logprobs for item in items if item.prompt_logprobs is not None]
    assert len(scored) == (params.prompt_logprobs is not None)
    check_scores(scored[0] if scored else None, expected.prompt_logprobs)
    check_scores(answer.prompt_logprobs, expected.prompt_logprobs)
    for index, wanted in enumerate(expected.outputs):
        check_answer(joined(items, index), wanted)
        check_answer(answer.outputs[index], wanted)
        assert answer.outputs[index].spec == wanted.spec
    run(until_idle(engine))


def test_draft_positions(run: Run, engine: AsyncLLM, offline: LLM) -> None:
    """Each step's accepted drafts count 1, 2, ... and the target's own token is 0."""
    params = SamplingParams(max_tokens=60, temperature=0.0, logit_bias={60: 100.0})
    (expected,) = offline.generate(PROMPT, params, use_tqdm=False)
    items = run(read(engine.stream(PROMPT, params)))
    found = [p for item in items for answer in item.answers for p in answer.draft_positions]
    spec = expected.outputs[0].spec
    assert spec is not None and spec.num_accepted_tokens > 20
    per_position = [found.count(position) for position in (1, 2, 3)]
    # The last step may accept drafts beyond max_tokens.
    for mine, theirs in zip(per_position, spec.num_accepted_tokens_per_pos, strict=True):
        assert theirs - 1 <= mine <= theirs
    for before, after in itertools.pairwise(found):
        assert after in (0, before + 1) or (before == 0 and after == 1)


# ---- many at once ----


def test_many_streams_with_aborts_leave_nothing_behind(
    run: Run, engine: AsyncLLM, offline: LLM
) -> None:
    dice = random.Random(4)
    seeds = [dice.randrange(1000) for _ in range(20)]
    params = [SamplingParams(max_tokens=40, seed=seed, ignore_eos=True) for seed in seeds]
    expected = offline.generate([PROMPT] * 20, params, use_tqdm=False)

    async def client(number: int) -> None:
        stream, ending = engine.stream(PROMPT, params[number]), number % 5
        text, leave_at = "", 1 + seeds[number] % 6
        async for item in stream:
            text += "".join(answer.text for answer in item.answers)
            leave_at -= 1
            if leave_at == 0 and ending == 1:
                await stream.aclose()
            elif leave_at == 0 and ending == 2:
                await engine.abort(stream.request_id)
            elif leave_at == 0 and ending == 3:
                break  # the iterator is dropped
        whole = expected[number].outputs[0].text
        assert text == whole if ending in (0, 4) else whole.startswith(text)

    async def all_of_them() -> None:
        await asyncio.gather(*(client(number) for number in range(20)))
        await asyncio.sleep(0)
        await until_idle(engine)

    run(all_of_them())
    assert not engine._frontend._groups and not engine._frontend._answers


def test_cancelling_a_task_aborts_its_request(run: Run, engine: AsyncLLM) -> None:
    async def cancel() -> None:
        stream = engine.stream(PROMPT, LONG)
        await anext(stream)
        reader = asyncio.create_task(read(stream))
        writer = asyncio.create_task(engine.generate(PROMPT, LONG))
        await asyncio.sleep(0.05)
        assert engine.num_open == 2
        for task in (reader, writer):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until_idle(engine)
        assert await read(stream) == []

    run(cancel())


def test_an_abort_ends_a_stream_with_a_last_item(run: Run, engine: AsyncLLM) -> None:
    async def abort() -> None:
        stream = engine.stream(PROMPT, LONG, request_id="mine")
        await anext(stream)
        answer = asyncio.create_task(engine.generate(PROMPT, LONG, request_id="other"))
        await asyncio.sleep(0)
        for name in ("mine", "other", "unknown"):
            await engine.abort(name)
        *_, last = await read(stream)
        assert last.finished and last.answers[0].finish_reason == "abort"
        assert (await answer).outputs[0].finish_reason == "abort"
        # The id is free at once, and late deltas of its first use do not reach the second.
        again = await engine.generate(PROMPT, CASES["greedy"], request_id="mine")
        assert again.outputs[0].finish_reason == "length"
        assert len(again.outputs[0].token_ids) == 40

    run(abort())
    run(until_idle(engine))


def test_a_slow_reader_gets_several_steps_in_one_item(run: Run, engine: AsyncLLM) -> None:
    async def wait_and_read() -> list[RequestDelta]:
        stream = engine.stream(PROMPT, LONG)
        first = await anext(stream)
        await until(lambda: engine.num_open == 0)  # the core is not held up
        return [first, *await read(stream)]

    items = run(wait_and_read())
    assert len(items) == 2 and items[1].finished
    assert len(joined(items, 0).token_ids) == 200


# ---- refusals ----


def test_a_stream_of_the_final_item_only(run: Run, engine: AsyncLLM) -> None:
    async def compare() -> None:
        whole = await engine.generate(PROMPT, LONG)
        (item,) = await read(engine.stream(PROMPT, LONG, final_only=True))
        (answer,) = item.answers
        assert item.finished and answer.finish_reason == "length"
        assert answer.text == whole.outputs[0].text
        assert answer.token_ids == whole.outputs[0].token_ids
        assert len(answer.draft_positions) == len(answer.token_ids)
        # What there is so far is known before the end, and after an abort.
        stream = engine.stream(PROMPT, LONG, final_only=True)
        reading = asyncio.create_task(anext(stream))
        await until(lambda: len(stream.output().outputs[0].token_ids) > 2)
        reading.cancel()
        await asyncio.wait([reading])
        assert 2 < len(stream.output().outputs[0].token_ids) < LONG.max_tokens
        await until_idle(engine)

    run(compare())


def test_errors_are_raised_by_the_call(run: Run, engine: AsyncLLM) -> None:
    async def call() -> None:
        with pytest.raises(RequestError, match="the prompt is empty"):
            engine.stream([])
        with pytest.raises(RequestError, match="priority"):
            engine.stream(PROMPT, priority=1.5)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="max_model_len"):
            engine.stream([1] * 5000)
        stream = engine.stream(PROMPT, LONG, request_id="twice")
        with pytest.raises(RequestError, match="is in use"):
            engine.stream(PROMPT, LONG, request_id="twice")
        await stream.aclose()
        assert engine.num_open == 0

    run(call())


def test_what_it_tells_about_itself(run: Run, engine: AsyncLLM, offline: LLM) -> None:
    assert engine.config.schedule == offline.config.schedule
    assert engine.default_params == offline.get_default_sampling_params()
    assert engine.get_tokenizer().encode("a") == offline.get_tokenizer().encode("a")
    run(engine.generate(PROMPT, CASES["greedy"]))
    run(until_idle(engine))
    found = engine.metrics()
    assert found["max_num_seqs"] == 4 and found["core_pid"] and found["heartbeat_age"] < 60
    assert found["num_steps_by_mode"] == {"none": found["num_steps"]}
    assert found["num_tokens_computed"] > 40 and found["num_tokens_padded"] == 0
    assert found["step_seconds_total"] > 0
    assert run(engine.reset_prefix_cache()) is True


def test_a_start_that_fails_raises_the_core_s_error(
    run: Run, text_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="block_size"):
        run(AsyncLLM.start(str(text_model), **SMALL, block_size=-1))
    # What is in the files, only the process of the core finds out.
    with pytest.raises(CheckpointError, match=r"config\.json"):
        run(AsyncLLM.start(str(tmp_path), **SMALL))
    shutil.copytree(text_model, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        run(AsyncLLM.start(str(tmp_path / "model"), **SMALL))


# ---- failures of one request ----


def test_a_lost_request_takes_its_other_answers_along(
    run: Run, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []

    def spy(command: Any, send: Callable[[Any], None] = engine._client.send) -> None:
        sent.append(command)
        send(command)

    async def lose() -> None:
        await until_ready(engine)
        monkeypatch.setattr(engine._client, "send", spy)
        stream, other = engine.stream(PROMPT, LONG.replace(n=2)), engine.stream(PROMPT, LONG)
        await anext(stream)
        core_ids = [answer.request.request_id for answer in stream._box.group.answers]
        engine._client._take([Lost([core_ids[0], "unknown/0"], "a step failed: retry")])
        assert sent[-1] == Abort(core_ids)
        with pytest.raises(RequestLost, match="a step failed"):
            await read(stream)
        assert await read(stream) == []
        assert engine.num_open == 1
        assert len(joined(await read(other), 0).token_ids) == 200
        await until_idle(engine)

    run(lose())


def test_a_failing_front_end_loses_the_requests_at_hand(
    run: Run, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        stream = engine.stream(PROMPT, LONG)
        await anext(stream)
        with monkeypatch.context() as patch:
            patch.setattr(engine._frontend, "absorb", None)
            with pytest.raises(RequestLost, match="front end failed"):
                await read(stream)
        await until_idle(engine)
        assert (await engine.generate(PROMPT, CASES["greedy"])).finished

    run(fail())


# ---- crashes ----


def test_a_killed_core_fails_its_requests_and_comes_back(run: Run, engine: AsyncLLM) -> None:
    async def crash() -> None:
        await until_ready(engine)
        restarts = engine.metrics()["num_restarts"]
        stream = engine.stream(PROMPT, LONG)
        await anext(stream)
        waiting = asyncio.create_task(engine.generate(PROMPT, LONG))
        await asyncio.sleep(0)
        first = kill_core(engine)
        for open_one in (read(stream), waiting):
            with pytest.raises(CoreDied, match="died"):
                await asyncio.wait_for(open_one, 5)
        assert engine.state == "restarting" and not engine.healthy and engine.num_open == 0
        # A request that is made now waits for the next process, and for the one after that.
        late = asyncio.create_task(engine.generate(PROMPT, CASES["greedy"]))
        dropped = engine.stream(PROMPT, LONG)
        await until(lambda: engine.metrics()["core_pid"] != first)
        await dropped.aclose()
        kill_core(engine)
        answer = await late
        assert len(answer.outputs[0].token_ids) == 40
        assert engine.metrics()["num_restarts"] == restarts + 2 and engine.healthy
        await until_idle(engine)

    run(crash())


def test_a_restart_that_changes_the_engine(run: Run, engine: AsyncLLM) -> None:
    """Memory may hold fewer tokens; with other drafts, requests that wait are refused."""

    async def change() -> None:
        await until_ready(engine)
        config, limits = engine.config, engine._frontend.inputs.limits
        short = replace(limits, kv_tokens=20)
        engine.on_restarted(Ready(config, short, {}))
        with pytest.raises(RequestError, match="the KV cache holds 20"):
            engine.stream([1] * 20)
        stream = engine.stream(PROMPT, LONG)
        plain = replace(config, schedule=replace(config.schedule, num_drafts=0))
        engine.on_restarted(Ready(plain, limits, {}))
        with pytest.raises(CoreDied, match="other options"):
            await read(stream)
        with pytest.raises(RequestError, match="does not draft"):
            engine.stream(PROMPT, SamplingParams(num_speculative_tokens=1))
        engine.on_restarted(Ready(config, limits, {}))
        kill_core(engine)  # which still has the request that was refused here
        await until(lambda: engine.state != "ready")
        await until_idle(engine)

    run(change())


def test_restarts_are_bounded(run: Run, text_model: Path) -> None:
    async def crash() -> None:
        engine = await AsyncLLM.start(str(text_model), max_restarts=0, **OPTIONS)
        kill_core(engine)
        await until(lambda: engine.state == "dead")
        with pytest.raises(CoreDied, match="too often"):
            engine.stream(PROMPT)
        assert not engine.healthy
        await engine.shutdown()
        assert engine.state == "stopped"
        with pytest.raises(CoreDied, match="shutting down"):
            engine.stream(PROMPT)

    run(crash())


def test_a_frozen_core_is_unhealthy_long_before_it_is_restarted(run: Run, engine: AsyncLLM) -> None:
    async def freeze() -> None:
        await until_ready(engine)
        pid = engine.metrics()["core_pid"]
        engine._heartbeat_timeout, before = 0.5, engine._heartbeat_timeout
        os.kill(pid, signal.SIGSTOP)
        try:
            await until(lambda: not engine.healthy)
            assert engine.state == "ready"
        finally:
            os.kill(pid, signal.SIGCONT)
            engine._heartbeat_timeout = before
        await until(lambda: engine.healthy)
        assert engine.metrics()["core_pid"] == pid

    run(freeze())


def test_shutdown_drains(run: Run, text_model: Path) -> None:
    async def drain() -> None:
        async with await AsyncLLM.start(str(text_model), **OPTIONS) as engine:
            pid = engine.metrics()["core_pid"]
            answer = asyncio.create_task(engine.generate(PROMPT, LONG))
            await asyncio.sleep(0)
            stopping = asyncio.create_task(engine.shutdown(drain=60))
            await asyncio.sleep(0)
            with pytest.raises(CoreDied, match="shutting down"):
                engine.stream(PROMPT)
            assert len((await answer).outputs[0].token_ids) == 200
            await stopping
            assert engine.state == "stopped" and not alive(pid)

    run(drain())


PARENT = """
import asyncio, sys
from stoop import AsyncLLM, SamplingParams
from stoop.engine.core_client import CoreClient

async def main():
    options = dict(device="cpu", kv_cache_memory="16MiB")
    if sys.argv[2] == "starting":
        launch = CoreClient._take_other
        def tell(self, message):
            print(self.pid, flush=True)
            launch(self, message)
        CoreClient._take_other = tell
    llm = await AsyncLLM.start(sys.argv[1], **options)
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True))
    await anext(stream)
    print(llm.metrics()["core_pid"], flush=True)
    await asyncio.sleep(100)

asyncio.run(main())
"""


@pytest.mark.parametrize("moment", ["starting", "streaming"])
def test_the_core_goes_when_its_parent_does(text_model: Path, moment: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(text_model), moment], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
    finally:
        parent.kill()
        parent.wait()
    limit = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < limit, "the core outlives its parent"
        time.sleep(0.02)


HUNG = """
import socket, sys, time
from stoop.engine.core_process import watch_parent
watch_parent(socket.socket(fileno=int(sys.argv[1])))
print("watching", flush=True)
time.sleep(100)
"""


def test_a_hung_core_goes_when_its_socket_closes() -> None:
    """In the middle of a start or a step, when nothing reads the socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", HUNG, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
        )
        theirs.close()
        assert process.stdout is not None and process.stdout.readline() == b"watching\n"
        assert process.poll() is None
        ours.close()
        assert process.wait(timeout=20) == 1


def test_uvloop(text_model: Path) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def stream_and_crash() -> None:
        async with await AsyncLLM.start(str(text_model), **OPTIONS) as engine:
            items = await read(engine.stream(PROMPT, CASES["greedy"]))
            assert len(joined(items, 0).token_ids) == 40
            stream = engine.stream(PROMPT, LONG)
            await anext(stream)
            kill_core(engine)
            with pytest.raises(CoreDied):
                await read(stream)

    uvloop.run(asyncio.wait_for(stream_and_crash(), 120))


def test_signals(run: Run, engine: AsyncLLM) -> None:
    """Ctrl-C and SIGTERM go to the whole group; the parent decides, and may drain first."""

    async def signals() -> None:
        await until_ready(engine)
        pid = engine.metrics()["core_pid"]
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
            await engine.generate(PROMPT, CASES["greedy"])
            assert engine.metrics()["core_pid"] == pid

    run(signals())


def test_deltas_of_many_steps_are_taken_together(
    run: Run, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event loop that lags gets all frames at once: one call, one wake-up per request."""
    calls: list[int] = []
    take = CoreClient._take

    def spy(self: CoreClient, messages: Any) -> None:
        calls.append(len(messages))
        take(self, messages)

    monkeypatch.setattr(CoreClient, "_take", spy)

    async def lag() -> list[RequestDelta]:
        stream = engine.stream(PROMPT, LONG)
        connection = engine._client._connection
        assert connection is not None
        monkeypatch.setattr(connection, "_take", engine._client._take)
        items = [await anext(stream)]
        time.sleep(1.0)
        return items + await read(stream)

    items = run(lag())
    assert max(calls) > 3
    assert len(items) < 150 and len(joined(items, 0).token_ids) == 200


def test_a_requests_text_stream_is_made_while_the_core_computes(run: Run, engine: AsyncLLM) -> None:
    """Otherwise the first tokens wait for it."""

    async def main() -> None:
        pid = engine.metrics()["core_pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            stream = engine.stream(PROMPT, SamplingParams(max_tokens=2))
            (answer,) = stream._box.group.answers
            assert answer._stream is None  # the request goes first
            await until(lambda: answer._stream is not None, 10.0)
            assert not answer.token_ids
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (await read(stream))[-1].finished

    run(main())
