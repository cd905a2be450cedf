"""Every sampling option means the same with speculation as without.

Drafts here are compared with what the target draws, so seeded answers must equal those of plain
decoding token for token, with the same scores and the same end. Targets that walk in circles
of four tokens, or into loops of one, have heads that are right as long as they do, so that options
act inside of accepted runs; another target is random.
"""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from stoop import LLM, SamplingParams
from stoop.checkpoint import toy
from stoop.core.outputs import CompletionOutput, Logprob, RequestOutput
from stoop.graph.descriptor import RunMode
from stoop.sampling.sampler import Positions, Sampler
from support import small_models

VOCAB = toy.SIZE
STRIDE = VOCAB // 4  # 3, 19, 35, 51, 3, ...
SHARPNESS = 5.5  # what follows has about three chances in four
END = 51  # ends the text, unless ignored
TOLERANCE = 1e-9
MAX_MODEL_LEN = 72
PROMPTS = (
    [3, 19, 35],
    [8, 40, 60, 12, 28, 44, 60, 1, 2, 60],
    [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 30],
)
EVERY = bool(os.environ.get("STOOP_TEST_ALL"))

Patch = pytest.MonkeyPatch


# ---- models ----


def write_blurred(folder: Path) -> None:
    """The toy, with no two logits alike."""
    toy.write_target(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(5)
    weight = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = weight + 0.06 * torch.randn(weight.shape, generator=generator)
    save_file(tensors, file)


def add_text(folder: Path) -> None:
    """Token 7 is written w07, and END ends the text."""
    vocab = {f"w{token:02}": token for token in range(VOCAB)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="w00"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": END}))


# name: target, speculative_config without the path of its head
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "circles-eagle3-right": (
        "circles",
        {"model": "right", "num_speculative_tokens": 3, "draft_sample_method": "greedy"},
    ),
    "circles-eagle3-half": ("circles", {"model": "half", "num_speculative_tokens": 4}),
    "circles-eagle3-wrong": ("circles", {"model": "wrong", "num_speculative_tokens": 3}),
    "circles-eagle": (
        "circles",
        {"model": "right1", "num_speculative_tokens": 4, "draft_sample_method": "greedy"},
    ),
    "circles-ngram": ("circles", {"method": "ngram", "num_speculative_tokens": 3}),
    "loops-eagle": ("loops", {"model": "right1", "num_speculative_tokens": 4}),
    "random-eagle3": ("random", {"model": "random3", "num_speculative_tokens": 2}),
    "random-eagle": ("random", {"model": "random1", "num_speculative_tokens": 3}),
    "random-ngram": ("random", {"method": "ngram", "num_speculative_tokens": 1}),
}
RIGHT = ("circles-eagle3-right", "circles-eagle", "loops-eagle")
ALONE = (
    "circles-eagle3-right",
    "circles-eagle",
    "circles-ngram",
)  # the others run all options at once


class Engines:
    """Models on disk, and engines made on first use."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(toy, "STRIDE", STRIDE)
            patch.setattr(toy, "SHARPNESS", SHARPNESS)
            write_blurred(root / "circles")
            toy.write_head(root / "right", "eagle3")
            # Of each circle's tokens every other one.
            known = frozenset(t for t in range(VOCAB) if t // STRIDE % 2)
            toy.write_head(root / "half", "eagle3", knows=known)
            toy.write_head(root / "wrong", "eagle3", knows=frozenset({7}))
            toy.write_head(root / "right1", "eagle")
            patch.setattr(toy, "successor", lambda token: token | VOCAB // 2)
            write_blurred(root / "loops")
        small_models.write_target(root / "random", VOCAB, seed=1, sureness=2.0)
        for name, method, noise in (("random3", "eagle3", 0.1), ("random1", "eagle", 0.15)):
            small_models.write_head(root / name, method, root / "random", noise)
        for name in ("circles", "loops", "random"):
            add_text(root / name)
        self._made: dict[Any, LLM] = {}
        self._plain: dict[Any, list[RequestOutput]] = {}

    def plain(self, target: str) -> LLM:
        return self._get(target)

    def speculating(self, name: str, **options: Any) -> LLM:
        target, given = DRAFTERS[name]
        config = {key: options.pop(key) for key in list(options) if key in SPEC_KEYS}
        config = given | config
        if "model" in config:
            config["model"] = str(self.root / config["model"])
        else:
            config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
        return self._get(target, speculative_config=json.dumps(config), **options)

    def _get(self, target: str, **options: Any) -> LLM:
        key = (target, *sorted(options.items()))
        if key not in self._made:
            settings: dict[str, Any] = {
                "dtype": "float64",
                "device": "cpu",
                "max_model_len": MAX_MODEL_LEN,
                "max_num_seqs": 24,
                "block_size": 8,
                "num_kv_blocks": 400,
            }
            self._made[key] = LLM(str(self.root / target), **(settings | options))
        return self._made[key]

    def plain_answers(self, target: str, params: SamplingParams) -> list[RequestOutput]:
        key = (target, repr(params))
        if key not in self._plain:
            self._plain[key] = generate(self.plain(target), params)
        return self._plain[key]


SPEC_KEYS = (
    "draft_sample_method",
    "rejection_sample_method",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
)


def generate(llm: LLM, params: SamplingParams) -> list[RequestOutput]:
    """All prompts at once, each with a seed of its own."""
    given = [seeded(params, number) for number in range(len(PROMPTS))]
    return llm.generate([list(prompt) for prompt in PROMPTS], given, use_tqdm=False)


def seeded(params: SamplingParams, number: int) -> SamplingParams:
    return params if params.seed is None else params.replace(seed=params.seed + number)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(tmp_path_factory.mktemp("options"))


# ---- options ----

BASE = SamplingParams(seed=11, max_tokens=18, ignore_eos=True, logprobs=2)
GREEDY = BASE.replace(temperature=0.0)
STOPS = (3, 19, 24, 40, 61)
BAD = ("w35 w51", "w44", "w60 w12 w28", "w01 w17 w33", "w46")
HALF = tuple(range(VOCAB // 2))


def base(**changes: Any) -> SamplingParams:
    return BASE.replace(**changes)


OPTIONS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "plain": BASE,
    "cool": base(temperature=0.5),
    "hot": base(temperature=1.7),
    "seed below zero": base(seed=-(2**63)),
    "largest seed": base(seed=2**63 - 10),
    "top_k 1": base(temperature=2.0, top_k=1),
    "top_k": base(temperature=2.0, top_k=7),
    "top_p": base(temperature=1.5, top_p=0.6),
    "top_k and top_p": base(temperature=2.0, top_k=20, top_p=0.7),
    "min_p": base(temperature=2.0, min_p=0.1),
    "repetition": base(repetition_penalty=1.8),
    "presence": base(presence_penalty=1.7),
    "frequency": base(frequency_penalty=0.9),
    "negative penalties": base(temperature=2.0, frequency_penalty=-1.0, presence_penalty=-1.5),
    "greedy penalties": GREEDY.replace(repetition_penalty=1.5, frequency_penalty=1.4),
    "logit_bias": base(logit_bias={5: 4.0, 19: -100.0, 28: 3.5, 44: -3.0, 62: 5.0}),
    "greedy logit_bias": GREEDY.replace(logit_bias={19: -100.0, 28: -3.0}),
    "bad_words": base(bad_words=BAD),
    "greedy bad_words": GREEDY.replace(bad_words=BAD),
    "min_tokens": base(min_tokens=7, stop_token_ids=HALF),
    "greedy min_tokens": GREEDY.replace(min_tokens=3, stop_token_ids=(35, 60, 30)),
    "stop_token_ids": base(stop_token_ids=STOPS, max_tokens=40),
    "greedy stop_token_ids": GREEDY.replace(stop_token_ids=STOPS),
    "end of text": base(ignore_eos=False, max_tokens=None),
    "greedy end of text": GREEDY.replace(ignore_eos=False),
    "stop": base(stop=["w51 w03", "w44 w60", "7 w33"], max_tokens=40),
    "greedy stop": GREEDY.replace(stop=["w03 w1", "28", "w62 w14 w"]),
    "included stop": base(stop=["51 w0", "w60"], include_stop_str_in_output=True),
    "stop after min_tokens": base(stop=["w0", "w4"], min_tokens=6),
    "one token": base(max_tokens=1),
    "two tokens": base(max_tokens=2),
    "seven tokens": GREEDY.replace(max_tokens=7),
    "to the end": base(max_tokens=None, logprobs=None),
    "no logprobs": base(logprobs=None),
    "own logprobs": base(logprobs=0, temperature=1.5),
    "many logprobs": base(logprobs=20),
    "prompt_logprobs": base(prompt_logprobs=0),
    "all prompt_logprobs": GREEDY.replace(prompt_logprobs=-1, max_tokens=5),
    "several": base(n=4, prompt_logprobs=2),
    "several greedy": GREEDY.replace(n=2),
    "everything": base(
        temperature=0.9,
        top_k=30,
        top_p=0.97,
        min_p=0.001,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias={5: 1.0, 19: -1.0},
        bad_words=BAD,
        min_tokens=6,
        stop_token_ids=STOPS,
        stop=["w62"],
        n=3,
        prompt_logprobs=1,
        max_tokens=30,
    ),
}


def check_same(found: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    for mine, plain in zip(found, wanted, strict=True):
        check_scores(mine.prompt_logprobs, plain.prompt_logprobs)
        for answer, other in zip(mine.outputs, plain.outputs, strict=True):
            check_answer(answer, other)


def check_answer(found: CompletionOutput, wanted: CompletionOutput) -> None:
    for name in ("index", "token_ids", "text", "finish_reason", "stop_reason"):
        assert getattr(found, name) == getattr(wanted, name), name
    check_scores(found.logprobs, wanted.logprobs)
    assert (found.cumulative_logprob is None) == (wanted.cumulative_logprob is None)
    if wanted.cumulative_logprob is not None:
        assert abs(found.cumulative_logprob - wanted.cumulative_logprob) < TOLERANCE


def check_scores(
    found: list[dict[int, Logprob]] | list[dict[int, Logprob] | None] | None,
    wanted: list[dict[int, Logprob]] | list[dict[int, Logprob] | None] | None,
) -> None:
    assert (found is None) == (wanted is None)
    for entries, others in zip(found or (), wanted or (), strict=True):
        assert (entries is None) == (others is None)
        assert list(entries or ()) == list(others or ())  # in the same order
        for token, entry in (entries or {}).items():
            other = (others or {})[token]
            assert abs(entry.logprob - other.logprob) < TOLERANCE
            assert (entry.rank, entry.decoded_token) == (other.rank, other.decoded_token)


def num_accepted(outputs: list[RequestOutput]) -> int:
    return sum(a.spec.num_accepted_tokens for o in outputs for a in o.outputs if a.spec)


# ---- tests ----

# Where no draft is ever wanted: the second token is the last.
TOO_SHORT = ("one token", "two tokens")
# Those that ask for other numbers, not for other tokens.
SAME_TOKENS = ("no logprobs", "many logprobs", "prompt_logprobs", "all prompt_logprobs", "several")


@pytest.mark.parametrize(
    ("drafter", "name"),
    [
        (drafter, name)
        for place, drafter in enumerate(ALONE)
        for number, name in enumerate(OPTIONS)
        if EVERY or number % len(ALONE) == place
    ],
)
def test_option_alone(engines: Engines, drafter: str, name: str) -> None:
    found = generate(engines.speculating(drafter), OPTIONS[name])
    check_same(found, engines.plain_answers(DRAFTERS[drafter][0], OPTIONS[name]))
    if drafter in RIGHT and name not in TOO_SHORT:
        assert num_accepted(found) > 0


@pytest.mark.parametrize("name", OPTIONS)
def test_options_matter(engines: Engines, name: str) -> None:
    """Each changes what is said, so that ignoring it would be seen."""
    greedy = OPTIONS[name].greedy
    usual = engines.plain_answers("circles", GREEDY if greedy else BASE)
    changed = engines.plain_answers("circles", OPTIONS[name])
    tokens = [[o.outputs[0].token_ids for o in outputs] for outputs in (usual, changed)]
    same = name in ("plain", "greedy", "several greedy", *SAME_TOKENS)
    length = 5 if name == "all prompt_logprobs" else None
    assert ([ids[:length] for ids in tokens[0]] == tokens[1]) == same


def run_together(llm: LLM, names: list[str], wishes: list[int | None]) -> list[RequestOutput]:
    """Every prompt with each of these options, in one call; name by name, prompt by prompt.

    wishes: drafts a step that requests ask for, in turn
    """
    every = [(name, prompt) for name in names for prompt in range(len(PROMPTS))]
    params = [
        seeded(OPTIONS[name], prompt).replace(num_speculative_tokens=wishes[place % len(wishes)])
        for place, (name, prompt) in enumerate(every)
    ]
    outputs = llm.generate([list(PROMPTS[p]) for _, p in every], params, use_tqdm=False)
    for output, each in zip(outputs, params, strict=True):
        check_num_drafts(output, each.num_speculative_tokens)
    return outputs


def check_num_drafts(output: RequestOutput, limit: int | None) -> None:
    """No more drafts a step than were asked for."""
    for answer in output.outputs:
        assert answer.spec is not None
        if limit is not None:
            assert answer.spec.num_draft_tokens <= limit * answer.spec.num_drafts
            assert not any(answer.spec.num_accepted_tokens_per_pos[limit:])


STEP_GRAPHS: dict[str, Any] = {"graph_mode": "step", "capture_sizes": "8,24"}
IN_GRAPHS = ("circles-eagle3-half", "random-ngram")


def name_of(value: str | dict[str, Any]) -> str:
    return value if isinstance(value, str) else value.get("graph_mode", "eager")


@pytest.mark.parametrize(
    ("drafter", "graphs"),
    [(d, {}) for d in DRAFTERS if EVERY or d not in (*ALONE, *IN_GRAPHS)]
    + [(d, STEP_GRAPHS) for d in IN_GRAPHS],
    ids=name_of,
)
def test_all_options_in_one_batch(engines: Engines, drafter: str, graphs: dict[str, Any]) -> None:
    """Side by side, each request with as many drafts a step as it likes."""
    target, config = DRAFTERS[drafter]
    wishes = [None, *range(config["num_speculative_tokens"] + 1)]
    llm = engines.speculating(drafter, **graphs)
    replays = small_models.count_replays(llm)
    found = run_together(llm, list(OPTIONS), wishes)
    assert (replays[RunMode.STEP] > 20) == bool(graphs)
    wanted = [o for params in OPTIONS.values() for o in engines.plain_answers(target, params)]
    check_same(found, wanted)


@pytest.mark.parametrize("limit", range(4))
def test_drafts_of_a_request(engines: Engines, limit: int) -> None:
    """A head that is always right has as many accepted a step as the request lets it draft."""
    params = GREEDY.replace(max_tokens=1 + 3 * (limit + 1))
    wanted = engines.plain_answers("circles", params)
    llm = engines.speculating("circles-eagle3-right")
    found = generate(llm, params.replace(num_speculative_tokens=limit))
    check_same(found, wanted)
    for output in found:
        spec = output.outputs[0].spec
        # The first token comes with the prompt, then three steps.
        assert spec.num_accepted_tokens_per_pos[:limit] == [3] * limit
        assert spec.num_drafts == (3 if limit else 0)


# ---- history: what was said before a draft is said, drafts before it included ----

HISTORY = {
    "repetition": "loops-eagle",
    "presence": "loops-eagle",
    "frequency": "loops-eagle",
    "negative penalties": "loops-eagle",
    "bad_words": "circles-eagle",
    "greedy bad_words": "circles-eagle",
    "min_tokens": "circles-eagle",
    "greedy min_tokens": "circles-eagle",
    "everything": "circles-eagle",
}


def forget_drafts(known: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return known


def forget_the_newest_draft(known: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return known + (after - 1).clamp(min=0)


@pytest.mark.parametrize("seen", [forget_drafts, forget_the_newest_draft])
@pytest.mark.parametrize("name", HISTORY)
def test_forgotten_drafts_are_noticed(
    engines: Engines, monkeypatch: Patch, name: str, seen: Callable[..., torch.Tensor]
) -> None:
    edit = Sampler._edit_

    def forgetful(self: Sampler, logits: Any, where: Positions, needs: Any) -> None:
        known = self.slots.num_tokens[where.slot]
        edit(self, logits, replace(where, num_tokens=seen(known, where.num_tokens - known)), needs)

    drafter, params = HISTORY[name], OPTIONS[name].replace(n=6)
    wanted = engines.plain_answers(DRAFTERS[drafter][0], params)
    check_same(generate(engines.speculating(drafter), params), wanted)
    monkeypatch.setattr(Sampler, "_edit_", forgetful)
    with pytest.raises(AssertionError):
        check_same(generate(engines.speculating(drafter), params), wanted)


# ---- drawn drafts, greedy requests ----


@pytest.mark.parametrize(
    ("drafter", "graphs"),
    [("circles-eagle3-half", STEP_GRAPHS), ("circles-eagle3-half", {}), ("random-eagle", {})],
    ids=name_of,
)
def test_drawn_drafts_do_not_change_greedy_answers(
    engines: Engines, drafter: str, graphs: dict[str, Any]
) -> None:
    """Among themselves, and beside requests that draw."""
    llm = engines.speculating(drafter, draft_sample_method="probabilistic", **graphs)
    replays = small_models.count_replays(llm)
    greedy = [name for name, params in OPTIONS.items() if params.greedy]
    target = DRAFTERS[drafter][0]
    wanted = [o for name in greedy for o in engines.plain_answers(target, OPTIONS[name])]
    check_same(run_together(llm, greedy, [None]), wanted)
    noisy = [name for name in OPTIONS if name not in greedy]
    count = len(PROMPTS)
    mixed = run_together(
        llm, [x for pair in zip(greedy, noisy, strict=False) for x in pair], [None]
    )
    pairs = [mixed[i : i + count] for i in range(0, len(mixed), 2 * count)]
    check_same([output for pair in pairs for output in pair], wanted)
    assert (replays[RunMode.STEP] > 20) == bool(graphs)


def test_drawn_drafts_are_seeded(engines: Engines) -> None:
    """Other text than without them, but the same each time, in any company."""
    llm = engines.speculating("circles-eagle3-half", draft_sample_method="probabilistic")
    first = generate(llm, BASE)
    alone = [
        llm.generate(list(prompt), seeded(BASE, i), use_tqdm=False)[0]
        for i, prompt in enumerate(PROMPTS)
    ]
    check_same(alone, first)
    plain = engines.plain_answers("circles", BASE)
    assert any(
        a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in zip(first, plain, strict=True)
    )


# ---- acceptance by chance ----


def count_runs(llm: LLM, monkeypatch: Patch, params: SamplingParams) -> np.ndarray:
    """Accepted drafts of each verification that had all K."""
    most = llm.config.schedule.num_drafts
    found: list[int] = []
    update = llm.engine.scheduler.update

    def counted(result: Any) -> Any:
        found.extend(len(r.token_ids) - 1 for r in result.rows if r.num_drafts == most)
        return update(result)

    monkeypatch.setattr(llm.engine.scheduler, "update", counted)
    every = [params.replace(seed=seed) for seed in range(24)]
    llm.generate([[t, t + 1, t + 2] for t in range(24)], every, use_tqdm=False)
    return np.array(found)


@pytest.mark.parametrize("drafter", ["circles-eagle3-wrong", "circles-eagle3-right"])
@pytest.mark.parametrize("params", [GREEDY, BASE], ids=["greedy", "drawn"])
def test_synthetic_rates(
    engines: Engines, monkeypatch: Patch, drafter: str, params: SamplingParams
) -> None:
    """Whatever the drafts are worth."""
    rates = [0.85, 0.5, 0.15]
    llm = engines.speculating(
        drafter, rejection_sample_method="synthetic", synthetic_acceptance_rates=rates
    )
    params = params.replace(max_tokens=None, logprobs=None, n=1 if params.greedy else 2)
    runs = count_runs(llm, monkeypatch, params)
    assert len(runs) > 500
    for place, rate in enumerate(rates):
        error = (rate * (1 - rate) / len(runs)) ** 0.5
        assert abs((runs > place).mean() - rate) < 4 * error


@pytest.mark.parametrize("length", [1.0, 1.7, 2.0, 3.25, 4.0])
def test_synthetic_length(engines: Engines, monkeypatch: Patch, length: float) -> None:
    llm = engines.speculating(
        "circles-eagle3-wrong",
        rejection_sample_method="synthetic",
        synthetic_acceptance_length=length,
    )
    runs = count_runs(llm, monkeypatch, BASE.replace(max_tokens=None, logprobs=None))
    share = length % 1  # of the steps that have one token more than the others
    error = (share * (1 - share) / len(runs)) ** 0.5
    assert abs(runs.mean() + 1 - length) <= 4 * error
    assert runs.max() - runs.min() == (share > 0)
