"""Encoding, special tokens and chat templates, on tiny tokenizers made here."""

import builtins
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    decoders,
    models,
    pre_tokenizers,
    processors,
)
from tokenizers import (
    Tokenizer as Backend,
)

from stoop.config.errors import CheckpointError, RequestError
from stoop.text.tokenizer import LONG_TEXT, Tokenizer

CHATML = (
    "{% for message in messages %}{{ '<s>' + message['role'] + '\n' + message['content'] }}"
    "{{ '</s>' }}{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "Hello"}]


def build_backend(post_processor: bool = False) -> Backend:
    """Every byte is a token; <s> and </s> are special, <tool> is not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    if post_processor:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 256)]
        )
    return backend


def write_folder(folder: Path, post_processor: bool = False, **settings: Any) -> Path:
    build_backend(post_processor).save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def with_template(template: str) -> Tokenizer:
    from stoop.text.chat import ChatTemplate

    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(build_backend(), settings, ChatTemplate({"default": template}))


def test_long_texts_are_encoded_like_short_ones(tmp_path: Path) -> None:
    """They take another way, on which other threads go on."""
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, post_processor=True))
    text = "Grüße <s> <tool>\n " * 500
    assert len(text) > LONG_TEXT
    for special in (True, False):
        wanted = tokenizer._backend.encode(text, add_special_tokens=special).ids
        assert tokenizer.encode(text, special) == wanted
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode(text + "\ud800")


def test_folder_gives_ids_and_special_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path))
    assert tokenizer.vocab_size == 259
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
    assert tokenizer.special_ids == {256, 257}
    assert tokenizer.has_chat_template is False
    ids = tokenizer.encode("<s>é<tool>")
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "é<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>é<tool>"


def test_special_tokens_map_is_read_too(tmp_path: Path) -> None:
    build_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_token_id == 257
    assert tokenizer.bos_token_id is None


@pytest.mark.parametrize("post_processor", [False, True])
@pytest.mark.parametrize("add_bos_token", [False, True])
def test_bos_is_added_once(tmp_path: Path, post_processor: bool, add_bos_token: bool) -> None:
    folder = write_folder(tmp_path, post_processor, add_bos_token=add_bos_token)
    tokenizer = Tokenizer.from_folder(folder)
    expected = 1 if post_processor or add_bos_token else 0
    assert tokenizer.encode("ab").count(256) == expected
    assert tokenizer.encode("ab", add_special_tokens=False).count(256) == 0


def test_saved_padding_and_truncation_are_ignored(tmp_path: Path) -> None:
    backend = build_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    assert len(Tokenizer(backend).encode("abcde")) == 5


@pytest.mark.parametrize(("text", "message"), [("\ud800", "lone surrogate"), (5, "not int")])
def test_what_is_no_text_is_refused(text: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Tokenizer(build_backend()).encode(text)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json: add"):
        Tokenizer.from_folder(tmp_path)


def test_without_transformers_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").touch()
    real_import = builtins.__import__

    def no_transformers(name: str, *rest: Any) -> Any:
        if name == "transformers":
            raise ImportError(name)
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", no_transformers)
    with pytest.raises(CheckpointError, match=r"pip install stoop\[hf\]"):
        Tokenizer.from_folder(tmp_path)


def test_transformers_builds_what_the_folder_lacks(tmp_path: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*letters, "ab", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("ab") == [256]
    assert tokenizer.eos_token_id == 257


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path)
    (tmp_path / name).write_text("{")
    with pytest.raises(CheckpointError, match=f"{name}.*fetch the model again"):
        Tokenizer.from_folder(tmp_path)


def test_chat_is_rendered_and_encoded_without_a_second_bos(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, post_processor=True, chat_template=CHATML)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat(USER) == "<s>user\nHello</s><s>assistant\n"
    assert tokenizer.render_chat(USER, add_generation_prompt=False) == "<s>user\nHello</s>"
    ids = tokenizer.encode_chat(USER)
    assert ids.count(256) == 2
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.render_chat(USER)


@pytest.mark.parametrize("content", ["Hello ", "  Hello", ""])
def test_the_final_message_can_be_continued(content: str) -> None:
    messages = [*USER, {"role": "assistant", "content": content}]
    text = with_template(CHATML).render_chat(messages, continue_final_message=True)
    assert text == "<s>user\nHello</s><s>assistant\n" + content


def test_continuing_what_the_template_hides_is_refused() -> None:
    with pytest.raises(RequestError, match="drop continue_final_message"):
        with_template("nothing").render_chat(USER, continue_final_message=True)


def test_templates_are_chosen_by_name(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools {{ tools | length }}"},
    ]
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, chat_template=templates))
    assert tokenizer.render_chat(USER) == "plain"
    assert tokenizer.render_chat(USER, tools=[{"name": "f"}]) == "tools 1"
    with pytest.raises(RequestError, match="no place for tools"):
        tokenizer.render_chat(USER, tools=[{"name": "f"}], chat_template="{{ messages }}")


def test_a_template_file_wins(tmp_path: Path) -> None:
    write_folder(tmp_path, chat_template="from the config")
    (tmp_path / "chat_template.jinja").write_text("from the file é")
    assert Tokenizer.from_folder(tmp_path).render_chat(USER) == "from the file é"


def test_a_malformed_template_list_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, chat_template=[{"title": "x"}])
    with pytest.raises(CheckpointError, match="neither a string nor a list"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{{ {'k': 'é<'} | tojson }}", '{"k": "é<"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Hello"),
        ("  {% if true %}\nx{% endif %}", "x"),
        ("{{ enable_thinking }}", "False"),
        ("{{ tools is none }}", "True"),
    ],
)
def test_templates_find_the_helpers_they_expect(template: str, expected: str) -> None:
    assert with_template(template).render_chat(USER, enable_thinking=False) == expected


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text = with_template("{{ messages[0].content }}").render_chat(
        [{"role": "user", "content": parts}]
    )
    assert text == "one\ntwo"


def test_tool_calls_need_no_content() -> None:
    message = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    text = with_template("{{ messages[0].tool_calls[0].name }}").render_chat([message])
    assert text == "f"


def test_the_messages_given_are_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    with_template(CHATML).render_chat(messages, continue_final_message=True)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "x"}]}]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hello", "messages is a list such as .*not str"),
        ({"role": "user"}, "messages is a list such as .*not dict"),
        (5, "not int"),
        ([], "messages is empty"),
        (["Hello"], "each message is an object"),
        ([{"content": "x"}], 'needs a "role"'),
        ([{"role": "user"}], 'the "content" of a message is a string'),
        ([{"role": "user", "content": 5}], 'the "content" of a message is a string'),
        ([{"role": "user", "content": ["x"]}], "only parts of the form"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "reads no images"),
    ],
)
def test_messages_of_the_wrong_form_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        with_template(CHATML).render_chat(messages)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role') }}", "refused these messages: no system role"),
        ("{% if %}", "refused these messages"),
        ("{{ messages[0].missing.deeper }}", "refused these messages"),
        ("{{ 'a' + 1 }}", "failed on these messages .TypeError"),
        ("{{ messages.append(1) }}", "refused these messages"),
        ("{{ ''.__class__.__mro__ }}", "refused these messages"),
    ],
)
def test_what_a_template_does_wrong_is_told(template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        with_template(template).render_chat(USER)


def test_a_model_without_template_says_what_to_do() -> None:
    with pytest.raises(RequestError, match="use generate with a prompt"):
        Tokenizer(build_backend()).render_chat(USER)
