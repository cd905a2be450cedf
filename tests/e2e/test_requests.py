"""How requests end, fail and are refused, and what that leaves of others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoop import LLM, RequestError, SamplingParams
from stoop.text.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def letter(llm: LLM, text: str) -> dict[int, float]:
    """A bias that makes answers of nothing but this letter."""
    (token_id,) = llm.get_tokenizer().encode(text)
    return {token_id: 100.0}


@pytest.fixture(scope="module", params=[None, NGRAM], ids=["plain", "drafts"])
def any_llm(request: pytest.FixtureRequest, text_model: Path) -> LLM:
    options = {"dtype": "float64", "device": "cpu", "max_num_seqs": 4}
    return LLM(str(text_model), speculative_config=request.param, **options)


# ---- ends ----


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3, 7])
def test_a_stop_string_that_the_last_allowed_token_completes_is_the_reason(
    any_llm: LLM, num_tokens: int, include: bool
) -> None:
    stop = "a" * num_tokens
    params = GREEDY.replace(
        max_tokens=num_tokens,
        stop=stop,
        logit_bias=letter(any_llm, "a"),
        include_stop_str_in_output=include,
    )
    answer = any_llm.generate("baaaaaaaaaaaa", params)[0].outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.text == (stop if include else "")
    assert len(answer.token_ids) == num_tokens
    answer = any_llm.generate("baaaaaaaaaaaa", params.replace(stop=stop + "a"))[0].outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("length", None)
    assert answer.text == stop


@pytest.mark.parametrize("min_tokens", range(6))
def test_min_tokens_and_stop_strings(any_llm: LLM, min_tokens: int) -> None:
    """ "aaa" ends with every token from the third on; the first beyond min_tokens stops."""
    params = GREEDY.replace(stop="aaa", min_tokens=min_tokens, logit_bias=letter(any_llm, "a"))
    texts = [output.outputs[0].text for output in any_llm.stream("baaaaaaaaaa", params)]
    num_tokens = max(3, min_tokens + 1)
    assert texts[-1] == "a" * (num_tokens - 3)
    assert all(texts[-1].startswith(text) for text in texts)
    answer = any_llm.generate("baaaaaaaaaa", params)[0].outputs[0]
    assert (len(answer.token_ids), answer.text) == (num_tokens, texts[-1])


def test_an_aborted_request_returns_the_text_that_was_held_back(llm: LLM) -> None:
    params = GREEDY.replace(stop="aaaaaaaab", logit_bias=letter(llm, "a"))
    llm.engine.add_request("held", "hello", params)
    for _ in range(3):
        (output,) = llm.engine.step()
    assert output.outputs[0].text == ""  # it may be the beginning of the stop string
    aborted = llm.engine.abort_request("held")
    assert aborted is not None and aborted.finished
    assert aborted.outputs[0].text == "aaa"
    assert (aborted.outputs[0].finish_reason, len(aborted.outputs[0].token_ids)) == ("abort", 3)
    assert aborted.times.last_token == output.times.last_token
    assert aborted.times.finished > aborted.times.last_token > aborted.times.first_token


# ---- a tokenizer that fails ----


class Panic(BaseException):
    """As the tokenizers library raises it, by name."""


Panic.__name__ = "PanicException"


def fail_on(monkeypatch: pytest.MonkeyPatch, token_id: int, error: BaseException) -> None:
    decode = Tokenizer.decode

    def failing(self: Tokenizer, ids: Any, skip_special_tokens: bool = True) -> str:
        if token_id in ids:
            raise error
        return decode(self, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", failing)


@pytest.mark.parametrize("error", [ValueError("no such\npiece"), Panic("index out of bounds")])
@pytest.mark.parametrize("options", [{}, {"logprobs": 1}, {"detokenize": False, "logprobs": 1}])
def test_a_failing_tokenizer_costs_one_answer(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: BaseException, options: dict[str, Any]
) -> None:
    params = [GREEDY.replace(logit_bias=letter(llm, text), **options) for text in "abc"]
    expected = [output.outputs[0].token_ids for output in llm.generate(["x"] * 3, params)]
    with monkeypatch.context() as patch:
        fail_on(patch, next(iter(letter(llm, "b"))), error)
        outputs = llm.generate(["x"] * 3, params)
    answers = [output.outputs[0] for output in outputs]
    assert [answer.finish_reason for answer in answers] == ["length", "error", "length"]
    assert isinstance(answers[1].stop_reason, str) and "tokenizer failed" in answers[1].stop_reason
    assert "\n" not in answers[1].stop_reason
    assert [answers[0].token_ids, answers[2].token_ids] == [expected[0], expected[2]]
    llm.engine.scheduler.check_idle()
    assert llm.generate("x", params[1])[0].outputs[0].token_ids == expected[1]


def test_an_answer_that_failed_keeps_its_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was held back because of a stop string included."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)
    whole = llm.generate("x", params)[0].outputs[0]
    place = next(i for i, token in enumerate(whole.token_ids) if i > 8 and token not in
                 whole.token_ids[:i])  # fmt: skip
    before = llm.generate("x", params.replace(max_tokens=place))[0].outputs[0].text
    with monkeypatch.context() as patch:
        fail_on(patch, whole.token_ids[place], ValueError("no"))
        failed = llm.generate("x", params.replace(stop=before[-3:] + "never"))[0].outputs[0]
    assert (failed.finish_reason, failed.text) == ("error", before)
    assert failed.token_ids == whole.token_ids[: place + 1]


def test_a_failing_tokenizer_costs_one_of_several_answers(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True)
    expected = [answer.token_ids for answer in llm.generate("x", params)[0].outputs]
    only_second = set(expected[1]) - set(expected[0]) - set(expected[2])
    with monkeypatch.context() as patch:
        fail_on(patch, only_second.pop(), ValueError("no"))
        answers = llm.generate("x", params)[0].outputs
    assert [answer.finish_reason for answer in answers] == ["length", "error", "length"]
    assert [answers[0].token_ids, answers[2].token_ids] == [expected[0], expected[2]]


def test_an_interrupt_is_no_failure_of_the_tokenizer(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_on(patch, next(iter(letter(llm, "b"))), KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            llm.generate("x", GREEDY.replace(logit_bias=letter(llm, "b")))
    llm.engine.scheduler.check_idle()


# ---- refusals and seeds ----


UNSEEDED = SamplingParams(max_tokens=12, ignore_eos=True)
REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "prompt": ([9999], {}),
    "long prompt": ("x" * 300, {}),
    "params": ("x", {"sampling_params": {"temperature": 1}}),
    "bad word": ("x", {"sampling_params": UNSEEDED.replace(bad_words=["x" * 40])}),
    "stop token": ("x", {"sampling_params": UNSEEDED.replace(stop_token_ids=[9999])}),
    "drafts": ("x", {"sampling_params": UNSEEDED.replace(num_speculative_tokens=9)}),
    "second prompt": (["x", "x" * 300], {}),
    "priority": (["x", "y"], {"priority": [0, "first"]}),
    "parameters of the second": (["x", "y"], {"sampling_params": [UNSEEDED, None]}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_call_does_not_change_later_answers(text_model: Path, case: str) -> None:
    """Unseeded requests draw their seeds one after the other; a refused one must not draw."""
    options = {"dtype": "float64", "device": "cpu"}
    undisturbed, refusing = (LLM(str(text_model), seed=5, **options) for _ in range(2))
    expected = [undisturbed.generate("x", UNSEEDED)[0].outputs[0].token_ids for _ in range(2)]
    prompts, call = REFUSED[case]
    with pytest.raises(RequestError):
        refusing.generate(prompts, **{"sampling_params": UNSEEDED, **call})
    refusing.engine.scheduler.check_idle()
    found = [refusing.generate("x", UNSEEDED)[0].outputs[0].token_ids for _ in range(2)]
    assert found == expected
    assert expected[0] != expected[1]


def test_a_prompt_beyond_the_kv_cache_draws_no_seed(text_model: Path) -> None:
    options: dict[str, Any] = {"dtype": "float64", "device": "cpu", "seed": 5}
    undisturbed, refusing = (LLM(str(text_model), **options) for _ in range(2))
    inputs = refusing.engine.frontend.inputs
    inputs.limits = replace(inputs.limits, kv_tokens=32)  # a cache that holds less than a model
    with pytest.raises(RequestError, match="the KV cache holds 32"):
        refusing.generate("x" * 40, UNSEEDED)
    found, expected = (
        llm.generate("x", UNSEEDED)[0].outputs[0].token_ids for llm in (refusing, undisturbed)
    )
    assert found == expected
