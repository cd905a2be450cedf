"""Threads that share one `LLM`: each call gets its own answers, and they are right."""

import os
import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stoop import RequestError, SamplingParams
from support.engines import make_llm

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [f"{'long ' * (i % 4 * 5)}prompt {i}" for i in range(12)]
NUM_THREADS = 6


make_small_llm = partial(make_llm, max_num_seqs=4, num_kv_blocks=24, max_num_batched_tokens=64)


def in_threads(work: Callable[[int], None], count: int = NUM_THREADS) -> None:
    """Run `work(0)`, `work(1)` ... side by side; the first error is raised here."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a call hangs"
    if errors:
        raise errors[0]


@pytest.fixture(scope="module")
def alone(text_model: Path) -> dict[str, list[int]]:
    """Answers one at a time."""
    llm = make_small_llm(text_model)
    return {text: llm.generate(text, GREEDY)[0].outputs[0].token_ids for text in PROMPTS}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"run_ahead": 2, "graph_mode": "step"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=["plain", "ahead", "ngram"],
)
def test_threads_that_share_an_engine_get_their_own_answers(
    text_model: Path, alone: dict[str, list[int]], options: dict[str, Any]
) -> None:
    llm = make_small_llm(text_model, **options)

    def work(number: int) -> None:
        draw = random.Random(number)
        for turn in range(6):
            texts = draw.sample(PROMPTS, draw.randint(1, 4))
            kind = (number + turn) % 3
            if kind == 0:
                for text, output in zip(texts, llm.generate(texts, GREEDY), strict=True):
                    assert output.prompt == text
                    assert output.outputs[0].token_ids == alone[text]
            elif kind == 1:
                outputs = list(llm.stream(texts[0], GREEDY))
                assert outputs[-1].outputs[0].token_ids == alone[texts[0]]
                lengths = [len(output.outputs[0].token_ids) for output in outputs]
                assert lengths == sorted(set(lengths))
            else:
                stream = llm.stream(texts[0], GREEDY)
                first = next(stream).outputs[0].token_ids
                assert first == alone[texts[0]][: len(first)]
                stream.close()  # type: ignore[attr-defined]

    in_threads(work)
    llm.engine.scheduler.check_idle()
    assert llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids == alone[PROMPTS[0]]


def test_a_bad_call_in_one_thread_hurts_no_other(
    text_model: Path, alone: dict[str, list[int]]
) -> None:
    llm = make_small_llm(text_model)

    def work(number: int) -> None:
        for turn in range(6):
            text = PROMPTS[(number + turn) % len(PROMPTS)]
            if number % 2:
                with pytest.raises(RequestError):
                    llm.generate([text, [999]], GREEDY)
            else:
                assert llm.generate(text, GREEDY)[0].outputs[0].token_ids == alone[text]

    in_threads(work)
    llm.engine.scheduler.check_idle()


def test_an_error_goes_to_the_thread_whose_request_it_ended(
    text_model: Path, alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request a step: the step of prompt 0 always fails, whichever thread runs it."""
    llm = make_small_llm(text_model, max_num_seqs=1)
    bad, launch = llm.get_tokenizer().encode(PROMPTS[0]), llm.engine.runner.launch

    def launch_or_fail(plan: Any) -> Any:
        if any(admission.token_ids[: len(bad)] == bad for admission in plan.admissions):
            raise ZeroDivisionError
        return launch(plan)

    monkeypatch.setattr(llm.engine.runner, "launch", launch_or_fail)

    def work(number: int) -> None:
        for _ in range(4):
            if number == 0:
                with pytest.raises((ZeroDivisionError, RequestError)):
                    llm.generate(PROMPTS[0], GREEDY)
            else:
                output = llm.generate(PROMPTS[number], GREEDY)[0]
                assert output.outputs[0].token_ids == alone[PROMPTS[number]]

    in_threads(work, 4)
    llm.engine.scheduler.check_idle()


def test_a_stream_that_pauses_holds_up_nobody(
    text_model: Path, alone: dict[str, list[int]]
) -> None:
    llm = make_small_llm(text_model)
    stream = llm.stream(PROMPTS[1], GREEDY)
    next(stream)

    def work(number: int) -> None:
        assert llm.generate(PROMPTS[2], GREEDY)[0].outputs[0].token_ids == alone[PROMPTS[2]]

    in_threads(work, 2)
    assert list(stream)[-1].outputs[0].token_ids == alone[PROMPTS[1]]


def test_a_dropped_stream_stops_its_request(text_model: Path) -> None:
    llm = make_small_llm(text_model)
    stream = llm.stream("hello", GREEDY)
    next(stream)
    del stream
    assert llm.metrics()["num_requests_running"] == 0
    llm.engine.scheduler.check_idle()


def test_a_stream_that_was_never_read_is_dropped_too(text_model: Path) -> None:
    llm = make_small_llm(text_model)
    stream = llm.stream("hello", GREEDY)
    assert llm.metrics()["num_requests_waiting"] == 1
    del stream
    llm.generate("other", GREEDY)
    llm.engine.scheduler.check_idle()
    assert llm.metrics()["num_generated_tokens"] == 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_an_engine_is_refused_in_a_forked_process(text_model: Path) -> None:
    """Threads of the parent are not there: a step would wait for them forever."""
    llm = make_small_llm(text_model)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            llm.generate("hello", GREEDY)
            os.write(writer, b"it ran")
        except RequestError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    assert b"another process" in os.read(reader, 1000)
    os.close(reader)
    os.waitpid(child, 0)
    assert len(llm.generate("hello", GREEDY)[0].outputs[0].token_ids) == 10


def test_a_step_that_calls_its_own_engine_is_told(
    text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_small_llm(text_model)
    with monkeypatch.context() as patch:
        patch.setattr(
            llm.engine.runner.target, "forward", lambda *args: llm.generate("again", GREEDY)
        )
        with pytest.raises(RuntimeError, match="called the engine"):
            llm.generate("hello", GREEDY)
    assert len(llm.generate("hello", GREEDY)[0].outputs[0].token_ids) == 10
    llm.engine.scheduler.check_idle()


def test_a_caller_is_woken_for_its_own_outputs_only(
    text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many threads that wait for whole answers, a step must not wake all of them."""
    llm = make_small_llm(text_model, max_num_seqs=8)
    num_sleeps, sleep = [], llm._shared._sleep

    def counted(box: Any) -> None:
        num_sleeps.append(1)
        sleep(box)

    monkeypatch.setattr(llm._shared, "_sleep", counted)
    monkeypatch.setattr("stoop.engine.shared.POLL_SECONDS", 60)
    started = llm.metrics()["num_steps"]
    in_threads(lambda number: llm.generate(PROMPTS[number], GREEDY.replace(max_tokens=40)), 8)
    num_steps = llm.metrics()["num_steps"] - started
    assert num_steps > 40 and len(num_sleeps) < 2 * 8 + 8, (num_steps, len(num_sleeps))
