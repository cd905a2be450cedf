"""What `SamplingParams` refuses, in one sentence that names the option, and what it takes."""

import copy
import dataclasses
import logging
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from stoop.config.errors import RequestError
from stoop.config.values import shown
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
    *[("logprobs", v) for v in (-1, MAX_LOGPROBS + 1, 1.0, "1", False)],
    *[("prompt_logprobs", v) for v in (-2, MAX_LOGPROBS + 1, 1.0, False)],
]


def label(case: tuple[str, Any]) -> str:
    return f"{case[0]}={shown(case[1])[:20]}"


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=map(label, REFUSED))
def test_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**{name: value})
    text = str(refusal.value)
    assert name in text
    assert "\n" not in text and ". " not in text, "one sentence"


def test_numpy_and_torch_numbers_are_taken() -> None:
    params = SamplingParams(
        n=np.int64(2),
        temperature=np.float32(0.5),
        top_p=torch.tensor(0.25),
        max_tokens=torch.tensor(7),
        seed=np.array(3),
        ignore_eos=np.bool_(True),
        stop_token_ids=np.array([4, 5]),
        logit_bias={np.int32(6): np.float64(1.5)},
        stop=np.array(["a", "b"]),
    )
    assert params == SamplingParams(
        n=2, temperature=0.5, top_p=0.25, max_tokens=7, seed=3, ignore_eos=True,
        stop_token_ids=[4, 5], logit_bias={6: 1.5}, stop=["a", "b"],
    )  # fmt: skip
    kinds = {type(value) for value in dataclasses.asdict(params).values()}
    assert kinds == {int, float, bool, list, dict, type(None)}


NONSENSE: list[tuple[str, Any]] = [
    ("temperature", 10**400),
    ("temperature", 10**5000),
    ("top_k", np.zeros((9, 9))),
    ("stop", b"end"),
    ("stop_token_ids", "12"),
    ("logit_bias", {"²": 1}),
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", {5: {}}),
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


ANYTHING: list[Any] = [
    None, True, 0, 1, -1, 2**70, 10**5000, 0.5, float("nan"), 1j, "", "x", "²", b"x", [], [1],
    ["x"],
    [None], [[1]], {}, {1: 1}, {"x": "y"}, {(): 1}, set(), {1}, (), object(), len, int, range(3),
    np.zeros(3), np.int64(1), np.zeros((2, 2)), np.array("x"), torch.zeros(2), torch.tensor(1),
    Fraction(1, 2), iter([1]),
]  # fmt: skip


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(SamplingParams)])
def test_any_value_is_taken_or_refused_with_a_sentence(name: str) -> None:
    for value in ANYTHING:
        try:
            params = SamplingParams(**{name: value})
        except RequestError as error:
            refusal = str(error)
        else:
            assert params.clone() == params
            continue
        assert name in refusal and "\n" not in refusal and len(refusal) < 300


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
    assert SamplingParams(stop="x").stop == ["x"]
    assert SamplingParams(bad_words="x").bad_words == ["x"]
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(logprobs=True, prompt_logprobs=True).logprobs == 1
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


# ---- as vLLM's ----


def test_fields_can_be_assigned_and_are_checked() -> None:
    params = SamplingParams(max_tokens=5)
    params.max_tokens = 7
    params.stop = "x"
    params.stop.append("y")  # type: ignore[union-attr]
    params.temperature = np.float32(0)  # type: ignore[assignment]
    assert params == SamplingParams(max_tokens=7, stop=["x", "y"], temperature=0)
    assert params.greedy
    with pytest.raises(RequestError, match="top_k=-3"):
        params.top_k = -3
    assert params.top_k == 0
    with pytest.raises(RequestError, match=r"'topk': did you mean top_k"):
        params.topk = 3  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match="output_kind=2 is not supported"):
        params.output_kind = 2  # type: ignore[attr-defined]


def test_fields_that_depend_on_each_other_can_be_assigned_one_after_the_other() -> None:
    params = SamplingParams()
    params.min_tokens = 20  # above max_tokens, for now
    with pytest.raises(RequestError, match="min_tokens=20 is above max_tokens=16"):
        params.clone()
    params.max_tokens = 30
    assert params.clone() == params


def test_a_clone_shares_nothing() -> None:
    params = SamplingParams(stop=["x"], logit_bias={1: 2.0})
    twin = params.clone()
    twin.stop.append("y")  # type: ignore[union-attr]
    twin.logit_bias[3] = 1.0  # type: ignore[index]
    twin.max_tokens = 1
    assert params == SamplingParams(stop=["x"], logit_bias={1: 2.0})


def test_containers_given_are_not_kept() -> None:
    words, bias = ["x"], {1: 2.0}
    params = SamplingParams(stop=words, logit_bias=bias)
    words.append("y")
    bias[2] = 1.0
    assert params == SamplingParams(stop=["x"], logit_bias={1: 2.0})


def test_copies_and_pickles_are_equal() -> None:
    params = SamplingParams(stop=["x"], logit_bias={1: 2.0}, seed=4)
    for twin in (copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert twin == params
        assert type(twin) is SamplingParams


def test_options_by_position_mean_what_they_do_in_vllm() -> None:
    params = SamplingParams(2, 0.1, 0.2, 1.1, 0.7, 0.9, 5)
    assert params == SamplingParams(
        n=2, presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.1,
        temperature=0.7, top_p=0.9, top_k=5,
    )  # fmt: skip
    for args, options in (((1,), {"n": 2}), ((1,) * 17, {})):
        with pytest.raises(RequestError, match="name=value"):
            SamplingParams(*args, **options)  # type: ignore[arg-type]


def test_from_optional_leaves_defaults_for_none() -> None:
    assert SamplingParams.from_optional(temperature=None, n=None) == SamplingParams()
    params = SamplingParams.from_optional(max_tokens=None, top_k=5, logit_bias={"1": 2})
    assert params == SamplingParams(max_tokens=None, top_k=5, logit_bias={1: 2.0})


HARMLESS: list[dict[str, Any]] = [
    {"best_of": None},
    {"best_of": 1},
    {"use_beam_search": False},
    {"structured_outputs": None, "guided_decoding": None, "logits_processors": None},
    {"truncate_prompt_tokens": None, "allowed_token_ids": None, "extra_args": {}},
    {"spaces_between_special_tokens": False, "skip_clone": True},
]


@pytest.mark.parametrize("options", HARMLESS, ids=str)
def test_harmless_options_of_vllm_are_ignored_and_logged(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert SamplingParams(top_k=3, **options) == SamplingParams(top_k=3)
    told = [name for name, value in options.items() if value is not None]
    assert len(caplog.messages) == bool(told)
    assert all(name in caplog.text for name in told)


FOREIGN: list[tuple[str, Any, str]] = [
    ("best_of", 4, "ask for n answers"),
    ("use_beam_search", True, "no beam search"),
    ("guided_json", {"type": "object"}, "write structured_outputs="),
    ("guided_decoding", object(), "write structured_outputs="),
    ("logits_processors", [len], "no logits processors"),
    ("truncate_prompt_tokens", 5, "cut them"),
    ("allowed_token_ids", [1, 2], "logit_bias"),
    ("logprob_token_ids", np.array([1]), "use logprobs"),
    ("extra_args", {"x": 1}, "no plugins"),
]


@pytest.mark.parametrize(("name", "value", "advice"), FOREIGN)
def test_options_of_vllm_that_would_matter_are_refused_by_name(
    name: str, value: Any, advice: str
) -> None:
    with pytest.raises(RequestError, match=f"^{name}=.* is not supported: .*{advice}") as refusal:
        SamplingParams(**{name: value})
    assert "did you mean" not in str(refusal.value) and "known are" not in str(refusal.value)
