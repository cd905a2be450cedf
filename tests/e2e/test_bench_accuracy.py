"""`stoop bench accuracy`: from a file of questions to a table, a file and a JSON line."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from stoop.bench.questions import encode_tasks, read_exam
from stoop.check.mutants.graphs import share_warm_up_state
from stoop.config.errors import ConfigError
from stoop.text.tokenizer import Tokenizer

QUESTIONS = Path(__file__).parents[1] / "data" / "questions.jsonl"
NGRAM = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}'
SYNTHETIC = (
    '{"method": "eagle3", "model": "x", "num_speculative_tokens": 2, '
    '"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2}'
)
FIELDS = {
    *("asked_mode", "graph_mode", "drafter", "num_questions", "num_correct", "accuracy"),
    *("num_tokens", "loglikelihood_per_token", "tokens_per_step", "acceptance_rates", "seconds"),
    *("same", "num_equal", "first_position", "largest_gap", "loglikelihood_change"),
    *("differences", "num_cut"),
}
SMALL = ("--device", "cpu", "--dtype", "float64", "--max-tokens", "8", "--max-num-seqs", "2")


@pytest.fixture
def stoop(stoop: Callable) -> Callable:
    """Runs the command; its exit code and what it wrote."""
    return partial(stoop, "bench", "accuracy")


def test_a_table_a_file_and_a_json_line(text_model: Path, tmp_path: Path, stoop: Callable) -> None:
    out = tmp_path / "out.json"
    args = ["--questions", str(QUESTIONS), "-sc", NGRAM, "--modes", "none,full,step", "--strict"]
    args += ["--num-questions", "3", "--capture-sizes", "1,2,64", "--out", str(out)]
    code, shown, progress = stoop(str(text_model), *SMALL, *args)
    assert code == 0, progress
    record = json.loads(shown.splitlines()[-1])
    assert json.loads(out.read_text()) == record
    assert "engine 6 of 6: step, ngram, 0 of 3 correct, 3 of 3 as eager" in progress
    assert "accepted by position" in shown
    assert (record["bench"], record["max_tokens"], record["shots"]) == ("accuracy", 8, 0)
    assert (record["dtype"], record["attention_backend"]) == ("float64", "reference")
    assert record["same"] is True and record["kv_cache_dtype"] == "float64"
    assert "3 of 3 answers were cut at the limit of --max-tokens" in shown
    rows = record["rows"]
    places = [(row["graph_mode"], row["drafter"]) for row in rows]
    assert places == [(m, d) for m in ("none", "full", "step") for d in (None, "ngram")]
    for row in rows:
        assert set(row) == FIELDS and row["num_cut"] == 3
        assert row["num_questions"] == row["num_equal"] == 3 and row["differences"] == []
        assert row["same"] is True and row["first_position"] is row["largest_gap"] is None
        assert row["loglikelihood_per_token"] == rows[0]["loglikelihood_per_token"] < 0
        assert (row["tokens_per_step"] > 1) == (row["drafter"] is not None)


def test_engines_without_decode_graphs_make_a_fixed_number(
    text_model: Path, stoop: Callable
) -> None:
    varies = NGRAM.replace("}", ', "adaptive": true}')
    args = ["--questions", str(QUESTIONS), "-sc", varies, "--modes", "none,step", "--strict"]
    args += ["--num-questions", "2", "--capture-sizes", "1,2,64", "--no-plain"]
    code, shown, progress = stoop(str(text_model), *SMALL, *args)
    assert code == 0, progress
    rows = json.loads(shown.splitlines()[-1])["rows"]
    assert [(row["graph_mode"], row["drafter"]) for row in rows if row["drafter"]] == [
        ("none", "ngram"),
        ("step", "ngram"),
    ]


def test_strict_fails_for_a_broken_engine(
    text_model: Path, stoop: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_warm_up_state(monkeypatch)
    args = [str(text_model), *SMALL, "--questions", str(QUESTIONS), "--modes", "full"]
    args += ["--capture-sizes", "1,2,4,16,64", "--max-num-batched-tokens", "64", "-sc", "none"]
    code, shown, _ = stoop(*args)
    assert code == 0
    first, broken = json.loads(shown.splitlines()[-1])["rows"]
    assert first["same"] and not broken["same"] and broken["num_equal"] < 6
    for each in broken["differences"]:
        assert set(each) == {*("question", "position", "expected", "found"), "gap", "gap_is_bound"}
        assert each["expected"] != each["found"] and each["gap"] > 0
    assert broken["first_position"] == min(each["position"] for each in broken["differences"])
    code, _, told = stoop(*args, "--strict")
    (line,) = [text for text in told.splitlines() if text.startswith("--strict: ")]
    assert code == 1 and line.startswith("--strict: full, plain differs from the first row: ")
    place = f"first at token {broken['first_position']}, gap "
    assert f": {6 - broken['num_equal']} of 6 answers, {place}" in line


def test_the_dtype_of_the_cache_is_named(text_model: Path, stoop: Callable) -> None:
    args = ["--questions", str(QUESTIONS), "-sc", "none", "--num-questions", "1"]
    code, shown, started = stoop(str(text_model), *SMALL, *args, "--kv-cache-dtype", "fp8")
    assert code == 0, started
    assert json.loads(shown.splitlines()[-1])["kv_cache_dtype"] == "fp8"
    assert "float64 on cpu, KV cache in fp8, reference" in " ".join(shown.split())
    assert "MiB, fp8), ready in" in started
    _, _, started = stoop(str(text_model), *SMALL, *args)
    assert "MiB), ready in" in started


def test_drafts_alone_and_worked_examples(text_model: Path, stoop: Callable) -> None:
    args = [str(text_model), *SMALL, "--questions", str(QUESTIONS), "-sc", NGRAM, "--shots", "1"]
    code, shown, progress = stoop(*args, "--num-questions", "2", "--no-plain", "--modes", "step")
    assert code == 0, progress
    record = json.loads(shown.splitlines()[-1])
    rows = [(row["graph_mode"], row["drafter"], row["num_questions"]) for row in record["rows"]]
    assert rows == [("none", None, 2), ("step", "ngram", 2)] and record["shots"] == 1
    # On a CPU the default mode is that of the first row.
    code, shown, _ = stoop(str(text_model), *SMALL, "--questions", str(QUESTIONS), "-sc", "none")
    assert [row["asked_mode"] for row in json.loads(shown.splitlines()[-1])["rows"]] == ["none"]


def test_prompts_with_and_without_the_chat_template(text_model: Path) -> None:
    tokenizer = Tokenizer.from_folder(text_model)
    exam, shots = read_exam(QUESTIONS, limit=1, num_shots=1)
    (chat,) = encode_tasks(exam, tokenizer, shots)
    assert tokenizer.decode(chat.prompt, skip_special_tokens=False) == (
        "<s>user: Ann has 3 pears and buys 4 more. How many pears does she have?</s>"
        "<s>assistant: 3 + 4 = 7 pears\n#### 7</s>"
        "<s>user: A pen costs $2. What do 6 pens cost?</s><s>assistant: "
    )
    assert tokenizer.decode(chat.solution) == "6 * 2 = $12\n#### 12"
    assert (chat.answer, chat.stop) == (12, ())
    (raw,) = encode_tasks(exam, tokenizer, shots, raw=True)
    assert tokenizer.decode(raw.prompt) == (
        "Question: Ann has 3 pears and buys 4 more. How many pears does she have?\n"
        "Answer: 3 + 4 = 7 pears\n#### 7\n\n"
        "Question: A pen costs $2. What do 6 pens cost?\nAnswer:"
    )
    assert tokenizer.decode(raw.solution) == " 6 * 2 = $12\n#### 12"
    assert raw.stop == ("\n\nQuestion:",)


def test_a_model_without_a_chat_template_needs_raw(text_model: Path, stoop: Callable) -> None:
    tokenizer = Tokenizer.from_folder(text_model)
    tokenizer._chat_template = None
    exam, _ = read_exam(QUESTIONS)
    with pytest.raises(ConfigError, match="no chat template: add --raw"):
        encode_tasks(exam, tokenizer)
    args = ["--questions", str(QUESTIONS), "--num-questions", "1", "--raw", "-sc", "none"]
    assert stoop(str(text_model), *SMALL, *args)[0] == 0


@pytest.mark.parametrize(
    ("args", "pattern"),
    [
        (["--questions", "NONE"], "no questions were given: add --questions"),
        (["--questions", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["--questions", "BAD"], "BAD.jsonl:1 has no answer"),
        (["--modes", "full,fast"], "--modes has 'fast': use auto, none"),
        (["--modes", ""], "--modes has '': use auto, none"),
        (["--capture-sizes", "1,2"], "graph_mode is none: choose a mode"),
        (["--max-model-len", "64"], "a question with its solution of"),
        (["--shots", "6"], "too few questions"),
        (["--shots-file", str(QUESTIONS)], "needs --shots N"),
        (["-sc", SYNTHETIC], "synthetic acceptance gives wrong answers"),
        (["--out", "/no/such/folder/x.json"], "does not exist"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    args: list[str], pattern: str, text_model: Path, tmp_path: Path, stoop: Callable
) -> None:
    bad = tmp_path / "BAD.jsonl"
    bad.write_text('{"question": "How many?"}')
    args = [str(bad) if arg == "BAD" else arg for arg in args]
    if "--questions" not in args:
        args += ["--questions", str(QUESTIONS)]
    if "NONE" in args:
        args = []
    code, _, err = stoop(str(text_model), *args, "--device", "cpu")
    assert code == 2
    (line,) = [text for text in err.splitlines() if text.startswith("error: ")]
    assert pattern in line


@pytest.mark.model
def test_smollm2_scores_the_same_with_drafts(stoop: Callable) -> None:
    args = ["--questions", str(QUESTIONS), "--num-questions", "2", "--max-tokens", "24"]
    args += ["--device", "cpu", "--dtype", "float32", "--max-model-len", "256"]
    args += ["--modes", "step", "--no-plain", "--capture-sizes", "2", "--max-num-seqs", "2"]
    code, shown, progress = stoop(*args, "--strict")
    assert code == 0, shown + progress
    eager, drafted = json.loads(shown.splitlines()[-1])["rows"]
    assert drafted["drafter"] == "eagle3" and drafted["tokens_per_step"] > 1.5
    assert eager["num_correct"] == drafted["num_correct"] >= 1
    assert -3 < eager["loglikelihood_per_token"] < -0.3
