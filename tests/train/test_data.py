"""Prompts in, answers in shards: layouts, loops, resuming, the vocabulary."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoop import LLM
from stoop.config.errors import ConfigError
from stoop.text.prompts import read_prompts
from stoop.train import answers
from stoop.train.answers import Share, is_loop, make_data, plan_asks, read_inventions
from stoop.train.packing import plan_batches, split
from stoop.train.progress import Teller
from stoop.train.prompts import Prompt, encode_prompts
from stoop.train.settings import DataSettings, Deadline
from stoop.train.shards import load_corpus, read_counts
from stoop.train.vocabulary import choose_vocabulary
from support.engines import make_llm
from support.training import documents, write_text_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_text_model(tmp_path_factory.mktemp("text") / "model")
    return make_llm(folder, max_num_seqs=4, max_model_len=96)


SETTINGS: dict[str, Any] = {"max_answer": 12, "max_len": 96, "temperature": 1.5}


def make(
    llm: LLM, folder: Path, texts: list[str], seconds: float | None = None, **more: Any
) -> str:
    conversations = [[{"role": "user", "content": text}] for text in texts]
    lines: list[str] = []
    settings = DataSettings(**{**SETTINGS, **more})
    share = Share(0, 1, read_inventions(folder))
    teller = Teller(lines.append)
    make_data(llm, folder, conversations, settings, 0, Deadline(seconds), teller, share)
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("line", "content"),
    [
        ('{"prompt": "Hi"}', "Hi"),
        ('{"text": "Hi"}', "Hi"),
        ('{"question": "Hi", "answer": "Ho"}', "Hi"),
        ('{"instruction": "Sum", "input": "1 2"}', "Sum\n\n1 2"),
        ('{"instruction": "Sum", "input": ""}', "Sum"),
        ('{"question_id": 1, "turns": ["Hi", "And now?"]}', "Hi"),
        ('{"messages": [{"role": "user", "content": "Hi"}]}', "Hi"),
    ],
)
def test_prompts_of_every_layout(tmp_path: Path, line: str, content: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n\n")
    assert read_prompts(path) == [[{"role": "user", "content": content}]]


def test_a_conversation_ends_before_its_last_answer(tmp_path: Path) -> None:
    turns = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant")]
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": turns}))
    assert read_prompts(path) == [turns[:2]]


def test_a_separator_inside_of_a_prompt_does_not_end_its_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one\u2028two"}\n', encoding="utf-8")
    assert read_prompts(path)[0][0]["content"] == "one\u2028two"


def test_plain_text_is_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n{two}\n")
    assert [each[0]["content"] for each in read_prompts(path)] == ["one", "{two}"]


@pytest.mark.parametrize("line", ["{", "[]", '{"answer": "x"}', '{"prompt": 3}', '{"turns": []}'])
def test_what_is_no_prompt_is_refused_by_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "ok"}\n' + line)
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:2"):
        read_prompts(path)


def test_each_prompt_once_and_none_too_long(llm: LLM) -> None:
    texts = ["a", "b", "a", "c" * 100]
    conversations = [[{"role": "user", "content": text}] for text in texts]
    found = list(encode_prompts(llm.get_tokenizer(), conversations, max_tokens=60))
    decode = llm.get_tokenizer().decode
    assert [decode(each.token_ids) for each in found] == [
        "user: aassistant: ",
        "user: bassistant: ",
    ]


def test_loops() -> None:
    assert is_loop([1, 2, 3] * 30)
    assert is_loop(list(range(20)) + [7] * 60)
    assert not is_loop(list(range(200)))
    assert not is_loop(list(range(50)) * 2)  # said twice, as a song does
    assert not is_loop([1, 1, 1])


def test_greedy_and_drawn_answers_by_share() -> None:
    prompts = [Prompt(key, [1]) for key in range(400)]
    asks = list(plan_asks(prompts, DataSettings(answers=2, greedy_share=0.25), 0, set()))
    greedy = [ask for ask in asks if ask.params.greedy]
    assert len(asks) == 800 and 150 < len(greedy) < 250
    assert {ask.place[1] for ask in greedy} == {0}
    assert len({ask.params.seed for ask in asks}) == 800
    again = plan_asks(prompts, DataSettings(answers=2, greedy_share=0.25), 0, {greedy[0].place})
    assert [ask for ask in asks if ask is not greedy[0]] == list(again)


def test_shards_hold_prompts_and_answers(llm: LLM, tmp_path: Path) -> None:
    said = make(llm, tmp_path, ["one", "two", "three"], greedy_share=0.0)
    corpus, counts = load_corpus(tmp_path), read_counts(tmp_path)
    assert len(corpus) == counts["answers"] == 3 and "3 answers" in said
    decode = llm.get_tokenizer().decode
    starts = sorted(decode(corpus.document(i)[: corpus.prompt_lens[i]]) for i in range(3))
    assert starts == [f"user: {text}assistant: " for text in ("one", "three", "two")]
    assert corpus.tokens.dtype == np.int32
    assert counts["answer_tokens"] == len(corpus.tokens) - corpus.prompt_lens.sum()
    assert corpus.count_answers(258).sum() == counts["answer_tokens"]


def test_loops_are_dropped_and_not_asked_again(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[int]] = []

    def second_is_a_loop(token_ids: list[int]) -> bool:
        found.append(token_ids)
        return len(found) == 2

    monkeypatch.setattr(answers, "is_loop", second_is_a_loop)
    make(llm, tmp_path, ["one", "two", "three"])
    counts = read_counts(tmp_path)
    assert (counts["answers"], counts["loops_dropped"]) == (2, 1)
    assert load_corpus(tmp_path).count_answers(258).sum() == len(found[0]) + len(found[2])
    make(llm, tmp_path, ["one", "two", "three"])
    assert len(found) == 3
    assert read_counts(tmp_path)["loops_dropped"] == 1


def test_a_stopped_run_goes_on(llm: LLM, tmp_path: Path) -> None:
    texts = [f"number {i}" for i in range(24)]
    make(llm, tmp_path / "whole", texts, greedy_share=0.0)
    make(llm, tmp_path / "parts", texts, seconds=0.05, greedy_share=0.0)
    done = read_counts(tmp_path / "parts")["answers"]
    assert done < 24
    assert not llm.engine.has_work
    make(llm, tmp_path / "parts", texts, greedy_share=0.0)
    assert documents(tmp_path / "parts") == documents(tmp_path / "whole")
    make(llm, tmp_path / "parts", [*texts, "one more"], greedy_share=0.0)
    assert read_counts(tmp_path / "parts")["answers"] == 25


def test_the_target_invents_prompts(llm: LLM, tmp_path: Path) -> None:
    make(llm, tmp_path, [], invent=3, greedy_share=0.0)
    lines = (tmp_path / "invented.jsonl").read_text().splitlines()
    found = [json.loads(line)["prompt"] for line in lines]
    assert len(found) >= 3 and all(len(text) > 3 for text in found)
    make(llm, tmp_path, [], invent=3, greedy_share=0.0)
    assert (tmp_path / "invented.jsonl").read_text().splitlines() == lines


def test_the_vocabulary_is_the_most_frequent_tokens() -> None:
    counts = np.array([0, 5, 0, 9, 1, 5, 0])
    vocabulary = choose_vocabulary(counts, 3)
    assert vocabulary.token_ids.tolist() == [1, 3, 5]
    assert vocabulary.d2t.tolist() == [1, 2, 3]
    assert vocabulary.t2d.tolist() == [False, True, False, True, False, True, False]
    assert vocabulary.coverage == pytest.approx(19 / 20)
    assert choose_vocabulary(counts, 5).token_ids.tolist() == [0, 1, 3, 4, 5]  # low ids fill up
    assert choose_vocabulary(counts, 99).is_whole


def test_the_vocabulary_grows_until_it_covers_enough() -> None:
    assert len(choose_vocabulary(np.ones(40_000), None)) == 32_768
    assert len(choose_vocabulary(np.ones(16_500), None)) == 16_384
    peaked = np.concatenate((np.full(100, 10**6), np.ones(40_000)))
    assert len(choose_vocabulary(peaked, None)) == 8192


def test_batches_are_whole_documents_in_a_fixed_order() -> None:
    lengths = np.array([5, 3, 7, 2, 6, 4])
    batches = plan_batches(lengths, 10, seed=1, epochs=2, steps=None)
    assert sorted(np.concatenate(batches).tolist()) == sorted(list(range(6)) * 2)
    assert all(lengths[batch].sum() <= 10 for batch in batches)
    longer = plan_batches(lengths, 10, seed=1, epochs=9, steps=len(batches) + 3)
    assert [b.tolist() for b in longer[: len(batches)]] == [b.tolist() for b in batches]
    assert len(longer) == len(batches) + 3


def test_answers_to_one_prompt_stay_together(llm: LLM, tmp_path: Path) -> None:
    texts = [f"number {i}" for i in range(12)]
    make(llm, tmp_path, texts, answers=2, greedy_share=0.0)
    corpus = load_corpus(tmp_path)
    train, held_out = split(corpus, 0.4)
    assert len(train) + len(held_out) == len(corpus) and len(held_out) > 0
    assert not set(corpus.keys[train]) & set(corpus.keys[held_out])
