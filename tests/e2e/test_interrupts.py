"""Interrupts at any moment: the engine is right afterwards, every time."""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import stoop
from stoop import LLM, SamplingParams
from stoop.engine.interrupts import HeldInterrupts
from support.engines import make_llm

EVERYTHING = bool(os.environ.get("STOOP_TEST_ALL"))
NUM_SIGNALS = 3000 if EVERYTHING else 250
NUM_INJECTED = 1200 if EVERYTHING else 160
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SAMPLED = SamplingParams(n=2, seed=3, max_tokens=5, stop=["x", "yz"], logprobs=1)
PROMPTS = ["one", "two " * 12, "three"]
WAITING = "a prompt that waits"

on_main_thread = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(),
    reason="signals reach the main thread only",
)


make_small_llm = partial(
    make_llm,
    max_model_len=64,
    max_num_seqs=3,
    max_num_batched_tokens=32,
    block_size=4,
    num_kv_blocks=18,
)


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate([*PROMPTS, WAITING], GREEDY) + llm.generate("many", SAMPLED)
    return [answer.token_ids for output in outputs for answer in output.outputs]


def check_right(llm: LLM, expected: list[list[int]]) -> None:
    assert answers(llm) == expected
    assert llm.metrics()["num_requests_waiting"] == llm.metrics()["num_requests_running"] == 0
    llm.engine.scheduler.check_idle()
    llm.engine.scheduler.pool.check()
    frontend = llm.engine.frontend
    assert not frontend._groups and not frontend._answers


# ---- real signals ----


class Storm:
    """A thread that presses Ctrl-C at random moments, while this is armed."""

    def __init__(self) -> None:
        self.num_raised = 0
        self.budget = 0  # how often it may still raise in this round
        self.running = True
        self.thread = threading.Thread(target=self._press, daemon=True)

    def _press(self) -> None:
        draw = random.Random(0)
        main = threading.main_thread().ident
        assert main is not None
        while self.running:
            time.sleep(draw.choice([0.0003, 0.002, 0.006, 0.015]) * draw.random())
            if self.budget:
                signal.pthread_kill(main, signal.SIGINT)

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if self.budget:
            self.budget -= 1
            self.num_raised += 1
            raise KeyboardInterrupt


@contextmanager
def storm() -> Iterator[Storm]:
    made = Storm()
    before = signal.signal(signal.SIGINT, made.handle)
    made.thread.start()
    try:
        yield made
    finally:
        made.running, made.budget = False, 0
        made.thread.join()
        signal.signal(signal.SIGINT, before)


@on_main_thread
@pytest.mark.parametrize("options", [{}, {"run_ahead": 2}], ids=["plain", "ahead"])
def test_a_storm_of_ctrl_c_leaves_the_engine_right(
    text_model: Path, options: dict[str, Any]
) -> None:
    llm = make_small_llm(text_model, **options)
    expected = answers(llm)
    crowd = [[i % 250 + 1, 5] for i in range(40)]
    with storm() as presses:
        turn = 0
        while presses.num_raised < NUM_SIGNALS // 2:
            turn += 1
            try:
                try:
                    presses.budget = 1 + turn % 2  # every other round a second one, on the way out
                    if turn % 3:
                        llm.generate(crowd, GREEDY)
                    else:
                        for _ in llm.stream("hello", SAMPLED):
                            pass
                except KeyboardInterrupt:
                    time.sleep(0.001)
                presses.budget = 0
            except KeyboardInterrupt:
                presses.budget = 0
            if turn % 5 == 0:
                check_right(llm, expected)
    check_right(llm, expected)


def press(times: int, reached: list[int]) -> None:
    """Ctrl-C that often, with interrupts held and no check in between."""
    with HeldInterrupts():
        for number in range(1, times + 1):
            signal.raise_signal(signal.SIGINT)
            reached.append(number)


@on_main_thread
@pytest.mark.parametrize(("times", "held"), [(1, [1]), (2, [1, 2]), (4, [1, 2])])
def test_ctrl_c_is_held_and_the_third_is_not(times: int, held: list[int]) -> None:
    reached: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        press(times, reached)
    assert reached == held
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@on_main_thread
def test_a_check_lets_ctrl_c_through() -> None:
    with HeldInterrupts() as held:
        held.check()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            held.check()
        held.check()


@on_main_thread
def test_handlers_of_others_are_called_or_left_alone() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, frame: calls.append(signum))
    try:
        with HeldInterrupts() as held:
            signal.raise_signal(signal.SIGINT)
            assert calls == []
            held.check()
            assert calls == [signal.SIGINT]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with HeldInterrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# ---- an exception at every line ----


class Struck(BaseException):
    """As an interrupt: nothing catches it on the way."""


PACKAGE = Path(stoop.__file__).parent
STRUCK_FILES = {
    str(path)
    for pattern in (
        "engine/engine.py", "engine/core.py", "engine/frontend.py", "engine/uniproc.py",
        "engine/outputs.py", "engine/shared.py", "scheduler/*.py", "core/request.py",
        "core/outputs.py", "batch/*.py", "worker/runner.py", "worker/output.py",
    )
    for path in PACKAGE.glob(pattern)
}  # fmt: skip


class Lines:
    """Counts the lines that run in those files, and strikes at one of them, or at several."""

    def __init__(self, strikes: tuple[int, ...] = ()) -> None:
        self.count = 0
        self.strikes = set(strikes)

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in STRUCK_FILES:
            return None
        if event == "line":
            self.count += 1
            if self.count in self.strikes:
                self.strikes.discard(self.count)
                raise Struck
        return self.trace

    @contextmanager
    def watching(self) -> Iterator[None]:
        sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(None)


def scenario(llm: LLM) -> None:
    """Chunks, preemption, a queue, several answers, stop strings, a stream that is left early."""
    stream = llm.stream(WAITING, GREEDY)
    next(stream)
    llm.generate([*PROMPTS, "many"], [GREEDY] * len(PROMPTS) + [SAMPLED])
    next(stream)
    stream.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"run_ahead": 2},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    ],
    ids=["plain", "ahead", "ngram"],
)
def test_an_exception_at_any_line_leaves_the_engine_right(
    text_model: Path, options: dict[str, Any]
) -> None:
    llm = make_small_llm(text_model, **options)
    expected = answers(llm)
    dry = Lines()
    with dry.watching():
        scenario(llm)
    assert llm.metrics()["num_preemptions"] > 0
    num_struck = 0
    places = random.Random(1).sample(range(1, dry.count), NUM_INJECTED // 3)
    for place in places:
        # A second strike soon after the first: while things are being mended.
        lines = Lines((place, place + 1 + place % 97))
        with lines.watching():
            try:
                scenario(llm)
            except Struck:
                num_struck += 1
        check_right(llm, expected)
    assert num_struck > 0.9 * len(places)


def test_others_go_on_when_one_call_is_interrupted(text_model: Path) -> None:
    """A queued stream survives whatever strikes the steps of another call."""
    llm = make_small_llm(text_model, max_num_seqs=1)
    (whole,) = llm.generate(WAITING, GREEDY)
    expected = whole.outputs[0].token_ids
    first = Lines()
    with first.watching():
        llm.generate("one", GREEDY)
    num_struck = 0
    for place in random.Random(2).sample(range(1, first.count), 40):
        waits = llm.stream(WAITING, GREEDY)
        lines = Lines((place,))
        busy = llm.stream("busy", GREEDY)
        next(busy)  # has the only slot
        try:
            with lines.watching():
                llm.generate("one", GREEDY)
        except Struck:
            pass
        busy.close()  # type: ignore[attr-defined]
        assert list(waits)[-1].outputs[0].token_ids == expected
        num_struck += bool(not lines.strikes)
    llm.engine.scheduler.check_idle()
    assert num_struck > 30
