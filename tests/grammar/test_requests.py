"""Requests with structured outputs, from Python: every kind, next to others, and when they fail."""

import itertools
import json
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stoop import LLM, RequestError, SamplingParams, StructuredOutputs
from stoop.core.outputs import CompletionOutput
from stoop.engine.engine import Engine
from stoop.grammar import compiler, crew, parsing
from stoop.grammar.compiler import Compiled, GrammarStore, PendingGrammar, _Compiler
from stoop.grammar.masks import DEAD_END
from stoop.grammar.vocabulary import Vocabulary
from stoop.worker.runner import ModelRunner
from support.grammars import make_grammar_llm, tell
from support.sentencepiece_tokenizer import write_tokenizer as write_sentencepiece

GREEDY = SamplingParams(temperature=0, max_tokens=40)
ORACLE = {"method": "oracle", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return make_grammar_llm(model)


def ask(llm: LLM, asked: Any, prompt: str = "hi", **options: Any) -> CompletionOutput:
    params = GREEDY.replace(structured_outputs=asked, **options)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output.outputs[0]


# ---- kinds ----

COUNT = {"type": "integer", "minimum": 0, "maximum": 99}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<tool>",
        "content": {"type": "json_schema", "json_schema": COUNT},
        "end": "</t",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": "[ab]{3}é?"}, "[ab]{3}é?"),
        ({"choice": ["yes", "no", 'a "quote"\n\\']}, 'yes|no|a "quote"\n\\\\'),
        ({"grammar": 'root ::= "(" root ")" | "x"'}, r"\(*x\)*"),
        ({"structural_tag": TAG}, r"<tool>\d+</t"),
        ({"structural_tag": json.dumps(TAG)}, r"<tool>\d+</t"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 9}}, "[3-9]"),
        ({"json": '{"const": "a b"}'}, '"a b"'),
        (StructuredOutputs(regex="xyz"), "xyz"),
        ({"regex": "xyz", "choice": None, "disable_fallback": True}, "xyz"),
    ],
)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_answers_match(llm: LLM, asked: Any, pattern: str, temperature: float) -> None:
    for seed in range(4 if temperature else 1):
        answer = ask(llm, asked, temperature=temperature, seed=seed)
        if answer.finish_reason == "stop":
            assert re.fullmatch(pattern, answer.text), answer
        else:
            assert "root" in str(asked) and set(answer.text) <= set("(x)")


def test_any_object(llm: LLM) -> None:
    found = [ask(llm, {"json_object": True}, temperature=1.0, seed=seed) for seed in range(12)]
    complete = [json.loads(each.text) for each in found if each.finish_reason == "stop"]
    assert all(each.text.startswith("{") for each in found)
    assert complete and all(isinstance(each, dict) for each in complete)


def test_an_empty_schema_is_any_json(llm: LLM) -> None:
    found = [ask(llm, {"json": {}}, temperature=1.0, seed=seed) for seed in range(8)]
    assert all(json.loads(each.text) is not ... for each in found if each.finish_reason == "stop")


def test_whitespace_and_properties_can_be_limited(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    assert ask(llm, {"json": schema, "disable_any_whitespace": True}).text == '{"a": 1}'
    asked = {"json": schema | {"additionalProperties": True}, "disable_any_whitespace": True}
    closed = ask(llm, asked | {"disable_additional_properties": True})
    assert closed.text == '{"a": 1}'


def test_free_text_comes_before_the_marker(llm: LLM) -> None:
    free = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    (output,) = llm.generate("hi", free, use_tqdm=False)
    text = output.outputs[0].text
    marker = next(c for c in text[5:] if c.isascii() and c.isalnum())
    asked = {"choice": ["yes!", "no!"], "after": marker}
    (again,) = llm.generate(
        "hi", free.replace(ignore_eos=False, structured_outputs=asked), use_tqdm=False
    )
    answer = again.outputs[0]
    before, _, after = answer.text.partition(marker)
    assert text.startswith(before + marker) and before
    assert answer.finish_reason == "stop"
    assert after.endswith(("yes!", "no!")) and len(after) <= 8  # the rest of the marker's token


def test_a_marker_inside_a_window_of_drafts(model: Path) -> None:
    plain, llm = make_grammar_llm(model), make_grammar_llm(model, speculative_config=ORACLE)
    prompts = [[name, *range(40, 40 + name % 7)] for name in range(24)]
    params = [
        SamplingParams(
            temperature=1.0,
            seed=name,
            max_tokens=40,
            structured_outputs={"regex": "(ab|name)[0-9]{4}", "after": "aeinrst"[name % 7]},
        )
        for name in range(24)
    ]
    wanted = [output.outputs[0] for output in plain.generate(prompts, params, use_tqdm=False)]
    ids = [list(each.token_ids) for each in wanted]
    begun = [each for each in wanted if re.search("(ab|name)[0-9]{4}$", each.text)]
    assert len(begun) > 3
    for wrong in (0.0, 0.2):
        tell(prompts, ids, wrong)
        found = llm.generate(prompts, params, use_tqdm=False)
        assert [list(each.outputs[0].token_ids) for each in found] == ids


# ---- next to others ----


def test_others_are_not_touched(model: Path) -> None:
    """A batch with and without grammars: everyone's answer is what they get alone."""
    llm = make_grammar_llm(model, run_ahead=1)
    params = [
        GREEDY.replace(structured_outputs={"regex": "[a-f]{12}"}),
        GREEDY,
        GREEDY.replace(temperature=0.9, seed=4, structured_outputs={"choice": ["yes", "nope"]}),
        GREEDY.replace(temperature=0.9, seed=4, logprobs=2),
        GREEDY.replace(logprobs=1, structured_outputs={"json": {"type": "integer"}}, n=1),
    ]
    prompts = [[i, 5, 6] for i in range(len(params))]
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, each, output in zip(prompts, params, together, strict=True):
        (alone,) = llm.generate([prompt], each, use_tqdm=False)
        assert list(alone.outputs[0].token_ids) == list(output.outputs[0].token_ids)
        scored = [[list(at) for at in o.outputs[0].logprobs or ()] for o in (alone, output)]
        assert scored[0] == scored[1]


def test_several_answers_share_a_grammar(model: Path) -> None:
    llm = make_grammar_llm(model)
    params = SamplingParams(n=5, seed=3, max_tokens=20, structured_outputs={"regex": "[a-z]{4}"})
    (output,) = llm.generate("hi", params, use_tqdm=False)
    texts = [each.text for each in output.outputs]
    assert all(re.fullmatch("[a-z]{4}", text) for text in texts) and len(set(texts)) > 1
    assert len(llm.engine.runner.grammars.store._recent) == 1


@pytest.mark.parametrize("spec", [None, ORACLE])
def test_preemption_and_chunks(model: Path, spec: Any) -> None:
    """A follower is made again from the tokens that a preempted request has."""
    asked = {"json": {"type": "array", "items": {"type": "integer", "minimum": 100, "maximum": 999},
                      "minItems": 5, "maxItems": 9}}  # fmt: skip
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=50, structured_outputs=asked)
    prompts = [[name, *range(30, 80)] for name in range(6)]
    roomy = make_grammar_llm(model, enable_prefix_caching=False)
    wanted = [list(o.outputs[0].token_ids) for o in roomy.generate(prompts, params, use_tqdm=False)]
    options = {"num_kv_blocks": 34, "max_num_batched_tokens": 40, "speculative_config": spec}
    tight = make_grammar_llm(model, **options)
    if spec:
        tell(prompts, wanted, 0.2)
    found = tight.generate(prompts, params, use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in found] == wanted
    assert tight.metrics()["num_preemptions"] > 0


def test_a_batch_without_grammars_is_not_cut(model: Path) -> None:
    llm = make_grammar_llm(model, graph_mode="step", capture_structured=True)
    replayed: list[str] = []
    llm.engine.runner.executor.on_replay.append(lambda name, descriptor: replayed.append(name))
    llm.generate("hi", GREEDY, use_tqdm=False)
    assert set(replayed) == {"C", "ICVU"}
    replayed.clear()
    ask(llm, {"regex": "[a-f]{12}"})
    assert set(replayed) == {"C", "IC", "VU"}


# ---- depth 1 ----


def test_no_step_is_launched_past_a_grammar(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_grammar_llm(model, run_ahead=3, speculative_config=ORACLE)
    ahead: list[bool] = []
    launch = ModelRunner.launch

    def watched(self: ModelRunner, plan: Any) -> Any:
        before = llm.engine.core._in_flight
        ahead.append(any(step.grammars is not None for _, step in before))  # type: ignore[attr-defined]
        return launch(self, plan)

    monkeypatch.setattr(ModelRunner, "launch", watched)
    params = [GREEDY.replace(structured_outputs={"regex": "[a-f]{12}"}), GREEDY]
    found = llm.generate([[1, 2], [3, 4]], params, use_tqdm=False)
    wanted = make_grammar_llm(model).generate([[1, 2], [3, 4]], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in wanted]
    assert ahead and not any(ahead)


# ---- refusals ----


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex cannot be used"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json is not JSON"),
        ({"structured_outputs": {"json": {"type": "nothing"}}}, 'Unsupported type "nothing"'),
        ({"structured_outputs": {"grammar": "root ::= missing"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": 'start ::= "a"'}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": {"type": "x"}}}, "structural_tag cannot"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "regex and choice"),
        ({"structured_outputs": {"regexp": "a"}}, "did you mean"),
        ({"structured_outputs": {}}, "set exactly one"),
        ({"structured_outputs": {"choice": []}}, "give at least one text"),
        ({"structured_outputs": {"choice": ["a\ud800"]}}, "lone surrogate"),
        ({"structured_outputs": {"regex": "a", "after": ""}}, "the text of a marker"),
        ({"structured_outputs": {"regex": "a", "after": "\ud800"}}, "lone surrogate"),
        ({"structured_outputs": {"json": {"type": "string", "pattern": "^(?=a)b$"}}}, "lookaround"),
        ({"structured_outputs": {"json": {"not": {}}}}, "'not'"),
        ({"structured_outputs": 3}, "use StructuredOutputs or a dictionary"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "leave ignore_eos out"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "leave min_tokens out"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "whitespace_pattern"),
    ],
)  # fmt: skip
def test_bad_requests_get_one_sentence(llm: LLM, options: Any, sentence: str) -> None:
    with pytest.raises(RequestError, match=re.escape(sentence)) as refusal:
        llm.generate("hi", SamplingParams(**options), use_tqdm=False)
    assert "\n" not in str(refusal.value) and "/cpp/" not in str(refusal.value)
    assert not llm.engine.has_work


def test_a_missing_library_gets_one_sentence(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    parsing.parse.cache_clear()
    with pytest.raises(RequestError, match=r"pip install 'stoop\[structured\]'"):
        ask(llm, {"regex": "not parsed before"})


def test_an_engine_without_a_tokenizer_refuses(model: Path) -> None:
    llm = make_grammar_llm(model, skip_tokenizer_init=True)
    params = GREEDY.replace(structured_outputs={"regex": "a"})
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        llm.generate([[1, 2]], params, use_tqdm=False)


def test_synthetic_acceptance_refuses(model: Path, head: Path) -> None:
    spec = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2,
            "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 1.5}  # fmt: skip
    llm = make_grammar_llm(model, speculative_config=spec)
    with pytest.raises(RequestError, match="a benchmark decides which drafts are accepted"):
        ask(llm, {"regex": "a"})


# ---- failures ----


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_grammar_llm(model)
    compile_one = _Compiler.compile

    def failing(self: _Compiler, asked: StructuredOutputs) -> Any:
        if asked.regex == "bad":
            raise RuntimeError("[12:00:00] /x/y.cc:1: too large.")
        return compile_one(self, asked)

    monkeypatch.setattr(_Compiler, "compile", failing)
    params = [GREEDY.replace(structured_outputs={"regex": each}) for each in ("bad", "[ab]{9}")]
    bad, good, free = llm.generate(["hi"] * 3, [*params, GREEDY], use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error"
    assert bad.outputs[0].stop_reason == (
        "structured_outputs.regex cannot be compiled (too large): simplify it"
    )
    assert re.fullmatch("[ab]{9}", good.outputs[0].text)
    assert free.outputs[0].finish_reason == "length"
    assert ask(llm, {"regex": "bad"}).finish_reason == "error"
    assert not llm.engine.has_work


def test_options_that_leave_no_token_end_their_request_alone(llm: LLM) -> None:
    params = [
        GREEDY.replace(structured_outputs={"regex": "xy"}, bad_words=["y"]),
        GREEDY.replace(structured_outputs={"regex": "xy"}),
    ]
    dead, good = llm.generate(["hi"] * 2, params, use_tqdm=False)
    assert (dead.outputs[0].finish_reason, dead.outputs[0].stop_reason) == ("error", DEAD_END)
    assert dead.outputs[0].text == "x"
    assert good.outputs[0].text == "xy"


def test_a_dead_end_leaves_the_cached_prefix_to_others(model: Path) -> None:
    """Only NaN makes blocks unfit for others: bad words cannot."""
    llm = make_grammar_llm(model)
    prompt = list(range(40, 60))
    params = GREEDY.replace(structured_outputs={"regex": "xy"}, bad_words=["y"])
    (dead,) = llm.generate([prompt], params, use_tqdm=False)
    assert dead.outputs[0].stop_reason == DEAD_END
    (next_one,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert next_one.num_cached_tokens == 16


class Slow:
    """Grammars that compile when they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        run = PendingGrammar.run
        monkeypatch.setattr(PendingGrammar, "run", lambda p: self.go.wait(30) and run(p))


def test_others_go_on_while_a_grammar_is_compiled(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    engine = make_grammar_llm(model).engine
    engine.add_request("slow", "hi", GREEDY.replace(structured_outputs={"regex": "[ab]{5}"}))
    assert engine.has_work and engine.core.metrics()["num_requests_waiting"] == 1
    assert engine.step() == []  # it waits a moment and returns
    engine.add_request("fast", "hi", GREEDY)
    done = _finish(engine, "fast")
    assert done.outputs[0].finish_reason == "length"
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("slow", "hi", GREEDY)
    slow.go.set()
    assert re.fullmatch("[ab]{5}", _finish(engine, "slow").outputs[0].text)


def test_other_grammars_need_not_wait_for_a_slow_one(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, compile_one = threading.Event(), _Compiler.compile

    def slow(self: _Compiler, asked: StructuredOutputs) -> Any:
        assert asked.regex != "slow" or go.wait(30)
        return compile_one(self, asked)

    monkeypatch.setattr(_Compiler, "compile", slow)
    engine = make_grammar_llm(model).engine
    for name in ("slow", "fast"):
        engine.add_request(name, "hi", GREEDY.replace(structured_outputs={"regex": name}))
    assert _finish(engine, "fast").outputs[0].text == "fast"
    go.set()
    assert _finish(engine, "slow").outputs[0].text == "slow"


class Stuck:
    """Regular expressions that begin with "slow" compile when they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.2) -> None:
        self.go, self.tried = threading.Event(), list[str]()
        compile_one = _Compiler.compile

        def slow(compiler: _Compiler, asked: StructuredOutputs) -> Any:
            self.tried.append(str(asked.regex))
            assert not str(asked.regex).startswith("slow") or self.go.wait(60)
            return compile_one(compiler, asked)

        monkeypatch.setattr(_Compiler, "compile", slow)
        monkeypatch.setattr(compiler, "MAX_SECONDS", seconds)


def test_a_grammar_that_takes_too_long_ends_its_request_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck(monkeypatch)
    llm = make_grammar_llm(model)
    ask(llm, {"regex": "loads the library"})
    slow = GREEDY.replace(structured_outputs={"regex": "slow"})
    fast = GREEDY.replace(structured_outputs={"regex": "fast"})
    late, good, free = llm.generate(["hi"] * 3, [slow, fast, GREEDY], use_tqdm=False)
    sentence = (
        "structured_outputs.regex took longer than 0.2 s to compile: simplify it, with fewer "
        "parts or smaller counts and lengths"
    )
    assert (late.outputs[0].finish_reason, late.outputs[0].stop_reason) == ("error", sentence)
    assert good.outputs[0].text == "fast"
    assert free.outputs[0].finish_reason == "length"
    # While it is still compiled, it is not tried once more.
    assert ask(llm, {"regex": "slow"}).stop_reason == sentence
    assert stuck.tried.count("slow") == 1
    stuck.go.set()
    for _ in range(200):
        if ask(llm, {"regex": "slow"}).text == "slow":
            return
        time.sleep(0.02)
    raise AssertionError(stuck.tried)


def test_grammars_that_take_too_long_are_bounded(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their threads are replaced, up to a limit; then new grammars are refused, and no others."""
    others = _grammar_threads()
    stuck = Stuck(monkeypatch)
    llm = make_grammar_llm(model)
    assert ask(llm, {"regex": "fast"}).text == "fast"
    assert len(_grammar_threads() - others) == compiler.NUM_WORKERS
    count = compiler.NUM_WORKERS + crew.MAX_STUCK
    params = [GREEDY.replace(structured_outputs={"regex": f"slow{i}"}) for i in range(count + 3)]
    found = llm.generate(["hi"] * len(params), params, use_tqdm=False)
    reasons = [str(each.outputs[0].stop_reason) for each in found]
    assert ["took longer" in each for each in reasons] == [True] * count + [False] * 3
    assert reasons[count:] == [crew.BUSY] * 3
    assert ask(llm, {"regex": "another"}).stop_reason == crew.BUSY
    assert ask(llm, {"regex": "fast"}).text == "fast"  # it is known
    assert len(_grammar_threads() - others) == compiler.NUM_WORKERS + crew.MAX_STUCK
    stuck.go.set()
    for _ in range(500):
        if len(_grammar_threads() - others) == compiler.NUM_WORKERS:
            break
        time.sleep(0.02)
    assert len(_grammar_threads() - others) == compiler.NUM_WORKERS
    assert ask(llm, {"regex": "another"}).text == "another"


def _grammar_threads() -> set[threading.Thread]:
    """Also those of stores of earlier tests, which end at any time: count the new ones."""
    return {each for each in threading.enumerate() if each.name == "stoop-grammars"}


def test_threads_end_with_their_store(model: Path) -> None:
    others = _grammar_threads()
    store = GrammarStore(str(model), 330)
    store.get(StructuredOutputs(regex="a"))
    own = _grammar_threads() - others
    assert len(own) == compiler.NUM_WORKERS
    del store
    for each in own:
        each.join(timeout=10)
    assert not own & _grammar_threads()


def test_warming_up_loads_what_the_first_grammar_needs(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = GrammarStore(str(model), 330)
    store.warm_up()
    monkeypatch.setattr(Vocabulary, "of", lambda *arguments: 1 / 0)
    assert store.get(StructuredOutputs(regex="a"))


def test_warming_up_fails_in_silence() -> None:
    store = GrammarStore(None, 330)
    store.warm_up()
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        store.get(StructuredOutputs(regex="a"))


def test_a_request_may_go_while_its_grammar_is_compiled(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    engine = make_grammar_llm(model).engine
    for name in ("a", "b"):
        engine.add_request(name, "hi", GREEDY.replace(structured_outputs={"regex": "[ab]{5}"}))
    gone = engine.abort_request("a")
    assert gone is not None and gone.outputs[0].finish_reason == "abort"
    engine._mend(None)  # as after an interrupt: it still waits
    assert engine.has_work and not engine.take_lost()
    slow.go.set()
    assert re.fullmatch("[ab]{5}", _finish(engine, "b").outputs[0].text)
    assert not engine.has_work


def _finish(engine: Engine, name: str) -> Any:
    for _ in range(20_000):
        for output in engine.step():
            if output.request_id == name and output.finished:
                return output
    raise AssertionError(name)


# ---- the store ----


def test_grammars_are_kept_within_bounds(model: Path) -> None:
    store = GrammarStore(str(model), 330)
    held = store.request(StructuredOutputs(regex="held"))
    store.get(StructuredOutputs(regex="held"))
    store.max_bytes = 3 * store.num_bytes
    for number in range(20):
        store.get(StructuredOutputs(regex=f"a{{{number + 1}}}"))
        assert store.num_bytes <= store.max_bytes or len(store._recent) == 1
    assert len(store._recent) < 12
    assert store.request(StructuredOutputs(regex="held", after="x")) is held
    before = store.get(StructuredOutputs(regex="a{20}"))
    assert store.get(StructuredOutputs(regex="a{20}")) is before


def test_the_text_of_a_grammar_counts(model: Path) -> None:
    """A schema may be a megabyte of notes, and its grammar a few bytes."""
    store = GrammarStore(str(model), 330, max_bytes=1 << 20)
    for number in range(12):
        store.get(StructuredOutputs(json={"const": 1, "description": f"{number}" * 300_000}))
        assert len(store._recent) <= 3


def test_grammars_that_failed_are_not_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = GrammarStore(str(model), 330)
    monkeypatch.setattr(_Compiler, "compile", lambda self, asked: 1 / 0)
    with pytest.raises(RequestError, match="cannot be compiled"):
        store.get(StructuredOutputs(regex="a"))
    assert not store._recent and not store.num_bytes


def test_sizes_are_counted_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes milliseconds for a large grammar, and admissions look it up."""
    store = GrammarStore(str(model), 330)
    compiled = store.get(StructuredOutputs(regex="[ab]{3}"))
    assert compiled.num_bytes == compiled.grammar.memory_size_bytes > 0
    monkeypatch.setattr(Compiled, "grammar", property(lambda self: 1 / 0), raising=False)
    assert store.get(StructuredOutputs(regex="[ab]{3}")) is compiled


def test_a_grammar_that_no_request_waits_for_is_not_compiled(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "NUM_WORKERS", 1)
    slow, compiled = Slow(monkeypatch), list[str | None]()
    compile_one = _Compiler.compile

    def noted(self: _Compiler, asked: StructuredOutputs) -> Any:
        compiled.append(asked.regex)
        return compile_one(self, asked)

    monkeypatch.setattr(_Compiler, "compile", noted)
    engine = make_grammar_llm(model).engine
    for name in "abc":
        engine.add_request(name, "hi", GREEDY.replace(structured_outputs={"regex": f"{name}+"}))
    engine.abort_request("b")
    slow.go.set()
    _finish(engine, "c")
    assert compiled == ["a+", "c+"]


def test_words_of_a_sentencepiece_tokenizer(model: Path, tmp_path: Path) -> None:
    """Blocks are spaces and <0x0A> is a byte, in the middle of a text."""
    for metaspace in (False, True):
        folder = tmp_path / f"{metaspace}"
        folder.mkdir()
        for name in ("config.json", "model.safetensors", "generation_config.json"):
            (folder / name).symlink_to(model / name)
        write_sentencepiece(folder, metaspace)
        config = json.loads((model / "config.json").read_text()) | {"eos_token_id": 2}
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "generation_config.json").unlink()
        llm = make_grammar_llm(folder)
        for text in (" blue sky is", "blue é\n!", "[ i ]"):
            assert ask(llm, {"choice": [text]}).text == text
        pieces = llm.engine.runner.grammars.store._compiler._load()[0].pieces
        tokens = llm.get_tokenizer().tokens()
        assert pieces[tokens["\u2581sky"]] == b" sky"
        assert pieces[tokens["<0x0A>"]] == b"\n"
        assert pieces[tokens["</s>"]] == b""


def test_every_pair_of_kinds_is_refused() -> None:
    kinds = {"json": {}, "regex": "a", "choice": ["a"], "grammar": "a", "json_object": True}
    for one, other in itertools.combinations(kinds, 2):
        with pytest.raises(RequestError, match=f"{one} and {other}"):
            StructuredOutputs.of({one: kinds[one], other: kinds[other]})
