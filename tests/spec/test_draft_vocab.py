"""Heads that draft by some rows of the target's LM head: twins of heads that use all of it."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stoop import LLM
from stoop.check.workloads import GREEDY, SEEDED, Trace, watch_drafts
from stoop.checkpoint import toy
from stoop.config.errors import ConfigError, StoopError
from stoop.config.schema import DraftTokens
from stoop.models.draft_output import DraftOutput
from stoop.models.draft_vocab import (
    FILE,
    TokenRanking,
    choose_tokens,
    read_ranking,
    write_ranking,
)
from stoop.models.eagle import EagleHead
from support.checkpoints import CheckpointStore, copy_with_eos
from support.drafters import Drafter, DrafterStore, make_spec_llm, run, write_random_head
from support.head_layouts import LAYOUTS, TARGET, VOCAB, load, make_target, write_layout

TOKENS = (0, 3, 4, 9, 17, 18, 30, 39)


def head_of(llm: LLM) -> EagleHead:
    head = llm.engine.runner.draft_model
    assert isinstance(head, EagleHead)
    return head


# ---- the head ----


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["eagle1", "eagle3 that borrows all"])
def test_logits_are_those_of_the_full_head(name: str, tied: bool, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    write_layout(tmp_path, layout)
    target = make_target(dataclasses.replace(TARGET, tie_word_embeddings=tied))
    cut = dataclasses.replace(layout.spec, draft_tokens=DraftTokens(TOKENS, "a test"))
    full, few = (load(tmp_path, spec, target=target) for spec in (layout.spec, cut))
    states = torch.randn(5, TARGET.hidden_size, dtype=torch.float64)
    assert torch.equal(few.output_head.weight, target.lm_head.weight[list(TOKENS)])
    for number in range(5):  # one row at a time, which any number of outputs computes alike
        row = states[number : number + 1]
        assert torch.equal(few.logits(row), full.logits(row)[:, list(TOKENS)])
    torch.testing.assert_close(few.logits(states), full.logits(states)[:, list(TOKENS)])
    assert few.target_ids(torch.arange(len(TOKENS))).tolist() == list(TOKENS)
    assert few.spec.vocab_size == len(TOKENS) and full.spec.vocab_size == VOCAB
    rows = VOCAB - len(TOKENS)
    assert full.bytes_read(3) - few.bytes_read(3) == 3 * rows * TARGET.hidden_size * 8
    assert {view.name for view in few.weight_views()} == {v.name for v in full.weight_views()}
    assert dict(few.named_parameters()).keys() - dict(full.named_parameters()).keys() == {
        "lm_head.own",
        "d2t",
    }


# ---- engines ----


def listed(folder: Path, token_ids: list[int], vocab_size: int) -> str:
    path = folder / "list.json"
    write_ranking(path, TokenRanking(vocab_size, tuple(token_ids), "a test"))
    return str(path)


@pytest.fixture(scope="module")
def plain(drafters: DrafterStore) -> Trace:
    return run(make_spec_llm(drafters.get("eagle-random"), 0), 0)


# The random head's own answers have many tokens; these are some that it does draft.
SOME = [*range(1, 160, 3), 158]


@pytest.mark.parametrize(
    ("mode", "method"), [("none", "greedy"), ("none", "coupled"), ("step", "coupled")]
)
def test_answers_are_the_targets_and_drafts_are_listed(
    drafters: DrafterStore, plain: Trace, mode: str, method: str, tmp_path: Path
) -> None:
    """Greedy and seeded requests, preempted and chunked; in step mode under the sanitizer."""
    spec = {"draft_vocab": listed(tmp_path, SOME, 160), "draft_sample_method": method}
    options = {"graph_mode": mode, "sanitize": mode != "none"}
    llm = make_spec_llm(drafters.get("eagle-random"), 3, spec=spec, **options)
    assert head_of(llm).output_head.vocab_size == len(SOME)
    trace = run(llm, 3)
    assert trace.answers == plain.answers and trace.finish_reasons == plain.finish_reasons
    drafted = {token for drafts in trace.drafts.values() for token in drafts}
    assert drafted <= {2, *SOME} and len(drafted) > 15
    if mode == "step":
        buffers = {buffer.name for buffer in llm.engine.runner.speculator.buffers()}
        assert {"draft lm_head.own", "draft d2t"} <= buffers


def test_probabilistic_drafts_are_listed(drafters: DrafterStore, tmp_path: Path) -> None:
    spec = {"draft_vocab": listed(tmp_path, SOME, 160), "draft_sample_method": "probabilistic"}
    llm = make_spec_llm(drafters.get("eagle-random"), 2, spec=spec)
    trace = Trace()
    watch_drafts(llm, trace)
    llm.generate([[5, 6, 7], [8]], SEEDED)
    drafted = {token for drafts in trace.drafts.values() for token in drafts}
    assert drafted <= {2, *SOME} and len(drafted) > 5


WALK = [(4 + toy.STRIDE * place) % toy.SIZE for place in range(8)]  # what follows token 4
NUM_TOKENS = 41


def accepted_of_walk(drafters: DrafterStore, path: str) -> list[int]:
    """Of the toy's head, which is always right: accepted drafts by position."""
    roomy = {"max_model_len": 64, "num_kv_blocks": 40}
    spec = {"draft_vocab": path}
    llm = make_spec_llm(drafters.get("eagle-right"), 2, spec=spec, **roomy)
    (output,) = llm.generate([[4]], GREEDY.replace(max_tokens=NUM_TOKENS))
    (answer,) = output.outputs
    assert answer.token_ids == [WALK[(place + 1) % 8] for place in range(NUM_TOKENS)]
    assert answer.spec is not None
    return answer.spec.num_accepted_tokens_per_pos


def expected_of_walk(token_ids: list[int]) -> list[int]:
    """A draft is accepted if it and those before it are listed."""
    counts, known = [0, 0], 1
    while known < NUM_TOKENS:
        room = min(2, NUM_TOKENS - 1 - known)
        length = 0
        while length < room and WALK[(known + length + 1) % 8] in token_ids:
            counts[length] += 1
            length += 1
        known += length + 1
    return counts


@pytest.mark.parametrize("unlisted", [None, 12, 20, 60])
def test_a_right_head_loses_only_what_is_not_listed(
    drafters: DrafterStore, unlisted: int | None, tmp_path: Path
) -> None:
    token_ids = [token for token in (*WALK, 1, 2) if token != unlisted]
    expected = expected_of_walk(token_ids)
    assert (sum(expected) < 26) == (unlisted is not None)
    assert accepted_of_walk(drafters, listed(tmp_path, token_ids, toy.SIZE)) == expected


attach = DraftOutput.attach_output


def _shifted(self: DraftOutput, target: Any) -> None:
    """A mutant: each draft gets the offset of the next."""
    attach(self, target)
    assert self.d2t is not None
    self.d2t.data.copy_(self.d2t.roll(-1))


def test_wrong_offsets_are_noticed(
    drafters: DrafterStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers stay right, so acceptance has to tell."""
    monkeypatch.setattr(DraftOutput, "attach_output", _shifted)
    token_ids = [*WALK, 1, 2]
    found = accepted_of_walk(drafters, listed(tmp_path, token_ids, toy.SIZE))
    assert found == [0, 0] != expected_of_walk(token_ids)


def test_dummy_weights(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """Rows are taken from the target's random matrix; the head's layers are those of the twin."""
    head = write_random_head(tmp_path / "head", "eagle", {})
    drafter = Drafter(checkpoints.get("llama3", dtype="float64"), "eagle", head)
    few, full = (
        make_spec_llm(drafter, 2, spec={"draft_vocab_size": size}, load_format="dummy")
        for size in (48, "full")
    )
    matrix = few.engine.runner.model.lm_head.weight
    rows = [*range(48)]
    assert torch.equal(head_of(few).output_head.weight, matrix[rows]) and matrix.any()
    assert torch.equal(head_of(few).fc.weight, head_of(full).fc.weight)
    assert head_of(full).lm_head is None and head_of(full).d2t is None
    assert len(few.generate([[1, 2]], GREEDY)[0].outputs[0].token_ids) == 23


# ---- which tokens ----


@pytest.fixture
def start(drafters: DrafterStore, tmp_path: Path) -> Callable[..., LLM]:
    """Engines whose end-of-text tokens have high ids; the head is in a folder of its own."""
    drafter = drafters.get("eagle-random")
    target = copy_with_eos(drafter.target, tmp_path / "target", [150, 157])
    head = write_random_head(tmp_path / "head", "eagle", {})

    def make(**spec: Any) -> LLM:
        return make_spec_llm(Drafter(target, "eagle", head), 2, spec=spec)

    return make


def tokens_of(llm: LLM) -> list[int] | None:
    head = head_of(llm)
    return None if head.d2t is None else head.target_ids(torch.arange(len(head.d2t))).tolist()


def test_which_tokens_are_drafted(
    start: Callable[..., LLM], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "stoop")
    assert tokens_of(start()) is None
    assert "drafts all of the target's 160 tokens" in caplog.text
    assert tokens_of(start(draft_vocab_size=160)) is None
    assert tokens_of(start(draft_vocab_size=6)) == [0, 1, 2, 3, 150, 157]
    assert "drafts 6 of the target's 160 tokens: those with the lowest ids" in caplog.text
    mine = listed(tmp_path, [90, 8, 157, 70, 3], 160)
    assert tokens_of(start(draft_vocab=mine)) == [8, 70, 90, 150, 157]
    assert tokens_of(start(draft_vocab=mine, draft_vocab_size=3)) == [90, 150, 157]
    assert f"drafts 3 of the target's 160 tokens: the most frequent in a test ({mine})" in (
        caplog.text
    )
    # A list in the head's folder is found, and can be left aside.
    (tmp_path / "head" / FILE).write_text(Path(mine).read_text())
    assert tokens_of(start()) == [8, 70, 90, 150, 157]
    assert tokens_of(start(draft_vocab_size=4)) == [8, 90, 150, 157]
    for full in (0, "full"):
        assert tokens_of(start(draft_vocab_size=full)) is None


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        ({"draft_vocab_size": 161}, "draft_vocab_size=161: the target has 160 tokens, use fewer"),
        ({"draft_vocab_size": 1}, "must be among them, use at least 2"),
        ({"draft_vocab": "nowhere.json"}, "nowhere.json does not exist: make it with stoop draft"),
        ({"draft_vocab": "."}, "cannot be read"),
    ],
)
def test_sizes_that_are_refused(
    start: Callable[..., LLM], spec: dict[str, Any], pattern: str
) -> None:
    with pytest.raises(ConfigError, match=pattern.replace("(", r"\(")):
        start(**spec)


def test_a_list_that_does_not_fit_is_refused(start: Callable[..., LLM], tmp_path: Path) -> None:
    other = listed(tmp_path, [1, 2], 128)
    with pytest.raises(ConfigError, match="a vocabulary of 128 tokens, but the target has 160"):
        start(draft_vocab=other)
    short = listed(tmp_path, [1, 2, 3], 160)
    with pytest.raises(ConfigError, match=r"lists 3 tokens, .* stoop draft-vocab --size 8"):
        start(draft_vocab=short, draft_vocab_size=8)
    one = listed(tmp_path, [1], 160)  # and two tokens end a text
    with pytest.raises(ConfigError, match=f"draft_vocab {one} lists 1 tokens, fewer than the 2 "):
        start(draft_vocab=one)


def test_a_list_shorter_than_a_tile_of_packed_rows_is_refused_by_its_length() -> None:
    """No size was given, so that the sentence must not name one."""
    ranking, path = TokenRanking(VOCAB, (1, 2, 3), "a test"), Path("list.json")
    with pytest.raises(ConfigError) as refusal:
        choose_tokens(TARGET, None, ranking, path, multiple=16)
    assert str(refusal.value) == (
        "draft_vocab list.json lists 3 tokens, fewer than the 16 that this engine needs: make a "
        "larger list with stoop draft-vocab"
    )


def test_a_broken_list_that_was_found_stops_nothing(
    start: Callable[..., LLM], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = tmp_path / "head" / FILE
    for content, reason in (("{", "it is not JSON"), (json.dumps(GOOD | {"vocab_size": 99}), "99")):
        found.write_text(content)
        caplog.clear()
        assert tokens_of(start()) is None
        (warning,) = [each for each in caplog.records if each.levelname == "WARNING"]
        assert str(found) in warning.getMessage() and reason in warning.getMessage()
        assert "Until then all of the target's tokens are drafted" in warning.getMessage()
        with pytest.raises(StoopError, match=reason):  # a size is asked for
            start(draft_vocab_size=8)
        with pytest.raises(StoopError, match=reason):
            start(draft_vocab=str(found))


GOOD = {"kind": "stoop draft vocabulary", "vocab_size": 160, "token_ids": [5, 3]}


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        ("{", "it is not JSON"),
        ("[]", "does not say that it is a stoop draft vocabulary"),
        (GOOD | {"kind": "other"}, "does not say"),
        (GOOD | {"vocab_size": "160"}, "vocab_size is '160'"),
        (GOOD | {"token_ids": []}, "lists no token_ids"),
        (GOOD | {"token_ids": {"5": 1}}, "lists no token_ids"),
        (GOOD | {"token_ids": [5, 160]}, "160 is none of 160 tokens"),
        (GOOD | {"token_ids": [5, -1]}, "-1 is none of 160 tokens"),
        (GOOD | {"token_ids": [5, True]}, "True is none of"),
        (GOOD | {"token_ids": [5, 3, 5]}, "lists a token twice"),
    ],
)
def test_a_broken_list_is_refused(content: Any, pattern: str, tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(StoopError, match=pattern) as refusal:
        read_ranking(path)
    assert "make it again with stoop draft-vocab" in str(refusal.value)
    path.write_text(json.dumps(GOOD))
    assert read_ranking(path) == TokenRanking(160, (5, 3), "unknown")


@pytest.mark.parametrize("spec", [{"draft_vocab_size": 20}, {"draft_vocab": "x.json"}])
def test_a_head_with_its_own_lm_head_refuses_a_draft_vocabulary(
    drafters: DrafterStore, spec: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="has its own LM head, which drafts 96 tokens: leave out"):
        make_spec_llm(drafters.get("eagle3-random"), 2, spec=spec)
