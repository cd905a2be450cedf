"""MTP heads: transformers' drafts and logits, and answers that no draft changes."""

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stoop import LLM, SamplingParams
from stoop.core.step import StepPlan
from stoop.layers.embedding import Embedding
from stoop.layers.norm import RMSNorm
from stoop.models.draft_vocab import FILE, TokenRanking, write_ranking
from stoop.models.mtp import MtpHead
from stoop.worker.output import LaunchedStep
from support.checkpoints import VOCAB_SIZE
from support.draft_policies import RandomDrafts
from support.drafters import BACKENDS, MODES, Drafter, Trace, assert_same_drafts, make_spec_llm, run
from support.engines import make_llm
from support.huggingface import make_prompt
from support.mtp_checkpoints import MtpOracle, make_agreeing_pair, make_pair

Patch = pytest.MonkeyPatch
EVERY = bool(os.environ.get("STOOP_TEST_ALL"))
NUM_DRAFTS = 3
# Below the first, rounding decides; transformers rotates all positions by one more, in float32.
TIE_GAP, NOISE = 1e-4, 1e-5

# ---- transformers' drafts ----

PROMPTS = [make_prompt(length) for length in (1, 2, 7, 8, 9, 40)]
ORACLE_SETTINGS: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 24,  # the longest prompt comes in chunks
    "block_size": 8,
    "num_kv_blocks": 30,
}
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def oracle() -> MtpOracle:
    return MtpOracle(make_pair())


@pytest.fixture(scope="module")
def folder(oracle: MtpOracle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.pair.save(tmp_path_factory.mktemp("mtp") / "random")


def make_mtp_llm(folder: Path, num_drafts: int = NUM_DRAFTS, **options: Any) -> LLM:
    spec = {"method": "mtp", "num_speculative_tokens": num_drafts}
    return make_llm(folder, speculative_config=spec, **ORACLE_SETTINGS | options)


def assert_oracle_drafts(llm: LLM, oracle: MtpOracle, prompts: list[list[int]]) -> int:
    """Answer the prompts one by one and compare the drafts of every step, and their logits."""
    runner, compared = llm.engine.runner, 0
    launch, head, seen = runner.launch, runner.draft_model, []
    make_logits = head.logits

    def logits(states: Tensor) -> Tensor:
        seen.append(make_logits(states))
        return seen[-1]

    def spy(plan: StepPlan) -> LaunchedStep:
        nonlocal compared
        seen.clear()
        launched = launch(plan)
        (row,), slots = plan.rows, runner.target.state.tensors
        known, count = int(slots.num_tokens[row.slot]), int(slots.num_drafts[row.slot])
        token_ids = slots.token_ids[row.slot, : known + count].tolist()
        if row.samples and count:
            expected = oracle.logits(token_ids[:known], count)
            found = torch.cat(seen[:count])
            assert (found - expected).abs().max() < NOISE
            best = expected.topk(2, dim=1).values
            assert float((best[:, 0] - best[:, 1]).min()) > TIE_GAP, "choose another seed"
            assert token_ids[known:] == expected.argmax(dim=1).tolist()
            compared += count
        return launched

    head.logits, runner.launch = logits, spy
    for prompt in prompts:
        llm.generate(prompt, GREEDY, use_tqdm=False)
    return compared


@pytest.mark.parametrize("num_drafts", [1, NUM_DRAFTS])
def test_drafts_are_those_of_transformers(folder: Path, oracle: MtpOracle, num_drafts: int) -> None:
    llm = make_mtp_llm(folder, num_drafts)
    compared = assert_oracle_drafts(llm, oracle, PROMPTS)
    assert compared > 5 * num_drafts * len(PROMPTS)


def swap_the_halves(patch: Patch) -> None:
    joined = Embedding.joined

    def swapped(self: Embedding, *args: Any) -> Tensor:
        return torch.cat(joined(self, *args).chunk(2, dim=-1)[::-1], dim=-1)

    patch.setattr(Embedding, "joined", swapped)


def forget_the_norm_of_the_embedding(patch: Patch) -> None:
    def joined(self: Embedding, ids: Tensor, norm: RMSNorm, x: Tensor, x_norm: RMSNorm) -> Tensor:
        return torch.cat((self(ids), x_norm(x)), dim=-1)

    patch.setattr(Embedding, "joined", joined)


def forget_the_norm_of_the_feature(patch: Patch) -> None:
    def joined(self: Embedding, ids: Tensor, norm: RMSNorm, x: Tensor, x_norm: RMSNorm) -> Tensor:
        return torch.cat((norm(self(ids)), x), dim=-1)

    patch.setattr(Embedding, "joined", joined)


def pass_on_what_is_not_normalised(patch: Patch) -> None:
    def take(self: MtpHead, stream: Tensor, index: Tensor | None, features: Tensor) -> Tensor:
        return self.norm.take(stream, index, features)

    patch.setattr(MtpHead, "take", take)


def shift_no_tokens(patch: Patch) -> None:
    """The embedding of each position's own token, in draft prefill."""
    forward = MtpHead.forward

    def unshifted(self: MtpHead, token_ids: Tensor, *args: Any) -> Tensor:
        return forward(self, token_ids.roll(1) if len(token_ids) > 1 else token_ids, *args)

    patch.setattr(MtpHead, "forward", unshifted)


@pytest.mark.parametrize(
    "mutant",
    [
        swap_the_halves,
        forget_the_norm_of_the_embedding,
        forget_the_norm_of_the_feature,
        pass_on_what_is_not_normalised,
        shift_no_tokens,
    ],
    ids=lambda mutant: mutant.__name__.replace("_", " "),
)
def test_mutants_differ_from_transformers(
    folder: Path, oracle: MtpOracle, mutant: Callable[[Patch], None]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        with pytest.raises(AssertionError, match="max"):
            assert_oracle_drafts(make_mtp_llm(folder), oracle, PROMPTS[2:4])


# ---- answers ----


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    """Its drafts are right or wrong depending on all tokens before them."""
    folder = make_agreeing_pair(noise=0.1).save(tmp_path_factory.mktemp("mtp") / "agreeing")
    return Drafter(folder, "mtp")


@pytest.fixture(scope="module")
def plain(agreeing: Drafter) -> Trace:
    return run(make_spec_llm(agreeing, 0), 0)


@pytest.fixture(scope="module")
def eager(agreeing: Drafter) -> Trace:
    return run(make_spec_llm(agreeing, NUM_DRAFTS), NUM_DRAFTS)


def assert_same(trace: Trace, plain: Trace, eager: Trace) -> None:
    """Answers as without drafts; drafts and accepted ones by position as in eager steps."""
    assert trace.answers == plain.answers
    assert trace.finish_reasons == plain.finish_reasons
    assert trace.drafts == eager.drafts
    assert trace.per_position == eager.per_position


def test_the_workload_holds_what_it_claims(plain: Trace, eager: Trace) -> None:
    assert_same(eager, plain, eager)
    assert eager.metrics["num_preemptions"] > 0
    num_steps = eager.metrics["spec_decode_num_drafts"]
    for count in eager.per_position:  # some drafts are right and some wrong, at every position
        assert 0.1 < count / num_steps < 0.9, (eager.per_position, num_steps)
    assert len({tuple(answer) for answer in eager.answers}) > 5


@pytest.mark.parametrize(
    ("mode", "backend"),
    itertools.product(MODES[1:], BACKENDS)
    if EVERY
    else [("piecewise", "reference"), ("full", "hostplan"), ("step", "reference")],
)
def test_graphs_change_nothing(
    agreeing: Drafter, plain: Trace, eager: Trace, mode: str, backend: str
) -> None:
    """Under the sanitizer, each replay equals its eager twin."""
    options = {"graph_mode": mode, "attention_backend": backend, "sanitize": True}
    llm = make_spec_llm(agreeing, NUM_DRAFTS, **options)
    assert_same(run(llm, NUM_DRAFTS), plain, eager)


@pytest.mark.parametrize(
    ("mode", "ahead"),
    [("none", 0), ("full_decode_only", 2), *([("full", 2), ("step", 2)] if EVERY else [])],
)
def test_any_number_of_drafts_changes_nothing(
    agreeing: Drafter, plain: Trace, eager: Trace, mode: str, ahead: int
) -> None:
    """It changes from step to step. After a pause the head's KV, and the states of the target, are
    computed again: drafts after the same text are those of an engine that never pauses."""
    captured = mode != "none"
    options = {"graph_mode": mode, "run_ahead": ahead, "sanitize": captured}
    llm = make_spec_llm(agreeing, NUM_DRAFTS, {"adaptive": captured}, **options)
    llm.engine.core.drafts = RandomDrafts((0, 1, NUM_DRAFTS), seed=ahead)
    trace = run(llm, NUM_DRAFTS)
    assert trace.answers == plain.answers
    assert trace.metrics["num_computed_again"] > 0
    assert_same_drafts(trace, eager)


@pytest.mark.parametrize("mode", ["full_and_piecewise", *(["step"] if EVERY else [])])
def test_steps_ahead_and_other_chunks_change_nothing(
    agreeing: Drafter, plain: Trace, mode: str
) -> None:
    options = {"graph_mode": mode, "run_ahead": 2, "max_num_batched_tokens": 17}
    sizes = {"capture_sizes": "1,2,4,17"}
    trace = run(make_spec_llm(agreeing, NUM_DRAFTS, **options, **sizes), NUM_DRAFTS)
    assert trace.answers == plain.answers


def test_a_cached_prefix_gives_the_same_drafts(
    agreeing: Drafter, plain: Trace, eager: Trace
) -> None:
    """The head's KV of a block's last position depends on the token after the block."""
    roomy = {"num_kv_blocks": 60, "state_cache_memory": "2MiB"}
    trace = run(make_spec_llm(agreeing, NUM_DRAFTS, **roomy), NUM_DRAFTS)
    assert trace.metrics["prefix_cache_hit_tokens"] > 0
    assert trace.answers == plain.answers
    shared = trace.drafts.keys() & eager.drafts.keys()
    assert len(shared) > 40
    assert all(trace.drafts[key] == eager.drafts[key] for key in shared)


def test_half_precision_loads_and_drafts(agreeing: Drafter) -> None:
    """Norms stay in float32: 1 + weight has more digits than bfloat16 has."""
    llm = make_spec_llm(agreeing, NUM_DRAFTS, dtype="bfloat16")
    head = llm.engine.runner.draft_model
    dtypes = {name: each.dtype for name, each in head.named_parameters()}
    for name, dtype in dtypes.items():
        assert dtype == (torch.float32 if "norm" in name else torch.bfloat16), name
    run(llm, NUM_DRAFTS)
    assert llm.metrics()["spec_decode_num_accepted_tokens"] > 20


# ---- a smaller draft vocabulary ----


def test_a_smaller_draft_vocabulary(agreeing: Drafter, plain: Trace, tmp_path: Path) -> None:
    """Rows of the target's LM head: answers stay the same, and only listed tokens are drafted."""
    tokens = tuple(range(0, VOCAB_SIZE, 2))
    model = tmp_path / "model"
    shutil.copytree(agreeing.target, model)
    write_ranking(model / FILE, TokenRanking(VOCAB_SIZE, tokens, "a test"))  # is found there
    llm = make_spec_llm(Drafter(model, "mtp"), NUM_DRAFTS, graph_mode="step", sanitize=True)
    assert llm.engine.runner.draft_model.output_head.vocab_size == len(tokens)
    trace = run(llm, NUM_DRAFTS)
    assert trace.answers == plain.answers
    drafted = {token for drafts in trace.drafts.values() for token in drafts}
    assert drafted <= {*tokens, *llm.config.model.eos_token_ids} and len(drafted) > 10
    assert sum(trace.per_position) > 10  # of those that are listed, many are right
