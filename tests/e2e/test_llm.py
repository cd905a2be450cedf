"""The Python interface, as its users see it."""

from pathlib import Path

import pytest

from stoop import LLM, RequestError, SamplingParams
from stoop.text.tokenizer import Tokenizer
from support.engines import make_llm

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def answer(llm: LLM, prompt, params: SamplingParams = GREEDY):
    return llm.generate(prompt, params)[0].outputs[0]


def test_every_form_of_prompt_means_the_same(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("hello")
    expected = answer(llm, "hello").token_ids
    assert answer(llm, ids).token_ids == expected
    assert answer(llm, {"prompt_token_ids": ids}).token_ids == expected
    assert answer(llm, {"prompt": "hello"}).token_ids == expected
    assert answer(llm, [ids]).token_ids == expected
    assert [o.outputs[0].token_ids for o in llm.generate(["hello", "hello"], GREEDY)] == [
        expected,
        expected,
    ]


def test_outputs_come_in_the_order_of_prompts(llm: LLM) -> None:
    prompts = ["abc", "d", "efghijkl", "m" * 60]
    lengths = [9, 2, 5, 3]
    params = [GREEDY.replace(max_tokens=n) for n in lengths]
    outputs = llm.generate(prompts, params)
    assert [o.prompt for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * 4
    assert all(o.finished for o in outputs)
    assert outputs[0].prompt_token_ids == llm.get_tokenizer().encode("abc")


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    output = answer(llm, "hello", GREEDY.replace(max_tokens=60))
    assert output.text == llm.get_tokenizer().decode(output.token_ids)


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    output = llm.chat(messages, GREEDY)[0]
    assert output.prompt == "<s>user: hi</s><s>assistant: "
    assert output.prompt_token_ids[0] == 256
    assert output.outputs[0].token_ids == answer(llm, output.prompt_token_ids).token_ids
    both = llm.chat([messages, messages], GREEDY)
    assert [o.outputs[0].token_ids for o in both] == [output.outputs[0].token_ids] * 2


def test_a_stop_token_ends_the_answer_and_stays_out_of_the_text(llm: LLM) -> None:
    plain = answer(llm, "hello", GREEDY.replace(max_tokens=40))
    stop = next(t for t in plain.token_ids[3:] if t not in plain.token_ids[:3])
    place = plain.token_ids.index(stop)
    stopped = answer(llm, "hello", GREEDY.replace(max_tokens=40, stop_token_ids=[stop]))
    assert stopped.token_ids == plain.token_ids[: place + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.text == llm.get_tokenizer().decode(plain.token_ids[:place])
    kept = GREEDY.replace(max_tokens=40, stop_token_ids=[stop], include_stop_str_in_output=True)
    whole = answer(llm, "hello", kept)
    assert whole.text == llm.get_tokenizer().decode(plain.token_ids[: place + 1])


def test_a_stop_string_cuts_the_text(llm: LLM) -> None:
    plain = answer(llm, "stop here", GREEDY.replace(max_tokens=60))
    stop = plain.text[10:13]
    assert len(stop) == 3
    first = plain.text.index(stop)
    params = GREEDY.replace(max_tokens=60, stop=stop)
    stopped = answer(llm, "stop here", params)
    assert stopped.text == plain.text[:first]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert len(stopped.token_ids) < len(plain.token_ids)
    kept = answer(llm, "stop here", params.replace(include_stop_str_in_output=True))
    assert kept.text == plain.text[: first + 3]


def test_min_tokens_holds_off_stops_of_both_kinds(llm: LLM) -> None:
    plain = answer(llm, "hello", GREEDY.replace(max_tokens=40))
    stop = plain.token_ids[2]
    params = GREEDY.replace(max_tokens=40, stop_token_ids=[stop], min_tokens=8)
    held = answer(llm, "hello", params)
    assert stop not in held.token_ids[:8]
    assert len(held.token_ids) >= 8
    early = plain.text[1:3]
    text = GREEDY.replace(max_tokens=40, stop=[early], min_tokens=20)
    assert len(answer(llm, "hello", text).token_ids) >= 20


def test_eos_stops_unless_ignored(llm: LLM) -> None:
    force = {257: 100.0}  # make the end of text certain
    stopped = answer(llm, "hello", SamplingParams(temperature=0, logit_bias=force))
    assert (stopped.token_ids, stopped.finish_reason, stopped.text) == ([257], "stop", "")
    ignored = answer(llm, "hello", GREEDY.replace(logit_bias=force))
    assert ignored.token_ids == [257] * 12


def test_max_tokens_none_runs_to_the_models_limit(llm: LLM) -> None:
    output = answer(llm, "hello", GREEDY.replace(max_tokens=None))
    assert len(output.token_ids) == 256 - 5
    assert output.finish_reason == "length"


def test_logprobs_have_one_entry_a_token(llm: LLM) -> None:
    output = answer(llm, "hello", GREEDY.replace(logprobs=3))
    assert output.logprobs is not None
    assert len(output.logprobs) == 12
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(entry)) == token
        assert entry[token].rank == 1  # greedy
        assert len(entry) == 3  # the token itself is among the best
        assert entry[token].decoded_token == llm.get_tokenizer().decode([token], False)
    assert output.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(output.token_ids, output.logprobs, strict=True))
    )
    sampled = answer(llm, "hello", SamplingParams(seed=1, logprobs=0, max_tokens=4))
    assert sampled.logprobs is not None
    assert [len(entry) for entry in sampled.logprobs] == [1, 1, 1, 1]


def test_prompt_logprobs_score_every_token_but_the_first(llm: LLM) -> None:
    output = llm.generate("hello", GREEDY.replace(prompt_logprobs=1))[0]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == 5
    for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entry is not None
        assert token in entry


def test_n_answers_differ_and_the_first_is_the_single_one(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
    several = llm.generate("hello", params.replace(n=6))[0].outputs
    assert [o.index for o in several] == list(range(6))
    assert several[0].token_ids == answer(llm, "hello", params).token_ids
    assert len({tuple(o.token_ids) for o in several}) == 6


def test_bad_words_never_come(llm: LLM) -> None:
    plain = answer(llm, "hello", GREEDY.replace(max_tokens=40))
    word = next(
        plain.text[i : i + 2] for i in range(8, 30) if "\ufffd" not in plain.text[i : i + 2]
    )
    clean = answer(llm, "hello", GREEDY.replace(max_tokens=40, bad_words=[word]))
    assert word in plain.text
    assert word not in clean.text


def test_a_bad_word_that_the_tokenizer_drops_changes_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2's tokenizer drops some control characters."""
    encode = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text, **how: encode(self, text.strip("\x04"), **how)
    )
    expected = answer(llm, "hello", GREEDY)
    assert llm.get_tokenizer().encode("\x04", add_special_tokens=False) == []
    dropped = GREEDY.replace(bad_words=["\x04"])
    both = llm.generate(["hello", "hello"], [GREEDY, dropped], use_tqdm=False)
    assert [each.outputs[0].token_ids for each in both] == [expected.token_ids] * 2


def test_white_space_as_a_bad_word_bans_no_lone_space(llm: LLM) -> None:
    inputs, encode = llm.engine.frontend.inputs, llm.get_tokenizer().encode

    def ids(text: str) -> tuple[int, ...]:
        return tuple(encode(text, add_special_tokens=False))

    assert inputs._bad_words(["\n", "a"]) == (ids("\n"), ids("a"), ids(" a"))


def test_stream_grows_and_never_shows_half_a_character(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=80, ignore_eos=True)
    texts = [output.outputs[0].text for output in llm.stream("hello", params)]
    final = answer(llm, "hello", params).text
    assert texts[-1] == final
    assert all(final.startswith(text) for text in texts)
    assert len(texts) == 80


def test_leaving_a_stream_early_frees_everything(llm: LLM) -> None:
    stream = llm.stream("hello", GREEDY.replace(max_tokens=100))
    next(stream)
    stream.close()
    assert llm.metrics()["num_requests_running"] == 0
    llm.engine.scheduler.check_idle()


def test_metrics_count(text_model: Path) -> None:
    llm = make_llm(text_model, max_num_seqs=2)
    prompt = "a prompt that fills several blocks of the cache"
    llm.generate([prompt], GREEDY)
    llm.generate([prompt], GREEDY)
    metrics = llm.metrics()
    assert metrics["num_requests_finished"] == 2
    assert metrics["num_generated_tokens"] == 24
    assert metrics["num_prompt_tokens"] == 2 * len(prompt)
    assert metrics["prefix_cache_hit_tokens"] == 32
    assert metrics["kv_cache_usage"] == 0.0


def test_cached_tokens_are_reported_for_each_request(llm: LLM) -> None:
    prompt = "another prompt that fills several blocks of the cache"
    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_cached_prefixes_can_be_forgotten(text_model: Path) -> None:
    llm = make_llm(text_model, max_num_seqs=2)
    prompt = "a prompt that fills several blocks of the cache"
    expected = answer(llm, prompt).token_ids
    stream = llm.stream("hello", GREEDY)
    next(stream)
    assert not llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 32
    stream.close()
    assert llm.reset_prefix_cache()
    again = llm.generate(prompt, GREEDY)[0]
    assert (again.num_cached_tokens, again.outputs[0].token_ids) == (0, expected)


def test_priorities_go_first(text_model: Path) -> None:
    llm = make_llm(text_model, max_num_seqs=1)
    outputs = llm.generate(["a", "b", "c"], GREEDY, priority=[2, 1, 0])
    finished = [output.times.finished for output in outputs]
    assert finished[2] < finished[1] < finished[0]


def test_a_refused_prompt_stops_no_other(llm: LLM) -> None:
    with pytest.raises(RequestError, match="260"):
        llm.generate([[1, 2], [260]], GREEDY)
    llm.engine.scheduler.check_idle()
    assert len(answer(llm, "hello").token_ids) == 12


def test_dummy_weights_need_only_a_config(text_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((text_model / "config.json").read_text())
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu"}
    first, second = (LLM(str(tmp_path), seed=4, **options) for _ in range(2))
    other = LLM(str(tmp_path), seed=5, **options)
    assert answer(first, [1, 2, 3]).token_ids == answer(second, [1, 2, 3]).token_ids
    assert not first.engine.runner.model.lm_head.weight.equal(
        other.engine.runner.model.lm_head.weight
    )


def test_a_step_that_fails_costs_its_own_requests_only(
    text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(text_model, max_num_seqs=2)
    expected = answer(llm, "waits").token_ids
    engine = llm.engine
    engine.add_request("fails", "hello", GREEDY.replace(n=2, seed=1))
    engine.add_request("waits", "waits", GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.target, "forward", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert {output.request_id for output in outputs} == {"waits"}
    assert outputs[-1].outputs[0].token_ids == expected
    engine.scheduler.check_idle()


def test_a_stream_whose_request_was_lost_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream("hello", GREEDY)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner.target, "forward", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate("other", GREEDY)
    with pytest.raises(RequestError, match="lost"):
        next(stream)
    assert len(answer(llm, "hello").token_ids) == 12


def test_streams_take_turns(llm: LLM) -> None:
    alone = {text: answer(llm, text).token_ids for text in ("one", "two")}
    streams = {text: llm.stream(text, GREEDY) for text in alone}
    for _ in range(11):
        for text, stream in streams.items():
            assert next(stream).prompt == text
    for text, stream in streams.items():
        (last,) = stream
        assert last.outputs[0].token_ids == alone[text]


def test_an_interrupt_while_results_are_taken_strands_nobody(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [llm.stream(text, GREEDY) for text in ("one", "two")]
    for stream in streams:
        next(stream)

    def interrupted(self: object, row: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("stoop.engine.outputs.Answer.read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(streams[0])
    with pytest.raises(RequestError, match="lost"):
        list(streams[1])
    llm.engine.scheduler.check_idle()
    assert len(answer(llm, "hello").token_ids) == 12


def test_an_idle_step_does_nothing(llm: LLM) -> None:
    before = llm.metrics()["num_steps"]
    assert llm.engine.step() == []
    assert llm.metrics()["num_steps"] == before


def test_an_output_does_not_change_after_it_was_given(text_model: Path) -> None:
    llm = make_llm(text_model, max_num_batched_tokens=16)
    outputs = list(llm.stream("x" * 60, GREEDY.replace(prompt_logprobs=0)))
    lengths = [len(output.prompt_logprobs or ()) for output in outputs]
    assert lengths[0] < lengths[-1] == 60
