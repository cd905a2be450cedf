"""The plain engine on a CUDA device: the same tokens, a KV cache that fits, no hidden waits."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stoop import LLM, SamplingParams
from support.checkpoints import write_cuda_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SETTINGS = {
    "max_model_len": 400,
    "max_num_seqs": 6,
    "skip_tokenizer_init": True,
    "graph_mode": "none",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_cuda_llama(tmp_path_factory.mktemp("tiny"), "float64"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    source = random.Random(0)
    return [[source.randrange(256) for _ in range(n)] for n in (1, 5, 16, 17, 100, 300, 33, 64)]


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


def test_float64_tokens_equal_the_cpus(checkpoint: str, prompts: list[list[int]]) -> None:
    on_cpu = LLM(checkpoint, dtype="float64", device="cpu", **SETTINGS)
    small = {"kv_cache_memory": "64MiB", "max_num_batched_tokens": 64}
    on_gpu = LLM(checkpoint, dtype="float64", device="cuda", **SETTINGS, **small)
    assert tokens(on_gpu, prompts) == tokens(on_cpu, prompts)


def test_preemption_and_seeds_on_the_device(checkpoint: str, prompts: list[list[int]]) -> None:
    """Draws depend on seed and position alone, on any device and after a preemption."""
    params = SamplingParams(temperature=1, top_p=0.9, seed=7, max_tokens=90, ignore_eos=True)
    on_cpu = LLM(checkpoint, dtype="float64", device="cpu", **SETTINGS)
    tight = LLM(checkpoint, dtype="float64", device="cuda", num_kv_blocks=27, **SETTINGS)
    assert tokens(tight, prompts, params) == tokens(on_cpu, prompts, params)
    assert tight.metrics()["num_preemptions"] > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rounding_is_no_worse_than_transformers(
    checkpoint: str, prompts: list[list[int]], dtype: str
) -> None:
    """Both lose digits in a short dtype; we must not lose many more than the same model there."""
    exact = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    theirs = LlamaForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).cuda()
    ours = LLM(checkpoint, dtype=dtype, device="cuda", kv_cache_memory="64MiB", **SETTINGS)
    truth = torch.cat([hf_scores(exact, prompt) for prompt in prompts[1:]])
    our_error = torch.cat([engine_scores(ours, prompt) for prompt in prompts[1:]]) - truth
    their_error = torch.cat([hf_scores(theirs, prompt) for prompt in prompts[1:]]) - truth
    assert our_error.abs().max() <= 2 * their_error.abs().max() + 1e-5
    assert our_error.abs().mean() <= 1.2 * their_error.abs().mean() + 1e-6


def engine_scores(llm: LLM, prompt: list[int]) -> torch.Tensor:
    """Log-probability of each prompt token but the first."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    scores = llm.generate(prompt, params)[0].prompt_logprobs
    assert scores is not None
    return torch.tensor(
        [
            entry[token].logprob
            for token, entry in zip(prompt[1:], scores[1:], strict=True)
            if entry
        ],
        dtype=torch.float64,
    )


@torch.inference_mode()
def hf_scores(model: LlamaForCausalLM, prompt: list[int]) -> torch.Tensor:
    ids = torch.tensor([prompt], device=model.device)
    logits = model(ids).logits[0].double().cpu()
    logprobs = logits.log_softmax(-1)[:-1]
    return logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


def test_kv_cache_fills_its_share_and_no_more(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
        dtype="bfloat16",
    )  # fmt: skip
    (tmp_path / "config.json").write_text(
        json.dumps(config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    )
    torch.cuda.empty_cache()
    llm = LLM(str(tmp_path), load_format="dummy", gpu_memory_utilization=0.5, **SETTINGS)
    free, total = torch.cuda.mem_get_info()
    used = (total - free) / total
    assert 0.4 < used <= 0.51
    assert llm.metrics()["kv_cache_tokens"] > 100_000
    assert len(tokens(llm, [[1, 2, 3]])[0]) == 24


def test_phases_do_not_wait_for_the_device(checkpoint: str, prompts: list[list[int]]) -> None:
    """From the inputs to the update the host only launches."""
    llm = LLM(checkpoint, dtype="float32", device="cuda", kv_cache_memory="64MiB", **SETTINGS)
    tokens(llm, prompts)  # first launches may wait, for example to load kernels
    target = llm.engine.runner.target
    waited = []
    for name in ("inputs", "forward", "verify", "update"):
        setattr(target, name, _without_sync(getattr(target, name), name, waited))
    assert len(tokens(llm, prompts)) == len(prompts)
    assert set(waited) == {"inputs", "forward", "verify", "update"}


def _without_sync(phase, name: str, ran: list[str]):
    def strict(*args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return phase(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            ran.append(name)

    return strict
