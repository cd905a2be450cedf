"""A KV cache in fp8: the same as rounding what goes into it, with scales from the checkpoint."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stoop import SamplingParams
from stoop.attention import base
from stoop.attention.base import AttentionSetup
from stoop.attention.traits import FLASHINFER
from stoop.attention.triton import TritonBackend
from stoop.batch.request_state import RequestState
from stoop.bench.step import plant_prefix, step_bytes
from stoop.config.errors import CheckpointError, ConfigError
from stoop.core.state import DTYPE_BYTES
from stoop.layers import attention as attention_layer
from stoop.layers.attention import Attention
from stoop.models import kv_scales
from stoop.ops import kv_store, rope
from stoop.ops.kv_store import FP8, KVScales, to_fp8
from support.checkpoints import CheckpointStore, edit_json
from support.drafters import DrafterStore, make_spec_llm
from support.drafters import run as run_drafter
from support.engines import generate_ids
from support.fp8_values import nearest_fp8, values_to_round
from support.graph_workload import make_graph_llm, prompts

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
SCALES = KVScales(19 / 512, 0.3125)  # exact in float32


# ---- rounding ----


@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0, 3000.0])
def test_values_are_clamped_and_rounded_to_nearest_even(scale: float) -> None:
    values = values_to_round() * scale
    expected = nearest_fp8(values / torch.tensor(scale))
    assert torch.equal(to_fp8(values, scale).view(torch.uint8), expected)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):  # all by way of float32
        narrow = values.to(dtype)
        expected = nearest_fp8(narrow.float() / torch.tensor(scale))
        assert torch.equal(to_fp8(narrow, scale).view(torch.uint8), expected)


def test_dead_tokens_leave_a_cache_in_fp8_alone() -> None:
    cache = torch.randn(2, 4, 2, 1, 4).to(FP8)
    before = cache.clone()
    k, v = torch.randn(2, 3, 1, 4)
    kv_store.store_kv_fp8(k, v, cache, torch.tensor([5, -1, 3]), 0.5, 2.0)
    expected = before.view(torch.uint8).flatten(1, 2)
    expected[0, [5, 3]] = to_fp8(k, 0.5)[[0, 2]].view(torch.uint8)
    expected[1, [5, 3]] = to_fp8(v, 2.0)[[0, 2]].view(torch.uint8)
    assert torch.equal(cache.view(torch.uint8).flatten(1, 2), expected)


# ---- engines ----


@pytest.fixture(scope="module")
def folder(checkpoints: CheckpointStore) -> Path:
    return checkpoints.get("llama3", dtype="float32")


def make(folder: Path, **options: Any) -> Any:
    return make_graph_llm(folder, **{"kv_cache_dtype": "fp8", "dtype": "float32"} | options)


def caches(llm: Any) -> list[Tensor]:
    return [cache.view(torch.uint8) for cache in llm.engine.runner.kv_caches]


def poison(llm: Any) -> None:
    """NaN in every block, as memory that was never written may have."""
    for cache in caches(llm):
        cache[:, 1:] = torch.tensor([0x7F, 0xFF], dtype=torch.uint8).repeat(cache.shape[-1] // 2)


_store = rope.store_kv


def store_rounded(k: Tensor, v: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    _store(to_fp8(k, 1.0).to(k.dtype), to_fp8(v, 1.0).to(v.dtype), cache, slot_mapping)


def store_scaled(k: Tensor, v: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    pairs = zip((k, v), SCALES, strict=True)
    _store(*(to_fp8(x, scale).to(x.dtype) * scale for x, scale in pairs), cache, slot_mapping)


def rounded_answers(folder: Path, store: Callable[..., None], **options: Any) -> list[list[int]]:
    """The slow twin: a cache of the compute dtype, with values rounded on their way into it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rope, "store_kv", store)
        return generate_ids(make(folder, kv_cache_dtype="auto", **options), prompts(), GREEDY)


@pytest.fixture(scope="module")
def rounded(folder: Path) -> list[list[int]]:
    return rounded_answers(folder, store_rounded)


CASES = [
    ("none", "reference", None),
    ("none", "hostplan", None),
    ("piecewise", "reference", NGRAM),
    ("full", "hostplan", None),
    ("full_decode_only", "reference", None),
    ("full_and_piecewise", "hostplan", NGRAM),
    ("step", "reference", None),
]


@pytest.mark.parametrize(("mode", "backend", "spec"), CASES)
def test_answers_are_those_of_rounded_keys_and_values(
    folder: Path, rounded: list[list[int]], mode: str, backend: str, spec: Any
) -> None:
    llm = make(folder, attention_backend=backend, graph_mode=mode, speculative_config=spec)
    assert {cache.dtype for cache in llm.engine.runner.kv_caches} == {FP8}
    assert generate_ids(llm, prompts(), GREEDY) == rounded


@pytest.mark.parametrize("backend", ["reference", "hostplan"])
def test_the_sanitizer_agrees(folder: Path, rounded: list[list[int]], backend: str) -> None:
    """And NaN in blocks that were never written does no harm."""
    llm = make(
        folder,
        attention_backend=backend,
        graph_mode="step",
        speculative_config=NGRAM,
        sanitize=True,
    )
    poison(llm)
    assert generate_ids(llm, prompts(), GREEDY) == rounded


def test_chunks_preemption_and_the_prefix_cache_change_nothing(
    folder: Path, rounded: list[list[int]]
) -> None:
    roomy = {"num_kv_blocks": 300, "max_num_batched_tokens": 512, "enable_prefix_caching": False}
    llm = make(folder, **roomy)
    assert generate_ids(llm, prompts(), GREEDY) == rounded
    tight = make(folder)
    for _ in range(2):  # the second time from cached prefixes
        assert generate_ids(tight, prompts(), GREEDY) == rounded
    metrics = tight.metrics()
    assert metrics["num_preemptions"] > 0 and metrics["prefix_cache_hit_tokens"] > 0


@pytest.mark.parametrize(
    ("name", "mode", "backend"),
    [("eagle3-noisy", "step", "reference"), ("eagle-noisy", "full", "hostplan")],
)
def test_drafts_of_a_head_are_those_of_eager_steps(
    drafters: DrafterStore, name: str, mode: str, backend: str
) -> None:
    """The head's KV is in fp8, too."""
    drafter = drafters.get(name)
    plain = run_drafter(make_spec_llm(drafter, 0, kv_cache_dtype="fp8"), 0)
    eager = run_drafter(make_spec_llm(drafter, 3, kv_cache_dtype="fp8"), 3)
    llm = make_spec_llm(
        drafter, 3, kv_cache_dtype="fp8", graph_mode=mode, attention_backend=backend, sanitize=True
    )
    trace = run_drafter(llm, 3)
    assert trace.answers == eager.answers == plain.answers
    assert trace.drafts == eager.drafts and sum(trace.per_position) > 0


def test_the_cache_has_twice_the_blocks_in_the_same_bytes(folder: Path) -> None:
    options = {"dtype": "bfloat16", "num_kv_blocks": None, "kv_cache_memory": "1MiB"}
    half, eighth = (make(folder, kv_cache_dtype=kind, **options) for kind in ("auto", "fp8"))
    numbers = [llm.engine.runner.kv_caches[0].shape[1] for llm in (half, eighth)]
    assert numbers[1] == 2 * numbers[0]
    sizes = [llm.metrics()["kv_cache_bytes"] for llm in (half, eighth)]
    assert sizes[0] == sizes[1] <= 2**20
    assert DTYPE_BYTES["float8_e4m3fn"] == FP8.itemsize


def test_benchmarks_count_and_plant_a_cache_in_fp8(folder: Path) -> None:
    half, eighth = (
        make(folder, kv_cache_dtype=kind, dtype="bfloat16", num_kv_blocks=64)
        for kind in ("auto", "fp8")
    )
    sizes = [step_bytes(llm, batch=2, live_length=50.0).kv for llm in (half, eighth)]
    assert sizes[0] == 2 * sizes[1] > 0
    prompt = [1 + n % 90 for n in range(40)]
    poison(eighth)
    plant_prefix(eighth.engine, prompt)
    eighth.generate([prompt], GREEDY, use_tqdm=False)
    assert eighth.metrics()["prefix_cache_hit_tokens"] == 32
    assert eighth.engine.runner.target.hidden[:1].isfinite().all()


# ---- scales ----

NAMES = [
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
]


def with_scales(
    source: Path,
    target: Path,
    names: tuple[str, str] = NAMES[0],
    scales: tuple[Any, Any] = SCALES,
    prefix: str = "model.layers.{}.self_attn.",
    num_layers: int = 3,
) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    for layer in range(num_layers):
        for name, scale in zip(names, scales, strict=True):
            tensors[prefix.format(layer) + name] = torch.as_tensor(
                scale, dtype=torch.float32
            ).clone()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def layer_scales(llm: Any) -> set[KVScales]:
    return {layer.kv_scales for layer in llm.engine.runner.layers if isinstance(layer, Attention)}


@pytest.mark.parametrize("names", NAMES)
def test_scales_come_from_the_checkpoint(folder: Path, tmp_path: Path, names: Any) -> None:
    scales = (torch.tensor([SCALES.k]), torch.tensor(SCALES.v))  # of shape [1], and of none
    (found,) = layer_scales(make(with_scales(folder, tmp_path / "model", names, scales)))
    assert found == SCALES


def test_an_old_checkpoint_has_one_scale_for_both(folder: Path, tmp_path: Path) -> None:
    source = with_scales(folder, tmp_path / "model", ("kv_scale", "q_scale"), (0.25, 7.0))
    assert layer_scales(make(source)) == {KVScales(0.25, 0.25)}


@pytest.mark.parametrize("mode", ["none", "step"])
@pytest.mark.parametrize("backend", ["reference", "hostplan"])
def test_answers_are_those_of_scaled_and_rounded_values(
    folder: Path, tmp_path: Path, backend: str, mode: str
) -> None:
    source = with_scales(folder, tmp_path / "model")
    expected = rounded_answers(source, store_scaled)
    sanitize = mode != "none"
    llm = make(source, attention_backend=backend, graph_mode=mode, sanitize=sanitize)
    assert generate_ids(llm, prompts(), GREEDY) == expected
    unscaled = make(folder, attention_backend=backend)
    assert generate_ids(unscaled, prompts(), GREEDY) != expected
    assert not torch.equal(caches(llm)[0], caches(unscaled)[0])


def test_other_caches_ignore_scales(folder: Path, tmp_path: Path) -> None:
    source = with_scales(folder, tmp_path / "model", scales=(-1.0, torch.nan))
    options = {"kv_cache_dtype": "auto"}
    scaled, plain = (make(each, **options) for each in (source, folder))
    assert layer_scales(scaled) == {KVScales()}
    assert generate_ids(scaled, prompts(), GREEDY) == generate_ids(plain, prompts(), GREEDY)


@pytest.mark.parametrize(
    ("scales", "problem"),
    [
        ((0.0, 1.0), "k_scale is 0.0, and a scale must be above 0"),
        ((1.0, -0.5), "v_scale is -0.5, and"),
        ((torch.inf, 1.0), "k_scale is inf, and"),
        ((1.0, torch.nan), "v_scale is nan, and"),
        ((torch.ones(2), 1.0), r"k_scale has shape \[2\], and stoop has one scale"),
    ],
)
def test_broken_scales_are_refused(folder: Path, tmp_path: Path, scales: Any, problem: str) -> None:
    source = with_scales(folder, tmp_path / "model", scales=scales)
    with pytest.raises(CheckpointError, match=problem):
        make(source)


def test_scales_of_a_layer_too_many_are_refused(folder: Path, tmp_path: Path) -> None:
    prefix = "model.decoder.{}.self_attn."
    source = with_scales(folder, tmp_path / "model", prefix=prefix)
    with pytest.raises(CheckpointError, match="a scale of a layer that the model does not have"):
        make(source)


def test_scales_under_unknown_names_are_refused(folder: Path, tmp_path: Path) -> None:
    names = ("attn.impl.k_scale", "attn.impl.v_scale")
    source = with_scales(folder, tmp_path / "model", names)
    with pytest.raises(CheckpointError, match="a scale under a name that stoop does not know"):
        make(source)


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    cuda = torch.device("cuda", 0)
    slots = RequestState(2, 64, 16, torch.device("cpu")).tensors
    setup = AttentionSetup(cuda, 16, 2, 64, slots, torch.bfloat16, kv_dtype=FP8)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match=r"needs a GPU of compute capability 8\.9 or higher"):
        TritonBackend(setup)


def test_a_head_has_scales_of_its_own(drafters: DrafterStore, tmp_path: Path) -> None:
    drafter = drafters.get("eagle3-random")
    assert drafter.head is not None
    places = {"prefix": "midlayer.self_attn.", "num_layers": 1}
    head = with_scales(drafter.head, tmp_path / "head", **places)
    spec = {"model": str(head)}
    for kind, scales in (("fp8", {KVScales(), SCALES}), ("auto", {KVScales()})):
        found = layer_scales(make_spec_llm(drafter, 2, spec, kv_cache_dtype=kind))
        assert found == scales


def test_a_checkpoint_with_only_kv_scales_is_not_quantised(folder: Path, tmp_path: Path) -> None:
    source = with_scales(folder, tmp_path / "model")
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    config = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    edit_json(source / "config.json", quantization_config=config)
    (found,) = layer_scales(make(source))
    assert found == SCALES
    for change in ({"config_groups": {"group_0": {}}}, {"kv_cache_scheme": {"num_bits": 4}}):
        edit_json(source / "config.json", quantization_config=config | change)
        with pytest.raises(CheckpointError, match="is quantised"):
            make(source)


@pytest.fixture(scope="module")
def saturating(folder: Path, checkpoints: CheckpointStore) -> Path:
    """The same model with keys 3000 times as large, and queries as much smaller."""
    target = checkpoints.scratch("saturating")
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        tensor *= {"k_proj": 3000.0, "q_proj": 1 / 3000}.get(name.split(".")[-2], 1.0)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def prompt_logprobs(llm: Any) -> Tensor:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompt = prompts()[6]
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    entries = output.prompt_logprobs[1:]
    return torch.tensor([e[t].logprob for e, t in zip(entries, prompt[1:], strict=True)])


def test_scales_help_keys_that_saturate(saturating: Path, tmp_path: Path) -> None:
    exact = prompt_logprobs(make(saturating, kv_cache_dtype="auto"))
    source = with_scales(saturating, tmp_path / "model", scales=(100.0, 0.01))
    errors = [
        (prompt_logprobs(make(each)) - exact).abs().mean().item() for each in (saturating, source)
    ]
    assert errors[1] < 0.3 * errors[0], errors


# ---- mutants ----


def apply_twice(patch: pytest.MonkeyPatch) -> None:
    """The scale of keys is undone twice."""
    real = attention_layer.replace
    patch.setattr(
        attention_layer,
        "replace",
        lambda shape, scale, value_scale: real(
            shape, scale=scale * scale / shape.scale, value_scale=value_scale
        ),
    )


def forget_values(patch: pytest.MonkeyPatch) -> None:
    """The scale of values is not undone."""
    real = attention_layer.replace
    patch.setattr(
        attention_layer, "replace", lambda shape, scale, value_scale: real(shape, scale=scale)
    )


def exchange(patch: pytest.MonkeyPatch) -> None:
    """The scale of keys is taken for that of values, and the other way round."""
    names = kv_scales._NAMES
    patch.setattr(kv_scales, "_NAMES", {"k": names["v"], "v": names["k"]})


@pytest.mark.parametrize("mutate", [apply_twice, forget_values, exchange])
def test_wrong_scales_are_noticed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutate: Any
) -> None:
    source = with_scales(folder, tmp_path / "model")
    expected = rounded_answers(source, store_scaled)
    mutate(monkeypatch)
    assert generate_ids(make(source), prompts(), GREEDY) != expected


def wrap_around(x: Tensor, scale: float) -> Tensor:
    """A cast without the clamp, as torch has it in some versions: what is too large becomes NaN."""
    wide = x.float() / scale
    return wide.masked_fill(wide.abs() > 464, torch.nan).clamp(-448, 448).to(FP8)


def test_a_cast_without_the_clamp_is_noticed(
    saturating: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = values_to_round()
    assert not torch.equal(wrap_around(values, 1.0).view(torch.uint8), nearest_fp8(values))
    healthy = make(saturating)
    generate_ids(healthy, prompts(), GREEDY)
    assert not any(((cache & 0x7F) == 0x7F)[:, 1:4].any() for cache in caches(healthy))
    monkeypatch.setattr(kv_store, "to_fp8", wrap_around)
    broken = make(saturating)
    generate_ids(broken, prompts()[:1], GREEDY.replace(max_tokens=1))
    assert any(((cache & 0x7F) == 0x7F).any() for cache in caches(broken))


# ---- refusals ----


def test_flashinfer_says_which_backends_can() -> None:
    setup = base.AttentionSetup(
        device=torch.device("cuda"),
        block_size=16,
        max_reqs=1,
        max_model_len=16,
        slots=None,  # type: ignore[arg-type]
        dtype=torch.bfloat16,
        kv_dtype=FP8,
    )
    message = r"cannot read a KV cache in fp8 \(reference, hostplan, triton can\): use kv_cache_dt"
    with pytest.raises(ConfigError, match=f"attention_backend=flashinfer {message}"):
        base.refuse_unsupported(FLASHINFER, setup)
