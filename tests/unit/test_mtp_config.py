"""MTP heads in checkpoints and options: where they are found, and what is refused."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stoop import LLM, SamplingParams
from stoop.config.errors import CheckpointError, ConfigError, StoopError
from stoop.config.resolve import make_options
from stoop.engine.choose_drafter import MTP_DRAFTS, choose_drafter, expand_auto
from stoop.models.mtp import MtpSpec
from stoop.models.mtp_config import read_mtp_spec
from stoop.models.registry import read_model_spec
from support.checkpoints import CheckpointStore, as_multimodal, edit_json
from support.engines import generate_ids, make_llm
from support.mtp_checkpoints import make_pair

Tensors = dict[str, torch.Tensor]
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
PROMPTS = [[5, 9, 3], list(range(30))]
SETTINGS = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32}
MTP = {"method": "mtp"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pair().save(tmp_path_factory.mktemp("mtp") / "whole")


@pytest.fixture
def changed(whole: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy with other tensors or another config."""

    def change(edit: Callable[[Tensors], Any] | None = None, **config: Any) -> Path:
        folder = shutil.copytree(whole, tmp_path / "changed")
        tensors = load_file(folder / "model.safetensors")
        if edit is not None:
            edit(tensors)
        save_file(tensors, folder / "model.safetensors")
        edit_json(folder / "config.json", **config)
        return folder

    return change


def choose(folder: Path, device: str, given: Any = "auto", **options: Any) -> Any:
    made = make_options(str(folder), {"speculative_config": given, **options})
    return choose_drafter(made, read_model_spec(folder), folder, device, None)


# ---- found ----


def test_the_checkpoint_says_how_many_layers(whole: Path, changed: Callable[..., Path]) -> None:
    assert read_model_spec(whole).num_mtp_layers == 1
    spec = read_mtp_spec(whole, read_model_spec(whole))
    assert (spec.method, spec.taps, spec.vocab_size, spec.hidden_size) == ("mtp", (), 160, 64)
    unsaid = changed(mtp_num_hidden_layers=None)  # its tensors tell
    assert read_model_spec(unsaid).num_mtp_layers == 0
    assert isinstance(read_mtp_spec(unsaid, read_model_spec(unsaid)), MtpSpec)


def test_three_drafts_unless_another_number_is_given(whole: Path) -> None:
    for given, count in ((MTP, 3), ({**MTP, "num_speculative_tokens": 5}, 5)):
        spec = choose(whole, "cpu", given).spec
        assert (spec.method, spec.num_drafts, spec.folder) == ("mtp", count, str(whole))
        assert spec.draft_sample_method == "coupled"


def test_auto_takes_it_on_a_gpu_and_names_it_on_a_cpu(whole: Path) -> None:
    found = choose(whole, "cuda:0")
    assert (found.spec.method, found.spec.num_drafts) == ("mtp", MTP_DRAFTS)
    assert found.note == "the model's own head"
    found = choose(whole, "cpu")
    assert found.spec is None and '-sc \'{"method": "mtp"}\'' in found.note
    assert choose(whole, "cuda:0", load_format="dummy").spec is None
    expanded = {"method": "mtp", "num_speculative_tokens": MTP_DRAFTS}
    assert expand_auto(make_options(str(whole), {}), "cpu", None) == expanded


def test_a_number_alone_is_that_of_the_models_own_head(whole: Path) -> None:
    spec = choose(whole, "cpu", {"num_speculative_tokens": 2}).spec
    assert (spec.method, spec.num_drafts) == ("mtp", 2)


def test_auto_passes_over_heads_that_cannot_draft(
    checkpoints: CheckpointStore, changed: Callable[..., Path]
) -> None:
    for folder in (
        checkpoints.get("qwen3.5", dtype="float64"),
        checkpoints.get("llama3"),
        changed(lambda tensors: tensors.pop("mtp.norm.weight")),
    ):
        assert choose(folder, "cuda:0").spec is None
        assert expand_auto(make_options(str(folder), {}), "cuda:0", None) is None


def test_auto_says_why_a_head_of_several_layers_is_not_used(changed: Callable[..., Path]) -> None:
    folder = changed(
        lambda tensors: tensors.update(
            {name.replace("layers.0", "layers.1"): each.clone() for name, each in tensors.items()
             if name.startswith("mtp.layers.0.")}
        ),
        mtp_num_hidden_layers=2,
    )  # fmt: skip
    note = "the model's MTP head has 2 layers, and stoop drafts with heads of one layer only"
    for device in ("cuda:0", "cpu"):
        found = choose(folder, device)
        assert (found.spec, found.note) == (None, note)
    assert expand_auto(make_options(str(folder), {}), "cuda:0", None) is None
    llm = make_llm(folder, speculative_config="auto", **SETTINGS)
    assert llm.config.draft_note == note
    assert generate_ids(llm, PROMPTS, GREEDY)


def test_the_head_of_a_multimodal_checkpoint(whole: Path, tmp_path: Path) -> None:
    """The text part has a prefix, the MTP head none; also under the text part's config."""
    folder = as_multimodal(whole, tmp_path / "multimodal")
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    shutil.copy(whole / "config.json", again)
    found = []
    for each in (whole, folder, again):
        llm = make_llm(each, speculative_config=MTP, **SETTINGS)
        drafts = {"tokens": generate_ids(llm, PROMPTS, GREEDY)}
        weights = dict(llm.engine.runner.draft_model.named_parameters())
        found.append((drafts, {name: weight.sum() for name, weight in weights.items()}))
    assert found[0] == found[1] == found[2]


def test_plain_decoding_leaves_it_alone(whole: Path) -> None:
    llm = make_llm(whole, **SETTINGS)
    assert llm.config.spec is None
    asked = make_llm(whole, speculative_config=MTP, **SETTINGS)
    assert generate_ids(llm, PROMPTS, GREEDY) == generate_ids(asked, PROMPTS, GREEDY)


def test_random_weights_go_by_the_config(changed: Callable[..., Path]) -> None:
    folder = changed()
    (folder / "model.safetensors").unlink()
    dummy = {"load_format": "dummy", **SETTINGS}
    llm = make_llm(folder, speculative_config=MTP, **dummy)
    generate_ids(llm, PROMPTS, GREEDY)
    assert llm.metrics()["spec_decode_num_draft_tokens"] > 0
    number = {"num_speculative_tokens": 2}
    spec = choose(folder, "cpu", number, load_format="dummy").spec
    assert (spec.method, spec.num_drafts) == ("mtp", 2)
    edit_json(folder / "config.json", mtp_num_hidden_layers=0)
    with pytest.raises(ConfigError, match="has no MTP layers: name an EAGLE head, or use"):
        make_llm(folder, speculative_config=MTP, **dummy)
    with pytest.raises(ConfigError, match="no head ships with this model"):
        choose(folder, "cpu", number, load_format="dummy")


# ---- scales of a KV cache in fp8 ----


def test_scales_of_the_heads_layer_are_the_heads(changed: Callable[..., Path]) -> None:
    def add(tensors: Tensors) -> None:
        tensors["mtp.layers.0.self_attn.k_scale"] = torch.tensor(0.5)
        tensors["model.layers.3.self_attn.k_scale"] = torch.tensor(0.25)

    folder = changed(add)
    options = {"dtype": "float32", "kv_cache_dtype": "fp8", **SETTINGS}
    llm = make_llm(folder, speculative_config=MTP, **options)
    assert llm.engine.runner.draft_model.layer.self_attn.kv_scales.k == 0.5
    assert llm.engine.runner.model.layers[3].self_attn.kv_scales.k == 0.25
    assert make_llm(folder, **options).config.spec is None


# ---- refused ----


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda t: t.pop("mtp.fc.weight"), "the MTP head lacks mtp.fc.weight: fetch it again"),
        (
            lambda t: t.update({"mtp.embed_tokens.weight": torch.ones(2, 2)}),
            "the MTP head has mtp.embed_tokens.weight, which config.json does not account for",
        ),
        (
            lambda t: t.update({"mtp.norm.weight": torch.ones(3)}),
            "tensor mtp.norm.weight has shape [3] where config.json asks for [64]",
        ),
    ],
    ids=["missing", "extra", "shape"],
)
def test_tensors_that_do_not_fit(
    changed: Callable[..., Path], edit: Callable[[Tensors], Any], sentence: str
) -> None:
    with pytest.raises(CheckpointError) as refusal:
        make_llm(changed(edit), speculative_config=MTP, **SETTINGS)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"mtp_num_hidden_layers": 2}, "the model's MTP head has 2 layers, and stoop drafts with"),
        ({"mtp_num_hidden_layers": "one"}, "mtp_num_hidden_layers='one' where a whole number"),
        ({"mtp_num_hidden_layers": -1}, "mtp_num_hidden_layers=-1 where a whole number"),
    ],
)
def test_configs_that_do_not_fit(
    changed: Callable[..., Path], config: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(StoopError) as refusal:
        make_llm(changed(**config), speculative_config=MTP, **SETTINGS)
    assert sentence in str(refusal.value)


def test_models_without_a_head(checkpoints: CheckpointStore) -> None:
    with pytest.raises(ConfigError, match="stoop has no MTP heads for LlamaForCausalLM: name an"):
        LLM(str(checkpoints.get("llama3")), speculative_config=MTP, skip_tokenizer_init=True)
    plain = checkpoints.get("qwen3.5", dtype="float64")
    with pytest.raises(ConfigError, match=r"have no MTP head \(no tensor is called mtp\.\*\): fet"):
        make_llm(plain, speculative_config=MTP, **SETTINGS)


@pytest.mark.parametrize("given", [{"model": "folder"}, {"model": "a/b", "revision": "main"},
                                   {"revision": "main"}])  # fmt: skip
def test_the_head_is_in_the_targets_own_checkpoint(given: dict[str, Any], whole: Path) -> None:
    with pytest.raises(ConfigError, match="with method mtp, whose head is in the target's own"):
        make_llm(whole, speculative_config={**MTP, **given}, **SETTINGS)
