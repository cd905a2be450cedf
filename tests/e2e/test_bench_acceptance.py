"""`stoop bench acceptance`: from files of questions to a table, a file and a JSON line."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from stoop.bench.questions import encode_questions, read_questions
from stoop.text.tokenizer import Tokenizer

NGRAM = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}'
FIELDS = {
    *("questions", "temperature", "k", "num_answers", "num_tokens", "num_drafts"),
    *("acceptance_rates", "mean_acceptance_length"),
    *("tokens_per_step", "share_with_drafts"),
    *("tokens_per_s", "plain_tokens_per_s", "speedup"),
}


@pytest.fixture
def stoop(stoop: Callable) -> Callable:
    """Runs the command; its exit code and what it wrote."""
    return partial(stoop, "bench", "acceptance")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two layouts."""
    chat, plain = tmp_path / "chat.jsonl", tmp_path / "plain.jsonl"
    turns = [["first question", "and then?"], ["second"], ["third"], ["fourth"]]
    lines = [{"question_id": n, "category": "c", "turns": each} for n, each in enumerate(turns)]
    chat.write_text("\n".join(map(json.dumps, lines)) + "\n")
    plain.write_text('{"prompt": "abababab"}\n{"text": "xyxyxyxy"}\n')
    return [chat, plain]


def test_a_table_a_file_and_a_json_line(
    text_model: Path, files: list[Path], tmp_path: Path, stoop: Callable
) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "plot.png"
    args = [arg for path in files for arg in ("--questions", str(path))]
    args += ["--k", "1,3", "--max-tokens", "12", "--limit", "2", "-sc", NGRAM, "--device", "cpu"]
    args += ["--out", str(out), "--max-model-len", "128"]
    drawn = ["--plot", str(plot)]
    if find_spec("matplotlib") is None:
        code, _, refusal = stoop(str(text_model), *args, *drawn)
        assert code == 2 and "--plot needs matplotlib" in refusal and not out.exists()
        drawn = []
    code, shown, progress = stoop(str(text_model), *args, *drawn)
    assert code == 0, progress
    record = json.loads(shown.splitlines()[-1])
    assert json.loads(out.read_text()) == record
    assert (
        "of the steps had drafts" in shown
        and "engine 1 of 3: chat, temperature 0, K = 2" in progress
    )
    assert plot.exists() == bool(drawn)
    assert (record["bench"], record["batch_size"], record["max_tokens"]) == ("acceptance", 1, 12)
    assert record["speculative_config"]["method"] == "ngram"
    assert record["speculative_config"]["draft_sample_method"] == "greedy"
    rows = record["rows"]
    places = [(row["questions"], row["temperature"], row["k"]) for row in rows]
    assert places == [(str(f), t, k) for f in files for t in (0, 1) for k in (1, 2, 3)]
    for row in rows:
        assert set(row) == FIELDS
        assert row["num_answers"] == 2 and row["num_tokens"] <= 24
        assert len(row["acceptance_rates"]) == row["k"]
        rates, length = row["acceptance_rates"], row["mean_acceptance_length"]
        # The first tokens come with the prompts; lookups find drafts for some steps only.
        num_steps = round((row["num_tokens"] - 2) / row["tokens_per_step"])
        assert row["num_drafts"] < num_steps and row["tokens_per_step"] <= length
        # The last steps of an answer have room for fewer drafts.
        assert 1 + rates[0] - 1e-3 <= length <= 1 + sum(rates) + 1e-3
        assert row["share_with_drafts"] == pytest.approx(row["num_drafts"] / num_steps, rel=1e-4)
        assert row["plain_tokens_per_s"] > 0
        assert (row["tokens_per_s"] is None) == (row["speedup"] is None) == (row["k"] != 2)


def test_nothing_need_be_timed(text_model: Path, files: list[Path], stoop: Callable) -> None:
    args = [str(text_model), "--questions", str(files[1]), "-sc", NGRAM, "--device", "cpu"]
    args += ["--max-tokens", "12", "--max-model-len", "128", "--temperature", "0", "--k", "1,2"]
    code, shown, progress = stoop(*args, "--speed-k", "none")
    assert code == 0 and "engine 1 of 1" in progress
    alone = json.loads(shown.splitlines()[-1])["rows"]
    assert all(row["plain_tokens_per_s"] is row["tokens_per_s"] is None for row in alone)
    code, shown, _ = stoop(*args)
    timed = json.loads(shown.splitlines()[-1])["rows"]
    same = ("k", "num_tokens", "num_drafts", "acceptance_rates")
    assert [[row[n] for n in same] for row in alone] == [[row[n] for n in same] for row in timed]


def test_the_first_turn_goes_through_the_chat_template(text_model: Path, files: list[Path]) -> None:
    tokenizer = Tokenizer.from_folder(text_model)
    found = read_questions(files, limit=2)
    chat = encode_questions(found, tokenizer, raw=False)[str(files[0])]
    text = "<s>user: first question</s><s>assistant: "
    assert tokenizer.decode(chat[0], skip_special_tokens=False) == text
    assert "third" in tokenizer.decode(chat[1])  # spread over the file
    bare = encode_questions(found, tokenizer, raw=True)[str(files[1])]
    assert [tokenizer.decode(ids) for ids in bare] == ["abababab", "xyxyxyxy"]


def test_a_model_without_a_chat_template_needs_raw(
    text_model: Path, files: list[Path], tmp_path: Path, stoop: Callable
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(text_model, bare)
    (bare / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    args = [str(bare), "--questions", str(files[1]), "-sc", NGRAM, "--k", "2", "--device", "cpu"]
    code, _, progress = stoop(*args)
    assert code == 2 and "no chat template: add --raw" in progress
    code, shown, _ = stoop(*args, "--raw", "--max-tokens", "4", "--temperature", "0")
    assert code == 0
    (row,) = json.loads(shown.splitlines()[-1])["rows"]
    assert row["num_answers"] == 2 and row["speedup"] > 0


@pytest.mark.parametrize(
    ("args", "pattern"),
    [
        ([], "needs a drafter"),
        (["-sc", "none"], "needs a drafter"),
        (["-sc", NGRAM], "no questions were given: add --questions"),
        (["-sc", NGRAM, "--questions", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["-sc", NGRAM, "--questions", "EMPTY"], "is empty"),
        (["-sc", NGRAM, "--questions", "LONG"], "no room for its answer"),
        (["-sc", '{"method": "ngram"}'], "--speed-k"),
        (["-sc", NGRAM.replace("2", '"auto"', 1)], "number are timed: give --speed-k"),
        (["-sc", NGRAM, "--k", "17"], "1 to 16"),
        (["-sc", NGRAM, "--k", "a"], "such as 1,8"),
        (["-sc", NGRAM, "--temperature", "-1"], "such as 0,1"),
        (["-sc", NGRAM, "--temperature", "nan"], "such as 0,1"),
        (["-sc", NGRAM, "--out", "/no/such/folder/x.json"], "does not exist"),
        (["-sc", NGRAM, "--plot", "/tmp"], "is a folder"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    args: list[str], pattern: str, text_model: Path, tmp_path: Path, stoop: Callable
) -> None:
    contents = {"EMPTY": "\n", "LONG": json.dumps({"prompt": "x" * 64})}
    for name, text in contents.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(text)
        args = [str(path) if arg == name else arg for arg in args]
    code, _, err = stoop(str(text_model), *args, "--device", "cpu", "--max-model-len", "64")
    assert code == 2
    (line,) = [text for text in err.splitlines() if text.startswith("error: ")]
    assert pattern in line
