"""Values of a wrong type in a model's JSON files: refused with a sentence, or harmless."""

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoop import LLM
from stoop.checkpoint.fetch import resolve_model
from stoop.checkpoint.shipped import shipped_head
from stoop.config.errors import CheckpointError, ConfigError, StoopError
from stoop.config.resolve import make_options, resolve
from stoop.models.head_config import read_head_spec
from stoop.models.head_source import proposed_drafts
from stoop.models.loader import load_model
from stoop.models.registry import read_model_spec
from stoop.text.tokenizer import Tokenizer
from support.byte_tokenizer import write_tokenizer
from support.checkpoints import edit_json, make_model
from support.head_layouts import LAYOUTS, TARGET, write_layout

# One or two of each JSON type, and numbers that no machine can serve.
VALUES: list[Any] = [
    *(None, True, -1, 5, 1.5, 2**40, 10**400, float("inf"), float("nan")),
    *("", "x", "\ud800", [], [5], ["x"], [None], {}, {"a": 1}, {"content": 5}),
]
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "model.safetensors.index.json",
)
Path_ = tuple[str | int, ...]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in several files, with all the JSON files that a folder may have."""
    folder = tmp_path_factory.mktemp("base")
    make_model("llama-yarn", 0).float().save_pretrained(folder, max_shard_size="100KB")
    assert (folder / "model.safetensors.index.json").exists()
    write_tokenizer(folder)
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": "</s>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    edit_json(folder / "tokenizer_config.json", add_bos_token=True, model_max_length=100)
    edit_json(folder / "config.json", torch_dtype="float32", partial_rotary_factor=1.0)
    return folder


def places(content: Any, prefix: Path_ = ()) -> Iterator[Path_]:
    """The whole file, and every key in it at any depth; of a list the first place."""
    yield prefix
    keys: list[str | int] = list(content) if isinstance(content, dict) else []
    if isinstance(content, list) and content:
        keys = [0]
    if prefix == ("weight_map",):
        keys = keys[:2]  # all tensors are treated alike
    for key in keys:
        yield from places(content[key], (*prefix, key))


def replaced(content: Any, place: Path_, value: Any) -> Any:
    if not place:
        return value
    content = copy.deepcopy(content)
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return content


def load(folder: Path) -> None:
    """Everything that is read of a folder, without the engine."""
    assert resolve_model(folder) == folder
    spec = read_model_spec(folder)
    options = make_options(str(folder), {"max_model_len": 64})
    load_model(resolve(options, spec, str(folder), "cpu"))
    tokenizer = Tokenizer.from_folder(folder)
    tokenizer.encode("a")
    if tokenizer.has_chat_template:
        tokenizer.encode_chat([{"role": "user", "content": "a"}])
    shipped_head(folder)


def wrong_outcomes(file: Path, action: Callable[[], None]) -> list[str]:
    """Try every value in every place; what was neither success nor one sentence."""
    original = file.read_text()
    content = json.loads(original)
    wrong = []
    try:
        for place in places(content):
            for value in VALUES:
                file.write_text(json.dumps(replaced(content, place, value)))
                try:
                    action()
                except StoopError as error:
                    if "\n" in str(error) or len(str(error)) > 600:
                        wrong.append(f"{file.name} {place} {ascii(value)[:40]}: a long message")
                except Exception as error:
                    wrong.append(f"{file.name} {place} {ascii(value)[:40]}: {error!r:.80}")
    finally:
        file.write_text(original)
    return wrong


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_value_in_a_model_is_refused_or_harmless(base: Path, name: str) -> None:
    load(base)
    assert wrong_outcomes(base / name, lambda: load(base)) == []


@pytest.mark.parametrize(
    "architecture", ["MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
def test_a_wrong_value_for_a_windowed_model_is_refused_or_harmless(
    base: Path, tmp_path: Path, architecture: str
) -> None:
    config = json.loads((base / "config.json").read_text())
    windowed = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
    layer_types = ["full_attention", "sliding_attention", "full_attention"]
    config |= {"architectures": [architecture], "layer_types": layer_types, **windowed}
    file = tmp_path / "config.json"
    for left_out in ("nothing", "layer_types"):
        config.pop(left_out, None)
        file.write_text(json.dumps(config))
        read_model_spec(tmp_path)

        def read() -> None:
            read_model_spec(tmp_path)

        assert wrong_outcomes(file, read) == []


@pytest.mark.parametrize(
    "name", ["eagle1, named, with bias and embedding", "eagle3, prefixed, with taps",
             "eagle3 with new rope keys", "speculators eagle3", "speculators eagle"],
)  # fmt: skip
def test_a_wrong_value_in_a_head_is_refused_or_harmless(tmp_path: Path, name: str) -> None:
    write_layout(tmp_path, LAYOUTS[name])
    settings = {"proposal_methods": [{"speculative_tokens": 3}]}
    edit_json(tmp_path / "config.json", speculators_config=settings)

    def read() -> None:
        read_head_spec(tmp_path, TARGET)
        proposed_drafts(tmp_path)

    read()
    assert wrong_outcomes(tmp_path / "config.json", read) == []


@pytest.mark.parametrize(
    ("file", "changes", "sentence"),
    [
        ("config.json", {"architectures": [5]}, "architecture is 5"),
        ("config.json", {"architectures": 5}, "architecture is 5"),
        ("config.json", {"bos_token_id": "x"}, "bos_token_id is 'x' where token ids are needed"),
        ("generation_config.json", {"eos_token_id": True}, "eos_token_id is True"),
        ("config.json", {"num_hidden_layers": 2**32 - 1}, "num_hidden_layers=4294967295"),
        ("config.json", {"num_hidden_layers": 700}, "700, but the weights have 3 layers"),
        ("config.json", {"vocab_size": 2**24}, r"shape \[160, 64\] .* asks for \[16777216, 64\]"),
        ("config.json", {"hidden_size": 2**40}, "hidden_size=1099511627776"),
        ("config.json", {"tie_word_embeddings": "no"}, "tie_word_embeddings='no'"),
        ("config.json", {"max_position_embeddings": 10**9}, "max_position_embeddings=1000000000"),
        ("tokenizer_config.json", {"bos_token": 5}, "bos_token=5 where the text of a token"),
        ("tokenizer_config.json", {"eos_token": {"content": [1]}}, "eos_token="),
        ("tokenizer_config.json", {"add_bos_token": "yes"}, "add_bos_token='yes'"),
        ("model.safetensors.index.json", {"weight_map": {"a": 5}}, "not a valid index"),
        ("model.safetensors.index.json", {"weight_map": {"a": ["b"]}}, "not a valid index"),
    ],
)
def test_the_sentence_names_what_is_wrong(
    base: Path, tmp_path: Path, file: str, changes: dict[str, Any], sentence: str
) -> None:
    folder = shutil.copytree(base, tmp_path / "model")
    edit_json(folder / file, **changes)
    with pytest.raises(CheckpointError, match=sentence):
        load(folder)


def test_layer_types_of_a_wrong_type_are_refused(base: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(base, tmp_path / "model")
    changes = {"architectures": ["MistralForCausalLM"], "sliding_window": 8}
    for layer_types, sentence in (
        (5, "layer_types=5 where a list is needed"),
        (["chunked_attention"] * 3, "'chunked_attention' among its layer_types"),
    ):
        edit_json(folder / "config.json", layer_types=layer_types, **changes)
        with pytest.raises(CheckpointError, match=sentence):
            read_model_spec(folder)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}", "\x00"])
def test_json_that_python_cannot_read_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        read_model_spec(tmp_path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read \(Is a directory\)"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize("device", [5, None, ["cpu"], "cuda:²", "cuda:-1", "cuda:" + "9" * 5000])
def test_a_device_that_is_none_is_refused(base: Path, device: Any) -> None:
    with pytest.raises(ConfigError, match=r"device=.*: use auto, cpu, cuda or cuda:N"):
        LLM(str(base), device=device)


@pytest.mark.parametrize("checked", [True, False])
def test_weights_that_memory_cannot_hold_are_refused(
    base: Path, tmp_path: Path, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights have no files that bound their size. They are refused before memory is taken,
    and if that check was wrong, when it is."""
    if not checked:
        monkeypatch.setattr("stoop.worker.runner.check_room", lambda *_: None)
    config = json.loads((base / "config.json").read_text())
    huge = {"hidden_size": 2**24, "vocab_size": 2**24, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config | huge))
    told = "more than the .* GiB free on cpu" if checked else "which cpu has no room for"
    with pytest.raises(ConfigError, match=rf"the weights take .* GiB.*{told}"):
        LLM(str(tmp_path), device="cpu", load_format="dummy", skip_tokenizer_init=True)
