"""`reasoning_tokens` of usage: the tokens up to the end of the block, however they come."""

import random

import pytest

from stoop.server.pieces import PlainReader
from stoop.server.reading import AnswerReader, ReasoningCount
from stoop.server.reasoning import ReasoningReader
from support.fake_llm import FakeLLM
from support.http import USER, events, make_server, post

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
OPENS = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"  # the prompt begins the block


class Words:
    """A tokenizer whose tokens are these texts."""

    def __init__(self, *texts):
        self.texts = texts

    def encode(self, text, add_special_tokens=True):
        return [self.texts.index(text)] if text in self.texts else [0, 0]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(self.texts[each] for each in ids)


# The tokens of an answer, whether the prompt opened the block, and how many are reasoning.
CASES = [
    (["<think>", "hm", " so", "</think>", "\n\n", "Yes"], False, 4),
    (["hm", "</think>", "Yes"], True, 2),
    (["</think>", "Yes"], True, 1),
    (["hm", " so"], True, 2),  # it never ends
    (["Yes", ", ", "no"], False, 0),
    (["Yes", "</think>", "no"], False, 0),  # no block to end
    (["<th", "ink>", "hm</th", "in", "k>Yes", "!"], False, 5),
    (["hm", "</", "think>", "</think>", "x"], True, 3),  # spelled out before the token
    (["<", "think"], False, 0),
]


@pytest.mark.parametrize(("tokens", "opened", "wanted"), CASES)
def test_it_does_not_matter_how_tokens_and_text_come(tokens, opened, wanted):
    tokenizer = Words(*dict.fromkeys(tokens))
    ids = [tokenizer.texts.index(each) for each in tokens]
    for seed in range(50):
        chance = random.Random(seed)
        inner = ReasoningReader(PlainReader(), opened)
        reader = AnswerReader(inner, ReasoningCount(inner, tokenizer, True))
        text, place, told = "".join(tokens), 0, 0
        while place < len(ids):
            step = chance.randint(1, 3)
            new, place = ids[place : place + step], min(place + step, len(ids))
            # Text lags behind tokens, as when it may become a stop string.
            last = place == len(ids)
            ready = len("".join(tokens[:place])) - (0 if last else chance.randint(0, 3))
            reader.read(text[told : max(ready, told)], new, last)
            told = max(ready, told)
        assert reader.num_reasoning == wanted


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("opened", [True, False])
def test_usage(path, stream, opened):
    """One token a byte."""
    chunks = ["hm, ", "so</th", "ink>\n\nYes", "!"]
    if not opened:
        chunks[0] = "<think>" + chunks[0]
    wanted = len("hm, so</think>") + (0 if opened else len("<think>"))
    app, _ = make_server(
        FakeLLM(chunks, chat_template=OPENS if opened else None), reasoning_parser="think"
    )
    body = {"messages": USER} if path == CHAT else {"input": "hi"}
    if stream and path == CHAT:
        body["stream_options"] = {"include_usage": True}
    found = post(app, path, {**body, "stream": stream})
    if path == CHAT:
        usage = (events(found.text)[-2] if stream else found.json())["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == wanted
        assert usage["completion_tokens"] == len("".join(chunks))
    else:
        usage = (events(found.text)[-1]["response"] if stream else found.json())["usage"]
        assert usage["output_tokens_details"]["reasoning_tokens"] == wanted


def test_usage_of_several_answers_and_in_every_chunk():
    app, _ = make_server(
        FakeLLM(["a", "b</think>", "c"], chat_template=OPENS), reasoning_parser="think"
    )
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": USER, "n": 2, "stream": True, "stream_options": options}
    *chunks, _ = events(post(app, CHAT, body).text)
    counts = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] <= 2
    assert counts[-1] == 2 * len("ab</think>")


def test_without_a_parser_nothing_is_claimed():
    app, _ = make_server(FakeLLM(["<think>a</think>b"]))
    usage = post(app, CHAT, {"messages": USER}).json()["usage"]
    assert "reasoning_tokens" not in usage["completion_tokens_details"]
    plain, _ = make_server(FakeLLM(["b"]), reasoning_parser="think")
    usage = post(plain, CHAT, {"messages": USER}).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


def test_tags_that_are_special_tokens_are_not_skipped(monkeypatch):
    """Otherwise the end of the block would never be seen."""
    llm = FakeLLM(["a</think>b"], chat_template=OPENS)
    app, _ = make_server(llm, reasoning_parser="think")
    encode = llm.tokenizer.encode

    def one_token(text, *more, **given):
        return [256] if text == "</think>" else encode(text, *more, **given)

    assert 256 in llm.tokenizer.special_ids
    monkeypatch.setattr(llm.tokenizer, "encode", one_token)
    post(app, CHAT, {"messages": USER})
    ((_, params, _),) = llm.seen
    assert params.skip_special_tokens is False
