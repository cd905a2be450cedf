"""Whole engines with packed weights: the tokens of dense ones, whatever else is in a batch."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoop import LLM, SamplingParams
from stoop.config.errors import ConfigError
from stoop.models.decoder import DecoderModel
from stoop.models.fused import FusedLayers
from stoop.ops.packed import WIDE, Packed
from support import drafters
from support.drafters import write_random_head
from support.engines import make_llm
from support.graph_workload import GREEDY, SETTINGS, Answers, prompts, run
from support.packed_models import Sizes, one_kind, write_packable_gguf

pytestmark = pytest.mark.usefixtures("native")

MODELS = ("llama", "qwen2", "qwen3", "K", "odd", "alone")
ROOMY = SETTINGS | {"num_kv_blocks": 200}
LARGE = Sizes(hidden=256, intermediate=256, head_dim=64, num_layers=2)


def _k_quants(name: str) -> str:
    return "Q6_K" if "attn_v" in name or "down" in name or "output" in name else "Q4_K"


def _odd(name: str) -> str:
    """A vocabulary that is no multiple of 16 rows, and a matrix that is not quantised."""
    return "F32" if "blk.1.ffn_down" in name else "Q4_0"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """GGUF files by name; their conversions are in a cache of this module."""
    folder = tmp_path_factory.mktemp("packed")
    made = {
        "llama": write_packable_gguf(folder / "llama.gguf"),
        "qwen2": write_packable_gguf(folder / "qwen2.gguf", architecture="qwen2", seed=1),
        "qwen3": write_packable_gguf(folder / "qwen3.gguf", architecture="qwen3", seed=2),
        "K": write_packable_gguf(folder / "k.gguf", _k_quants, sizes=LARGE, seed=3),
        "odd": write_packable_gguf(folder / "odd.gguf", _odd, sizes=Sizes(vocab=150), seed=4),
        "alone": write_packable_gguf(folder / "alone.gguf", one_kind("Q4_1"), seed=5),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOOP_CACHE", str(folder / "cache"))
        yield made


def make_packed(file: Path, **options: Any) -> LLM:
    options = {"dtype": "float32", "weights": "packed"} | options
    return make_llm(file, **options)


def model_of(llm: LLM) -> DecoderModel:
    model = llm.engine.runner.model
    assert isinstance(model, DecoderModel)
    return model


@pytest.fixture(scope="module")
def eager(files: dict[str, Path]) -> dict[str, Answers]:
    return {name: run(make_packed(files[name], **SETTINGS)) for name in ("llama", "qwen3", "odd")}


@pytest.mark.parametrize("name", MODELS)
def test_packed_tokens_equal_dense_ones(files: dict[str, Path], name: str) -> None:
    llm = make_packed(files[name], **SETTINGS)
    dense = make_packed(files[name], weights="dense", **SETTINGS)
    assert model_of(dense).fused is None
    packed_matrices = [
        m for m in model_of(llm).modules() if isinstance(getattr(m, "scheme", None), Packed)
    ]
    assert len(packed_matrices) >= 4 * LARGE.num_layers
    assert (model_of(llm).fused is None) == (name == "odd")
    assert llm.config.attention_backend == "native"
    ours, theirs = run(llm), run(dense)
    assert ours.token_ids == theirs.token_ids
    for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-2)
    assert llm.metrics()["num_preemptions"] > 0


def test_matrices_of_several_kinds_are_one(files: dict[str, Path]) -> None:
    layer = model_of(make_packed(files["llama"])).layers[0]
    assert layer.self_attn.qkv_proj.scheme is WIDE and layer.mlp.gate_up_proj.scheme is WIDE
    assert layer.mlp.down_proj.scheme.name == "Q4_0"


def test_odd_matrices_stay_dense_beside_packed_ones(files: dict[str, Path]) -> None:
    model = model_of(make_packed(files["odd"]))
    assert model.embed_tokens.scheme.is_dense and model.lm_head.scheme.is_dense
    assert model.layers[1].mlp.down_proj.scheme.is_dense
    assert not model.layers[0].mlp.down_proj.scheme.is_dense


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "K"])
def test_one_call_for_all_layers_equals_the_loop_to_the_bit(
    files: dict[str, Path], name: str
) -> None:
    fused, looped = make_packed(files[name], **SETTINGS), make_packed(files[name], **SETTINGS)
    assert model_of(fused).fused is not None
    model_of(looped).fused = None
    assert run(fused) == run(looped)


@pytest.mark.parametrize("name", ["llama", "qwen3", "odd"])
def test_a_text_does_not_depend_on_the_batch(
    files: dict[str, Path], eager: dict[str, Answers], name: str
) -> None:
    """Tokens and log-probabilities to the bit: together, alone, in chunks of other sizes."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)

    def scores(llm: LLM, each: list[list[int]]) -> list[Any]:
        outputs = llm.generate(each, params, use_tqdm=False)
        return [
            [
                (token, {key: value.logprob for key, value in entry.items()})
                for token, entry in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)
            ]
            for o in outputs
        ]

    if name == "odd":
        params = params.replace(logprobs=None)  # its dense matrices are torch's
        llm = make_packed(files[name], **ROOMY)
        together = [list(o.outputs[0].token_ids) for o in llm.generate(prompts(), params)]
        alone = [list(llm.generate([p], params)[0].outputs[0].token_ids) for p in prompts()]
        assert together == alone
        return
    options = ROOMY | {"enable_prefix_caching": False}
    llm = make_packed(files[name], **options)
    together = scores(llm, prompts())
    assert [scores(llm, [prompt])[0] for prompt in prompts()] == together
    chunked = make_packed(files[name], **options | {"max_num_batched_tokens": 11})
    assert scores(chunked, prompts()) == together
    cached = make_packed(files[name], **ROOMY)
    assert scores(cached, prompts()) == scores(cached, prompts()) == together
    for num_threads in (2, 3):
        torch.set_num_threads(num_threads)
        assert scores(llm, prompts()[:3]) == together[:3]


def test_several_answers_of_one_prompt(files: dict[str, Path]) -> None:
    llm = make_packed(files["llama"], **ROOMY)
    params = SamplingParams(n=3, temperature=0.8, seed=5, max_tokens=10, ignore_eos=True)
    (together,) = llm.generate([prompts()[4]], params)
    dense = make_packed(files["llama"], weights="dense", **ROOMY)
    (theirs,) = dense.generate([prompts()[4]], params)
    ours = [list(each.token_ids) for each in together.outputs]
    assert ours == [list(each.token_ids) for each in theirs.outputs]
    assert len(set(map(tuple, ours))) == 3


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("qwen3", "full"),
        ("llama", "step"),
        ("qwen3", "piecewise"),
        ("odd", "full_and_piecewise"),
        ("qwen3", "step"),
        ("odd", "full_decode_only"),
    ],
)
def test_every_graph_mode_answers_as_eager_does(
    files: dict[str, Path], eager: dict[str, Answers], name: str, mode: str
) -> None:
    """The sanitizer compares each replay with its eager twin; texts and scores are those of
    unpadded steps, to the bit where all is packed."""
    llm = make_packed(files[name], graph_mode=mode, sanitize=True, **SETTINGS)
    answers = run(llm)
    assert answers.token_ids == eager[name].token_ids
    if name != "odd":
        assert answers.logprobs == eager[name].logprobs
    assert llm.metrics()["num_preemptions"] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8"},
        {"attention_backend": "reference"},
        {"attention_backend": "hostplan", "graph_mode": "step", "sanitize": True},
    ],
    ids=str,
)
def test_other_caches_and_backends_take_the_loop(
    files: dict[str, Path], options: dict[str, Any]
) -> None:
    llm = make_packed(files["qwen3"], **ROOMY | options)
    assert llm.config.attention_backend != "native"
    dense = make_packed(files["qwen3"], weights="dense", **ROOMY | options)
    params = GREEDY.replace(max_tokens=8)
    ours, theirs = (
        [list(o.outputs[0].token_ids) for o in e.generate(prompts(), params)] for e in (llm, dense)
    )
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    # A cache of few bits rounds up where the other rounds down.
    assert same == len(ours) or ("kv_cache_dtype" in options and same >= len(ours) - 2)


# ---- drafts ----

FUSED_HEAD = {"draft_vocab_size": 96, "intermediate_size": 96}
VARIANT = {
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 1, 1]},
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "fc_norm": True,
    "norm_output": True,
    "norm_before_residual": True,
}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("heads")
    eagle3 = {
        "fused": write_random_head(folder / "fused", "eagle3", FUSED_HEAD),
        "loop": write_random_head(folder / "loop", "eagle3", {"draft_vocab_size": 96}),
        "variant": write_random_head(folder / "variant", "eagle3", VARIANT, own_embedding=True),
    }
    found: dict[str, dict[str, Any]] = {
        name: {"method": "eagle3", "model": str(path)} for name, path in eagle3.items()
    }
    eagle = write_random_head(folder / "eagle", "eagle", {"intermediate_size": 96})
    found["eagle"] = {"method": "eagle", "model": str(eagle)}
    found["ngram"] = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return found


@pytest.fixture(scope="module")
def plain(files: dict[str, Path]) -> dict[str, drafters.Trace]:
    return {
        name: drafters.run(make_packed(files[name], **drafters.SETTINGS), 0)
        for name in ("llama", "qwen3")
    }


@pytest.mark.parametrize(
    ("name", "head", "mode"),
    [
        ("llama", "fused", "none"),
        ("llama", "loop", "none"),
        ("qwen3", "variant", "none"),
        ("llama", "eagle", "none"),
        ("qwen3", "ngram", "none"),
        ("llama", "fused", "step"),
        ("qwen3", "fused", "piecewise"),
        ("llama", "variant", "full"),
        ("llama", "ngram", "step"),
    ],
)
def test_drafts_change_no_answer(
    files: dict[str, Path],
    heads: dict[str, dict[str, Any]],
    plain: dict[str, drafters.Trace],
    name: str,
    head: str,
    mode: str,
) -> None:
    """Arrivals, chunks, preemption, cached prefixes, greedy and sampled requests."""
    config = heads[head] | {"num_speculative_tokens": 3}
    options = drafters.SETTINGS | {"graph_mode": mode, "sanitize": mode != "none"}
    llm = make_packed(files[name], speculative_config=config, **options)
    trace = drafters.run(llm, 3)
    assert trace.answers == plain[name].answers
    assert trace.finish_reasons == plain[name].finish_reasons
    assert sum(len(drafts) for drafts in trace.drafts.values()) > 20
    if head == "ngram":
        assert sum(trace.per_position) > 0, "some drafts should be right"
    elif mode != "none":  # wrong drafts change no answer: compare them
        twin = make_packed(files[name], speculative_config=config, **drafters.SETTINGS)
        assert drafters.run(twin, 3).drafts == trace.drafts


@pytest.mark.parametrize(("name", "mode"), [("llama", "none"), ("K", "step"), ("odd", "full")])
def test_activations_of_8_bits(
    files: dict[str, Path], heads: dict[str, dict[str, Any]], name: str, mode: str
) -> None:
    """Coarser, but a text still depends on nothing else: not on the batch, drafts or graphs."""
    fine = make_packed(files[name], **drafters.SETTINGS)
    coarse = make_packed(files[name], activation_bits=8, **drafters.SETTINGS)
    packed = [m.scheme for m in model_of(coarse).modules() if hasattr(m, "scheme")]
    assert {each.input_bits for each in packed if isinstance(each, Packed)} == {8}
    prompt, params = prompts()[0], GREEDY.replace(max_tokens=1, logprobs=1)
    scores = []
    for llm in (fine, coarse):
        (entry,) = llm.generate([prompt], params)[0].outputs[0].logprobs
        scores.append(max(each.logprob for each in entry.values()))
    assert 1e-6 < abs(scores[0] - scores[1]) < 0.1
    ngram = heads["ngram"] | {"num_speculative_tokens": 3}
    options = drafters.SETTINGS | {"graph_mode": mode, "sanitize": mode != "none"}
    drafted = make_packed(files[name], activation_bits=8, speculative_config=ngram, **options)
    answers = drafters.run(coarse, 0).answers
    trace = drafters.run(drafted, 3)
    assert trace.answers == answers and sum(trace.per_position) > 0
    if name != "odd":
        looped = make_packed(files[name], activation_bits=8, **SETTINGS)
        assert model_of(looped).fused is not None
        model_of(looped).fused = None
        assert run(looped) == run(make_packed(files[name], activation_bits=8, **SETTINGS))


def test_a_head_has_activations_of_8_bits_too(
    files: dict[str, Path], heads: dict[str, dict[str, Any]]
) -> None:
    config = heads["fused"] | {"num_speculative_tokens": 2}
    options = drafters.SETTINGS | {"speculative_config": config, "activation_bits": 8}
    llm = make_packed(files["llama"], **options)
    head: Any = llm.engine.runner.draft_model
    assert head.fused is not None and head.fc.scheme.input_bits == 8
    plain = make_packed(files["llama"], **drafters.SETTINGS, activation_bits=8)
    assert drafters.run(llm, 2).answers == drafters.run(plain, 0).answers


def test_activations_of_8_bits_need_packed_weights(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"activation_bits=8 is for .*weights=dense dequantises"):
        make_packed(files["llama"], weights="dense", activation_bits=8)
    with pytest.raises(ConfigError, match=r"activation_bits=8 is for .*dtype is bfloat16"):
        make_packed(files["llama"], weights="auto", dtype="bfloat16", activation_bits=8)
    for value in (4, "8", True):
        with pytest.raises(ConfigError, match=r"activation_bits=.*: use 8 or 16"):
            make_packed(files["llama"], activation_bits=value)
    monkeypatch.setattr("stoop.engine.choose_weights.find_native", lambda report: None)
    with pytest.raises(ConfigError, match=r"activation_bits=8 is for .*CPU kernels"):
        make_packed(files["llama"], weights="auto", activation_bits=8)


def test_a_head_takes_rows_of_a_packed_lm_head(
    files: dict[str, Path], heads: dict[str, dict[str, Any]], plain: dict[str, drafters.Trace]
) -> None:
    """They stay as they are, so logits are those of the whole matrix, to the bit."""
    config = heads["eagle"] | {"num_speculative_tokens": 2, "draft_vocab_size": 48}
    llm = make_packed(files["llama"], speculative_config=config, **drafters.SETTINGS)
    head: Any = llm.engine.runner.draft_model
    whole = llm.engine.runner.model.lm_head
    assert isinstance(whole.matrix.scheme, Packed) and head.output_head.vocab_size == 48
    assert head.output_head.matrix.scheme is whole.matrix.scheme
    states = torch.randn(3, whole.num_inputs, generator=torch.Generator().manual_seed(2))
    assert torch.equal(head.logits(states), whole(states)[:, head.target_ids(torch.arange(48))])
    trace = drafters.run(llm, 2)
    assert trace.answers == plain["llama"].answers
    with pytest.raises(ConfigError, match="use a multiple of 16"):
        make_packed(files["llama"], speculative_config=config | {"draft_vocab_size": 50})


@pytest.mark.parametrize(
    ("name", "head", "mutant"),
    [("llama", "fused", False), ("qwen3", "variant", False), ("llama", "fused", True)],
)
def test_a_head_in_one_call_drafts_as_the_loop_does(
    files: dict[str, Path],
    heads: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    head: str,
    mutant: bool,
) -> None:
    """In a prefill, the last layer's output is computed of the tokens that drafts follow only.

    mutant: of the tokens before them
    """
    run_for = FusedLayers.run_for

    def earlier(self: FusedLayers, wanted: Any, *args: Any, **kwargs: Any) -> Any:
        return run_for(self, (wanted - 1).clamp(min=0), *args, **kwargs)

    if mutant:
        monkeypatch.setattr(FusedLayers, "run_for", earlier)
    traces = []
    for fused in (True, False):
        config = heads[head] | {"num_speculative_tokens": 2}
        llm = make_packed(files[name], speculative_config=config, **drafters.SETTINGS)
        made: Any = llm.engine.runner.draft_model
        assert made.fused is not None and made.fc.scheme.name == "Q8_0"
        if not fused:
            made.fused = None
        traces.append(drafters.run(llm, 2))
    assert (traces[0].drafts == traces[1].drafts) != mutant
    assert traces[0].answers == traces[1].answers


def test_wanted_tokens_have_the_bits_of_all(
    files: dict[str, Path], heads: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order, some repeatedly, more of them than there are tokens."""
    run_for, compared = FusedLayers.run_for, []

    def both(
        self: FusedLayers, wanted: Any, ctx: Any, stream: Any, rotation: Any, given: Any = None
    ) -> Any:
        whole = stream.clone()
        assert self.run(ctx, whole, rotation, given=given) is not None
        num_tokens = stream.shape[0]
        generator = torch.Generator().manual_seed(num_tokens)
        other = torch.randint(num_tokens, (num_tokens + 3,), generator=generator)
        for tokens in (other, wanted):
            found = run_for(self, tokens, ctx, stream, rotation, given)
            assert found is not None and torch.equal(found, whole[tokens])
        compared.append(num_tokens)
        return found

    monkeypatch.setattr(FusedLayers, "run_for", both)
    for name, head in (("llama", "fused"), ("qwen3", "variant")):
        config = heads[head] | {"num_speculative_tokens": 2}
        llm = make_packed(files[name], speculative_config=config, **drafters.SETTINGS)
        drafters.run(llm, 2)
    assert len(compared) > 20 and max(compared) > 16  # also rows of several blocks of queries


@pytest.mark.parametrize("mutant", [False, True])
def test_taps_of_one_call_are_those_of_the_loop(
    files: dict[str, Path],
    heads: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    mutant: bool,
) -> None:
    """Drafts come from the streams that enter layers 3, 1 and 1. mutant: from the layer before"""
    prepare = FusedLayers.prepare

    def shifted(self: FusedLayers, caches: Any, tapped: Any, taps: Any) -> Any:
        return prepare(self, caches, tapped, [tap - 1 for tap in taps])

    if mutant:
        monkeypatch.setattr(FusedLayers, "prepare", shifted)
    config = heads["variant"] | {"num_speculative_tokens": 2}
    traces = []
    for fused in (True, False):
        llm = make_packed(files["qwen3"], speculative_config=config, **drafters.SETTINGS)
        if not fused:
            model_of(llm).fused = None
        traces.append(drafters.run(llm, 2))
    assert (traces[0].drafts == traces[1].drafts) != mutant
    assert traces[0].answers == traces[1].answers


def test_windows_of_some_layers(files: dict[str, Path]) -> None:
    """Packed layers in one call, in the loop, and dense ones."""
    found = []
    for kind in ("packed", "loop", "dense"):
        weights = "dense" if kind == "dense" else "packed"
        llm = make_packed(files["llama"], weights=weights, **ROOMY)
        model = model_of(llm)
        for layer in model.layers[1:]:
            attention: Any = layer.self_attn
            attention.shape = dataclasses.replace(attention.shape, window=24)
        model.prepare(ROOMY["max_model_len"])
        if kind == "loop":
            model.fused = None
        found.append(run(llm))
    packed, loop, dense = found
    assert packed == loop and packed.token_ids == dense.token_ids
    assert packed != run(make_packed(files["llama"], **ROOMY)), "the window should matter"


def test_another_cache_at_the_same_address(files: dict[str, Path]) -> None:
    """The structures of the kernels follow a cache with other blocks."""
    llm = make_packed(files["llama"], block_size=8)
    fused: Any = model_of(llm).fused
    caches = [torch.zeros(2, 6, 8, 2, 16) for _ in range(3)]
    none = torch.empty(0, 1, 64)
    assert [each.heads.block_size for each in fused.prepare(caches, none, [])] == [8] * 3
    others = [cache.view(2, 3, 16, 2, 16) for cache in caches]
    assert [each.heads.block_size for each in fused.prepare(others, none, [])] == [16] * 3
