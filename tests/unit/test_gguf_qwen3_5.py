"""GGUF files of Qwen3.5 become the folders that transformers would write."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from stoop import LLM
from stoop.checkpoint import gguf as converter
from stoop.checkpoint.gguf import convert_gguf
from stoop.checkpoint.gguf_layout import Change, HeadOrder, same
from stoop.checkpoint.gguf_tokenizer import QWEN35_PATTERN
from stoop.checkpoint.weights import WeightReader
from stoop.config.errors import CheckpointError
from stoop.layers.linear import FusedLinear
from stoop.models.qwen3_5_gguf import QWEN3_5_LAYOUT
from stoop.models.registry import read_model_spec
from stoop.ops.packed import Packed
from support.checkpoints import ARCHITECTURES, draw_parameter
from support.engines import make_llm
from support.huggingface import greedy_params, make_prompt
from support.hybrid_gguf_files import write_hybrid_gguf

KINDS = gguf.GGMLQuantizationType
SETTINGS = {"max_model_len": 128, "dtype": "float32"}
# Two value heads to each of 8 key heads: the wrong way round is another order.
HEADS = {"linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_value_head_dim": 32}
OUT = "model.layers.0.linear_attn.out_proj.weight"
QKV = "model.layers.0.linear_attn.in_proj_qkv.weight"
Tensors = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOOP_CACHE", str(tmp_path / "cache"))


def make_qwen(**changes: Any) -> PreTrainedModel:
    made = ARCHITECTURES["qwen3.5"]
    config = replace(made, changes={**made.changes, **HEADS, **changes}).config()
    model = made.model_class(config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            draw_parameter(key, parameter, generator, config.tie_word_embeddings)
            if "norm" in key and "linear_attn" not in key:
                parameter.sub_(1.0)  # these norms multiply by 1 + weight
    return model


def save(model: PreTrainedModel, folder: Path) -> Path:
    """What transformers writes."""
    model.save_pretrained(folder)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    with WeightReader(folder) as reader:
        return {name: reader.tensor(name).clone() for name in sorted(reader.names())}


def differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> set[str]:
    """Names of tensors that would compute something else."""
    assert ours.keys() == theirs.keys()
    found = set()
    for name, tensor in theirs.items():
        if name.endswith("A_log"):  # through an exponential and back
            equal = torch.allclose(ours[name], tensor, rtol=0, atol=1e-6)
        elif "norm" in name and "linear_attn" not in name:
            equal = torch.equal(1 + ours[name], 1 + tensor)
        else:
            equal = torch.equal(ours[name], tensor)
        if not equal:
            found.add(name)
    return found


def mtp_tensors(model: PreTrainedModel) -> Tensors:
    """A made-up head: its layer has the shapes of the model's last one."""
    source, size = np.random.default_rng(7), model.config.hidden_size
    found = {"mtp.fc.weight": source.normal(size=(size, 2 * size))}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        found[f"mtp.{name}.weight"] = source.normal(size=size)
    prefix = "model.layers.3."
    for key, parameter in model.named_parameters():
        if key.startswith(prefix):
            new = key.replace(prefix, "mtp.layers.0.")
            found[new] = source.normal(size=tuple(parameter.shape))
    return {name: (0.1 * values).astype(np.float32) for name, values in found.items()}


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True, "attention_bias": True}, {"linear_num_key_heads": 16}],
    ids=["grouped", "tied", "equal"],
)
def test_the_folder_is_that_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = make_qwen(**changes)
    wanted = save(model, tmp_path / "wanted")
    convert_gguf(write_hybrid_gguf(tmp_path / "m.gguf", model), tmp_path / "out")
    assert differing(tensors_of(tmp_path / "out"), tensors_of(wanted)) == set()
    spec, ours = read_model_spec(wanted), read_model_spec(tmp_path / "out")
    assert replace(ours, bos_token_id=1, eos_token_ids=spec.eos_token_ids) == spec


def lose(part: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A loader that forgets one of llama.cpp's conversions."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        layout = QWEN3_5_LAYOUT
        if part == "norms":
            kept = {k: v for k, v in layout.changes.items() if not k.endswith("norm.weight")}
            layout = replace(layout, changes=kept)
        elif part == "ssm_a":
            plain = Change(same, lambda values: values)
            layout = replace(layout, changes={**layout.changes, "ssm_a": plain})
        else:
            old = layout.head_order
            layout = replace(layout, head_order=lambda n, f: None if n == part else old(n, f))
        monkeypatch.setattr(converter, "find_layout", lambda fields: layout)

    return patch


def invert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts heads in turns once more, instead of undoing it."""

    def old(name: str, fields: Any) -> HeadOrder | None:
        order = QWEN3_5_LAYOUT.head_order(name, fields)
        return order and replace(order, num_groups=order.num_heads // order.num_groups)

    layout = replace(QWEN3_5_LAYOUT, head_order=old)
    monkeypatch.setattr(converter, "find_layout", lambda fields: layout)


@pytest.mark.parametrize(
    ("mutate", "hit"),
    [
        (lose("norms"), "norm"),
        (lose("ssm_a"), "A_log"),
        (lose("attn_qkv.weight"), "in_proj_qkv"),
        (lose("attn_gate.weight"), "in_proj_z"),
        (lose("ssm_alpha.weight"), "in_proj_a"),
        (lose("ssm_beta.weight"), "in_proj_b"),
        (lose("ssm_dt.bias"), "dt_bias"),
        (lose("ssm_conv1d.weight"), "conv1d"),
        (lose("ssm_out.weight"), "out_proj"),
        (invert, "linear_attn"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_lost_conversion_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutate: Callable[..., None], hit: str
) -> None:
    model = make_qwen()
    file = write_hybrid_gguf(tmp_path / "m.gguf", model)
    mutate(monkeypatch)
    convert_gguf(file, tmp_path / "out")
    found = differing(tensors_of(tmp_path / "out"), tensors_of(save(model, tmp_path / "wanted")))
    assert found
    assert all(hit in name for name in found), found


def answers(source: Path, **options: Any) -> tuple[list[list[int]], np.ndarray, LLM]:
    """Greedy answers, and the log-probability of each of their tokens."""
    llm = make_llm(source, **SETTINGS | options)
    prompts = [make_prompt(length) for length in (1, 17, 70)]
    outputs = llm.generate(prompts, greedy_params(8, logprobs=0), use_tqdm=False)
    found = [output.outputs[0] for output in outputs]
    rows = [[row[t].logprob for row, t in zip(a.logprobs, a.token_ids, strict=True)] for a in found]
    return [answer.token_ids for answer in found], np.array(rows), llm


def test_answers_are_those_of_the_folder(tmp_path: Path) -> None:
    model = make_qwen()
    ids, scores, _ = answers(write_hybrid_gguf(tmp_path / "m.gguf", model), weights="dense")
    wanted, due, _ = answers(save(model, tmp_path / "wanted"))
    assert ids == wanted
    np.testing.assert_allclose(scores, due, atol=1e-5)


@pytest.mark.parametrize("kind", [KINDS.Q8_0, KINDS.Q4_1], ids=lambda kind: kind.name)
def test_quantised_matrices_have_the_values_of_their_blocks(tmp_path: Path, kind: KINDS) -> None:
    model = make_qwen()
    file = write_hybrid_gguf(tmp_path / "m.gguf", model, kind_of=lambda name: kind)
    convert_gguf(file, tmp_path / "packed", packed=True)
    convert_gguf(file, tmp_path / "dense")
    found, dense = tensors_of(tmp_path / "packed"), tensors_of(tmp_path / "dense")
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with WeightReader(tmp_path / "packed") as reader:
        for name, tensor in found.items():
            assert torch.equal(tensor, dense[name]), name
            rows = reader.quantized(name)
            assert (rows is not None) == (tensor.ndim == 2), name
            if rows is not None:  # blocks of 32 along a row: quantising does not depend on places
                blocks = gguf.quants.quantize(state[name].numpy(), kind)
                assert np.array_equal(rows.data.numpy(), blocks), name


def test_blocks_with_several_heads_are_dequantised(tmp_path: Path) -> None:
    """A block of 32 values has two heads of 16, which belong to different places."""
    model = make_qwen(linear_value_head_dim=16)
    file = write_hybrid_gguf(tmp_path / "m.gguf", model, kind_of=lambda name: KINDS.Q8_0)
    convert_gguf(file, tmp_path / "packed", packed=True)
    convert_gguf(file, tmp_path / "dense")
    found, dense = tensors_of(tmp_path / "packed"), tensors_of(tmp_path / "dense")
    with WeightReader(tmp_path / "packed") as reader:
        assert reader.quantized(OUT) is None
        assert reader.quantized(QKV) is not None
    wanted = dict(model.named_parameters())
    for name in (OUT, QKV):
        assert torch.equal(found[name], dense[name])
        torch.testing.assert_close(found[name], wanted[name].detach(), rtol=0, atol=0.01)


def test_packed_answers_are_near_dense_ones(tmp_path: Path, native: None) -> None:
    model = make_qwen(intermediate_size=128)
    file = write_hybrid_gguf(tmp_path / "m.gguf", model, kind_of=lambda name: KINDS.Q8_0)
    ids, scores, packed = answers(file, weights="packed")
    wanted, due, _ = answers(file, weights="dense")
    modules = packed.engine.runner.model.named_modules()
    kept = {name for name, each in modules if isinstance(getattr(each, "scheme", None), Packed)}
    assert len(kept) >= 4 * 4, kept  # two of the mixer and two of the MLP in each layer
    assert ids == wanted
    np.testing.assert_allclose(scores, due, atol=2e-2)


def test_the_mtp_head_is_loaded(tmp_path: Path) -> None:
    model = make_qwen()
    head = mtp_tensors(model)
    file = write_hybrid_gguf(tmp_path / "m.gguf", model, mtp=head)
    convert_gguf(file, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["mtp_num_hidden_layers"]) == (4, 1)
    wanted = tensors_of(save(model, tmp_path / "wanted"))
    wanted |= {name: torch.from_numpy(values) for name, values in head.items()}
    assert differing(tensors_of(tmp_path / "out"), wanted) == set()


@pytest.mark.parametrize("kind", [KINDS.Q8_0, KINDS.Q4_0, KINDS.Q4_1], ids=lambda kind: kind.name)
def test_the_mtp_head_drafts(tmp_path: Path, native: None, kind: KINDS) -> None:
    """Packed as the dense one, but for the rounding of its matrices to 8 bits."""
    model = make_qwen(intermediate_size=128)
    file = write_hybrid_gguf(
        tmp_path / "m.gguf", model, kind_of=lambda name: kind, mtp=mtp_tensors(model)
    )
    drafter = {"method": "mtp", "num_speculative_tokens": 2}
    matrices = []
    for weights in ("dense", "packed"):
        plain = answers(file, weights=weights)[0]
        ids, _, llm = answers(file, weights=weights, speculative_config=drafter)
        assert ids == plain
        head: Any = llm.engine.runner.draft_model
        for product in (head.fc, *(m for m in head.modules() if isinstance(m, FusedLinear))):
            scheme, weight = product.scheme, product.matrix
            packed = isinstance(scheme, Packed)
            assert packed == (weights == "packed")
            matrices.append(scheme.dequantize(weight) if packed else weight.data)
    count = len(matrices) // 2
    assert count >= 5
    for dense, packed in zip(matrices[:count], matrices[count:], strict=True):
        step = dense.unflatten(1, (-1, 32)).abs().amax(dim=-1, keepdim=True) / 127
        error = (dense - packed).unflatten(1, (-1, 32)).abs()
        assert bool((error <= 0.55 * step).all())  # scales are rounded to float16


def assert_refused(path: Path, message: str, **options: Any) -> None:
    file = write_hybrid_gguf(path / "m.gguf", make_qwen(), **options)
    with pytest.raises(CheckpointError, match=message) as refused:
        convert_gguf(file, path / "out")
    assert "\n" not in str(refused.value)
    assert not (path / "out").exists()


def without(key: str, value: int | None = None) -> Callable[[gguf.GGUFWriter], None]:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(f"qwen35.{key}", None)
        if value is not None:
            writer.add_uint32(f"qwen35.{key}", value)

    return more


@pytest.mark.parametrize(
    "key",
    [
        *("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank"),
        *("ssm.inner_size", "rope.dimension_count", "attention.head_count"),
    ],
)
def test_a_missing_field_is_named(tmp_path: Path, key: str) -> None:
    assert_refused(tmp_path, f"the GGUF field qwen35.{key} is missing", more=without(key))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ssm.group_count", 3, "16 value heads for 3 key heads"),
        ("ssm.inner_size", 500, "cannot be shared out: use another file"),
        ("ssm.inner_size", 256, "does not fit 16 heads of 16: use another file"),
        ("ssm.group_count", 4, "does not fit 16 heads of 32: use another file"),
        ("nextn_predict_layers", 4, "4 MTP layers among 4: use one of the whole model"),
        ("nextn_predict_layers", 1, "lacks the tensor 'blk.3.nextn.eh_proj.weight'"),
        ("expert_count", 8, "mixture-of-experts models cannot be loaded"),
        ("full_attention_interval", 3, "lacks the tensor 'blk.2.attn_q.weight'"),
    ],
)
def test_a_field_that_does_not_fit_is_refused(
    tmp_path: Path, key: str, value: int, message: str
) -> None:
    assert_refused(tmp_path, message, more=without(key, value))


@pytest.mark.parametrize("name", ["ssm_dt.bias", "ssm_a", "attn_gate.weight", "ssm_beta.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    name = f"blk.0.{name}"
    assert_refused(tmp_path, f"lacks the tensor '{name}'", edit=lambda found: found.pop(name))


@pytest.mark.parametrize("shape", [(512,), (64, 256), (2, 32, 512)])
def test_a_matrix_of_another_shape_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    new = {"blk.0.ssm_out.weight": np.zeros(shape, dtype=np.float32)}
    message = "'blk.0.ssm_out.weight' of this GGUF file has shape .* does not fit 16 heads of 32"
    assert_refused(tmp_path, message, edit=lambda found: found.update(new))


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    def rename(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["general.architecture"].value = "qwen35moe"

    assert_refused(tmp_path, "architecture 'qwen35moe' cannot be loaded", more=rename)


def test_a_list_of_recurrent_layers_comes_first(tmp_path: Path) -> None:
    kinds = ["full_attention", *["linear_attention"] * 3]
    flags = [kind == "linear_attention" for kind in kinds]
    file = write_hybrid_gguf(
        tmp_path / "m.gguf",
        make_qwen(layer_types=kinds),
        more=lambda writer: writer.add_array("qwen35.attention.recurrent_layers", flags),
    )
    convert_gguf(file, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["layer_types"] == kinds


def test_text_is_split_as_in_transformers() -> None:
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

    assert QWEN35_PATTERN == PRETOKENIZE_REGEX
