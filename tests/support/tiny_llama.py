"""A Llama of two layers in float64: on disk, in transformers and in an engine."""

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from stoop import LLM
from stoop.core.request import Request
from support.checkpoints import write_llama
from support.engines import make_llm

VOCAB = 128


@functools.cache
def tiny_model_folder(initializer_range: float = 0.2) -> str:
    """A Llama of two layers in float64, saved once a session."""
    folder = tempfile.mkdtemp(prefix="stoop-tiny-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_llama(
        Path(folder),
        seed=0,
        vocab_size=VOCAB,
        intermediate_size=128,
        initializer_range=initializer_range,
    )
    return folder


@functools.cache
def hf_model(initializer_range: float = 0.2) -> Any:
    folder = tiny_model_folder(initializer_range)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def hf_logits(token_ids: Sequence[int], initializer_range: float = 0.2) -> Any:
    """[tokens, vocab] float64 numpy, from the independent implementation."""
    with torch.inference_mode():
        return hf_model(initializer_range)(torch.tensor([list(token_ids)])).logits[0].numpy()


def make_tiny_llm(initializer_range: float = 0.2, **options: Any) -> LLM:
    settings = {"max_model_len": 64, "block_size": 4, "num_kv_blocks": 128}
    return make_llm(tiny_model_folder(initializer_range), **settings | options)


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
