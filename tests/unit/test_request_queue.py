"""The queue of waiting requests, and what a long one costs."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoop import LLM, SamplingParams
from stoop.core.request import Request, TokenRules
from stoop.scheduler.queue import RequestQueue


def make_request(number: int, priority: int = 0) -> Request:
    request = Request(str(number), (1,), TokenRules(SamplingParams(), 0, 1), priority)
    request.arrival = number
    return request


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("puxr"), st.integers(0, 3)), max_size=80))
def test_the_queue_is_a_sorted_list(actions: list[tuple[str, int]]) -> None:
    queue, model, taken = RequestQueue(), [], []
    for number, (action, value) in enumerate(actions):
        if action == "p":
            model.append(make_request(number, priority=value))
            queue.push(model[-1])
        elif action == "u" and taken:  # a preempted request comes back
            model.append(taken.pop())
            queue.push(model[-1])
        elif action == "x" and model:  # leaves from anywhere
            queue.remove(model.pop(value % len(model)))
        elif action == "r" and model:
            taken.append(queue.peek())
            queue.remove(taken[-1])
            model.remove(taken[-1])
        model.sort(key=lambda request: request.order)
        assert list(queue) == model and len(queue) == len(model) and bool(queue) == bool(model)
        assert all(request in queue for request in model)
        if model:
            assert queue.peek() is model[0]


def test_to_leave_a_long_queue_takes_linear_time() -> None:
    """With a list, 60,000 removals from the middle took half a minute."""
    requests = [make_request(number) for number in range(60_000)]
    queue = RequestQueue()
    for request in requests:
        queue.push(request)
    started = time.perf_counter()
    for request in reversed(requests):
        queue.remove(request)
    assert time.perf_counter() - started < 6
    assert not queue


class CallCounter:
    """Python calls, and calls of builtins, in each step and in all."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.in_steps: list[int] = []

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        self.num_calls += event in ("call", "c_call")


def count_calls(llm: LLM, num_prompts: int, monkeypatch: pytest.MonkeyPatch) -> CallCounter:
    counter = CallCounter()
    shared = llm._shared
    step = shared._step

    def counted(own: Any) -> None:
        before = counter.num_calls
        step(own)
        counter.in_steps.append(counter.num_calls - before)

    prompts = [[number % 150 + 1] for number in range(num_prompts)]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
    with monkeypatch.context() as patch:
        patch.setattr(shared, "_step", counted)
        sys.setprofile(counter)
        try:
            llm.generate(prompts, params, use_tqdm=False)
        finally:
            sys.setprofile(None)
    return counter


def test_the_cost_of_a_step_does_not_grow_with_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoints: Any
) -> None:
    folder = checkpoints.get("llama2", dtype="float64")
    llm = LLM(str(folder), device="cpu", skip_tokenizer_init=True, max_num_seqs=4)
    short, long = (count_calls(llm, size, monkeypatch) for size in (40, 1200))
    middle = [sorted(each.in_steps)[len(each.in_steps) // 2] for each in (short, long)]
    assert middle[1] <= 1.05 * middle[0], middle
    assert long.num_calls / 1200 <= 1.1 * short.num_calls / 40  # linear in all
