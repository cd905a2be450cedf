"""`stoop draft-vocab`: counts by hand, layouts, refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoop.models.draft_vocab import default_size, read_ranking
from stoop.text.counting import count_tokens, read_texts
from stoop.text.tokenizer import Tokenizer

Stoop = Callable[..., tuple[int, str, str]]


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def ids(model: Path, text: str) -> list[int]:
    return Tokenizer.from_folder(model).encode(text, add_special_tokens=False)


def test_a_text_is_counted(text_model: Path, tmp_path: Path, stoop: Stoop) -> None:
    """aaabbc: two of its tokens make 5 of 6; after those that occur come the lowest ids."""
    text, out = tmp_path / "text.txt", tmp_path / "list.json"
    text.write_text("aaabbc")
    args = ["draft-vocab", str(text_model), "--from", str(text), "--out", str(out)]
    code, shown, told = stoop(*args, "--size", "2")
    assert code == 0, told
    assert shown.splitlines() == [
        f"{text}: 6 tokens in 1 texts, 3 different",
        f"2 of 260 tokens cover 83.3% of {text}",
        "without a list, the 2 lowest ids cover 0.0%",
        f"{out} lists 2 tokens",
    ]
    assert list(read_ranking(out).token_ids) == ids(text_model, "ab")
    code, shown, told = stoop(*args, "--size", "5")
    assert code == 0 and "5 of 260 tokens cover 100.0%" in shown, told
    assert "only 3 different tokens occur, so the list ends with the lowest ids" in shown
    ranking = read_ranking(out)
    assert list(ranking.token_ids) == [*ids(text_model, "abc"), 0, 1]
    assert (ranking.vocab_size, ranking.source) == (260, "text.txt")
    record = json.loads(out.read_text())
    assert (record["num_texts"], record["num_tokens"], record["coverage"]) == (1, 6, 1.0)
    code, shown, told = stoop(*args, "--size", "65")  # ids of bytes are in order: up to a
    assert code == 0 and "without a list, the 65 lowest ids cover 50.0%" in shown, told


def test_a_tenth_of_the_texts_is_held_out(text_model: Path, tmp_path: Path, stoop: Stoop) -> None:
    """Nine texts say aab, the tenth c and, as its answer, ab: 29 of 30 tokens, 2 of the last 3."""
    questions = write(tmp_path / "q.jsonl", *[{"text": "aab"}] * 9, {"prompt": "c", "answer": "ab"})
    out = tmp_path / "list.json"
    args = ["--from", str(questions), "--size", "2", "--out", str(out)]
    code, shown, told = stoop("draft-vocab", str(text_model), *args)
    assert code == 0, told
    assert f"2 of 260 tokens cover 96.7% of {questions}, 66.7% of texts held out" in shown


def test_a_list_has_a_quarter_of_the_vocabulary(
    text_model: Path, tmp_path: Path, stoop: Stoop
) -> None:
    """Rounded up to a multiple of 64, and of a large vocabulary no more than drafts need."""
    text, out = tmp_path / "text.txt", tmp_path / "list.json"
    text.write_text("aaabbc")
    code, shown, told = stoop(
        "draft-vocab", str(text_model), "--from", str(text), "--out", str(out)
    )
    assert code == 0 and f"{out} lists 128 tokens" in shown, told
    assert len(read_ranking(out).token_ids) == 128
    known = {32_000: 8000, 49_152: 12_288, 128_256: 32_064, 151_936: 32_768, 248_320: 32_768}
    assert {each: default_size(each) for each in known} == known


def test_every_layout_is_counted(tmp_path: Path) -> None:
    records = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"turns": ["c", "d"], "reference": ["e"]},
        {"instruction": "f", "input": "g", "output": "h"},
        {"question": "i", "answer": "j"},
        {"prompt": "k", "outputs": [{"text": "l", "token_ids": [1]}, {"text": "m"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "n"}]}]},
        {"tokens": 3, "metrics": {"num_steps": 4}},  # the last line of stoop generate --json
        {"prompt": "o", "completion": "p", "id": "unread"},
        "q",
    ]
    found = list(read_texts(write(tmp_path / "r.jsonl", *records), "--from"))
    assert ["".join(parts) for parts in found] == ["ab", "cde", "fgh", "ij", "klm", "n", "op", "q"]


def test_long_files_are_read_in_pieces(text_model: Path, tmp_path: Path) -> None:
    """Blank lines count: they are tokens that models write. Progress is reported as bytes."""
    text = tmp_path / "long.txt"
    text.write_text("one line of some length\n\n" * 5000 + "x" * 40000)
    pieces = [piece for (piece,) in read_texts(text, "--from")]
    assert "".join(pieces) == text.read_text() and len(pieces) > 10
    assert all(piece.endswith("\n") for piece in pieces[:10])
    assert max(map(len, pieces)) <= 2 * 8192
    seen: list[tuple[str, int, int | None]] = []
    tokenizer = Tokenizer.from_folder(text_model)
    counts = count_tokens(text, "--from", tokenizer, 260, lambda *each: seen.append(each))
    assert counts.num_texts == len(pieces)
    assert counts.everywhere.sum() == len(text.read_text())
    assert counts.everywhere[ids(text_model, "\n")[0]] == 10000
    size = text.stat().st_size
    assert seen[-1] == ("reading long.txt", size, size) and seen[0][1] < size


@pytest.mark.parametrize(
    ("content", "name", "args", "pattern"),
    [
        (None, "a.txt", [], "a.txt does not exist"),
        ("\n \n", "a.txt", [], "a.txt is empty"),
        ("", "a.jsonl", [], "a.jsonl is empty"),
        ("{", "a.jsonl", [], "a.jsonl:1 is not JSON"),
        ('{"text": "a"}\n{"id": 3}\n', "a.jsonl", [], "a.jsonl:2 has no text that stoop can read"),
        ("[1]", "a.jsonl", [], "a.jsonl:1 has no text"),
        ("a", "a.txt", ["--size", "260"], "--size 260: the model has 260 tokens, choose fewer"),
        ("a", "a.txt", ["--out", "/no/such/folder/x.json"], "its folder does not exist"),
    ],
)
def test_what_cannot_be_counted_is_refused(
    content: str | None,
    name: str,
    args: list[str],
    pattern: str,
    text_model: Path,
    tmp_path: Path,
    stoop: Stoop,
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    out = [] if "--out" in args else ["--out", str(tmp_path / "list.json")]
    code, _, told = stoop("draft-vocab", str(text_model), "--from", str(path), *args, *out)
    (line,) = [text for text in told.splitlines() if text.startswith("error: ")]
    assert code == 2 and pattern in line


def test_a_tokenizer_of_another_model_is_refused(text_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("é")
    from stoop.config.errors import CheckpointError

    with pytest.raises(CheckpointError, match="but the model's vocabulary has 64 tokens"):
        count_tokens(path, "--from", Tokenizer.from_folder(text_model), 64)
