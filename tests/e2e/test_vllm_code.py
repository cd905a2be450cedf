"""Code as people write it for vLLM."""

import dataclasses
import json
import logging
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stoop
from stoop import (
    LLM,
    CompletionOutput,
    EngineArgs,
    RequestError,
    RequestOutput,
    SamplingParams,
    StoopError,
    TextPrompt,
    TokensPrompt,
)

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

# As Qwen3's: thinking is on unless it is switched off.
THINKING = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: "
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
USER = [{"role": "user", "content": "hi"}]


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_arguments_that_mean_nothing_here_are_taken(text_model: Path) -> None:
    llm = LLM(
        model=str(text_model),
        tensor_parallel_size=1,
        trust_remote_code=True,
        dtype=torch.float64,
        enforce_eager=True,
        swap_space=4,
        gpu_memory_utilization=0.5,
        disable_log_stats=True,
        device="cpu",
    )
    assert (llm.config.device.dtype, llm.config.graph.mode) == ("float64", "none")
    outputs = llm.generate("hello", GREEDY, use_tqdm=False, lora_request=None)
    assert isinstance(outputs[0], RequestOutput)
    assert isinstance(outputs[0].outputs[0], CompletionOutput)


def test_engine_args_make_an_llm(text_model: Path, llm: LLM) -> None:
    args = EngineArgs(model=str(text_model), dtype="float64", device="cpu", enforce_eager=True)
    other = LLM(**dataclasses.asdict(args))
    assert ids_of(other.generate("hello", GREEDY)) == ids_of(llm.generate("hello", GREEDY))


PROMPTS: dict[str, Any] = {
    "TextPrompt": TextPrompt(prompt="hello"),
    "TokensPrompt": lambda ids: TokensPrompt(prompt_token_ids=ids),
    "None beside": lambda ids: {"prompt_token_ids": ids, "multi_modal_data": None},
    "both": lambda ids: TokensPrompt(prompt_token_ids=ids, prompt="hello"),
    "array": np.array,
    "tensor": torch.tensor,
    "list of numpy ints": lambda ids: [np.int32(token) for token in ids],
    "list of tensors": lambda ids: [torch.tensor(token) for token in ids],
    "array in a dictionary": lambda ids: {"prompt_token_ids": np.array(ids)},
    "list of one array": lambda ids: [np.array(ids)],
    "matrix": lambda ids: torch.tensor([ids]),
    "array of texts": np.array(["hello"]),
}


@pytest.mark.parametrize("form", PROMPTS)
def test_every_form_of_prompt(llm: LLM, form: str) -> None:
    ids = llm.get_tokenizer().encode("hello")
    expected = ids_of(llm.generate("hello", GREEDY))
    prompt = PROMPTS[form](ids) if callable(PROMPTS[form]) else PROMPTS[form]
    output = llm.generate(prompt, GREEDY)[0]
    assert [output.outputs[0].token_ids] == expected
    assert output.prompt_token_ids == ids
    assert all(type(token) is int for token in output.prompt_token_ids)
    assert list(llm.stream(prompt, GREEDY))[-1].outputs[0].token_ids == expected[0]


def test_priorities_and_parameters_may_be_arrays(llm: LLM) -> None:
    outputs = llm.generate(["a", "b"], (GREEDY, GREEDY), priority=np.array([1, 0]))
    assert len(outputs) == 2
    with pytest.raises(RequestError, match="sampling_params has 2 entries for 1 prompts"):
        llm.generate(["a"], [GREEDY, GREEDY])
    with pytest.raises(RequestError, match="sampling_params is str"):
        llm.generate(["a"], "greedy")  # type: ignore[arg-type]


def test_parameters_may_change_while_a_request_runs(llm: LLM) -> None:
    """The engine took a copy."""
    params = GREEDY.replace(stop=["\0\0\0"], logit_bias={5: -1.0})
    expected = ids_of(llm.generate("hello", params))
    llm.engine.add_request("queued", "hello", params)
    params.max_tokens = 1
    params.temperature = 2.0
    params.stop.append(chr(0))  # type: ignore[union-attr]
    params.logit_bias[7] = 100.0  # type: ignore[index]
    while llm.engine.has_work:
        outputs = llm.engine.step()
    assert ids_of(outputs) == expected
    assert len(llm.generate("hello", params)[0].outputs[0].token_ids) == 1


def test_parameters_that_contradict_each_other_are_refused_when_used(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5)
    params.min_tokens = 9
    with pytest.raises(RequestError, match="min_tokens=9 is above max_tokens=5"):
        llm.generate("hello", params)
    params = SamplingParams(stop_token_ids=[1])
    params.stop_token_ids.append("x")  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match="stop_token_ids='x'"):
        llm.generate("hello", params)


def test_an_output_has_metrics(llm: LLM) -> None:
    started = time.time()
    output = llm.generate("hello", GREEDY.replace(n=2))[0]
    ended = time.time()
    metrics = output.metrics
    assert started <= metrics.arrival_time <= metrics.first_token_time  # type: ignore[operator]
    assert metrics.first_token_time < metrics.finished_time <= ended + 0.01  # type: ignore[operator]
    assert metrics.last_token_ts > metrics.first_token_ts > metrics.queued_ts  # type: ignore[operator]
    assert metrics.first_token_latency == metrics.first_token_ts - metrics.queued_ts  # type: ignore[operator]
    assert metrics.num_generation_tokens == 24
    first = next(llm.stream("x", GREEDY)).metrics
    assert first.finished_time is None and first.last_token_ts == first.first_token_ts


def test_answers_say_whether_they_are_finished(llm: LLM) -> None:
    """A method of an answer and an attribute of the output, as in vLLM."""
    outputs = list(llm.stream("hello", GREEDY.replace(max_tokens=2)))
    assert [output.finished for output in outputs] == [False, True]
    assert [output.outputs[0].finished() for output in outputs] == [False, True]


def test_defaults_come_from_the_models_generation_config(text_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(text_model, folder)
    path = folder / "generation_config.json"
    found = json.loads(path.read_text())
    wishes = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 3, "do_sample": True}
    path.write_text(json.dumps({**found, **wishes}))
    llm = LLM(str(folder), dtype="float64", device="cpu")
    defaults = llm.get_default_sampling_params()
    assert defaults == SamplingParams(temperature=0.6, top_k=20, max_tokens=3)
    defaults.max_tokens = 7
    assert llm.get_default_sampling_params().max_tokens == 3
    for outputs in (llm.generate("hello"), llm.chat(USER), list(llm.stream("hello"))[-1:]):
        assert len(outputs[0].outputs[0].token_ids) <= 3
    assert llm.generate("hello", SamplingParams(ignore_eos=True))[0].outputs[0].token_ids[3:]


def test_without_a_generation_config_defaults_are_plain(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()


# ---- chat ----


def test_thinking_can_be_switched_off(text_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(text_model, folder)
    (folder / "chat_template.jinja").write_text(THINKING)
    llm = LLM(str(folder), dtype="float64", device="cpu")
    on = llm.chat(USER, GREEDY)[0]
    off = llm.chat(USER, GREEDY, chat_template_kwargs={"enable_thinking": False})[0]
    assert on.prompt == "<s>user: hi</s><s>assistant: "
    assert off.prompt == on.prompt + "<think>\n\n</think>\n\n"
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(
        USER, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert text == off.prompt
    assert ids_of(llm.generate([off.prompt_token_ids], GREEDY)) == ids_of([off])


def test_an_ordinary_chat_logs_nothing(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stoop")
    llm.chat(USER, GREEDY)
    assert not caplog.messages


def test_chat_takes_vllms_arguments(llm: LLM) -> None:
    messages = [*USER, {"role": "assistant", "content": "Well,"}]
    prompt = llm.chat(
        messages, GREEDY, add_generation_prompt=False, continue_final_message=True
    )[0].prompt  # fmt: skip
    assert prompt == "<s>user: hi</s><s>assistant: Well,"
    template = "{{ tools[0].name }}: {{ messages[0].content }}{{ tone }}"
    output = llm.chat(
        [USER, USER],
        [GREEDY, GREEDY],
        False,
        None,
        template,
        chat_template_content_format="string",
        tools=[{"name": "search"}],
        chat_template_kwargs={"tone": "!", "messages": "hidden"},
    )[1]
    assert output.prompt == "search: hi!"


def test_the_tokenizer_applies_the_template_as_transformers_do(llm: LLM, text_model: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    ours = llm.get_tokenizer()
    theirs = PreTrainedTokenizerFast.from_pretrained(text_model)
    for options in (
        {},
        {"tokenize": False},
        {"tokenize": False, "add_generation_prompt": True},
        {"add_generation_prompt": True, "return_dict": True},
        {"tokenize": False, "chat_template": "{{ messages[0].content }}{{ x }}", "x": "y"},
    ):
        for messages in (USER, [USER, USER]):
            wanted = theirs.apply_chat_template(messages, **{"return_dict": False, **options})
            found = ours.apply_chat_template(messages, **options)
            for key in ("input_ids", "attention_mask") if options.get("return_dict") else ():
                assert found[key] == wanted[key]
            assert options.get("return_dict") or found == wanted
    with pytest.raises(RequestError, match="leave out return_tensors"):
        ours.apply_chat_template(USER, return_tensors="pt")
    ids = theirs.encode("hello")
    assert ours.decode(np.array(ids)) == ours.decode(torch.tensor(ids)) == "hello"
    assert ours.decode(ids[0]) == "h"


BAD_CHATS: list[tuple[Any, dict[str, Any], str]] = [
    ({"role": "user", "content": "hi"}, {}, "messages is a list such as"),
    ("hi", {}, "not str"),
    (5, {}, "not int"),
    ([5], {}, "not int"),
    (["hi"], {}, "not str"),
    ([[{"role": "user"}]], {}, "content"),
    ([USER[0], [USER[0]]], {}, "each message is an object"),
    ([{1: 2, **USER[0]}], {}, "keys of a message"),
    (USER, {"tools": 5}, "tools is a list"),
    (USER, {"tools": [len]}, "tools is a list"),
    (USER, {"chat_template": 5}, "chat_template is int"),
    (USER, {"chat_template": "{% if %}"}, "refused these messages"),
    (USER, {"chat_template_kwargs": [1]}, "dictionary, not list"),
    (USER, {"chat_template_content_format": "openai"}, "chat_template_content_format='openai'"),
    (USER, {"lora_request": object()}, "no LoRA adapters"),
    (USER, {"mm_processor_kwargs": {"x": 1}}, "text only"),
]


@pytest.mark.parametrize(("messages", "options", "pattern"), BAD_CHATS)
def test_chats_that_cannot_be_had_get_a_sentence(
    llm: LLM, messages: Any, options: dict[str, Any], pattern: str
) -> None:
    with pytest.raises(RequestError, match=pattern) as refusal:
        llm.chat(messages, GREEDY, **options)
    assert "\n" not in str(refusal.value)


# ---- what is missing ----


BAD_CALLS: list[tuple[Any, dict[str, Any], str]] = [
    ("hi", {"lora_request": object()}, "lora_request=.* is not supported: .*LoRA"),
    ("hi", {"lora_request": [object()]}, "LoRA"),
    ("hi", {"guided_options_request": {"json": {}}}, "write structured_outputs="),
    (None, {"prompt_token_ids": [1]}, "prompt_token_ids=.*pass prompts="),
    ({"prompt": "hi", "multi_modal_data": {"image": 1}}, {}, "multi_modal_data.*text only"),
    ({"prompt_token_ids": [1], "cache_salt": "x"}, {}, "cache_salt='x'.*enable_prefix_caching"),
    ({"encoder_prompt": "x"}, {}, "use 'prompt' or 'prompt_token_ids'"),
    ({5: "x"}, {}, "has 5: use 'prompt'"),
    ({}, {}, "no keys"),
    ({"prompt": None}, {}, "use 'prompt'"),
    ({"prompt": 5}, {}, "'prompt' is int"),
    ({"prompt": 5, "prompt_token_ids": [1]}, {}, "'prompt' is int"),
    (np.array([0.5]), {}, "not float"),
    (np.array([[[1]]]), {}, r"\[1\] among its token ids"),
    (iter(["x"]), {}, "list_iterator"),
    ([None], {}, "NoneType"),
    ([[10**5000]], {}, "token id <int>"),
    ("hi", {"priority": ["x"]}, "priority='x'"),
]


@pytest.mark.parametrize(("prompts", "options", "pattern"), BAD_CALLS)
def test_calls_that_cannot_be_had_get_a_sentence(
    llm: LLM, prompts: Any, options: dict[str, Any], pattern: str
) -> None:
    with pytest.raises(RequestError, match=pattern) as refusal:
        llm.generate(prompts, GREEDY, **options)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300
    llm.engine.scheduler.check_idle()


def test_harmless_arguments_of_a_call_are_ignored(llm: LLM) -> None:
    llm.generate("hi", GREEDY, lora_request=[None], tokenization_kwargs={}, use_tqdm=print)
    with pytest.raises(TypeError, match="unexpected keyword argument 'promts'"):
        llm.generate("hi", GREEDY, promts="x")


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("embed", "no pooling models"),
        ("encode", "no pooling models"),
        ("score", "no pooling models"),
        ("beam_search", "sample n answers"),
        ("sleep", "make a new one"),
        ("collective_rpc", "no worker processes"),
        ("llm_engine", "use config"),
    ],
)
def test_methods_that_are_missing_say_so(llm: LLM, name: str, pattern: str) -> None:
    with pytest.raises(StoopError, match=f"LLM.{name} is not supported: .*{pattern}"):
        getattr(llm, name)
    assert not hasattr(llm, name)


def test_other_attributes_are_missing_as_ever(llm: LLM) -> None:
    with pytest.raises(AttributeError, match="no attribute 'genrate'"):
        llm.genrate("x")  # type: ignore[attr-defined]


def test_the_names_people_import_are_there() -> None:
    for name in stoop.__all__:
        assert getattr(stoop, name) is not None
