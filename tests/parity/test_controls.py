"""The suite can fail: a model with one thing wrong is told from the right one."""

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch

from stoop import LLM
from stoop.layers.linear import FusedLinear
from stoop.layers.rope import RopeSpec
from stoop.models.decoder import DecoderModel
from support.checkpoints import HYBRIDS, PLAIN, WINDOW, WINDOWED
from support.engines import MakeEngine
from support.huggingface import (
    TIE_GAPS,
    Reference,
    ReferenceStore,
    make_prompt,
    mismatch,
    mismatches,
    run_greedy,
)

PROMPTS = [make_prompt(length) for length in (17, 150, 300)]
TIE_GAP = TIE_GAPS["float32"]


def model_of(llm: LLM) -> DecoderModel:
    return llm.engine.runner.model


def count_wrong(llm: LLM, wanted: Sequence[Reference]) -> int:
    return len(mismatches(run_greedy(llm, PROMPTS, 16), wanted, TIE_GAP))


def answers(references: ReferenceStore, name: str) -> list[Reference]:
    return [references.get(name).greedy(prompt, 16) for prompt in PROMPTS]


def change_one_weight(model: DecoderModel) -> None:
    """Of the last matrix of a layer, which is that of the MLP."""
    *_, last = (m for m in model.layers[1].modules() if isinstance(m, FusedLinear))
    last.weight.data[5, 7] += 4.0


def zero_biases(model: DecoderModel) -> None:
    for key, parameter in model.named_parameters():
        if key.endswith("bias"):
            parameter.data.zero_()


def plain_norms(which: str) -> Callable[[DecoderModel], None]:
    def change(model: DecoderModel) -> None:
        for key, parameter in model.named_parameters():
            if which in f".{key}":
                parameter.data.fill_(1.0)

    return change


def plain_rope(model: DecoderModel) -> None:
    model.spec = dataclasses.replace(model.spec, rope=RopeSpec(model.spec.rope.theta))
    model.prepare(model.rotary.table.shape[1])


def set_window(window: int | None) -> Callable[[DecoderModel], None]:
    def change(model: DecoderModel) -> None:
        for layer in model.layers:
            attention = layer.self_attn
            if attention.shape.window is not None:
                attention.shape = dataclasses.replace(attention.shape, window=window)

    return change


def set_parameters(which: str, value: float) -> Callable[[DecoderModel], None]:
    def change(model: DecoderModel) -> None:
        found = [p for key, p in model.named_parameters() if key.endswith(which)]
        assert found
        for parameter in found:
            parameter.data.fill_(value)

    return change


def shift_convolutions(model: DecoderModel) -> None:
    """Each looks one token too far back."""
    for key, parameter in model.named_parameters():
        if key.endswith("conv_weight"):
            parameter.data = parameter.data.roll(-1, dims=2)


def set_residual_multiplier(model: DecoderModel) -> None:
    for layer in model.layers:
        layer.multiplier = 1.0


def set_attention_multiplier(model: DecoderModel) -> None:
    attention = model.layers[1].self_attn
    attention.shape = dataclasses.replace(attention.shape, scale=attention.shape.head_dim**-0.5)


def set_embedding_multiplier(model: DecoderModel) -> None:
    model.spec = dataclasses.replace(model.spec, embedding_multiplier=1.0)


def rotate_all(model: DecoderModel) -> None:
    rope = RopeSpec(10000.0)
    model.spec = dataclasses.replace(model.spec, rotary_dim=None, rope=rope)
    model.prepare(model.rotary.table.shape[1])


CHANGES: list[tuple[str, str, Callable[[DecoderModel], None]]] = [
    *((name, "one-weight", change_one_weight) for name in (*PLAIN, *HYBRIDS)),
    *((name, "no-window", set_window(None)) for name in WINDOWED),
    *((name, "window-too-wide", set_window(WINDOW + 1)) for name in WINDOWED),
    *((name, "window-too-narrow", set_window(WINDOW - 1)) for name in WINDOWED),
    *((name, "no-bias", zero_biases) for name in ("llama-biases", "qwen2", "qwen3-window")),
    ("qwen3", "no-q-norm", plain_norms("q_norm")),
    ("qwen3", "no-k-norm", plain_norms("k_norm")),
    ("llama2", "no-final-norm", plain_norms(".norm.weight")),
    ("llama2", "no-input-norm", plain_norms("input_layernorm")),
    *((name, "plain-rope", plain_rope) for name in ("llama3", "llama-linear", "llama-yarn")),
    *((name, "no-bias", zero_biases) for name in ("lfm2-biases", "granite-groups", "bamba-groups")),
    *((name, "late-convolution", shift_convolutions) for name in HYBRIDS),
    ("lfm2", "no-operator-norm", plain_norms("operator_norm")),
    ("granite-hybrid", "no-mamba-norm", plain_norms("mamba.norm")),
    ("granite-hybrid", "no-decay-rate", set_parameters("a_log", 0.0)),
    ("granite-hybrid", "no-skip", set_parameters("mamba.d", 0.0)),
    ("granite-hybrid", "no-time-bias", set_parameters("dt_bias", 0.0)),
    ("granite-hybrid", "residual-multiplier", set_residual_multiplier),
    ("granite-hybrid", "attention-multiplier", set_attention_multiplier),
    ("granite-hybrid", "embedding-multiplier", set_embedding_multiplier),
    *((name, "rotated", rotate_all) for name in ("granite-hybrid", "bamba")),
]


@pytest.mark.parametrize(
    ("name", "change"),
    [pytest.param(name, change, id=f"{name}-{label}") for name, label, change in CHANGES],
)
def test_wrong_model_is_noticed(
    references: ReferenceStore,
    make_engine: MakeEngine,
    name: str,
    change: Callable[[DecoderModel], None],
) -> None:
    wanted = answers(references, name)
    llm = make_engine(name, max_model_len=336, enable_prefix_caching=False)
    assert count_wrong(llm, wanted) == 0
    with torch.no_grad():
        change(model_of(llm))
    assert count_wrong(llm, wanted) > 0


def test_corrupt_cache_is_noticed(references: ReferenceStore, make_engine: MakeEngine) -> None:
    """Keys and values of the prefix cache are really read again."""
    wanted = answers(references, "llama2")
    llm = make_engine("llama2", max_model_len=336)
    assert count_wrong(llm, wanted) == 0
    for cache in llm.engine.runner.kv_caches:
        cache.neg_()
    assert count_wrong(llm, wanted) > 0


def made_up(gaps: Sequence[float]) -> Reference:
    """Token 0 leads token 1 by these gaps."""
    logits = torch.zeros(len(gaps) + 1, 3)
    logits[:-1, 0] = torch.tensor(gaps)
    logits[:, 2] = -5.0
    return Reference((9,), [0] * len(gaps), logits)


def test_only_ties_excuse_a_difference() -> None:
    reference = made_up([1.0, 1e-4, 1.0])
    assert mismatch([0, 0, 0], reference, 1e-3) is None
    assert mismatch([0, 1, 2], reference, 1e-3) is None
    assert mismatch([0, 0, 1], reference, 1e-3) is not None
    assert mismatch([1, 1, 0], reference, 1e-3) is not None
    assert mismatch([0, 1, 0], reference, 1e-5) is not None


def test_lengths_are_compared() -> None:
    reference = made_up([1.0, 1.0])
    assert mismatch([0], reference, 1e-3) is not None
    assert mismatch([0, 0, 0], reference, 1e-3) is not None
