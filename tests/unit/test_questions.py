"""Numbers in answers, and files of questions with answers."""

import json
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoop.bench.questions import Question, find_number, read_answered, read_exam, read_questions
from stoop.config.errors import ConfigError

SHIPPED = Path(__file__).parents[1] / "data" / "questions.jsonl"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", "42"),
        ("The answer is 42.", "42"),
        ("42.0", "42"),
        ("It costs $1,234.50.", "1234.5"),
        ("€ 3.00 each", "3"),
        ("about 50%.", "50"),
        ("3 apples and 4 pears are 7", "7"),
        ("x = -5", "-5"),
        ("a loss of -$5", "-5"),
        ("a loss of $-5", "-5"),
        ("-$-5", "-5"),
        ("minus sign: −7", "-7"),
        ("(-3)", "-3"),
        ("10-3", "3"),
        ("7 - 4", "4"),
        ("- 4 pears", "4"),
        ("1,2,3", "3"),
        ("12,34", "34"),
        ("1,234,567 nails", "1234567"),
        ("1,2345", "2345"),
        (".5", "0.5"),
        (r"\boxed{42}", "42"),
        ("**18** eggs", "18"),
        ("so 3 + 4 = 7\n#### 7\nThere are 9 of 10 left", "7"),
        ("#### 1\n#### $2,000", "2000"),
        ("####18", "18"),
        ("#### -3.", "-3"),
        ("#### Step one\nThen 5", "5"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_the_number_of_an_answer(text: str, number: str) -> None:
    assert find_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none", "$", "-", "...", "#### ", "one two", ",", "½", "٣"])
def test_no_number(text: str) -> None:
    assert find_number(text) is None


@given(st.text(alphabet="0123456789.,-−$€% #a\n", max_size=40) | st.text())
def test_no_text_is_too_odd(text: str) -> None:
    found = find_number(text)
    assert found is None or found.is_finite()


@given(
    st.integers(),
    st.sampled_from(["{}", "{:,}", "{:,}.0", "{:,}.", "{}%", "${}", "#### {:,}\n or 3"]),
    st.sampled_from(["", "Of 12 there are ", "4 + 5 = "]),
)
def test_a_number_is_found_however_it_is_written(number: int, form: str, before: str) -> None:
    assert find_number(before + form.format(number)) == number


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return path


def test_both_layouts(tmp_path: Path) -> None:
    solution = "2 + 3 = <<2+3=5>>5\n#### 5"
    path = write(
        tmp_path / "q.jsonl",
        {"question": "2 + 3?", "answer": solution},
        {"question_id": 0, "turns": ["2 + 3?", "Why?"], "reference": [solution, "Because."]},
        {"question": "2 + 3?", "answer": 5},
    )
    first, second, third = read_answered(path)
    asked = [{"role": "user", "content": "2 + 3?"}]
    assert first == second == Question(asked, "2 + 3 = 5\n#### 5", Decimal(5))
    assert third == Question(asked, "5", Decimal(5))
    # Files without answers, and their readers, go on as before.
    assert read_questions([path], None) == {str(path): [asked] * 3}


GOOD = {"question": "1 + 1?", "answer": "#### 2"}


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ("{", r"q\.jsonl:2 is not JSON"),
        ("[1]", r"q\.jsonl:2 has no prompt"),
        ('"question"', r"q\.jsonl:2 has no prompt"),
        ("7", r"q\.jsonl:2 has no prompt"),
        ({"answer": "#### 2"}, r"q\.jsonl:2 has no prompt"),
        ({"question": 3, "answer": "#### 2"}, r"q\.jsonl:2 has no prompt"),
        ({"question": "1 + 1?"}, r"q\.jsonl:2 has no answer"),
        ({"question": "1 + 1?", "answer": "two"}, r"q\.jsonl:2 has no answer"),
        ({"question": "1 + 1?", "answer": True}, r"q\.jsonl:2 has no answer"),
        ({"question": "1 + 1?", "answer": None}, r"q\.jsonl:2 has no answer"),
        ({"turns": ["1 + 1?"], "reference": []}, r"q\.jsonl:2 has no answer"),
        ({"turns": ["1 + 1?"], "reference": [["2"]]}, r"q\.jsonl:2 has no answer"),
        ('{"question": "?", "answer": ' + "9" * 5000 + "}", r"q\.jsonl:2 is not JSON"),
    ],
)
def test_a_bad_line_is_named(line: object, pattern: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=pattern) as refusal:
        read_answered(write(tmp_path / "q.jsonl", GOOD, line))
    assert "\n" not in str(refusal.value)
    assert '{"question": ..., "answer": "... #### 42"}' in str(refusal.value)  # what to write
    assert "messages" not in str(refusal.value)  # which has no answer


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    for path, pattern in [
        (tmp_path / "nowhere.jsonl", "--questions .*nowhere.jsonl does not exist: .*its answer"),
        (
            write(tmp_path / "empty.jsonl", "", " "),
            "empty.jsonl is empty: write a question with its answer, as JSON, on each line",
        ),
        (write(tmp_path / "text.txt", "1 + 1?"), "text.txt is not a .jsonl file"),
    ]:
        with pytest.raises(ConfigError, match=pattern):
            read_answered(path)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_answered(binary)


def test_worked_examples_are_not_asked(tmp_path: Path) -> None:
    every = read_answered(SHIPPED)
    assert [int(each.answer) for each in every] == [7, 12, 60, 2000, 30, -3]
    assert read_exam(SHIPPED) == (every, [])
    assert read_exam(SHIPPED, 2, 3) == (every[3:5], every[:3])
    other = write(tmp_path / "shots.jsonl", GOOD, GOOD)
    assert read_exam(SHIPPED, 1, 2, other) == (every[:1], read_answered(other))
    for limit, shots, path in [(None, 6, None), (2, 7, None), (2, 3, other)]:
        with pytest.raises(ConfigError, match="too few questions"):
            read_exam(SHIPPED, limit, shots, path)
    with pytest.raises(ConfigError, match="needs --shots N"):
        read_exam(SHIPPED, None, 0, other)
