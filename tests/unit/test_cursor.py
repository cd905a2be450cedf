"""What a stream hands out, and when."""

import pytest

from stoop.core.messages import Delta, EngineRequest
from stoop.core.sampling_params import SamplingParams
from stoop.core.step import TokenScores
from stoop.engine.cursor import GroupCursor
from stoop.engine.outputs import Answer, AnswerError, RequestGroup
from support.fake_llm import byte_tokenizer
from support.scheduling import make_rules


def make_group() -> RequestGroup:
    """Two answers to a prompt of three tokens, which the first answer scores."""
    answers = []
    for index, scored in enumerate((0, None)):
        rules = make_rules(params=SamplingParams(n=2, prompt_logprobs=scored, max_tokens=4))
        request = EngineRequest(f"r/{index}", (1, 2, 3), rules, 0)
        answers.append(Answer(index, request, None))
    return RequestGroup("r", None, answers)


def test_no_answer_comes_before_the_scores_of_the_prompt():
    """The second answer may find the prompt in the cache, and be faster than the first."""
    group = make_group()
    cursor = GroupCursor(group)
    first, second = group.answers
    second.extend(Delta("r/1", [7]))
    assert cursor.take_new() is None
    scores = [TokenScores([token], [-0.5], 1) for token in (2, 3)]
    group.take_prompt_scores(first, Delta("r/0", [], prompt_scores=scores, prompt_scores_start=1))
    item = cursor.take_new()
    assert item is not None and [each.index for each in item.answers] == [1]
    assert item.prompt_logprobs is not None and len(item.prompt_logprobs) == 3
    assert cursor.take_new() is None
    second.extend(Delta("r/1", [8]))
    item = cursor.take_new()
    assert item is not None and item.prompt_logprobs is None


def test_an_end_is_told_without_the_scores():
    group = make_group()
    cursor = GroupCursor(group)
    for answer in group.answers:
        answer.end("abort")
    item = cursor.take_new()
    assert item is not None and item.finished and item.prompt_logprobs is None


def test_a_tokenizer_that_fails_early_fails_with_the_first_tokens(monkeypatch):
    """Only then is there someone to tell."""
    rules = make_rules(params=SamplingParams(max_tokens=4))
    answer = Answer(0, EngineRequest("r/0", (1, 2, 3), rules, 0), byte_tokenizer())

    def fail(self):
        raise ValueError("no text")

    monkeypatch.setattr(Answer, "_make_stream", fail)
    RequestGroup("r", None, [answer]).prepare()
    with pytest.raises(AnswerError, match=r"the tokenizer failed on this answer .*no text"):
        answer.read(Delta("r/0", [7]))
