"""`speculative_config`: every key, and that a refusal names the key at fault."""

import dataclasses
import json
import random
from types import MappingProxyType
from typing import Any

import pytest

from stoop.config.errors import ConfigError
from stoop.config.resolve import make_options, resolve
from stoop.config.schema import SpecConfig
from stoop.config.speculation import (
    MAX_DRAFTS,
    SpecOptions,
    fixed_drafts,
    methods,
    parse_speculation,
    settle_speculation,
)
from stoop.models.eagle import EagleSpec
from support.specs import tiny_spec

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
HEAD = {"model": "folder", "num_speculative_tokens": 3}
SYNTHETIC = {**HEAD, "rejection_sample_method": "synthetic"}


def head_spec(method: Any = "eagle3") -> EagleSpec:
    return EagleSpec(method, tiny_spec(), target_hidden_size=8, target_vocab_size=32)


def settle(given: Any, proposed: int | None = None, adaptive: bool = False) -> SpecConfig:
    """As the engine does it, with a head where one is named. adaptive: as on a GPU"""
    options = parse_speculation(given)
    assert options is not None
    named = options.model is not None
    return settle_speculation(
        options, head_spec() if named else None, "folder" if named else None, proposed, adaptive
    )


# ---- none, JSON, mappings ----


@pytest.mark.parametrize("given", [None, "none", "None", " NONE ", "none\n"])
def test_none_means_no_speculation(given: str | None) -> None:
    assert parse_speculation(given) is None


@pytest.mark.parametrize(
    "given", [NGRAM, json.dumps(NGRAM), MappingProxyType(NGRAM)], ids=["dict", "JSON", "mapping"]
)
def test_mappings_and_json_say_the_same(given: Any) -> None:
    assert parse_speculation(given) == SpecOptions(method="ngram", num_speculative_tokens=3)


@pytest.mark.parametrize(
    "given", ["", "{", "n-gram", "{'method': 'ngram'}", '{"method": "ngram"} x', "[1", "nan,"]
)
def test_text_that_is_no_json_is_refused_with_an_example(given: str) -> None:
    with pytest.raises(ConfigError, match="speculative_config is not JSON") as refusal:
        parse_speculation(given)
    assert '"num_speculative_tokens"' in str(refusal.value)


@pytest.mark.parametrize("given", ["off", "on", "eagle9"])
def test_another_word_is_refused_with_the_words_that_there_are(given: str) -> None:
    with pytest.raises(ConfigError, match=f"^speculative_config is {given}: use auto, none, or "):
        parse_speculation(given)


def test_a_bare_method_is_refused_with_what_to_write() -> None:
    for method in ("ngram", "mtp"):
        with pytest.raises(ConfigError, match=f"is {method}: write it as ") as refusal:
            parse_speculation(method)
        example = str(refusal.value).partition("write it as ")[2]
        options = parse_speculation(example)
        assert options is not None and options.method == method


@pytest.mark.parametrize("given", ["[1]", "3", '"ngram"', "null", "true", 3, True, ["ngram"]])
def test_anything_but_an_object_is_refused_with_an_example(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"speculative_config is .*write an object"):
        parse_speculation(given)


@pytest.mark.parametrize("key", ["tokens", "draft_tensor_parallel_size", "Method", "", 3])
def test_an_unknown_key_is_named_with_all_known_ones(key: Any) -> None:
    with pytest.raises(ConfigError, match="speculative_config has") as refusal:
        parse_speculation({**NGRAM, key: 1})
    assert repr(key) in str(refusal.value)
    for field in dataclasses.fields(SpecOptions):
        assert field.name in str(refusal.value)


# ---- every key, as it arrives ----


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (NGRAM, {"method": "ngram", "num_drafts": 3, "head": None, "folder": None}),
        (HEAD, {"method": "eagle3", "num_drafts": 3, "folder": "folder", "head": head_spec()}),
        ({**HEAD, "method": "eagle3"}, {"method": "eagle3"}),
        ({**HEAD, "revision": "abc"}, {"num_drafts": 3}),
        ({**HEAD, "num_speculative_tokens": 1}, {"num_drafts": 1}),
        ({**HEAD, "num_speculative_tokens": MAX_DRAFTS}, {"num_drafts": MAX_DRAFTS}),
        (HEAD, {"draft_sample_method": "coupled", "synthetic_rates": None}),
        ({**HEAD, "draft_sample_method": None}, {"draft_sample_method": "coupled"}),
        ({**HEAD, "draft_sample_method": "greedy"}, {"draft_sample_method": "greedy"}),
        ({**HEAD, "draft_sample_method": "coupled"}, {"draft_sample_method": "coupled"}),
        (
            {**HEAD, "draft_sample_method": "probabilistic"},
            {"draft_sample_method": "probabilistic"},
        ),
        (HEAD, {"adaptive": False}),
        ({**HEAD, "adaptive": True}, {"adaptive": True, "num_drafts": 3}),
        ({**HEAD, "num_speculative_tokens": "auto"}, {"adaptive": True, "num_drafts": 3}),
        ({**NGRAM, "adaptive": True}, {"adaptive": True}),
        (NGRAM, {"draft_sample_method": "greedy"}),
        ({**NGRAM, "draft_sample_method": "greedy"}, {"draft_sample_method": "greedy"}),
        ({**HEAD, "rejection_sample_method": "standard"}, {"synthetic_rates": None}),
        ({**SYNTHETIC, "synthetic_acceptance_length": 4}, {"synthetic_rates": (1.0, 1.0, 1.0)}),
        (
            {**SYNTHETIC, "synthetic_acceptance_rates": [1, 0.5, 0.25]},
            {"synthetic_rates": (1.0, 0.5, 0.5)},
        ),
        (NGRAM, {"prompt_lookup_min": 3, "prompt_lookup_max": 5}),
        ({**NGRAM, "prompt_lookup_min": 2}, {"prompt_lookup_min": 2, "prompt_lookup_max": 5}),
        ({**NGRAM, "prompt_lookup_min": 7}, {"prompt_lookup_min": 7, "prompt_lookup_max": 7}),
        ({**NGRAM, "prompt_lookup_max": 9}, {"prompt_lookup_min": 3, "prompt_lookup_max": 9}),
        ({**NGRAM, "prompt_lookup_max": 2}, {"prompt_lookup_min": 2, "prompt_lookup_max": 2}),
        (
            {**NGRAM, "prompt_lookup_min": 1, "prompt_lookup_max": 1},
            {"prompt_lookup_min": 1, "prompt_lookup_max": 1},
        ),
    ],
)
def test_keys_arrive(given: dict[str, Any], expected: dict[str, Any]) -> None:
    config = settle(given)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("more", "adaptive"),
    [
        ({}, True),
        ({"adaptive": False}, False),
        ({"draft_sample_method": "probabilistic"}, False),
        ({"rejection_sample_method": "synthetic"}, False),
        ({"rejection_sample_method": "synthetic", "adaptive": True}, True),
        ({"rejection_sample_method": "synthetic", "num_speculative_tokens": "auto"}, True),
    ],
)
def test_drafts_whose_number_matters_are_all_made(more: dict[str, Any], adaptive: bool) -> None:
    """Unless the user asks for fewer: by default the number varies on a GPU."""
    if "rejection_sample_method" in more:
        more = {**more, "synthetic_acceptance_length": 2}
    assert settle({**HEAD, **more}, adaptive=True).adaptive == adaptive


def test_every_key_has_a_case() -> None:
    """A key that is added must enter the tables here."""
    assert {f.name for f in dataclasses.fields(SpecOptions)} == {
        "method",
        "model",
        "revision",
        "num_speculative_tokens",
        "adaptive",
        "draft_sample_method",
        "rejection_sample_method",
        "synthetic_acceptance_length",
        "synthetic_acceptance_rates",
        "prompt_lookup_min",
        "prompt_lookup_max",
        "draft_vocab_size",
        "draft_vocab",
    }
    assert methods() == ("eagle", "eagle3", "mtp", "ngram")


def test_the_heads_own_number_of_drafts_serves_unless_another_is_given() -> None:
    assert settle({"model": "folder"}, proposed=5).num_drafts == 5
    assert settle(HEAD, proposed=5).num_drafts == 3
    with pytest.raises(ConfigError, match="lacks num_speculative_tokens"):
        settle({"model": "folder"})
    with pytest.raises(ConfigError, match="lacks num_speculative_tokens"):
        settle({"method": "ngram"})
    with pytest.raises(ConfigError, match="proposes 99"):
        settle({"model": "folder"}, proposed=99)


def test_the_heads_method_counts() -> None:
    options = parse_speculation(HEAD)
    assert options is not None
    assert settle_speculation(options, head_spec("eagle"), "folder").method == "eagle"


# ---- refusals ----

WRONG_COUNTS = (0, -1, MAX_DRAFTS + 1, 2.0, "3", True, [3])
REFUSALS: list[tuple[str, dict[str, Any]]] = [
    *(("method", {**HEAD, "method": value}) for value in ("medusa", "EAGLE", 3, "", ["ngram"])),
    ("is empty", {}),
    ("is empty", {"model": None}),
    ("revision", {"method": "eagle3", "revision": "main"}),
    *(("model", {**HEAD, "model": value}) for value in (3, ["folder"], True)),
    *(("revision", {**HEAD, "revision": value}) for value in (3, ["main"])),
    ("model", {**NGRAM, "model": "folder"}),
    ("revision", {**NGRAM, "revision": "main"}),
    *(
        ("num_speculative_tokens", {**base, "num_speculative_tokens": value})
        for base in (NGRAM, HEAD)
        for value in WRONG_COUNTS
    ),
    *(
        ("draft_sample_method", {**HEAD, "draft_sample_method": value})
        for value in ("random", True, "Greedy")
    ),
    ("draft_sample_method", {**NGRAM, "draft_sample_method": "probabilistic"}),
    ("draft_sample_method", {**NGRAM, "draft_sample_method": "coupled"}),
    *(
        ("rejection_sample_method", {**HEAD, "rejection_sample_method": value})
        for value in ("typical", None, 1)
    ),
    ("rejection_sample_method", {**HEAD, "synthetic_acceptance_length": 2.0}),
    ("rejection_sample_method", {**HEAD, "synthetic_acceptance_rates": [1, 1, 1]}),
    ("synthetic_acceptance_length", SYNTHETIC),
    (
        "synthetic_acceptance_rates",
        {
            **SYNTHETIC,
            "synthetic_acceptance_length": 2.0,
            "synthetic_acceptance_rates": [1, 1, 1],
        },
    ),
    *(
        ("synthetic_acceptance_length", {**SYNTHETIC, "synthetic_acceptance_length": value})
        for value in (0.9, 4.1, 0, -1, "2", True, [2], float("nan"), float("inf"))
    ),
    *(
        ("synthetic_acceptance_rates", {**SYNTHETIC, "synthetic_acceptance_rates": value})
        for value in (
            [],
            [0.5],
            [0.5, 0.4],
            [0.5, 0.4, 0.3, 0.2],
            [0.5, 0.6, 0.1],
            [1.1, 0.5, 0.1],
            [0.5, 0.4, -0.1],
            [0.5, 0.4, float("nan")],
            [True, 0.4, 0.1],
            ["1", 0.4, 0.1],
            "111",
            0.5,
            {"0": 1},
        )
    ),
    *(
        (name, {**NGRAM, name: value})
        for name in ("prompt_lookup_min", "prompt_lookup_max")
        for value in WRONG_COUNTS
    ),
    ("prompt_lookup_min", {**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 3}),
    ("prompt_lookup_max", {**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 3}),
    ("prompt_lookup_min", {**HEAD, "prompt_lookup_min": 2}),
    ("prompt_lookup", {**HEAD, "prompt_lookup_max": 2}),
    *(
        ("draft_vocab_size", {**HEAD, "draft_vocab_size": value})
        for value in (-1, 2.0, "8", "FULL", True, [8])
    ),
    *(("draft_vocab", {**HEAD, "draft_vocab": value}) for value in (3, ["list.json"], True)),
    ("draft_vocab_size", {**NGRAM, "draft_vocab_size": 8}),
    ("draft_vocab", {**NGRAM, "draft_vocab": "list.json"}),
    *(
        ("draft_vocab", {**HEAD, "draft_vocab": "list.json", "draft_vocab_size": value})
        for value in (0, "full")
    ),
]


@pytest.mark.parametrize(("key", "given"), REFUSALS, ids=[f"{k}-{g}" for k, g in REFUSALS])
def test_a_refusal_names_the_key_that_was_given(key: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^speculative_config ") as refusal:
        settle(given)
    assert key in str(refusal.value)


# ---- synthetic lengths and rates ----


@pytest.mark.parametrize(
    ("length", "rates"),
    [
        (1, (0.0, 0.0, 0.0)),
        (1.5, (0.5, 0.0, 0.0)),
        (2, (1.0, 0.0, 0.0)),
        (2.25, (1.0, 0.25, 0.0)),
        (3.5, (1.0, 1.0, 0.5)),
        (4.0, (1.0, 1.0, 1.0)),
    ],
)
def test_lengths_become_rates(length: float, rates: tuple[float, ...]) -> None:
    config = settle({**SYNTHETIC, "synthetic_acceptance_length": length})
    assert config.synthetic_rates == pytest.approx(rates)


def expected_length(rates: tuple[float, ...]) -> float:
    """Tokens of a step: the one behind the accepted ones, and each draft that is reached."""
    length, reached = 1.0, 1.0
    for rate in rates:
        reached *= rate
        length += reached
    return length


@pytest.mark.parametrize("num_tokens", [1, 2, 5, MAX_DRAFTS])
def test_any_length_is_met_on_average(num_tokens: int) -> None:
    rng = random.Random(num_tokens)
    for length in (1, num_tokens + 1, *(rng.uniform(1, num_tokens + 1) for _ in range(20))):
        config = settle(
            {
                **SYNTHETIC,
                "num_speculative_tokens": num_tokens,
                "synthetic_acceptance_length": length,
            }
        )
        assert config.synthetic_rates is not None and len(config.synthetic_rates) == num_tokens
        assert all(0 <= rate <= 1 for rate in config.synthetic_rates)
        assert expected_length(config.synthetic_rates) == pytest.approx(length)


@pytest.mark.parametrize(
    "given", [[0.9, 0.6, 0.3], [1, 1, 1], [0.5, 0.5, 0.0], [0.5, 0, 0], [0, 0, 0], (0.8, 0.8, 0.1)]
)
def test_given_rates_are_of_positions_and_kept_ones_of_what_comes_before(given: Any) -> None:
    rates = settle({**SYNTHETIC, "synthetic_acceptance_rates": given}).synthetic_rates
    assert rates is not None
    reached = 1.0
    for wanted, rate in zip(given, rates, strict=True):
        reached *= rate
        assert 0 <= rate <= 1
        assert reached == pytest.approx(wanted)


def test_lengths_are_held_against_the_heads_own_number() -> None:
    given = {
        "model": "folder",
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 5.5,
    }
    assert settle(given, proposed=5).synthetic_rates == pytest.approx((1, 1, 1, 1, 0.5))
    with pytest.raises(ConfigError, match=r"synthetic_acceptance_length=5\.5: use 1 to 5"):
        settle(given, proposed=4)


@pytest.mark.parametrize(("asked", "number"), [(5, 5), ("auto", 3)])
def test_a_fixed_number_of_drafts(asked: Any, number: int) -> None:
    given = {"method": "ngram", "num_speculative_tokens": asked, "adaptive": True}
    fixed = fixed_drafts(json.dumps(given))
    assert fixed is not None and fixed["method"] == "ngram"
    assert (fixed["num_speculative_tokens"], fixed["adaptive"]) == (number, False)
    assert parse_speculation(fixed) is not None
    assert fixed_drafts(None) is None


# ---- into the engine's configuration ----


def resolved(spec: SpecConfig | None, **options: Any) -> Any:
    return resolve(make_options("x", options), tiny_spec(), "folder", "cpu", spec)


def test_a_schedule_knows_its_drafts() -> None:
    plain = resolved(None).schedule
    assert (plain.num_drafts, plain.drafter_has_kv) == (0, False)
    assert (plain.query_len, plain.num_lookahead) == (1, 0)
    ngram = resolved(settle(NGRAM)).schedule
    assert (ngram.num_drafts, ngram.drafter_has_kv) == (3, False)
    assert (ngram.query_len, ngram.num_lookahead) == (4, 0)
    eagle = resolved(settle(HEAD)).schedule
    assert (eagle.num_drafts, eagle.drafter_has_kv) == (3, True)
    assert (eagle.query_len, eagle.num_lookahead) == (4, 2)


def test_everybody_must_be_able_to_decode_in_one_step() -> None:
    spec = settle(NGRAM)
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 15}
    with pytest.raises(ConfigError, match="max_num_batched_tokens=15") as refusal:
        resolved(spec, **options)
    assert "max_num_seqs=4 times 4 tokens" in str(refusal.value)
    assert resolved(None, **options).schedule.max_num_batched_tokens == 15
    assert resolved(spec, **{**options, "max_num_batched_tokens": 16}).spec is spec
    wide = resolved(spec, max_num_seqs=1000).schedule
    assert wide.max_num_batched_tokens == 4000
