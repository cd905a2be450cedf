"""Run-ahead as users see it: every way to come, to go and to end, against the plain loop."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stoop import LLM, RequestError, SamplingParams
from stoop.core.outputs import RequestOutput
from stoop.core.step import StepPlan, StepResult
from stoop.worker.output import LaunchedStep
from support.engines import make_llm

AHEAD = (1, 2, 4)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = GREEDY.replace(temperature=1.0, seed=5)
PENALISED = SEEDED.replace(
    seed=6, top_p=0.9, frequency_penalty=0.4, repetition_penalty=1.2, logit_bias={7: 1.0}
)
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
LONG = "a prompt of several blocks, which others begin with as well; "
EOS = 257
SETTINGS: dict[str, Any] = {
    "max_model_len": 96,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 24,
    "block_size": 8,
    "num_kv_blocks": 256,
}


def make_ahead_llm(folder: Path, run_ahead: int, **options: Any) -> LLM:
    return make_llm(folder, run_ahead=run_ahead, **SETTINGS | options)


@dataclass
class Watch:
    """Looks on while an engine runs ahead."""

    llm: LLM
    depths: set[int] = field(default_factory=set)  # steps under way, with the one just launched
    num_drained: int = 0  # launches that had to wait for scores
    num_reused_slots: int = 0  # while a step of the former holder was under way
    num_preemptions: int = 0
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        runner = self.llm.engine.runner
        launch = runner.launch

        def spy(plan: StepPlan) -> LaunchedStep:
            self._look(plan)
            return launch(plan)

        runner.launch = spy  # type: ignore[method-assign]

    def _look(self, plan: StepPlan) -> None:
        under_way = list(self.llm.engine.core._in_flight)
        assert not any(launched.wants_scores for _, launched in under_way), "hidden states are lost"
        self.num_drained += any(row.rules.params.wants_scores for row in plan.rows)
        self.depths.add(len(under_way) + 1)
        before, self.num_preemptions = self.num_preemptions, self.llm.metrics()["num_preemptions"]
        assert not under_way or before == self.num_preemptions, "preempted with steps under way"
        slots = {row.slot for other, _ in under_way for row in other.rows}
        self.num_reused_slots += sum(admission.slot in slots for admission in plan.admissions)
        self.plans.append(plan)


def summary(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [(a.index, a.token_ids, a.text, a.finish_reason, a.stop_reason) for a in output.outputs]


def serve(llm: LLM, requests: list[tuple[str, SamplingParams]]) -> dict[str, RequestOutput]:
    """One arrives with every other step, while the others run."""
    engine, outputs, step = llm.engine, {}, 0
    pending = [(f"r{i}", *request) for i, request in enumerate(requests)]
    while pending or engine.has_work:
        if pending and (step % 2 == 0 or not engine.has_work):
            engine.add_request(*pending.pop(0))
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = output
        step += 1
    engine.scheduler.check_idle()
    return outputs


# ---- every kind of request ----


@pytest.fixture(scope="module")
def every_request(text_model: Path) -> list[tuple[str, SamplingParams]]:
    """Stops are taken from what the model says without them."""
    llm = make_ahead_llm(text_model, 0)
    (plain,) = llm.generate("stop here", GREEDY)
    answer = plain.outputs[0]
    token = next(t for t in answer.token_ids[5:] if t not in answer.token_ids[:5])
    early = answer.token_ids[1]
    string = answer.text[9:12]
    assert len(string) == 3 and string not in answer.text[:9]
    ends = SEEDED.replace(ignore_eos=False, logit_bias={EOS: 4.0}, max_tokens=60)
    return [
        ("one", GREEDY),
        ("stop here", GREEDY.replace(stop_token_ids=[token, 3])),
        ("stop here", GREEDY.replace(stop=string)),
        ("stop here", GREEDY.replace(stop=string, include_stop_str_in_output=True)),
        ("stop here", GREEDY.replace(stop_token_ids=[early], min_tokens=6)),
        ("to the limit", GREEDY.replace(max_tokens=None)),
        (LONG + "x", SEEDED),
        (LONG + "y", PENALISED),
        (LONG + "x", GREEDY.replace(max_tokens=1)),
        ("scores", GREEDY.replace(logprobs=2, max_tokens=9)),
        (LONG, SEEDED.replace(prompt_logprobs=1, max_tokens=3)),
        ("three", SEEDED.replace(n=3, max_tokens=11)),
        *(("eos", ends.replace(seed=seed)) for seed in range(4)),
        ("scores of three", PENALISED.replace(n=3, logprobs=1, max_tokens=5)),
        ("one", GREEDY.replace(max_tokens=2)),
    ]


def check_scores(found: RequestOutput, expected: RequestOutput) -> None:
    for ours, theirs in zip(found.outputs, expected.outputs, strict=True):
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        if ours.logprobs is not None:
            assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-9)
            for mine, other in zip(ours.logprobs, theirs.logprobs or [], strict=True):
                assert scores_of(mine) == pytest.approx(scores_of(other), abs=1e-9)
    prompt, other_prompt = found.prompt_logprobs, expected.prompt_logprobs
    assert (prompt is None) == (other_prompt is None)
    for mine, other in zip((prompt or [])[1:], (other_prompt or [])[1:], strict=True):
        assert scores_of(mine) == pytest.approx(scores_of(other), abs=1e-9)


def scores_of(entry: Any) -> dict[int, float]:
    return {token: each.logprob for token, each in entry.items()}


CASES = [
    (1, {}),
    (4, {}),
    (2, {"speculative_config": NGRAM}),
    (4, {"speculative_config": NGRAM, "attention_backend": "hostplan"}),
    (1, {"num_kv_blocks": 14}),
    (4, {"num_kv_blocks": 14, "speculative_config": NGRAM}),
    (2, {"enable_prefix_caching": False, "max_num_seqs": 2}),
    (2, {"graph_mode": "step", "sanitize": True, "capture_sizes": "1,3,24"}),
]


@pytest.fixture(scope="module")
def plain(text_model: Path, every_request):
    """Outputs and metrics of the plain loop, with drafts or without."""

    @functools.cache
    def answers(drafts: bool) -> tuple[dict[str, RequestOutput], dict[str, Any]]:
        llm = make_ahead_llm(text_model, 0, speculative_config=NGRAM if drafts else None)
        return serve(llm, every_request), llm.metrics()

    return answers


@pytest.mark.parametrize(("ahead", "options"), CASES)
def test_every_kind_of_request(
    text_model: Path, every_request, plain, ahead: int, options: dict[str, Any]
) -> None:
    expected, plain_metrics = plain("speculative_config" in options)
    llm = make_ahead_llm(text_model, ahead, **options)
    watch = Watch(llm)
    found = serve(llm, every_request)
    assert found.keys() == expected.keys()
    for name, output in expected.items():
        assert summary(found[name]) == summary(output), name
        check_scores(found[name], output)
    reasons = {(a.finish_reason, type(a.stop_reason)) for o in found.values() for a in o.outputs}
    assert reasons >= {("stop", int), ("stop", str), ("length", type(None))}
    assert watch.depths == set(range(1, ahead + 2)) and watch.num_drained > 5
    metrics = llm.metrics()
    assert (metrics["num_preemptions"] > 0) == ("num_kv_blocks" in options)
    for key in ("num_requests_finished", "num_generated_tokens", "num_prompt_tokens"):
        assert metrics[key] == plain_metrics[key], key
    if not metrics["num_preemptions"]:  # which cuts runs of drafts
        for key, value in plain_metrics.items():
            assert not key.startswith("spec_") or metrics[key] == value, key


@pytest.mark.parametrize("ahead", AHEAD)
def test_aborts_in_mid_flight(text_model: Path, ahead: int) -> None:
    """The aborted keep what was read; whoever comes after them finds nothing amiss."""
    texts = [f"{LONG[: 10 + 6 * i]}{i}" for i in range(9)]
    expected = {
        text: make_ahead_llm(text_model, 0).generate(text, GREEDY)[0].outputs[0].token_ids
        for text in texts
    }
    llm = make_ahead_llm(text_model, ahead, num_kv_blocks=32)
    watch, engine = Watch(llm), llm.engine
    for text in texts:
        engine.add_request(text, text, GREEDY)
    finished: dict[str, list[int]] = {}
    for step in range(400):
        if not engine.has_work:
            break
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output.outputs[0].token_ids
        if step in (2, 7, 9) and engine.scheduler.running:
            victim = engine.scheduler.running[step % len(engine.scheduler.running)]
            text = victim.request_id.rpartition("/")[0]
            output = engine.abort_request(text)
            assert output is not None and output.outputs[0].finish_reason == "abort"
            kept = output.outputs[0].token_ids
            assert kept == expected[text][: len(kept)]
            engine.add_request(text, text, GREEDY)  # at once, by the same name
    assert finished == expected
    assert watch.num_reused_slots >= 3
    engine.scheduler.check_idle()


@pytest.mark.parametrize("ahead", AHEAD)
def test_slots_are_reused_while_steps_are_under_way(text_model: Path, ahead: int) -> None:
    """Requests end by stop tokens: the host learns of it when the next steps are launched."""
    plain = make_ahead_llm(text_model, 0, max_num_seqs=2)
    texts = [f"text {i}" for i in range(8)]
    free = {text: plain.generate(text, PENALISED)[0].outputs[0].token_ids for text in texts}
    params = [
        PENALISED.replace(stop_token_ids=[free[text][2 + i % 3]]) for i, text in enumerate(texts)
    ]
    expected = [summary(output) for output in plain.generate(texts, params)]
    llm = make_ahead_llm(text_model, ahead, max_num_seqs=2)
    watch = Watch(llm)
    assert [summary(output) for output in llm.generate(texts, params)] == expected
    assert watch.num_reused_slots >= 4
    # The dead steps that were under way at the end disturb nobody.
    assert llm.engine.core._in_flight
    assert [summary(output) for output in llm.generate(texts, params)] == expected


def test_a_request_that_is_sure_to_end_launches_nothing_in_vain(text_model: Path) -> None:
    llm = make_ahead_llm(text_model, 4)
    watch = Watch(llm)
    llm.generate("hello", GREEDY.replace(max_tokens=7))
    assert len(watch.plans) == llm.metrics()["num_steps"] == 7
    assert not llm.engine.core._in_flight


# ---- streams ----


@pytest.mark.parametrize("ahead", AHEAD)
def test_streams_and_calls_take_turns(text_model: Path, ahead: int) -> None:
    plain = make_ahead_llm(text_model, 0)
    expected = {t: plain.generate(t, GREEDY)[0].outputs[0].token_ids for t in ("one", "two", "six")}
    llm = make_ahead_llm(text_model, ahead)
    streams: dict[str, Iterator[RequestOutput]] = {t: llm.stream(t, GREEDY) for t in ("one", "two")}
    seen: dict[str, list[int]] = {t: [] for t in streams}
    for turn in range(GREEDY.max_tokens):
        for text, stream in streams.items():
            ids = next(stream).outputs[0].token_ids
            assert ids[: len(seen[text])] == seen[text] and len(ids) > len(seen[text])
            seen[text] = ids
        if turn in (3, 11):
            (output,) = llm.generate("six", GREEDY)
            assert output.outputs[0].token_ids == expected["six"]
    assert seen == {t: expected[t] for t in streams}
    assert all(next(stream, None) is None for stream in streams.values())
    llm.engine.scheduler.check_idle()


def test_leaving_a_stream_early_frees_everything(text_model: Path) -> None:
    llm = make_ahead_llm(text_model, 2)
    stream = llm.stream("hello", GREEDY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    llm.engine.scheduler.check_idle()
    expected = make_ahead_llm(text_model, 0).generate("hello", GREEDY)
    assert summary(llm.generate("hello", GREEDY)[0]) == summary(expected[0])


# ---- steps that fail ----


class Refused(Exception):
    pass


def fail_at(monkeypatch: pytest.MonkeyPatch, llm: LLM, where: str, number: int) -> list[set[str]]:
    """The step of this number fails once; returns, when it has, whose it was."""
    lost: list[set[str]] = []
    runner = llm.engine.runner
    launch, result = runner.launch, LaunchedStep.result

    def refuse(plan_rows: list[Any]) -> None:
        lost.append({row.request_id.partition("/")[0] for row in plan_rows})
        raise Refused

    def launch_or_fail(plan: StepPlan) -> LaunchedStep:
        if where == "launch" and plan.index == number:
            refuse(plan.rows)
        launched = launch(plan)
        if where == "half" and plan.index == number:
            refuse(plan.rows)  # the device has it already
        return launched

    def result_or_fail(self: LaunchedStep) -> StepResult:
        if where == "result" and self.index == number:
            refuse(self.batch.plan_rows)
        return result(self)

    monkeypatch.setattr(runner, "launch", launch_or_fail)
    monkeypatch.setattr(LaunchedStep, "result", result_or_fail)
    return lost


@pytest.mark.parametrize("where", ["launch", "half", "result"])
@pytest.mark.parametrize(("ahead", "number"), [(1, 2), (2, 6), (4, 9)])
def test_a_step_that_fails_costs_its_own_requests_only(
    text_model: Path, monkeypatch: pytest.MonkeyPatch, where: str, ahead: int, number: int
) -> None:
    params = [GREEDY.replace(max_tokens=5 + 3 * i) for i in range(5)]
    texts = [f"{LONG}{i}" for i in range(5)]
    expected = {
        text: make_ahead_llm(text_model, 0).generate(text, each)[0].outputs[0].token_ids
        for text, each in zip(texts, params, strict=True)
    }
    llm = make_ahead_llm(text_model, ahead, max_num_seqs=2)
    lost, engine = fail_at(monkeypatch, llm, where, number), llm.engine
    for text, each in zip(texts, params, strict=True):
        engine.add_request(text, text, each)
    finished: dict[str, list[int]] = {}
    num_failures = 0
    while engine.has_work:
        try:
            outputs = engine.step()
        except Refused:
            num_failures += 1
            continue
        finished |= {o.request_id: o.outputs[0].token_ids for o in outputs if o.finished}
    engine.scheduler.check_idle()
    assert num_failures == len(lost) == 1 and 0 < len(lost[0]) <= 2
    assert finished == {t: ids for t, ids in expected.items() if t not in lost[0]}
    # The lost ones are asked again: no half-written block is found by anybody.
    again = llm.generate(texts, params)
    assert {o.prompt: o.outputs[0].token_ids for o in again} == expected


@pytest.mark.parametrize("where", ["launch", "result"])
def test_a_stream_that_was_lost_says_so_and_another_goes_on(
    text_model: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    expected = make_ahead_llm(text_model, 0).generate("late", GREEDY)
    llm = make_ahead_llm(text_model, 2, max_num_seqs=1)
    first, second = llm.stream("early", GREEDY), llm.stream("late", GREEDY)
    next(first)
    fail_at(monkeypatch, llm, where, llm.metrics()["num_steps"] + (where == "launch"))
    assert summary(list(second)[-1]) == summary(expected[0])
    with pytest.raises(RequestError, match="lost") as told:
        list(first)
    assert isinstance(told.value.__cause__, Refused)
    assert summary(llm.generate("late", GREEDY)[0]) == summary(expected[0])
    llm.engine.scheduler.check_idle()
