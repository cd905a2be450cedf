"""What several unit tests share: requests, a tiny model on disk, and a bare engine loop."""

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from stoop.config.schema import CacheConfig, ScheduleConfig
from stoop.core.request import Request, TokenRules
from stoop.core.sampling_params import SamplingParams
from stoop.core.step import RowResult, StepPlan, StepResult
from stoop.layers.rope import RopeSpec
from stoop.models.decoder import DecoderSpec
from stoop.scheduler.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


def make_rules(
    max_tokens: int = 8,
    params: SamplingParams = GREEDY,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    num_drafts: int = 0,
) -> TokenRules:
    return TokenRules(
        params,
        seed,
        max_tokens,
        num_drafts=num_drafts,
        stop_ids=frozenset(stop_ids),
        bad_words=tuple(tuple(word) for word in bad_words),
    )


def make_request(
    request_id: str, prompt: Sequence[int], max_tokens: int = 8, priority: int = 0, **rules: Any
) -> Request:
    return Request(request_id, tuple(prompt), make_rules(max_tokens, **rules), priority)


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 64,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    chunked: bool = True,
    prefix_caching: bool = True,
    num_drafts: int = 0,
    drafter_has_kv: bool = False,
) -> Scheduler:
    config = ScheduleConfig(
        max_model_len,
        max_num_seqs,
        max_num_batched_tokens,
        chunked,
        num_drafts=num_drafts,
        drafter_has_kv=drafter_has_kv,
    )
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=prefix_caching)
    return Scheduler(config, cache, num_blocks)


def result_of(plan: StepPlan, token: int | Callable[[str], int] = 7) -> StepResult:
    """A worker's answer: `token` for every row that samples."""
    rows = []
    for row in plan.rows:
        value = token(row.request_id) if callable(token) else token
        rows.append(RowResult(row.request_id, row.epoch, [value] if row.samples else []))
    return StepResult(plan.index, rows)


def step(scheduler: Scheduler, token: int | Callable[[str], int] = 7) -> StepPlan:
    """One whole step with a worker that always answers."""
    plan = scheduler.schedule()
    scheduler.update(result_of(plan, token))
    return plan


def rows_of(plan: StepPlan) -> dict[str, tuple[int, int]]:
    """{request id: (tokens before, tokens of this step)}"""
    return {row.request_id: (row.num_computed, row.num_tokens) for row in plan.rows}


# ---- a tiny model and the engine around it ----


def tiny_spec() -> DecoderSpec:
    """A model that exists as numbers only."""
    return DecoderSpec(
        architecture="llama",
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        rms_norm_eps=1e-5,
        max_position=512,
        rope=RopeSpec(theta=10000.0),
        dtype="float32",
    )


VOCAB = 128
TINY = {
    "skip_tokenizer_init": True,
    "device": "cpu",
    "dtype": "float64",
    "max_model_len": 64,
    "block_size": 4,
    "num_kv_blocks": 128,
}


@functools.cache
def tiny_model_folder(initializer_range: float = 0.2) -> str:
    """A Llama of two layers in float64, saved once a session."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = tempfile.mkdtemp(prefix="stoop-tiny-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        initializer_range=initializer_range,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).double().save_pretrained(folder)
    return folder


@functools.cache
def hf_model(initializer_range: float = 0.2) -> Any:
    import torch
    from transformers import LlamaForCausalLM

    folder = tiny_model_folder(initializer_range)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def hf_logits(token_ids: Sequence[int], initializer_range: float = 0.2) -> Any:
    """[tokens, vocab] float64 numpy, from the independent implementation."""
    import torch

    with torch.inference_mode():
        return hf_model(initializer_range)(torch.tensor([list(token_ids)])).logits[0].numpy()


def make_llm(initializer_range: float = 0.2, **options: Any) -> Any:
    from stoop import LLM

    return LLM(tiny_model_folder(initializer_range), **(TINY | options))


def generate_ids(llm: Any, prompts: Sequence[Sequence[int]], params: Any) -> list[list[int]]:
    outputs = llm.generate([list(p) for p in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def run_requests(
    engine: Any, requests: Sequence[Request], between: Callable[[], None] = lambda: None
) -> list[list[int]]:
    """Scheduler and worker without the rest of the engine; `between` runs before every step."""
    for request in requests:
        engine.scheduler.add(request)
    while engine.scheduler.has_work:
        between()
        plan = engine.scheduler.schedule()
        assert plan.rows
        engine.scheduler.update(engine.runner.execute(plan))
    engine.scheduler.check_idle()
    engine.scheduler.pool.check()
    return [request.output_token_ids for request in requests]
