"""Accuracy: healthy engines score as the eager one, token for token, and broken ones do not."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from stoop import LLM
from stoop.bench.accuracy import BASELINE, AccuracyReport, Answer, Result, Row, compare, score
from stoop.bench.accuracy_report import describe_difference, print_accuracy
from stoop.bench.questions import Task, encode_tasks, find_number, read_answered
from stoop.check.mutants.graphs import share_warm_up_state, skip_the_rebuild
from stoop.config.errors import ConfigError
from stoop.core.outputs import SpecCounts
from support.byte_tokenizer import write_tokenizer
from support.checkpoints import write_llama
from support.drafters import DrafterStore, make_spec_llm
from support.engines import make_llm

Patch = pytest.MonkeyPatch

QUESTIONS = Path(__file__).parents[1] / "data" / "questions.jsonl"
MAX_TOKENS = 20
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
SETTINGS |= {"capture_sizes": "1,2,4,16,64", "speculative_config": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("accuracy")
    write_llama(folder, seed=11, vocab_size=260, bos_token_id=256, eos_token_id=257)
    write_tokenizer(folder)
    return folder


def start(folder: Path, mode: str, **options: Any) -> LLM:
    return make_llm(folder, **{**SETTINGS, "graph_mode": mode, **options})


@pytest.fixture(scope="module")
def eager(folder: Path) -> LLM:
    return start(folder, "none")


@pytest.fixture(scope="module")
def tasks(eager: LLM) -> list[Task]:
    return encode_tasks(read_answered(QUESTIONS), eager.get_tokenizer())


@pytest.fixture(scope="module")
def baseline(eager: LLM, tasks: list[Task]) -> Result:
    return score(eager, tasks, MAX_TOKENS, with_rivals=True)


# ---- engines ----


def test_the_baseline_is_what_the_engine_says(
    eager: LLM, tasks: list[Task], baseline: Result
) -> None:
    assert (baseline.mode, baseline.drafter) == ("none", None)
    assert len(baseline.answers) == len(tasks) == 6
    assert len({each.token_ids for each in baseline.answers}) == 6  # no two answers are equal
    assert baseline.tokens_per_step == 1.0 and baseline.counts == SpecCounts()
    for answer in baseline.answers:
        assert answer.number == find_number(answer.text)
        for token, rivals in zip(answer.token_ids, answer.rivals, strict=True):
            assert rivals[token] == max(rivals.values())  # greedy
    assert all(total < 0 for total in baseline.loglikelihoods)
    mean = sum(baseline.loglikelihoods) / sum(len(task.solution) for task in tasks)
    assert baseline.loglikelihood_per_token == pytest.approx(mean)
    assert compare(baseline, baseline).same


def test_likelihoods_are_those_of_the_next_tokens(
    eager: LLM, tasks: list[Task], baseline: Result
) -> None:
    """A solution that is the model's own answer has the likelihood of that answer."""
    own = [replace(t, solution=a.token_ids) for t, a in zip(tasks, baseline.answers, strict=True)]
    result = score(eager, own, 1)
    for answer, found in zip(baseline.answers, result.loglikelihoods, strict=True):
        each = [rivals[t] for t, rivals in zip(answer.token_ids, answer.rivals, strict=True)]
        assert found == pytest.approx(sum(each), rel=1e-9)


def test_a_right_number_counts(eager: LLM, tasks: list[Task], baseline: Result) -> None:
    numbers = [answer.number for answer in baseline.answers]
    assert sum(number is not None for number in numbers) >= 2
    known = [
        replace(task, answer=Decimal(-1) if number is None else number)
        for task, number in zip(tasks, numbers, strict=True)
    ]
    result = score(eager, known, MAX_TOKENS)
    assert [answer.correct for answer in result.answers] == [n is not None for n in numbers]
    assert result.num_correct > baseline.num_correct
    assert compare(result, baseline).correct_change > 0 and not compare(result, baseline).same


@pytest.mark.parametrize(
    ("mode", "drafter", "backend"),
    [
        ("none", NGRAM, "reference"),
        ("piecewise", None, "hostplan"),
        ("full", None, "reference"),
        ("full", NGRAM, "hostplan"),
        ("full_decode_only", NGRAM, "reference"),
        ("full_and_piecewise", None, "reference"),
        ("step", None, "hostplan"),
        ("step", NGRAM, "reference"),
    ],
)
def test_every_healthy_engine_scores_the_same(
    mode: str, drafter: Any, backend: str, folder: Path, tasks: list[Task], baseline: Result
) -> None:
    llm = start(folder, mode, speculative_config=drafter, attention_backend=backend)
    result = score(llm, tasks, MAX_TOKENS)
    found = compare(result, baseline)
    assert found.same and found.differences == () and found.loglikelihood_change < 1e-9
    assert (result.mode, result.drafter) == (mode, drafter and "ngram")
    assert len(result.counts.acceptance_rates) == (3 if drafter else 0)


def test_a_head_drafts_and_the_engine_needs_no_tokenizer(drafters: DrafterStore) -> None:
    drafter = drafters.get("eagle3-some")
    source = [Task((3, 1, 4, n), (5, 9, n), Decimal(n)) for n in range(4)]
    plain = score(make_spec_llm(drafter, 0), source, MAX_TOKENS, with_rivals=True)
    drafted = score(make_spec_llm(drafter, 3, graph_mode="step"), source, MAX_TOKENS)
    assert compare(drafted, plain).same
    assert drafted.tokens_per_step > 1.5 and drafted.counts.acceptance_rates[0] > 0
    assert all(answer.text == "" and not answer.correct for answer in drafted.answers)


# ---- broken engines ----


@pytest.mark.parametrize(
    ("break_it", "mode", "drafter", "backend"),
    [
        (share_warm_up_state, "full", None, "reference"),
        (share_warm_up_state, "step", NGRAM, "reference"),
        (skip_the_rebuild, "piecewise", None, "hostplan"),
    ],
)
def test_a_broken_engine_does_not(
    break_it: Callable[[Patch], None],
    mode: str,
    drafter: Any,
    backend: str,
    folder: Path,
    tasks: list[Task],
    baseline: Result,
    monkeypatch: Patch,
) -> None:
    break_it(monkeypatch)
    llm = start(folder, mode, speculative_config=drafter, attention_backend=backend)
    found = compare(score(llm, tasks, MAX_TOKENS), baseline)
    assert not found.same
    assert found.num_equal < len(tasks) and found.first_position is not None
    assert found.largest_gap is not None and found.largest_gap > 0.1  # no rounding
    assert found.loglikelihood_change > 0.1


# ---- comparing ----


def answer_of(*token_ids: int, rivals: Sequence[dict[int, float]] = ()) -> Answer:
    return Answer(token_ids, "", None, False, tuple(rivals))


def result_of(*answers: Answer, loglikelihood: float = -2.0) -> Result:
    count = len(answers)
    totals, lengths = (loglikelihood,) * count, (4,) * count
    return Result("none", None, answers, totals, lengths, SpecCounts(), 1.0)


RIVALS = [{1: -0.1, 2: -3.0}, {5: -0.7, 6: -0.7001}, {7: -0.5, 8: -1.5}]


@pytest.mark.parametrize(
    ("token_ids", "position", "pair", "gap", "is_bound"),
    [
        ((1, 6, 7), 1, (5, 6), 0.0001, False),
        ((2, 5, 7), 0, (1, 2), 2.9, False),
        ((1, 5, 99), 2, (7, 99), 1.0, True),
        ((1, 5), 2, (7, None), None, False),
        ((), 0, (1, None), None, False),
        ((1, 5, 7, 9), 3, (None, 9), None, False),
    ],
)
def test_where_answers_differ(
    token_ids: tuple[int, ...],
    position: int,
    pair: tuple[int | None, int | None],
    gap: float | None,
    is_bound: bool,
) -> None:
    expected = result_of(answer_of(1, 5, 7, rivals=RIVALS))
    found = compare(result_of(answer_of(*token_ids)), expected)
    (difference,) = found.differences
    assert (difference.question, difference.position) == (0, position)
    assert (difference.expected, difference.found) == pair
    assert difference.gap == (gap and pytest.approx(gap, abs=1e-6))
    assert difference.gap_is_bound == is_bound
    assert found.first_position == position and found.num_equal == 0 and not found.same
    assert found.largest_gap == difference.gap
    without = compare(result_of(answer_of(*token_ids)), result_of(answer_of(1, 5, 7)))
    assert without.largest_gap is None and without.first_position == position


def test_the_largest_gap_and_the_first_position_may_be_of_two_answers() -> None:
    expected = result_of(*[answer_of(1, 5, 7, rivals=RIVALS)] * 3)
    found = compare(result_of(answer_of(1, 6), answer_of(1, 5, 7), answer_of(1, 5, 8)), expected)
    assert found.num_equal == 1 and [each.question for each in found.differences] == [0, 2]
    assert found.first_position == 1 and found.largest_gap == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("loglikelihood", "same"),
    [(-2.0, True), (-2.0001, True), (-2.1, False), (math.nan, False), (-math.inf, False)],
)
def test_equal_answers_are_not_enough(loglikelihood: float, same: bool) -> None:
    one = answer_of(1)
    result = result_of(one, one, loglikelihood=loglikelihood)
    found = compare(result, result_of(one, one))
    assert found.same == same and found.num_equal == 2
    # JSON has neither NaN nor infinity.
    record = {**result.as_record(), **found.as_record()}
    finite = math.isfinite(loglikelihood)
    assert (record["loglikelihood_change"] is None) == (not finite)
    assert (record["loglikelihood_per_token"] is None) == (not finite)


def test_what_a_strict_run_says() -> None:
    expected = result_of(*[answer_of(1, 5, 7, rivals=RIVALS)] * 2)

    def told(result: Result) -> str:
        text = describe_difference(Row(BASELINE, result, compare(result, expected)))
        assert text.startswith("none, plain differs from the first row: ")
        return text.partition("row: ")[2]

    other = result_of(answer_of(1, 5, 99), answer_of(1, 5, 7))
    assert told(other) == "1 of 2 answers, first at token 2, gap >1"
    assert told(result_of(answer_of(1, 5), answer_of(1, 5, 7))).endswith("token 2, gap -")
    same = expected.answers
    assert told(result_of(*same, loglikelihood=-6)) == "the logp of a solution by 1 per token"
    assert told(result_of(*same, loglikelihood=math.nan)).endswith("by nan per token")


def test_answers_that_a_limit_cuts_and_solutions_without_tokens(
    eager: LLM, tasks: list[Task], capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    short = score(eager, [replace(task, solution=()) for task in tasks[:2]], 3)
    stopped = replace(short, answers=tuple(replace(each, cut=False) for each in short.answers))
    assert (short.num_cut, stopped.num_cut) == (2, 0)
    assert short.as_record()["loglikelihood_per_token"] is None and compare(short, short).same
    for results, note in [
        ([short], "2 of 2 answers were cut at the limit of --max-tokens or --max-model-len"),
        ([short, stopped], "0 to 2 of 2 answers were cut"),
        ([stopped], ""),
    ]:
        rows = [Row(BASELINE, each, compare(each, results[0])) for each in results]
        print_accuracy(AccuracyReport(eager.config, rows, 3), "m", "q.jsonl", 0, None)
        shown = capsys.readouterr().out
        assert note in shown and ("cut at" in shown) == bool(note)
        assert "0.0000" not in shown and "nan" not in shown


def test_no_questions_are_refused(eager: LLM) -> None:
    with pytest.raises(ConfigError, match="no questions"):
        score(eager, [])
