"""One request's place in its grammar: masks along drafts, tokens that count, free text first."""

import random
from pathlib import Path

import pytest
import torch

from stoop import StructuredOutputs
from stoop.grammar.compiler import Compiled, GrammarStore
from stoop.grammar.follower import FREE, Follower
from stoop.text.tokenizer import Tokenizer
from support.grammars import VOCAB_SIZE


class Kit:
    """Followers of a model's vocabulary, in text."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_folder(folder)
        self.store = GrammarStore(str(folder), VOCAB_SIZE)
        self.eos = self.tokenizer.eos_token_id

    def compile(self, **asked: object) -> Compiled:
        return self.store.get(StructuredOutputs(**asked))  # type: ignore[arg-type]

    def follow(
        self, after: str | None = None, stops: tuple[int, ...] = (), **asked: object
    ) -> Follower:
        assert self.eos is not None
        return self.compile(**asked).follow((self.eos, *stops), after)

    def ids(self, text: str) -> list[int]:
        """One token per byte."""
        letters = self.tokenizer.tokens()
        spelt = self.tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)
        return [letters[letter] for piece, _ in spelt for letter in piece]

    def path(self, follower: Follower, drafts: list[int]) -> list[set[str] | None]:
        """The tokens that each mask allows; None without a mask."""
        bits = torch.zeros(len(drafts) + 1, -(-VOCAB_SIZE // 32), dtype=torch.int32)
        rows = follower.fill(drafts, bits, 0)
        return [None if row == FREE else self.allowed(bits[row]) for row in rows]

    def allowed(self, words: torch.Tensor) -> set[str]:
        found = [i for i in range(32 * len(words)) if int(words[i // 32]) >> (i % 32) & 1]
        assert all(token < VOCAB_SIZE for token in found)
        backend = self.tokenizer._backend
        return {backend.id_to_token(token) or f"#{token}" for token in found}


@pytest.fixture(scope="module")
def kit(model: Path) -> Kit:
    return Kit(model)


def test_masks_follow_drafts_and_drafts_are_taken_back(kit: Kit) -> None:
    follower = kit.follow(regex="ab(c|d)")
    wanted = [{"a", "ab"}, {"b"}, {"c", "d"}, {"</s>"}]
    assert kit.path(follower, kit.ids("abd")) == wanted
    assert kit.path(follower, kit.ids("abd")) == wanted
    assert follower.advance(kit.ids("a")) == 1
    assert kit.path(follower, kit.ids("bc")) == wanted[1:]
    assert kit.path(follower, []) == wanted[1:2]


def test_the_path_ends_at_a_forbidden_draft(kit: Kit) -> None:
    follower = kit.follow(regex="ab(c|d)")
    assert kit.path(follower, kit.ids("axd")) == [{"a", "ab"}, {"b"}]
    assert kit.path(follower, [kit.tokenizer.bos_token_id or 0, *kit.ids("b")]) == [{"a", "ab"}]
    assert kit.path(follower, [VOCAB_SIZE - 1]) == [{"a", "ab"}]
    assert kit.path(follower, kit.ids("abc")) == [{"a", "ab"}, {"b"}, {"c", "d"}, {"</s>"}]


def test_a_stop_token_ends_the_path_and_the_answer(kit: Kit) -> None:
    follower = kit.follow(regex="ab*")
    assert kit.eos is not None
    after = {"b", "</s>"}
    assert kit.path(follower, [*kit.ids("a"), kit.eos, *kit.ids("b")])[1:] == [after]
    assert follower.advance([*kit.ids("ab"), kit.eos, *kit.ids("zzz")]) == 6
    assert follower.ended
    assert kit.path(kit.follow(regex="ab*"), [kit.eos]) == [{"a", "ab"}]


def test_stop_tokens_of_the_user_end_complete_answers_only(kit: Kit) -> None:
    (b,) = kit.ids("b")
    follower = kit.follow(regex="a[bc]*", stops=(b,))
    assert kit.path(follower, kit.ids("ac")) == [{"a", "ab"}, *[{"b", "c", "</s>"}] * 2]


def test_a_token_that_the_grammar_forbids_is_counted_out(kit: Kit) -> None:
    follower = kit.follow(regex="abc")
    assert follower.advance(kit.ids("abx")) == 2


@pytest.mark.parametrize("seed", range(20))
def test_filling_changes_nothing(kit: Kit, seed: int) -> None:
    """Walk at random with drafts of every kind: masks are those of a follower without drafts."""
    source = random.Random(seed)
    schema = (
        '{"type": "object", "properties": {"a": {"type": "integer"}, "name": {"enum": ["ab", 1]}}}'
    )
    after = source.choice([None, "</think>", "ab"])
    follower, fresh = (kit.follow(after, json=schema) for _ in range(2))
    taken: list[int] = []
    for _ in range(20):
        drafts: list[int] = []
        for _ in range(source.randrange(4)):
            probe = kit.compile(json=schema).follow((kit.eos or 0,), after, [*taken, *drafts])
            (allowed,) = kit.path(probe, [])
            free = allowed is None or source.random() < 0.2
            if not free and kit.eos is not None:
                tokens = kit.tokenizer.tokens()
                drafts.append(tokens[source.choice(sorted(allowed or ()))])
            else:
                drafts.append(source.choice([source.randrange(256), *kit.ids("ab")]))
            if probe.advance(drafts[-1:]) == 0 or probe.ended:
                break
        masks = kit.path(follower, drafts)
        for place, mask in enumerate(masks):
            expected = kit.compile(json=schema).follow(
                (kit.eos or 0,), after, [*taken, *drafts[:place]]
            )
            assert kit.path(expected, []) == [mask]
        if drafts and len(masks) > 1:
            count = source.randrange(1, len(masks))
            assert follower.advance(drafts[:count]) == fresh.advance(drafts[:count]) == count
            taken += drafts[:count]
    assert kit.path(follower, []) == kit.path(fresh, [])


# ---- free text before the grammar ----


def test_the_grammar_begins_after_the_marker(kit: Kit) -> None:
    follower = kit.follow("END", regex="ab")
    assert kit.path(follower, kit.ids("xyz")) == [None] * 4
    assert follower.advance(kit.ids("so EN")) == 5
    assert kit.path(follower, kit.ids("Da")) == [None, {"a", "ab"}, {"b"}]
    assert kit.path(follower, kit.ids("x")) == [None, None]
    assert follower.advance(kit.ids("D")) == 1
    assert kit.path(follower, kit.ids("ab")) == [{"a", "ab"}, {"b"}, {"</s>"}]


def test_the_marker_may_end_inside_a_token(kit: Kit) -> None:
    """The rest of that token is free; the grammar begins with the next."""
    tokens = kit.tokenizer.tokens()
    follower = kit.follow("<", regex="ab")
    assert kit.path(follower, [tokens["</t"], *kit.ids("a")]) == [None, {"a", "ab"}, {"b"}]
    assert kit.path(follower, [tokens["</think>"]]) == [None, {"a", "ab"}]
    spread = kit.follow("so</t", regex="ab")
    assert spread.advance(kit.ids("so")) == 2
    assert kit.path(spread, [tokens["</t"]]) == [None, {"a", "ab"}]


def test_special_tokens_may_be_part_of_a_marker(kit: Kit) -> None:
    follower = kit.follow("<s>", regex="ab")
    assert kit.path(follower, [kit.tokenizer.bos_token_id or 0]) == [None, {"a", "ab"}]


def test_an_answer_may_end_before_its_marker(kit: Kit) -> None:
    follower = kit.follow("END", regex="ab")
    assert kit.eos is not None
    assert follower.advance([*kit.ids("no"), kit.eos]) == 3
    assert follower.ended


def test_a_follower_can_start_from_tokens(kit: Kit) -> None:
    """As after a preemption."""
    for after, text in (("END", "x"), ("END", "xENDa"), (None, "a"), ("END", "EN")):
        fresh = kit.follow(after, regex="abc")
        fresh.advance(kit.ids(text))
        again = kit.compile(regex="abc").follow((kit.eos or 0,), after, kit.ids(text))
        drafts = kit.ids("Dab")
        assert kit.path(again, drafts) == kit.path(fresh, drafts)
