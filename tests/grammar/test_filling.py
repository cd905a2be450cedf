"""Masks of many rows at once are those of one row after the other."""

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stoop import StructuredOutputs
from stoop.grammar import filling
from stoop.grammar.compiler import Compiled, GrammarStore
from stoop.grammar.filling import MaskFiller, fill_one_by_one
from stoop.grammar.filling import Path as DraftPath
from stoop.grammar.follower import FREE, Follower
from stoop.text.tokenizer import Tokenizer
from support.grammars import VOCAB_SIZE, whole_schema

WORDS = -(-VOCAB_SIZE // 32)
K = 3


class Kit:
    """Random rows of a batch."""

    def __init__(self, folder: Path) -> None:
        self.store = GrammarStore(str(folder), VOCAB_SIZE)
        tokenizer = Tokenizer.from_folder(folder)
        assert tokenizer.eos_token_id is not None
        self.eos = tokenizer.eos_token_id
        self.letters = tokenizer.tokens()

    def compile(self, source: random.Random) -> Compiled:
        asked: list[dict[str, Any]] = [
            {"regex": "[a-f]{2,5}(name|tru)?"},
            {"regex": ".*"},  # every character, so masks hold nearly all tokens
            {"choice": ["ab", "name", "a"]},
            {"grammar": 'root ::= "(" root ")" | "ab" root | ""'},
            {"regex": "ab(c|d)"},  # after "a" a dead end, if "b" is a stop token
        ]
        asked += [{"json": whole_schema(source)} for _ in range(5)]
        return self.store.get(StructuredOutputs(**source.choice(asked)))

    def allowed(self, follower: Follower) -> list[int]:
        bits = torch.zeros(1, WORDS, dtype=torch.int32)
        row = FREE if follower.ended else follower.fill([], bits, 0)[0]
        words = bits[0].tolist()
        if row == FREE:
            return list(range(VOCAB_SIZE - 1))
        return [token for token in range(VOCAB_SIZE) if words[token // 32] >> (token % 32) & 1]

    def walk(self, source: random.Random, follower: Follower) -> int:
        """A token for the row, which the grammar may forbid."""
        if source.random() < 0.15:
            return source.choice([self.eos, source.randrange(VOCAB_SIZE - 1), VOCAB_SIZE - 1])
        return source.choice(self.allowed(follower) or [0])

    def path(self, source: random.Random) -> DraftPath:
        compiled = self.compile(source)
        after = source.choice([None, None, "a", "name"])
        stops = [self.eos, *source.choice([[], [self.letters["b"]]])]

        def start(tokens: list[int]) -> Follower:
            return compiled.follow(stops, after, tokens)

        answer: list[int] = []
        for _ in range(source.randrange(6)):
            token = self.walk(source, start(answer))
            if start(answer).advance([token]) and token not in stops:
                answer.append(token)
        drafts: list[int] = []
        for _ in range(source.randrange(K + 1)):
            probe = start(answer)
            probe.advance(drafts)
            drafts.append(self.walk(source, probe))
        return start(answer), drafts


@pytest.fixture(scope="module")
def kit(model: Path) -> Kit:
    return Kit(model)


Fill = Callable[[list[DraftPath], torch.Tensor], tuple[list[list[int]], int]]


def masks(fill: Fill, paths: list[DraftPath]) -> list[list[Any]]:
    """The mask of each position, None for one that allows everything."""
    bits = torch.full((len(paths) * (K + 1), WORDS), 0x5A5A, dtype=torch.int32)  # left over
    every, count = fill(paths, bits)
    used = [row for rows in every for row in rows if row != FREE]
    assert len(set(used)) == len(used) and all(0 <= row < count <= len(bits) for row in used)
    return [[None if row == FREE else _some(bits[row].tolist()) for row in rows] for rows in every]


def _some(words: list[int]) -> list[int] | None:
    bits = [words[token // 32] >> (token % 32) & 1 for token in range(VOCAB_SIZE)]
    return bits if not all(bits) else None


@pytest.fixture(params=[False, True], ids=["in turn", "in threads"])
def filler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MaskFiller:
    made = MaskFiller()
    if request.param:
        monkeypatch.setattr(filling, "_num_threads", lambda: 3)
        monkeypatch.setattr(filling, "SLOW_SECONDS", -1.0)
        made._num_threaded, made._plain_seconds = 10**9, 1e9
    return made


@pytest.mark.parametrize("seed", range(12))
def test_masks_are_those_of_one_row_after_the_other(
    kit: Kit, filler: MaskFiller, seed: int
) -> None:
    source = random.Random(seed)
    for count in (1, 2, 16, 40):
        paths = [kit.path(source) for _ in range(count)]
        wanted = masks(fill_one_by_one, paths)
        assert masks(filler.fill, paths) == wanted
        assert masks(filler.fill, paths) == wanted  # followers are where they were
        assert masks(fill_one_by_one, paths) == wanted


def test_the_random_rows_have_every_kind(kit: Kit) -> None:
    """Otherwise the test above would say little."""
    source = random.Random(1)
    paths = [kit.path(source) for _ in range(400)]
    every = masks(fill_one_by_one, paths)
    drafts = [drafts for _, drafts in paths]
    cut = [len(found) <= len(each) for found, each in zip(every, drafts, strict=True)]
    assert sum(cut) > 30 and sum(len(found) == K + 1 for found in every) > 30
    assert any(None in found and found[-1] is not None for found in every)  # a marker in the drafts
    assert any(f.is_free and kit.eos in each for f, each in paths)
    assert any(not f.is_free and kit.eos in each for f, each in paths)
    bits = torch.zeros(K + 1, WORDS, dtype=torch.int32)
    dead = [f for f, _ in paths if not f.is_free and f.fill([], bits, 0) == [FREE]]
    assert any(not bits_of(f).any() for f in dead)


def bits_of(follower: Follower) -> torch.Tensor:
    bits = torch.zeros(1, WORDS, dtype=torch.int32)
    follower.matcher.fill_next_token_bitmask(bits, 0)
    return bits


def test_no_rows_are_no_work() -> None:
    assert MaskFiller().fill([], torch.zeros(0, WORDS, dtype=torch.int32)) == ([], 0)


@pytest.mark.parametrize("helps", [True, False])
def test_slow_masks_are_filled_by_threads_while_that_helps(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, helps: bool
) -> None:
    ran_in = list[str]()
    traverse = filling._traverse

    def noted(calls: Any) -> None:
        ran_in.append(threading.current_thread().name)
        traverse(calls)

    monkeypatch.setattr(filling, "_traverse", noted)
    monkeypatch.setattr(filling, "_num_threads", lambda: 3)
    monkeypatch.setattr(filling, "NUM_THREADED_STEPS", 2)
    monkeypatch.setattr(filling, "NUM_PLAIN_STEPS", 2)
    source, filler = random.Random(3), MaskFiller()
    paths = [kit.path(source) for _ in range(8)]
    steps = []
    for slow in (1e9, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0):
        monkeypatch.setattr(filling, "SLOW_SECONDS", slow)
        masks(filler.fill, paths)
        filler._plain_seconds = 1e9 if helps else 0.0
        steps.append("".join("t" if name.startswith("stoop-masks") else "-" for name in ran_in))
        ran_in.clear()
    if helps:
        assert steps == ["-", "-", "ttt", "ttt", "-", "ttt", "ttt"]
    else:
        assert steps == ["-", "-", "ttt", "-", "-", "-", "ttt"]
