"""The numbered invariants of plain decoding: each test names the number that it holds.

Numbers are those of the project's list. Left out are those of speculation, graphs, several
devices, and what needs a GPU (19: streams; 24: sleep and wake; 28: copy on write).
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stoop import SamplingParams
from stoop.batch.staging import StagedWrites
from stoop.core.request import Request
from stoop.core.step import Admission, BlockAppend
from stoop.sampling.verifier import Verdict
from stoop.worker.output import OutputRing, StepOutput
from stoop.worker.profiling import run_dummy_step
from support.engines import generate_ids
from support.scheduling import GREEDY, make_request, make_rules
from support.tiny_llama import VOCAB, make_tiny_llm, run_requests

PROMPTS = [[5, 6, 7], list(range(11, 24)), [5, 6, 7, 8, 9, 10, 11, 12, 13], [99]]
GREEDY_24 = SamplingParams(temperature=0.0, max_tokens=24)


def greedy_requests(prefix: str = "r", max_tokens: int = 24) -> list[Request]:
    return [make_request(f"{prefix}{i}", p, max_tokens) for i, p in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def greedy_answers() -> list[list[int]]:
    """One request at a time, in an engine with room for all."""
    llm = make_tiny_llm(max_num_seqs=1, enable_prefix_caching=False)
    return [generate_ids(llm, [prompt], GREEDY_24)[0] for prompt in PROMPTS]


# ---- 15: counters ----


def check_counters(engine: Any, *, drained: bool) -> None:
    slots = engine.runner.target.state.tensors
    for request in engine.scheduler.running:
        device_computed = int(slots.num_computed[request.slot])
        device_known = int(slots.num_tokens[request.slot])
        if drained:
            assert request.num_computed == device_computed
            assert request.num_tokens == device_known
            history = slots.token_ids[request.slot, :device_known].tolist()
            assert history == request.token_ids
        else:
            assert request.num_computed >= device_computed


@pytest.mark.parametrize("num_kv_blocks", [128, 18])
def test_invariant_15_host_counters_bound_device_counters(num_kv_blocks: int) -> None:
    engine = make_tiny_llm(
        max_num_seqs=4, max_num_batched_tokens=6, num_kv_blocks=num_kv_blocks
    ).engine
    for request in greedy_requests():
        engine.scheduler.add(request)
    num_checks = 0
    while engine.scheduler.has_work:
        plan = engine.scheduler.schedule()
        admitted = {admission.slot for admission in plan.admissions}
        live = [r for r in engine.scheduler.running if r.slot not in admitted]
        slots = engine.runner.target.state.tensors
        assert all(r.num_computed >= int(slots.num_computed[r.slot]) for r in live)
        result = engine.runner.execute(plan)
        check_counters(engine, drained=False)
        engine.scheduler.update(result)
        check_counters(engine, drained=True)
        num_checks += len(engine.scheduler.running)
    assert num_checks > 50
    assert (engine.scheduler.stats.num_preemptions > 0) == (num_kv_blocks == 18)


@pytest.mark.parametrize("ahead", [1, 2, 4])
@pytest.mark.parametrize("num_kv_blocks", [128, 18])
def test_invariant_15_bounds_hold_with_steps_under_way(num_kv_blocks: int, ahead: int) -> None:
    """Drafts make the bounds loose; the device's numbers stay within them."""
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    llm = make_tiny_llm(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        num_kv_blocks=num_kv_blocks,
        run_ahead=ahead,
        speculative_config=ngram,
    )
    engine, slots = llm.engine, llm.engine.runner.target.state.tensors
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, GREEDY_24.replace(ignore_eos=True))
    loose = 0
    while engine.has_work:
        engine.step()
        for request in engine.scheduler.running:
            known = int(slots.num_tokens[request.slot])
            computed = int(slots.num_computed[request.slot])
            assert request.num_tokens <= known <= request.num_expected
            assert computed <= request.num_computed
            history = slots.token_ids[request.slot, : request.num_tokens].tolist()
            assert history == request.token_ids
            if request.in_flight:
                loose += computed < request.num_computed
            else:
                assert (known, computed) == (request.num_tokens, request.num_computed)
    assert loose > 5
    assert (engine.scheduler.stats.num_preemptions > 0) == (num_kv_blocks == 18)


# ---- 16: reused slots ----

LADEN = SamplingParams(
    temperature=1.7,
    top_k=7,
    top_p=0.8,
    min_p=0.05,
    repetition_penalty=1.9,
    presence_penalty=1.5,
    frequency_penalty=1.5,
    logit_bias={3: 50.0, 65: -100.0, 6: -100.0},
    min_tokens=3,
    logprobs=4,
    max_tokens=None,
)
PLAIN = {
    "greedy": GREEDY,
    "seeded": SamplingParams(max_tokens=None),
    "penalised": SamplingParams(presence_penalty=0.1, min_tokens=1, max_tokens=None),
    "biased": SamplingParams(logit_bias={9: 0.5}, temperature=0.0, max_tokens=None),
}


def laden_request(name: str) -> Request:
    return make_request(
        name,
        list(range(40, 52)),
        max_tokens=16,
        params=LADEN,
        seed=123,
        stop_ids=range(100, 128),
        bad_words=[(80,), (6, 6), (64,)],
    )


def plain_request(kind: str) -> Request:
    words = [(1,)] if kind == "penalised" else []
    return make_request(
        kind, [5, 6, 7], 16, params=PLAIN[kind], seed=9, stop_ids=(2,), bad_words=words
    )


def test_invariant_16_a_like_request_in_the_same_slot_is_sampled_by_its_own_rules() -> None:
    """The batch looks the same from one step to the next: one row of one token."""
    llm = make_tiny_llm(max_num_seqs=1, enable_prefix_caching=False)
    params = [
        SamplingParams(temperature=0.0, max_tokens=1),
        *(SamplingParams(temperature=3.0, seed=seed, max_tokens=1) for seed in range(4)),
        SamplingParams(temperature=3.0, top_k=1, max_tokens=1),
        SamplingParams(temperature=0.0, logit_bias={9: 100.0}, max_tokens=1),
        SamplingParams(temperature=0.0, max_tokens=1),
    ]
    fresh = [
        generate_ids(make_tiny_llm(max_num_seqs=1, enable_prefix_caching=False), [[5]], each)[0]
        for each in params
    ]
    assert generate_ids(llm, [[5]] * len(params), params) == fresh
    assert len({tuple(answer) for answer in fresh}) > 3


@pytest.mark.parametrize("kind", PLAIN)
def test_invariant_16_reused_slots_keep_nothing_of_their_former_holder(kind: str) -> None:
    options = {"max_num_seqs": 1, "enable_prefix_caching": False}
    fresh = run_requests(make_tiny_llm(**options).engine, [plain_request(kind)])
    engine = make_tiny_llm(**options).engine
    run_requests(engine, [laden_request("laden")])
    assert run_requests(engine, [plain_request(kind)]) == fresh


def test_invariant_16_every_parameter_of_a_slot_is_rewritten() -> None:
    """After a laden holder, a plain one's row is as in a fresh engine, up to its live length."""
    rows = []
    for requests in ([plain_request("seeded")], [laden_request("l"), plain_request("seeded")]):
        engine = make_tiny_llm(max_num_seqs=1, enable_prefix_caching=False).engine
        run_requests(engine, requests)
        state = engine.runner.target.sampling_state
        counts = {"stop_ids": state.stop_counts, "bias_ids": state.bias_counts}
        counts |= {"bias_values": state.bias_counts, "bad_words": state.bad_word_counts}
        row = {}
        for field in fields(state):
            value = getattr(state, field.name)[0]
            if field.name in counts:
                value = value[: int(counts[field.name][0])]
            row[field.name] = value.tolist()
        rows.append(row)
    assert rows[0] == rows[1]


# ---- 17: preemption ----


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("budget", [None, 6])
def test_invariant_17_preempted_answers_equal_uninterrupted_ones(
    greedy_answers: list[list[int]], prefix_caching: bool, budget: int | None
) -> None:
    llm = make_tiny_llm(
        max_num_seqs=4,
        num_kv_blocks=18,
        max_num_batched_tokens=budget,
        enable_prefix_caching=prefix_caching,
    )
    assert generate_ids(llm, PROMPTS, GREEDY_24) == greedy_answers
    assert llm.metrics()["num_preemptions"] > 0


def test_invariant_17_chunks_and_cached_prefixes_change_nothing(
    greedy_answers: list[list[int]],
) -> None:
    llm = make_tiny_llm(max_num_seqs=4, max_num_batched_tokens=4)
    for _ in range(2):
        assert generate_ids(llm, PROMPTS, GREEDY_24) == greedy_answers
    assert llm.metrics()["prefix_cache_hit_tokens"] > 0


# ---- 18: host buffers ----


def test_invariant_18_staged_values_are_the_callers_no_more() -> None:
    staged, target = StagedWrites(torch.device("cpu")), torch.zeros(2, 4, dtype=torch.int64)
    values = [1, 2, 3]
    staged.put(target, 0, values)
    values[0] = 99
    staged.apply()
    values[1] = 98
    assert target.tolist() == [[1, 2, 3, 0], [0] * 4]
    staged.put(target, 1, [7])
    assert target.tolist() == [[1, 2, 3, 0], [0] * 4]


def test_invariant_18_each_step_stages_from_arrays_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No host array is written again by a later step, so a copy under way reads what was meant."""
    engine = make_tiny_llm(max_num_seqs=4, max_num_batched_tokens=8).engine
    buffers = engine.runner.target.buffers
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    copy_in = buffers._copy_in

    def spy(target: torch.Tensor, host: np.ndarray) -> None:
        seen.append((host, host.copy()))
        copy_in(target, host)

    monkeypatch.setattr(buffers, "_copy_in", spy)
    run_requests(engine, greedy_requests())
    assert len(seen) > 10  # a batch that goes on as it is copies nothing
    assert all(np.array_equal(host, then) for host, then in seen)
    assert not any(np.shares_memory(a, b) for (a, _), (b, _) in pairwise(seen))


def test_invariant_18_an_outcome_is_not_written_over_before_it_is_read() -> None:
    """Not even if a launch failed behind its copy, and nobody will read that one."""
    verdict = Verdict.make(2, 3, torch.device("cpu"))
    ring = OutputRing(verdict, 2)
    in_flight: deque[tuple[int, StepOutput]] = deque()
    places = set()
    for step in range(40):
        if len(in_flight) == 2:
            number, output = in_flight.popleft()
            output.wait()
            assert output.host.packed.tolist() == [number] * 10
            output.release()
        verdict.packed.fill_(step)
        output = ring.send()
        places.add(output.host.packed.data_ptr())
        if step % 7:  # else it is lost
            in_flight.append((step, output))
    assert len(places) <= 2 + 6


def test_invariant_18_a_plan_is_not_changed_by_later_scheduling() -> None:
    engine = make_tiny_llm(max_num_seqs=4, num_kv_blocks=18).engine
    for request in greedy_requests():
        engine.scheduler.add(request)
    plans = []
    while engine.scheduler.has_work:
        plan = engine.scheduler.schedule()
        plans.append((plan, repr(plan)))
        engine.scheduler.update(engine.runner.execute(plan))
    assert all(repr(plan) == then for plan, then in plans)


# ---- 20: no host syncs ----

SYNCING_METHODS = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__")


_reads_allowed = False


@contextmanager
def _allow_reads() -> Iterator[None]:
    global _reads_allowed
    _reads_allowed = True
    try:
        yield
    finally:
        _reads_allowed = False


class _RefuseSyncs(TorchDispatchMode):
    """Operations for which a GPU would make the host wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "stoop":
            # One launch to the host. On a CPU it is Python that reads its own memory.
            with _allow_reads():
                return func(*args, **(kwargs or {}))
        name = func.name().split("::")[1].split(".")[0]
        masks = name in ("index", "index_put", "index_put_") and any(
            t is not None and t.dtype == torch.bool for t in args[1]
        )
        waits = name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero")
        assert not masks and not waits, f"{func.name()} waits for the device"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_syncs() -> Iterator[None]:
    def refuse(name: str) -> Callable[..., None]:
        original = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: object, **kwargs: object) -> Any:
            if _reads_allowed:
                return original(self, *args, **kwargs)
            raise AssertionError(f"Tensor.{name} waits for the device")

        return method

    with pytest.MonkeyPatch.context() as patch, _RefuseSyncs():
        for name in SYNCING_METHODS:
            patch.setattr(torch.Tensor, name, refuse(name))
        yield


def test_invariant_20_guard_notices_syncs() -> None:
    tensor = torch.arange(3)
    for sync in (lambda: tensor[0].item(), lambda: bool(tensor.any()), lambda: tensor[tensor > 1]):
        with pytest.raises(AssertionError, match="waits for the device"), no_host_syncs():
            sync()


def mixed_requests() -> list[Request]:
    params = LADEN.replace(logprobs=None)
    words = [(80,), (6, 6)]
    laden = make_request("l", PROMPTS[0], 8, params=params, stop_ids=(1,), bad_words=words)
    return [laden, *greedy_requests(max_tokens=8)]


def run_phases(guarded: str, requests: list[Request]) -> int:
    """Steps run with one phase under guard."""
    engine = make_tiny_llm(max_num_seqs=8).engine
    runner, scheduler = engine.runner, engine.scheduler
    for request in requests:
        scheduler.add(request)
    num_steps = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        with pytest.MonkeyPatch.context() as patch:
            phase = getattr(runner.target, guarded)

            def under_guard(*args: Any, phase: Any = phase) -> Any:
                with no_host_syncs():
                    return phase(*args)

            patch.setattr(runner.target, guarded, under_guard)
            scheduler.update(runner.execute(plan))
        num_steps += 1
    return num_steps


@pytest.mark.parametrize("phase", ["inputs", "forward", "verify", "update"])
def test_invariant_20_phases_do_not_wait_for_the_device(phase: str) -> None:
    assert run_phases(phase, mixed_requests()) > 5


# ---- 21 and 22: chunks ----


def test_invariant_21_prompt_tail_is_not_overwritten_by_a_sampled_token() -> None:
    """Every row gets a token from the sampler; only a prompt's last chunk may keep it."""
    engine = make_tiny_llm(max_num_seqs=4, max_num_batched_tokens=4).engine
    requests = [make_request("a", range(20, 40), 4), make_request("b", [1, 2], 12)]
    slots = engine.runner.target.state.tensors

    def check_prompts() -> None:
        for request in engine.scheduler.running:
            prompt = list(request.prompt_token_ids)
            assert slots.token_ids[request.slot, : len(prompt)].tolist() == prompt

    run_requests(engine, requests, between=check_prompts)
    assert all(request.num_output_tokens for request in requests)


def test_invariant_22_chunks_before_the_last_sample_nothing() -> None:
    engine = make_tiny_llm(max_num_seqs=4, max_num_batched_tokens=4).engine
    request = make_request("a", range(20, 33), 2)
    engine.scheduler.add(request)
    found = []
    for _ in range(4):
        plan = engine.scheduler.schedule()
        result = engine.runner.execute(plan)
        slot = request.slot
        known = int(engine.runner.target.state.tensors.num_tokens[slot])
        found.append((plan.rows[0].samples, len(result.rows[0].token_ids), known))
        assert bool(engine.runner.target.buffers.step.samples[0]) == plan.rows[0].samples
        engine.scheduler.update(result)
    assert found == [(False, 0, 13), (False, 0, 13), (False, 0, 13), (True, 1, 14)]


# ---- 23: stale results ----


def test_invariant_23_results_of_freed_rows_are_discarded(
    greedy_answers: list[list[int]],
) -> None:
    """An abort while a step is under way; its slot and blocks go to the next at once."""
    engine = make_tiny_llm(max_num_seqs=1, num_kv_blocks=18, enable_prefix_caching=False).engine
    scheduler = engine.scheduler
    doomed = make_request("doomed", range(60, 80), 24)
    follower = make_request("follower", PROMPTS[0], 24)
    scheduler.add(doomed)
    scheduler.add(follower)
    result = engine.runner.execute(scheduler.schedule())
    scheduler.abort("doomed")
    assert scheduler.update(result) == []
    assert doomed.output_token_ids == []
    assert run_requests(engine, []) == []
    assert follower.output_token_ids == greedy_answers[0]


# ---- 25: bounds ----


def test_invariant_25_oversize_writes_raise() -> None:
    runner = make_tiny_llm(max_num_seqs=2).engine.runner
    limit = runner.config.schedule.max_model_len
    too_long = Admission(0, [1] * (limit + 1), 1, 0, make_rules(), limit)
    with pytest.raises(IndexError):
        runner.target.state.admit(runner.staged, too_long)
    with pytest.raises(IndexError):
        runner.target.state.append_blocks(
            runner.staged, BlockAppend(0, runner.target.state.max_blocks, [1])
        )
    many = make_rules(stop_ids=range(200))
    with pytest.raises(IndexError):
        runner.target.sampling_state.admit(runner.staged, 0, many)


def test_invariant_25_positions_stay_below_the_model_limit() -> None:
    engine = make_tiny_llm(max_num_seqs=4, max_model_len=20, num_kv_blocks=32).engine
    requests = [make_request(f"r{i}", range(1, n + 1), 1000) for i, n in enumerate((19, 18, 3))]
    step, highest = engine.runner.target.buffers.step, []
    run_requests(engine, requests, between=lambda: highest.append(int(step.positions.max())))
    assert [r.num_tokens for r in requests] == [20, 20, 20]
    assert {r.finish_reason for r in requests} == {"length"}
    assert max(highest) == 18  # the token at 19 ends the answer and is never computed


# ---- 26: prefix cache ----


def test_invariant_26_only_confirmed_tokens_enter_the_prefix_cache() -> None:
    engine = make_tiny_llm(max_num_seqs=4, max_num_batched_tokens=6).engine
    scheduler = engine.scheduler
    for request in greedy_requests():
        scheduler.add(request)
    while scheduler.has_work:
        running = list(scheduler.running)
        before = len(scheduler.prefix_cache)
        plan = scheduler.schedule()
        assert len(scheduler.prefix_cache) == before
        result = engine.runner.execute(plan)
        scheduler.update(result)
        slots = engine.runner.target.state.tensors
        for request in running:
            if request.finished:
                continue
            computed = int(slots.num_computed[request.slot])
            assert request.num_offered_blocks * 4 <= computed
            assert request.num_offered_blocks * 4 <= request.num_tokens
    # Every entry is a stretch of some request's tokens, never past its last computed one.
    texts = [[*p, *a] for p, a in zip(PROMPTS, map(list, _answers(engine)), strict=True)]
    for entry in scheduler.prefix_cache._entries.values():
        assert any(
            tuple(text[i : i + 4]) == entry.tokens and i + 4 < len(text)
            for text in texts
            for i in range(0, len(text), 4)
        )


def _answers(engine: Any) -> list[list[int]]:
    return run_requests(engine, greedy_requests("again"))


# ---- 27 and 29: the null block ----


def poison(engine: Any, blocks: list[int]) -> None:
    for cache in engine.runner.kv_caches:
        cache[:, blocks] = float("nan")


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_invariant_27_the_null_block_is_neither_written_nor_read(
    greedy_answers: list[list[int]], value: float
) -> None:
    engine = make_tiny_llm(max_num_seqs=4, max_num_batched_tokens=6, num_kv_blocks=18).engine
    for cache in engine.runner.kv_caches:
        cache[:, 0] = value
    before = [cache[:, 0].clone() for cache in engine.runner.kv_caches]
    assert run_requests(engine, greedy_requests()) == greedy_answers
    for cache, then in zip(engine.runner.kv_caches, before, strict=True):
        assert torch.equal(cache[:, 0].isnan(), then.isnan())
        assert torch.equal(cache[:, 0].nan_to_num(), then.nan_to_num())


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_invariant_27_free_blocks_are_never_read(
    greedy_answers: list[list[int]], prefix_caching: bool
) -> None:
    """NaN in every block that nobody holds and nobody may find again, before every step."""
    engine = make_tiny_llm(
        max_num_seqs=4,
        max_num_batched_tokens=6,
        num_kv_blocks=18,
        enable_prefix_caching=prefix_caching,
    ).engine
    pool = engine.scheduler.pool

    def poison_free() -> None:
        free = [b for b in range(pool.num_blocks) if not pool.refs(b) and b not in pool._cached]
        poison(engine, free)

    assert run_requests(engine, greedy_requests(), between=poison_free) == greedy_answers
    assert engine.scheduler.stats.num_preemptions > 0


def test_invariant_27_places_past_a_requests_end_are_never_read(
    greedy_answers: list[list[int]],
) -> None:
    """NaN in the unused rest of every held block."""
    engine = make_tiny_llm(max_num_seqs=4, max_num_batched_tokens=6).engine

    def poison_rest() -> None:
        for request in engine.scheduler.running:
            used = request.num_computed
            for index, block in enumerate(request.block_ids):
                for cache in engine.runner.kv_caches:
                    cache[:, block, max(0, min(4, used - 4 * index)) :] = float("nan")

    assert run_requests(engine, greedy_requests(), between=poison_rest) == greedy_answers


def test_invariant_29_dummy_runs_leave_the_cache_and_live_slots_alone(
    greedy_answers: list[list[int]],
) -> None:
    engine = make_tiny_llm(max_num_seqs=4, max_num_batched_tokens=32, num_kv_blocks=18).engine
    runner = engine.runner

    def everything() -> list[torch.Tensor]:
        slots, rules = runner.target.state.tensors, runner.target.sampling_state
        state = [getattr(slots, f.name)[:-1] for f in fields(slots)]
        sampling = [getattr(rules, f.name) for f in fields(rules)]
        bits = [cache.view(torch.int64) for cache in runner.kv_caches]  # unused places may be NaN
        return [*bits, *state, *sampling]

    def dummy_run() -> None:
        before = [tensor.clone() for tensor in everything()]
        run_dummy_step(runner.target, runner.executor, runner.config)
        assert all(torch.equal(a, b) for a, b in zip(everything(), before, strict=True))

    dummy_run()
    assert run_requests(engine, greedy_requests(), between=dummy_run) == greedy_answers


# ---- 37: broken logits ----


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_invariant_37_broken_logits_give_tokens_in_range(value: float) -> None:
    engine = make_tiny_llm(max_num_seqs=4).engine
    model = engine.runner.model
    logits = model.logits
    model.logits = lambda hidden: torch.full_like(logits(hidden), value)
    requests = [
        make_request("greedy", [1, 2], 4),
        make_request("noisy", [1, 2], 4, params=SamplingParams(seed=1)),
        make_request("laden", [1, 2], 4, params=LADEN, bad_words=[(3,)], stop_ids=(4,)),
    ]
    answers = run_requests(engine, requests)
    if value != float("inf"):  # there is no next token, so there is none out of range
        assert [request.finish_reason for request in requests] == ["error"] * 3
        assert answers == [[], [], []] and "NaN" in str(requests[0].stop_reason)
        return
    for answer in answers:
        assert len(answer) == 4 or answer[-1] == 4
        assert all(0 <= token < VOCAB for token in answer)


# ---- chunks and bad words together ----


def test_bad_words_with_chunked_prompts() -> None:
    prompt = list(range(20, 50))
    whole = make_tiny_llm(max_num_seqs=2, max_num_batched_tokens=64).engine
    chunks = make_tiny_llm(max_num_seqs=2, max_num_batched_tokens=8).engine
    answers = [
        run_requests(engine, [make_request("a", prompt, 8, bad_words=[(80,), (6, 6)])])
        for engine in (whole, chunks)
    ]
    assert answers[0] == answers[1]


def test_a_stream_survives_another_call_in_between() -> None:
    llm = make_tiny_llm(max_num_seqs=4)
    stream = llm.stream([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=5))
    next(stream)
    llm.generate([[4, 5]], GREEDY_24, use_tqdm=False)
    assert list(stream)[-1].finished
