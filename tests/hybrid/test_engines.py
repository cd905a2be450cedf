"""Hybrids in whole engines: answers are those of transformers, whatever happens on the way.

A scripted drafter makes drafts of which any number is accepted, 0 to K, by turns.
"""

import functools
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stoop import LLM, SamplingParams
from stoop.core.step import StepPlan
from stoop.worker.output import LaunchedStep
from stoop.worker.profiling import run_dummy_step
from support.checkpoints import MIXERS, VOCAB_SIZE, CheckpointStore
from support.draft_policies import RandomDrafts
from support.engines import generate_ids, make_llm
from support.huggingface import HuggingFace
from support.scripted import scripted, scripted_config

MODES = ("none", "piecewise", "full", "full_decode_only", "full_and_piecewise", "step")
BACKENDS = ("reference", "hostplan")
EVERY = bool(os.environ.get("STOOP_TEST_ALL"))
NUM_TOKENS = 22
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
LENGTHS = (1, 3, 4, 5, 8, 9, 16, 17, 50, 70)
# First tokens differ: the script goes by them.
PROMPTS = [[number, *(7 * i * number % VOCAB_SIZE for i in range(1, n))]
           for number, n in enumerate(LENGTHS, start=1)]  # fmt: skip
SETTINGS: dict[str, Any] = {
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 36,  # long prompts come in chunks
    "block_size": 8,
    "num_kv_blocks": 15,  # too few for all: some are preempted
    "capture_sizes": "1,2,4,36",
}


@pytest.fixture(scope="module", params=MIXERS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def folder(name: str, checkpoints: CheckpointStore) -> Path:
    return checkpoints.get(name, dtype="float64")


@functools.cache
def answers_of_transformers(folder: Path) -> list[list[int]]:
    model = HuggingFace(folder, "float64")
    return [model.greedy(prompt, NUM_TOKENS).token_ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return answers_of_transformers(folder)


@pytest.fixture(scope="module", autouse=True)
def _script(expected: list[list[int]]) -> Iterator[None]:
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    with scripted(texts, VOCAB_SIZE):
        yield


def make(folder: Path, **options: Any) -> LLM:
    num_drafts = options.pop("num_drafts", None)
    adaptive = options.pop("adaptive", False)
    if num_drafts is not None:
        options["speculative_config"] = scripted_config(num_drafts) | {"adaptive": adaptive}
    return make_llm(folder, **(SETTINGS | options))


def crossed() -> list[tuple[str, str, str]]:
    """Whole steps with every kind of layer, other modes with one; each with one of the backends."""
    if EVERY:
        return list(itertools.product(MIXERS, MODES, BACKENDS))
    return [
        (name, mode, BACKENDS[(m + n) % 2])
        for (n, name), (m, mode) in itertools.product(enumerate(MIXERS), enumerate(MODES))
        if mode == "step" or m % len(MIXERS) == n
    ]


def by_turns(*modes: str) -> list[tuple[str, str]]:
    """Each mode with one kind of layer, or all."""
    if EVERY:
        return list(itertools.product(MIXERS, modes))
    return list(zip(MIXERS, modes, strict=True))


@pytest.mark.parametrize(("name", "mode", "backend"), crossed(), indirect=["name"])
def test_drafts_change_no_answer(
    name: str, folder: Path, expected: list[list[int]], mode: str, backend: str
) -> None:
    """Invariants 2 and 10: under the sanitizer, each replay equals its eager twin, states too."""
    watched = {"attention_backend": backend, "sanitize": mode != "none"}
    num_drafts = (3, 1, 3, 7, 3, 7)[(MODES.index(mode) + MIXERS.index(name)) % 6]
    llm = make(folder, graph_mode=mode, num_drafts=num_drafts, **watched)
    assert generate_ids(llm, PROMPTS, GREEDY) == expected
    metrics = llm.metrics()
    assert metrics["num_preemptions"] > 0
    accepted = metrics["spec_decode_num_accepted_tokens"]
    assert 0 < accepted < metrics["spec_decode_num_draft_tokens"]
    assert generate_ids(llm, PROMPTS, GREEDY) == expected  # slots have been used before


@pytest.mark.parametrize(("name", "mode"), by_turns("step", "full", "none"), indirect=["name"])
def test_the_number_of_drafts_changes_no_answer(
    name: str, folder: Path, expected: list[list[int]], mode: str
) -> None:
    """From step to step: logs of the same length hold any number of tokens."""
    captured = mode != "none"
    options = {"run_ahead": MODES.index(mode) % 3, "sanitize": captured}
    llm = make(folder, graph_mode=mode, num_drafts=7, adaptive=captured, **options)
    policy = llm.engine.core.drafts = RandomDrafts((0, 1, 3, 7), seed=MIXERS.index(name))
    for _ in range(2):
        assert generate_ids(llm, PROMPTS, GREEDY) == expected
    assert len(set(policy.chosen)) == 4 and llm.metrics()["num_preemptions"] > 0


@pytest.mark.parametrize(("name", "mode"), by_turns("none", "step", "full"), indirect=["name"])
@pytest.mark.usefixtures("name")
def test_plain_decoding(folder: Path, expected: list[list[int]], mode: str) -> None:
    llm = make(folder, graph_mode=mode, sanitize=mode != "none")
    assert generate_ids(llm, PROMPTS, GREEDY) == expected


@pytest.mark.parametrize("num_tokens", [4, 5, 37])
def test_any_chunking(folder: Path, expected: list[list[int]], num_tokens: int) -> None:
    """Chunks as long as the log, one longer, and odd ones; a chunk's end may be a single token."""
    max_num_seqs = min(4, num_tokens // 4)
    llm = make(folder, num_drafts=3, max_num_batched_tokens=num_tokens, max_num_seqs=max_num_seqs)
    assert generate_ids(llm, PROMPTS, GREEDY) == expected


def test_run_ahead_changes_nothing(folder: Path, expected: list[list[int]]) -> None:
    llm = make(folder, graph_mode="step", num_drafts=3, run_ahead=2)
    assert generate_ids(llm, PROMPTS, GREEDY) == expected


def test_several_answers_of_a_prompt(folder: Path) -> None:
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=9, ignore_eos=True, n=3)
    answers = []
    for drafts in (None, 3):
        options = {} if drafts is None else {"num_drafts": drafts}
        (output,) = make(folder, **options).generate(PROMPTS[8], params, use_tqdm=False)
        answers.append([list(each.token_ids) for each in output.outputs])
    assert answers[0] == answers[1] and len({*map(tuple, answers[0])}) == 3


def test_what_slots_hold_between_requests_does_not_matter(
    folder: Path, expected: list[list[int]]
) -> None:
    """Invariant 3."""
    llm = make(folder, graph_mode="step", num_drafts=3)
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        for state in llm.engine.runner.states:
            for tensor in state.values() if isinstance(state, dict) else ():
                tensor.fill_(torch.nan)
        llm.engine.runner.target.model_state.pending.fill_(3)  # type: ignore[attr-defined]
        assert generate_ids(llm, [prompt], GREEDY) == [answer]


def test_dummy_runs_and_captures_touch_the_sink_only(folder: Path) -> None:
    """Invariant 4: every byte of every slot is as before."""
    llm = make(folder, graph_mode="full", num_drafts=3)
    runner = llm.engine.runner
    generate_ids(llm, PROMPTS[:4], GREEDY)
    held = {
        (index, key): tensor[:-1].clone()
        for index, state in enumerate(runner.states)
        if isinstance(state, dict)
        for key, tensor in state.items()
    }
    pending = runner.target.model_state.pending  # type: ignore[attr-defined]
    counts = pending[:-1].clone()
    run_dummy_step(runner.target, runner.executor, llm.config)
    with torch.inference_mode():
        runner.executor.capture(None)
    assert held
    for (index, key), before in held.items():
        assert torch.equal(runner.states[index][key][:-1], before), (index, key)
    assert torch.equal(pending[:-1], counts)


@pytest.mark.parametrize("memory", ["0", "1MiB"], ids=["zeros", "snapshots"])
def test_a_request_may_be_preempted_after_any_step(
    folder: Path, expected: list[list[int]], memory: str
) -> None:
    """Invariant 6: it starts again from zeros or a snapshot, with the tokens that it has."""
    llm = make(folder, num_drafts=3, num_kv_blocks=40, state_cache_memory=memory)
    prompt, answer = PROMPTS[8], expected[8]
    for last in range(20):
        llm.engine.add_request("r", prompt, GREEDY)
        found: list[int] = []
        for number in range(100):
            for output in llm.engine.step():
                found = list(output.outputs[0].token_ids)
            scheduler = llm.engine.scheduler
            if number == last and scheduler.running:
                scheduler._preempt(scheduler.running[0])
            if not llm.engine.has_work:
                break
        assert found == answer, last
        counts = llm.metrics()
        if counts["num_preemptions"] == last:
            break  # it had ended before that step
    assert last > 3
    assert (counts["state_cache_snapshots_restored"] > last) == (memory != "0")


def test_an_aborted_request_leaves_nothing_to_the_next_holder(
    folder: Path, expected: list[list[int]]
) -> None:
    """Invariant 8: its late steps write its own slot, before that is used again."""
    llm = make(folder, graph_mode="step", num_drafts=3, run_ahead=2, max_num_seqs=2)
    engine = llm.engine
    waiting = list(range(len(PROMPTS)))
    found: dict[str, list[int]] = {}
    step = 0
    engine.add_request("doomed-0", PROMPTS[4], GREEDY.replace(max_tokens=80))
    while waiting or engine.has_work:
        if step % 4 == 3:
            engine.abort_request(f"doomed-{step // 4}")
            if waiting:
                number = waiting.pop()
                engine.add_request(f"{number}", PROMPTS[number], GREEDY)
                params = GREEDY.replace(max_tokens=20)
                engine.add_request(f"doomed-{step // 4 + 1}", PROMPTS[5], params)
        for output in engine.step() if engine.has_work else ():
            if output.finished and output.request_id.isdigit():
                found[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
    assert found == {f"{number}": answer for number, answer in enumerate(expected)}


def test_pending_counts_logged_tokens(folder: Path) -> None:
    """Invariant 9: at most the tokens of a step, and none after a chunk."""
    llm = make(folder, num_drafts=3)
    runner = llm.engine.runner
    launch, seen = runner.launch, set()

    def spy(plan: StepPlan) -> LaunchedStep:
        launched = launch(plan)
        pending = runner.target.model_state.pending  # type: ignore[attr-defined]
        for row in plan.rows:
            count = int(pending[row.slot])
            assert 0 <= count <= min(row.num_tokens, 4) if row.num_tokens <= 4 else count == 0
            seen.add(count)
        return launched

    runner.launch = spy  # type: ignore[method-assign]
    generate_ids(llm, PROMPTS, GREEDY)
    assert seen == {0, 1, 2, 3, 4}
