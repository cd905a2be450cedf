"""Answers of the speculating engine have the same distribution as those of the target alone.

Over a vocabulary of six tokens every answer can be enumerated, and its probability worked out from
the target's plain logits, with no code of the sampler. Many seeds then go through the whole engine,
with its own drafter and random streams, for several rounds each. Each known bug is put back once,
to see that this check catches it.
"""

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats
from torch import Tensor

from stoop import LLM, SamplingParams
from stoop.graph.descriptor import RunMode
from stoop.models.registry import read_model_spec
from stoop.ops import drafting, random, verification
from stoop.ops.random import Purpose
from stoop.ops.sampling import draw
from stoop.spec import eagle
from support.reference_drafter import TargetReference
from support.small_models import count_replays, write_head, write_target

VOCAB = 6
PROMPT = (1, 4, 2)
LENGTH = 5  # tokens of an answer
SIGNIFICANCE = 1e-4
NUM_SEQS = 512
EVERY = bool(os.environ.get("STOOP_TEST_ALL"))
COUNT = 2048 if EVERY else 1024  # answers
CELL = 8.0  # answers that a cell of the test expects at least

Patch = pytest.MonkeyPatch
Probs = np.ndarray  # [VOCAB] * LENGTH: of every answer


@dataclass(frozen=True)
class Setting:
    """What the engine is, beside its requests."""

    method: str
    drafts: str = "probabilistic"
    num_drafts: int = 3
    graph_mode: str = "none"
    num_kv_blocks: int = 4 * NUM_SEQS  # of 4 tokens: enough for all


# ---- models ----


class Models:
    """One target; heads that are mostly right, and one that is sure of what is often wrong."""

    def __init__(self, root: Path) -> None:
        self._probs: dict[str, Probs] = {}  # by options
        self._plain: dict[str, np.ndarray] = {}
        target = self.target = write_target(root / "target", VOCAB, seed=3)
        self.heads = {
            # Its own vocabulary leaves out a token: q is 0 there.
            "eagle3": write_head(
                root / "eagle3", "eagle3", target, 0.15, seed=1, drafted=(0, 1, 3, 4, 5)
            ),
            "eagle": write_head(root / "eagle", "eagle", target, 0.2, seed=1),
            # The likeliest tokens but one: the residual falls on few others.
            "eagle3-narrow": write_head(
                root / "eagle3-narrow", "eagle3", target, 0.1, seed=2, drafted=(1, 3, 5)
            ),
        }

    def llm(self, setting: Setting | None) -> LLM:
        options: dict[str, Any] = {}
        if setting is not None:
            options["speculative_config"] = {
                "method": setting.method.removesuffix("-narrow"),
                "model": str(self.heads[setting.method]),
                "num_speculative_tokens": setting.num_drafts,
                "draft_sample_method": setting.drafts,
            }
            options["num_kv_blocks"] = setting.num_kv_blocks
            if setting.graph_mode != "none":
                options["graph_mode"] = setting.graph_mode
                options["capture_sizes"] = [NUM_SEQS]
        return LLM(
            str(self.target),
            dtype="float64",
            device="cpu",
            skip_tokenizer_init=True,
            max_model_len=16,
            max_num_seqs=NUM_SEQS,
            block_size=4,
            **options,
        )

    @functools.cached_property
    def logits(self) -> np.ndarray:
        """[VOCAB] * (LENGTH - 1) + [LENGTH, VOCAB]: after the prompt, and then after each token
        of each answer but its last."""
        tensors = load_file(self.target / "model.safetensors")
        target = TargetReference(read_model_spec(self.target), tensors)
        found = np.empty((VOCAB,) * (LENGTH - 1) + (LENGTH, VOCAB))
        for answer in itertools.product(range(VOCAB), repeat=LENGTH - 1):
            found[answer] = target.streams([*PROMPT, *answer])[2][len(PROMPT) - 1 :]
        return found

    def probs(self, params: SamplingParams) -> Probs:
        """Of all answers, exactly."""
        key = repr(params)
        if key not in self._probs:
            self._probs[key] = self._work_out(params)
        return self._probs[key]

    def _work_out(self, params: SamplingParams) -> Probs:
        found = np.empty((VOCAB,) * LENGTH)
        for before in itertools.product(range(VOCAB), repeat=LENGTH - 1):
            chance = 1.0
            for place, token in enumerate(before):
                chance *= next_probs(self.logits[before][place], before[:place], params)[token]
            found[before] = chance * next_probs(self.logits[before][-1], before, params)
        return found

    def plain_answers(self, params: SamplingParams) -> np.ndarray:
        """1024 of the target alone."""
        key = repr(params)
        if key not in self._plain:
            self._plain[key] = answers(self.llm(None), params, 1024)
        return self._plain[key]


def next_probs(logits: np.ndarray, output: tuple[int, ...], params: SamplingParams) -> np.ndarray:
    """The distribution of one token, as the options are documented."""
    counts = np.bincount(output, minlength=VOCAB) if output else np.zeros(VOCAB)
    logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    weights = np.exp((logits - logits.max()) / params.temperature)
    probs = weights / weights.sum()
    order = np.argsort(-probs)
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= params.top_p]] = 0.0
    return probs / probs.sum()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("distribution"))


# ---- the check ----


def answers(
    llm: LLM,
    params: SamplingParams,
    count: int,
    first_seed: int = 0,
    wishes: Sequence[int | None] = (None,),
) -> np.ndarray:
    """[count, LENGTH] tokens; count is a multiple of 128.

    wishes: drafts a step that requests ask for, in turn
    """
    each, found = 128, []
    for start in range(0, count, NUM_SEQS):  # all decode together, so that graphs serve them
        asked = [
            params.replace(
                seed=first_seed + i,
                n=each,
                max_tokens=LENGTH,
                num_speculative_tokens=wishes[i % len(wishes)],
            )
            for i in range(start // each, min(start + NUM_SEQS, count) // each)
        ]
        outputs = llm.generate([list(PROMPT)] * len(asked), asked, use_tqdm=False)
        found += [answer.token_ids for output in outputs for answer in output.outputs]
    return np.array(found)


def p_value(found: np.ndarray, probs: Probs) -> float:
    """How well the answers fit: whole ones, pairs of neighbours and single places; the least of
    all, times their number. 0 if an impossible one came."""
    assert abs(probs.sum() - 1) < 1e-9
    if (probs[tuple(found.T)] == 0).any():
        return 0.0
    places = range(LENGTH)
    groups = [tuple(places), *itertools.pairwise(places), *((place,) for place in places)]
    least = min(_chi_squared(found, probs, group) for group in groups)
    return min(1.0, len(groups) * least)


def _chi_squared(found: np.ndarray, probs: Probs, group: tuple[int, ...]) -> float:
    """Of the tokens in these places. Rare ones are pooled with those that begin as they do."""
    others = tuple(place for place in range(LENGTH) if place not in group)
    expected = probs.sum(axis=others).ravel() * len(found)
    shape = (VOCAB,) * len(group)
    counts = np.bincount(
        np.ravel_multi_index(tuple(found[:, group].T), shape), minlength=expected.size
    )
    wanted, had = [0.0], [0.0]
    for each, count in zip(expected, counts, strict=True):
        if wanted[-1] >= CELL:
            wanted.append(0.0)
            had.append(0.0)
        wanted[-1] += each
        had[-1] += count
    if wanted[-1] < CELL:  # the last one is left short: it joins its neighbour
        wanted[-2:], had[-2:] = [sum(wanted[-2:])], [sum(had[-2:])]
    return float(stats.chisquare(had, wanted).pvalue)


# ---- the engine ----

PLAIN = SamplingParams(temperature=1.0)


def options(temperature: float, **changes: Any) -> SamplingParams:
    return PLAIN.replace(temperature=temperature, **changes)


TOP_P: dict[str, Any] = {"top_p": 0.8}
PENALTIES: dict[str, Any] = {"presence_penalty": 0.7, "frequency_penalty": 0.5}
STEP: dict[str, Any] = {"graph_mode": "step"}
# Every temperature with every other option, each of them with every setting.
DRAWN = [
    (Setting("eagle3"), options(1.0)),
    (Setting("eagle", num_drafts=2, **STEP), options(0.7)),
    (Setting("eagle3-narrow", **STEP), options(1.5)),
    (Setting("eagle3", num_drafts=2, **STEP), options(0.7, **TOP_P)),
    (Setting("eagle", **STEP), options(1.0, **TOP_P)),
    (Setting("eagle", num_drafts=2), options(1.5, **TOP_P)),
    (Setting("eagle3", **STEP), options(1.5, **PENALTIES)),
    (Setting("eagle"), options(0.7, **PENALTIES)),
    (Setting("eagle3-narrow", num_drafts=2), options(1.0, **PENALTIES)),
]
MATCHED = [
    (Setting("eagle3", "greedy"), options(0.7, **PENALTIES)),
    (Setting("eagle", "greedy", num_drafts=2, **STEP), options(1.0, **TOP_P)),
    (Setting("eagle3", "greedy", **STEP), options(1.5)),
    (Setting("eagle3", "coupled"), options(0.7, **PENALTIES)),
    (Setting("eagle", "coupled", num_drafts=2, **STEP), options(1.0, **TOP_P)),
    (Setting("eagle3-narrow", "coupled", **STEP), options(1.5)),
]


def describe(value: Setting | SamplingParams) -> str:
    if isinstance(value, Setting):
        return f"{value.method} {value.drafts} {value.num_drafts} {value.graph_mode}"
    return f"{value.temperature} {value.top_p} {value.presence_penalty}"


def check_drafts_counted(llm: LLM, count: int) -> None:
    """Runs of them were accepted, and many were not: no test of an idle verifier."""
    metrics = llm.metrics()
    assert metrics["spec_decode_num_accepted_tokens_per_pos"][1] > count / 50
    drafted, accepted = (metrics[f"spec_decode_num_{x}_tokens"] for x in ("draft", "accepted"))
    assert 0.1 < accepted / drafted < 0.9


@pytest.mark.parametrize(("setting", "params"), DRAWN, ids=describe)
def test_answers_with_drawn_drafts(models: Models, setting: Setting, params: Any) -> None:
    llm = models.llm(setting)
    replays = count_replays(llm)
    found = answers(llm, params, COUNT)
    assert p_value(found, models.probs(params)) > SIGNIFICANCE
    check_drafts_counted(llm, len(found))
    assert (replays[RunMode.STEP] > 4) == (setting.graph_mode == "step")


@pytest.mark.parametrize(("setting", "params"), MATCHED, ids=describe)
def test_answers_with_matched_drafts(models: Models, setting: Setting, params: Any) -> None:
    """These are those of plain decoding besides, seed for seed."""
    llm = models.llm(setting)
    replays = count_replays(llm)
    found = answers(llm, params, 1024)
    assert p_value(found, models.probs(params)) > SIGNIFICANCE
    check_drafts_counted(llm, len(found))
    assert (replays[RunMode.STEP] > 4) == (setting.graph_mode == "step")
    assert np.array_equal(found, models.plain_answers(params))


def shares(models: Models, setting: Setting, params: SamplingParams) -> np.ndarray:
    """The share of accepted drafts, by position."""
    llm = models.llm(setting)
    answers(llm, params, COUNT // 2)
    metrics = llm.metrics()
    accepted = np.array(metrics["spec_decode_num_accepted_tokens_per_pos"])
    return accepted / metrics["spec_decode_num_drafts"]


@pytest.mark.parametrize("method", ["eagle", "eagle3", "eagle3-narrow"])
def test_coupled_drafts_stand_more_often_than_the_likeliest(models: Models, method: str) -> None:
    graphs = STEP if EVERY or method == "eagle3" else {}
    coupled = shares(models, Setting(method, "coupled", **graphs), PLAIN)
    likeliest = shares(models, Setting(method, "greedy", **graphs), PLAIN)
    drawn = shares(models, Setting(method, "probabilistic", **graphs), PLAIN)
    assert np.all(coupled > likeliest) and coupled.sum() > likeliest.sum() + 0.1
    # No draw from the head's distribution does better than the ratio test.
    assert np.all(coupled < drawn + 0.03)


@pytest.mark.parametrize(
    ("filters", "mode"),
    [({"top_k": 1}, {}), ({"top_p": 0.3}, STEP), ({"top_k": 2}, {}), ({"min_p": 0.6}, {})],
)
def test_coupled_drafts_are_filtered_as_the_target(
    models: Models, filters: dict[str, Any], mode: dict[str, Any], monkeypatch: Patch
) -> None:
    """Otherwise a target whose filters leave few tokens would get drafts of any token."""
    params, setting = options(1.5, **filters), Setting("eagle", "coupled", **mode)
    coupled = shares(models, setting, params).sum()
    assert coupled > shares(models, Setting("eagle", "greedy", **mode), params).sum() - 0.02

    def temper_only(logits: Tensor, temperature: Tensor, *filters: Tensor) -> None:
        drafting.temper_(logits, temperature[filters[-1]])

    monkeypatch.setattr(drafting, "filter_", temper_only)
    assert shares(models, setting, params).sum() < coupled - 0.05


def pick_with_the_noise_of(place: int, purpose: Purpose, maps: bool) -> Callable[[Patch], None]:
    def put_back(patch: Patch) -> None:
        function = drafting.gumbel_at

        def other(seeds: Any, positions: Any, _: Purpose, numbers: Any) -> Any:
            numbers = numbers if maps else torch.arange(len(numbers))
            return function(seeds, positions + place, purpose, numbers)

        patch.setattr(drafting, "gumbel_at", other)

    return put_back


UNCOUPLED = {
    "the place before": pick_with_the_noise_of(-1, Purpose.SAMPLE, True),
    "the place after": pick_with_the_noise_of(1, Purpose.SAMPLE, True),
    "another stream": pick_with_the_noise_of(0, Purpose.DRAFT, True),
    "the draft vocabulary": pick_with_the_noise_of(0, Purpose.SAMPLE, False),
}


COUPLED = Setting("eagle3-narrow", "coupled")


@pytest.fixture(scope="module")
def coupled_shares(models: Models) -> np.ndarray:
    return shares(models, COUPLED, PLAIN)


@pytest.mark.parametrize("name", UNCOUPLED)
def test_noise_that_is_not_the_targets_is_seen(
    models: Models, coupled_shares: np.ndarray, name: str, monkeypatch: Patch
) -> None:
    """Answers stay what they are, whatever is drafted: only acceptance tells."""
    UNCOUPLED[name](monkeypatch)
    assert shares(models, COUPLED, PLAIN)[0] < coupled_shares[0] - 0.1


def test_answers_with_drawn_drafts_and_preemption(models: Models) -> None:
    """A draft that was drawn but never judged leaves no trace."""
    llm = models.llm(Setting("eagle3", num_kv_blocks=750))
    found = answers(llm, PLAIN, COUNT)
    assert llm.metrics()["num_preemptions"] > 100
    assert p_value(found, models.probs(PLAIN)) > SIGNIFICANCE


def test_answers_of_requests_with_fewer_drafts(models: Models) -> None:
    params = options(0.7, **TOP_P)
    found = answers(models.llm(Setting("eagle")), params, COUNT, wishes=(1, 3, 0, 2))
    assert p_value(found, models.probs(params)) > SIGNIFICANCE


# ---- bugs, put back one at a time ----


def redraw_with_the_drafts_noise(patch: Patch) -> None:
    """vLLM's defect: the noise that chose a refused draft is used again to replace it."""
    share_stream(patch, verification, "gumbel", Purpose.RESAMPLE, Purpose.DRAFT)


def judge_with_the_drafts_noise(patch: Patch) -> None:
    share_stream(patch, verification, "uniform", Purpose.ACCEPT, Purpose.DRAFT)


def redraw_with_the_judges_number(patch: Patch) -> None:
    share_stream(patch, verification, "gumbel", Purpose.RESAMPLE, Purpose.ACCEPT)


def share_stream(patch: Patch, module: Any, name: str, own: Purpose, other: Purpose) -> None:
    function = getattr(module, name)

    def shared(seeds: Any, positions: Any, purpose: Purpose, count: int) -> Any:
        return function(seeds, positions, other if purpose is own else purpose, count)

    patch.setattr(module, name, shared)


def judge_all_by_one_number(patch: Patch) -> None:
    """What decided the first draft is drawn again for all later ones."""
    rekey_uniforms(patch, lambda positions, count: torch.zeros(len(positions), count))


def judge_by_number_of_the_draft(patch: Patch) -> None:
    """Every round begins with the same numbers, examined or not."""
    rekey_uniforms(patch, lambda positions, count: torch.arange(count).repeat(len(positions), 1))


def judge_neighbours_by_one_number(patch: Patch) -> None:
    """Of two places with one number, the first may end a round and the second begin the next."""
    rekey_uniforms(patch, lambda positions, count: (positions[:, None] + torch.arange(count)) // 2)


def rekey_uniforms(patch: Patch, place: Callable[[Any, int], Any]) -> None:
    def uniforms(seeds: Any, positions: Any, count: int) -> Any:
        where = place(positions, count).long().flatten()
        flat = random.uniform(seeds.repeat_interleave(count), where, Purpose.ACCEPT, 1)
        return flat.view(-1, count)

    patch.setattr(verification, "_uniforms", uniforms)


def redraw_from_the_target(patch: Patch) -> None:
    """The residual forgets what the draft had its chance at already."""
    residual = verification.draw_residual

    def whole(probs: Any, draft_probs: Any, seeds: Any, positions: Any) -> Any:
        return residual(probs, torch.zeros_like(draft_probs), seeds, positions)

    patch.setattr(verification, "draw_residual", whole)


def accept_everything(patch: Patch) -> None:
    patch.setattr(
        verification, "accept_by_ratio", lambda p, q, drafts, *rest: torch.ones_like(drafts).bool()
    )


def accept_by_the_inverse(patch: Patch) -> None:
    accept = verification.accept_by_ratio
    patch.setattr(verification, "accept_by_ratio", lambda p, q, *rest: accept(q, p, *rest))


def keep_logits_before_temperature(patch: Patch) -> None:
    """The stored distribution is not the one that was drawn from."""

    def tempered(logits: Any, temperature: Any, *rest: Any) -> Any:
        return draw(logits / temperature[:, None], temperature, *rest)

    patch.setattr(eagle, "temper_", lambda logits, temperature: None)
    patch.setattr(eagle, "draw", tempered)


def keep_all_in_one_column(patch: Patch) -> None:
    """Each draft's logits overwrite those of the one before."""
    commit = drafting.commit_draft
    patch.setattr(drafting, "commit_draft", lambda *args: commit(*args).clamp(max=0))


def keep_in_the_next_column(patch: Patch) -> None:
    commit = drafting.commit_draft

    def shifted(slots: Any, step: Any, room: Any, token_ids: Any) -> Any:
        number = commit(slots, step, room, token_ids)
        return torch.where(number < 0, number, (number + 1) % 3)

    patch.setattr(drafting, "commit_draft", shifted)


MUTANTS = (
    redraw_with_the_drafts_noise,
    judge_with_the_drafts_noise,
    redraw_with_the_judges_number,
    judge_all_by_one_number,
    judge_by_number_of_the_draft,
    judge_neighbours_by_one_number,
    redraw_from_the_target,
    accept_everything,
    accept_by_the_inverse,
    keep_logits_before_temperature,
    keep_all_in_one_column,
    keep_in_the_next_column,
)


# Where the likeliest token cannot be drafted, or few can, a mistake in the residual is large.
NARROW = (Setting("eagle3-narrow"), options(1.5))
WIDE = (Setting("eagle3"), options(0.7))
CAUGHT = 1e-6


@pytest.mark.parametrize(("setting", "params"), [NARROW, WIDE], ids=["narrow", "wide"])
def test_control_without_a_bug(models: Models, setting: Setting, params: Any) -> None:
    assert not caught(models, setting, params)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_bug_is_seen(
    models: Models, mutant: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The number that judges is the noise of token 0, which only the wide head may draft.
    setting, params = WIDE if mutant is judge_with_the_drafts_noise else NARROW
    mutant(monkeypatch)
    assert caught(models, setting, params)


def caught(models: Models, setting: Setting, params: SamplingParams) -> bool:
    """Within 2048 answers, asked for in parts: most bugs show in the first."""
    llm, found = models.llm(setting), np.empty((0, LENGTH), dtype=int)
    for part in range(4):
        found = np.concatenate((found, answers(llm, params, 512, first_seed=100 * part)))
        if p_value(found, models.probs(params)) < CAUGHT:
            return True
    return False
