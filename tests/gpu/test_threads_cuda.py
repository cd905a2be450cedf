"""Threads that share one engine on a CUDA device, and interrupts in the middle of its steps."""

import random
import signal
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch

from stoop import SamplingParams
from support.checkpoints import write_cuda_llama
from support.engines import make_llm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_cuda_llama(tmp_path_factory.mktemp("model"), "float32"))


make_cuda_llm = partial(
    make_llm,
    device="cuda",
    dtype="float32",
    max_model_len=256,
    max_num_seqs=6,
    kv_cache_memory="64MiB",
    capture_sizes="1,2,4,6,64",
)


def make_prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(256) for _ in range(draw.choice([3, 20, 60]))] for _ in range(10)]


@pytest.mark.parametrize(
    "options", [{}, {"run_ahead": 3}, {"speculative_config": NGRAM}], ids=["step", "ahead", "ngram"]
)
def test_threads_get_their_own_answers(checkpoint: str, options: dict[str, Any]) -> None:
    llm, prompts = make_cuda_llm(checkpoint, **options), make_prompts()
    alone = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    errors: list[BaseException] = []

    def work(number: int) -> None:
        draw = random.Random(number)
        try:
            for _ in range(10):
                chosen = draw.sample(range(len(prompts)), 3)
                outputs = llm.generate([prompts[i] for i in chosen], GREEDY)
                assert [o.outputs[0].token_ids for o in outputs] == [alone[i] for i in chosen]
                *_, last = llm.stream(prompts[chosen[0]], GREEDY)
                assert last.outputs[0].token_ids == alone[chosen[0]]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    llm.engine.scheduler.check_idle()


def test_ctrl_c_at_any_time_leaves_the_engine_right(checkpoint: str) -> None:
    llm, prompts = make_cuda_llm(checkpoint, run_ahead=2), make_prompts()
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)]
    main, draw, pressing = threading.main_thread().ident, random.Random(1), threading.Event()
    assert main is not None and threading.get_ident() == main

    def press(after: float) -> None:
        time.sleep(after)
        if pressing.is_set():
            signal.pthread_kill(main, signal.SIGINT)

    num_raised = 0
    for _ in range(60):
        pressing.set()
        thread = threading.Thread(target=press, args=(0.03 * draw.random(),))
        try:
            thread.start()
            llm.generate(prompts * 3, GREEDY)
            thread.join()
        except KeyboardInterrupt:
            num_raised += 1
        pressing.clear()
        thread.join()
        llm.engine.scheduler.check_idle()
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)] == expected
    assert num_raised > 20


def test_a_step_that_fails_on_the_device_is_mended(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With steps in flight: they are forgotten, and nothing of theirs is seen later."""
    llm, prompts = make_cuda_llm(checkpoint, run_ahead=3), make_prompts()
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)]
    launch, num_launched = llm.engine.runner.launch, 0

    def fail_now_and_then(plan: Any) -> Any:
        nonlocal num_launched
        num_launched += 1
        launched = launch(plan)
        if num_launched % 7 == 0:
            raise ZeroDivisionError
        return launched

    for _ in range(10):
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.runner, "launch", fail_now_and_then)
            with pytest.raises(ZeroDivisionError):
                llm.generate(prompts, GREEDY)
        llm.engine.scheduler.check_idle()
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)] == expected
