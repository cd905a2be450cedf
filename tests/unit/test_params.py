"""What `SamplingParams` refuses, in one sentence that names the option, and what it takes."""

from typing import Any

import pytest

from stoop.config.errors import RequestError
from stoop.core.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_IDS,
    SamplingParams,
)

NAN, INF = float("nan"), float("inf")

REFUSED: list[tuple[str, Any]] = [
    *[("n", v) for v in (0, -1, MAX_N + 1, 1.0, 1.5, "2", None, True)],
    *[("temperature", v) for v in (-0.1, 100.5, NAN, INF, -INF, "1", None, True)],
    *[("top_p", v) for v in (0, 0.0, -0.5, 1.0001, NAN, "0.5", None, True)],
    *[("top_k", v) for v in (-2, 1.5, "5", None, True)],
    *[("min_p", v) for v in (-0.1, 1.1, NAN, None, "0")],
    *[("repetition_penalty", v) for v in (0, -1.0, 101, NAN, INF, None)],
    *[("presence_penalty", v) for v in (-2.1, 2.1, NAN, None, "1")],
    *[("frequency_penalty", v) for v in (-2.1, 2.1, NAN, None)],
    *[("logit_bias", v) for v in ([1], "x", {"a": 1}, {None: 1}, {1: NAN}, {1: 101}, {1: "1"})],
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
    *[("seed", v) for v in (1.0, "1", 2**63, -(2**63) - 1, True)],
    *[("stop", v) for v in ("", ["a", ""], [1], [None])],
    *[("stop_token_ids", v) for v in ([-1], [1.0], ["1"], [None], [True])],
    ("stop_token_ids", list(range(MAX_STOP_IDS + 1))),
    *[("bad_words", v) for v in ([""], [1], [None])],
    ("bad_words", ["x"] * (MAX_BAD_WORDS + 1)),
    *[("max_tokens", v) for v in (0, -1, 1.0, "4", True)],
    *[("min_tokens", v) for v in (-1, 17, 1.0, None, True)],  # max_tokens is 16
    *[("logprobs", v) for v in (-1, MAX_LOGPROBS + 1, 1.0, "1", True)],
    *[("prompt_logprobs", v) for v in (-2, MAX_LOGPROBS + 1, 1.0, True)],
]


def label(case: tuple[str, Any]) -> str:
    return f"{case[0]}={str(case[1])[:20]}"


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=map(label, REFUSED))
def test_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**{name: value})
    text = str(refusal.value)
    assert name in text
    assert "\n" not in text and ". " not in text, "one sentence"


NONSENSE: list[tuple[str, Any]] = [
    ("temperature", 10**400),
    ("stop", 5),
    ("stop_token_ids", 5),
    ("bad_words", 5),
    ("logit_bias", {1.5: 1.0}),
    ("ignore_eos", "no"),
    ("detokenize", None),
    ("skip_special_tokens", 3),
    ("include_stop_str_in_output", "false"),
]


@pytest.mark.parametrize(("name", "value"), NONSENSE, ids=map(label, NONSENSE))
def test_nonsense_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


def test_unknown_names_are_refused_with_the_likeliest() -> None:
    with pytest.raises(RequestError, match=r"unknown sampling option 'temprature'.*temperature"):
        SamplingParams(temprature=1.0)
    with pytest.raises(RequestError, match=r"unknown sampling option 'zzz'.*known are.*top_k"):
        SamplingParams(zzz=1)


def test_replace_checks_too() -> None:
    params = SamplingParams(top_k=5)
    assert params.replace(top_k=7).top_k == 7 and params.top_k == 5
    with pytest.raises(RequestError, match="top_k"):
        params.replace(top_k=-3)
    with pytest.raises(RequestError, match="topk"):
        params.replace(topk=3)


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


ACCEPTED: list[dict[str, Any]] = [
    {"n": MAX_N},
    {"temperature": 0},
    {"temperature": 100.0},
    {"top_p": 1},
    {"top_p": 1e-9},
    {"top_k": 10**9},
    {"min_p": 0},
    {"min_p": 1.0},
    {"repetition_penalty": 1e-3},
    {"repetition_penalty": 100},
    {"presence_penalty": -2, "frequency_penalty": 2.0},
    {"logit_bias": {}},
    {"logit_bias": {5: -100, 6: 100.0}},
    {"seed": 2**63 - 1},
    {"seed": -(2**63)},
    {"max_tokens": None, "min_tokens": 1000},
    {"max_tokens": 1, "min_tokens": 1},
    {"logprobs": 0, "prompt_logprobs": 0},
    {"logprobs": MAX_LOGPROBS, "prompt_logprobs": -1},
    {"stop_token_ids": list(range(MAX_STOP_IDS))},
    {"bad_words": ["x"] * MAX_BAD_WORDS},
    {"stop": None, "stop_token_ids": None, "bad_words": None},
]


@pytest.mark.parametrize("options", ACCEPTED, ids=str)
def test_edge_values_are_taken_as_they_are(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    for name, value in options.items():
        kept = getattr(params, name)
        if isinstance(value, list) or (value is None and name != "max_tokens"):
            kept, value = list(kept), list(value or ())
        assert kept == value


def test_forms_are_made_one() -> None:
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(bad_words="x").bad_words == ("x",)
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(logit_bias={"5": 1}).logit_bias == {5: 1.0}


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0.0, True), (9e-6, True), (1e-5, False), (1.0, False)]
)
def test_greedy_is_a_temperature_of_about_zero(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}],
    ids=str,
)
def test_penalised(options: dict[str, Any]) -> None:
    assert SamplingParams(**options).penalised
    assert not SamplingParams().penalised
