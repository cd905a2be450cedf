"""Bad input gets one sentence that says what to do, and the engine goes on."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from stoop import LLM, CheckpointError, ConfigError, RequestError, SamplingParams, StoopError
from support.checkpoints import edit_json

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def refusal(error: StoopError) -> str:
    """The message, having checked that it is one sentence."""
    text = str(error)
    assert "\n" not in text
    assert len(text) < 400
    return text


def edit_config(folder: Path, **changes: object) -> None:
    edit_json(folder / "config.json", **changes)


def edit_weights(folder: Path, edit: Callable[[dict], None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def shrink_a_tensor(tensors: dict) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:-1].clone()


BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    "unknown architecture": (
        lambda f: edit_config(f, architectures=["MambaForCausalLM"]),
        "MambaForCausalLM.*LlamaForCausalLM",
    ),
    "quantised": (
        lambda f: edit_config(f, quantization_config={"quant_method": "awq"}),
        "awq.*unquantised",
    ),
    "unknown rope scaling": (
        lambda f: edit_config(f, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4}),
        "dynamic.*llama3",
    ),
    "rope scaling without its factor": (
        lambda f: edit_config(f, rope_parameters={"rope_type": "linear", "rope_theta": 1e4}),
        "'factor'.*linear",
    ),
    "a size of zero": (lambda f: edit_config(f, num_hidden_layers=0), "num_hidden_layers=0"),
    "heads that do not divide": (
        lambda f: edit_config(f, num_key_value_heads=3),
        "4 heads, which 3 key-value heads",
    ),
    "rope scaling that is no object": (lambda f: edit_config(f, rope_parameters=5), "object"),
    "a rope factor of 0": (
        lambda f: edit_config(
            f, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 0}
        ),
        "factor=0",
    ),
    "an odd head_dim": (lambda f: edit_config(f, head_dim=15), "head_dim=15"),
    "a window of 0": (
        lambda f: edit_config(f, architectures=["MistralForCausalLM"], sliding_window=0),
        "sliding_window=0",
    ),
    "layer types for other layers": (
        lambda f: edit_config(
            f,
            architectures=["MistralForCausalLM"],
            sliding_window=8,
            layer_types=["full_attention"],
        ),
        "1 layer_types for 2 layers",
    ),
    "an end of text that is no id": (
        lambda f: edit_json(f / "generation_config.json", eos_token_id="x"),
        "eos_token_id is 'x'",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
    "a truncated file": (truncate, "model.safetensors"),
    "a missing tensor": (
        lambda f: edit_weights(f, lambda t: t.pop("model.norm.weight")),
        "lacks model.norm.weight",
    ),
    "a tensor too many": (
        lambda f: edit_weights(
            f,
            lambda t: t.update(
                {"model.layers.0.self_attn.q_proj.bias": t["model.norm.weight"].clone()}
            ),
        ),
        "q_proj.bias",
    ),
    "a wrong shape": (
        lambda f: edit_weights(f, shrink_a_tensor),
        r"up_proj.weight has shape \[95, 64\].*\[96, 64\]",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_checkpoint_is_refused(name: str, text_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(text_model, folder)
    breaks, pattern = BREAKS[name]
    breaks(folder)
    with pytest.raises(CheckpointError, match=pattern) as caught:
        LLM(str(folder), dtype="float64", device="cpu")
    refusal(caught.value)


def test_a_missing_shard_is_named(text_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(text_model, folder)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    save_file({n: tensors[n] for n in names[:5]}, folder / "model-00001-of-00002.safetensors")
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {n: shards[i >= 5] for i, n in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="model-00002-of-00002") as caught:
        LLM(str(folder), dtype="float64", device="cpu")
    refusal(caught.value)


ENGINE_REFUSALS = [
    ({"max_model_length": 12}, "max_model_len"),
    ({"dtype": "float8"}, "float8"),
    ({"device": "tpu"}, "cuda:N"),
    ({"device": "cuda:99"}, "cuda"),
    ({"load_format": "pickle"}, "dummy"),
    ({"max_model_len": 0.5}, "max_model_len=0.5"),
    ({"max_model_len": 10_000}, "256"),
    ({"max_num_seqs": -1}, "max_num_seqs=-1"),
    ({"max_num_seqs": 0}, "max_num_seqs=0"),
    ({"max_model_len": 0}, "max_model_len=0"),
    ({"block_size": 24}, "power of two"),
    ({"block_size": 0}, "block_size=0"),
    ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
    ({"kv_cache_memory": "lots"}, "2GiB"),
    ({"kv_cache_memory": "1KiB"}, "max_model_len"),
    ({"kv_cache_memory": "9999TiB"}, "free on cpu: lower kv_cache_memory"),
    ({"run_ahead": -1}, "run_ahead=-1"),
    ({"run_ahead": 9}, "run_ahead=9: use at most 8"),
    ({"run_ahead": True}, "run_ahead=True"),
    ({"run_ahead": "1"}, "run_ahead='1'"),
    ({"run_ahead": 1.0}, "run_ahead=1.0"),
    ({"run_ahead": 1, "attention_backend": "flashinfer"}, "run_ahead=0 or another backend"),
    ({"graph_mode": "fast"}, "full_and_piecewise"),
    ({"graph_mode": None}, "full_and_piecewise"),
    ({"graph_mode": "step", "capture_sizes": "1,two"}, "such as 1,2,4,8"),
    ({"graph_mode": "step", "capture_sizes": "1,99999"}, "max_num_batched_tokens=2048"),
    ({"graph_mode": "step", "capture_sizes": []}, "such as 1,2,4,8"),
    ({"capture_sizes": "1,2"}, "choose a mode"),
    ({"sanitize": True}, "choose a mode"),
    ({"enable_chunked_prefill": "no"}, "True or False"),
    ({"num_kv_blocks": 3}, "max_model_len"),
    ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_seqs=64"),
    ({"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, "chunked prefill"),
    ({"attention_backend": "magic"}, "reference"),
    ({"attention_backend": "flashinfer"}, "does not run on cpu: use a CUDA device"),
]


@pytest.mark.parametrize(("options", "pattern"), ENGINE_REFUSALS)
def test_an_impossible_engine_option_is_refused(
    options: dict, pattern: str, text_model: Path
) -> None:
    with pytest.raises(ConfigError, match=pattern) as caught:
        LLM(str(text_model), **({"dtype": "float64", "device": "cpu"} | options))
    refusal(caught.value)


REQUEST_REFUSALS = [
    ("x" * 256, GREEDY, "256 tokens and max_model_len=256"),
    ([1] * 300, GREEDY, "300 tokens"),
    ("", GREEDY, "empty"),
    ([], GREEDY, "empty"),
    ([1, -1], GREEDY, "-1"),
    ([1, 260], GREEDY, "0 to 259"),
    ([1, "a"], GREEDY, "'a'"),
    ({"tokens": [1]}, GREEDY, "prompt_token_ids"),
    (7, GREEDY, "int"),
    (b"abc", GREEDY, "bytes"),
    ("hi", GREEDY.replace(stop_token_ids=[9999]), "stop_token_ids has token id 9999"),
    ("hi", GREEDY.replace(logit_bias={9999: 1.0}), "logit_bias has token id 9999"),
    ("hi", GREEDY.replace(bad_words=["a very long bad word indeed"]), "at most 16"),
    ("hi", {"temperature": 0}, "SamplingParams"),
]


@pytest.mark.parametrize(("prompt", "params", "pattern"), REQUEST_REFUSALS)
def test_an_impossible_request_is_refused_and_the_engine_goes_on(
    prompt: object, params: SamplingParams, pattern: str, llm: LLM
) -> None:
    before = llm.generate("hello", GREEDY)[0].outputs[0].token_ids
    with pytest.raises(RequestError, match=pattern) as caught:
        llm.generate([prompt] if isinstance(prompt, list) else prompt, params)
    refusal(caught.value)
    llm.engine.scheduler.check_idle()
    assert llm.generate("hello", GREEDY)[0].outputs[0].token_ids == before


def test_a_request_refused_in_mid_flight_disturbs_nobody(llm: LLM) -> None:
    alone = llm.generate("hello", GREEDY.replace(max_tokens=20))[0].outputs[0].token_ids
    stream = llm.stream("hello", GREEDY.replace(max_tokens=20))
    next(stream)
    with pytest.raises(RequestError):
        llm.engine.add_request("other", "x" * 300, GREEDY)
    assert [output.outputs[0].token_ids for output in stream][-1] == alone


def test_one_bad_prompt_of_several_is_named(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"prompts\[1\]: the prompt has 300 tokens") as caught:
        llm.generate(["fine", "x" * 300], GREEDY)
    refusal(caught.value)
    llm.engine.scheduler.check_idle()


@pytest.mark.parametrize("priority", [["x", 1], [1.5, 1], [None, 1], [True, 1]])
def test_a_bad_priority_is_refused_and_the_engine_goes_on(llm: LLM, priority: list) -> None:
    with pytest.raises(RequestError, match="priority=") as caught:
        llm.generate(["a", "b"], GREEDY, priority=priority)
    refusal(caught.value)
    assert len(llm.generate(["a", "b"], GREEDY)) == 2


def test_a_stream_takes_one_prompt(llm: LLM) -> None:
    with pytest.raises(RequestError, match="use generate"):
        next(llm.stream(["a", "b"], GREEDY))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="the prompt is empty"):
        next(llm.stream([], GREEDY))


@pytest.mark.parametrize("messages", [[], [[]]])
def test_a_conversation_without_messages_is_refused(llm: LLM, messages: list) -> None:
    with pytest.raises(RequestError) as caught:
        llm.chat(messages, GREEDY)
    refusal(caught.value)


def test_text_without_a_tokenizer_is_refused(text_model: Path) -> None:
    llm = LLM(str(text_model), dtype="float64", device="cpu", skip_tokenizer_init=True)
    for prompt, params in (("hi", GREEDY), ([1], GREEDY.replace(stop="x"))):
        with pytest.raises(RequestError, match="tokenizer") as caught:
            llm.generate(prompt, params)
        refusal(caught.value)
    assert len(llm.generate([1], GREEDY)[0].outputs[0].token_ids) == 4


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoopError, match="nowhere") as caught:
        LLM(str(tmp_path / "nowhere"))
    refusal(caught.value)


def test_end_of_text_beyond_the_vocabulary_is_harmless(text_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(text_model, folder)
    edit_json(folder / "generation_config.json", eos_token_id=[999, 257])
    llm = LLM(str(folder), dtype="float64", device="cpu")
    params = SamplingParams(temperature=0, min_tokens=2, max_tokens=4)
    assert len(llm.generate("hello", params)[0].outputs[0].token_ids) >= 2


@pytest.mark.parametrize(
    "options", [{"top_k": 2**70}, {"min_tokens": 2**70, "max_tokens": None}, {"max_tokens": 2**40}]
)
def test_numbers_too_large_for_the_device_are_refused(options: dict) -> None:
    with pytest.raises(RequestError, match=next(iter(options))) as caught:
        SamplingParams(**options)
    refusal(caught.value)
