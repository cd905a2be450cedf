"""Encodes text to token ids and decodes them, for one model folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoop.config.errors import CheckpointError, RequestError
from stoop.config.values import is_whole, plain, shown
from stoop.text.chat import ChatTemplate, as_conversations, load_chat_template
from stoop.text.spelling import Speller

if TYPE_CHECKING:
    import tokenizers

# What transformers' apply_chat_template takes for tensors and training.
_TENSOR_ARGUMENTS = (
    "padding", "truncation", "max_length", "return_tensors", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)  # fmt: skip

LONG_TEXT = 4096  # characters

# Files from which transformers can build the tokenizer.json that a folder lacks.
SLOW_TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "spiece.model", "tokenizer_config.json")


class Tokenizer:
    """A `tokenizers` backend, the special tokens of its config, and its chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: dict[str, Any] | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """`settings` is what tokenizer_config.json says."""
        settings = settings or {}
        # Some published tokenizer.json files carry the padding of the run that saved them.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._chat_template = chat_template
        self.bos_token = _token_text(settings, "bos_token")
        self.eos_token = _token_text(settings, "eos_token")
        self.bos_token_id = self._id_of(self.bos_token)
        self.eos_token_id = self._id_of(self.eos_token)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id in added if added[token_id].special)
        adds_bos = settings.get("add_bos_token")
        if adds_bos is not None and not isinstance(adds_bos, bool):
            raise _wrong_setting("add_bos_token", adds_bos, "true or false")
        self._prepends_bos = bool(adds_bos) and not self._adds_bos_itself()

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read the tokenizer of a folder in Hugging Face layout."""
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointError(f"tokenizer {folder} is not a folder: name one with its files")
        settings = _read_json(folder / "special_tokens_map.json")
        settings.update(_read_json(folder / "tokenizer_config.json"))
        backend = _load_backend(folder)
        return cls(backend, settings, load_chat_template(folder, settings))

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def tokens(self) -> dict[str, int]:
        """The id of every token, added ones included, as the vocabulary spells them."""
        return self._backend.get_vocab(with_added_tokens=True)

    @cached_property
    def _speller(self) -> Speller | None:
        return Speller.of(self.decoder_settings())

    def token_bytes(self, token_id: int) -> bytes:
        """What a token spells in the middle of a text; it may be half a character."""
        token = self._backend.id_to_token(token_id)
        if token is None or self._speller is None or token_id in self.special_ids:
            return (token or "").encode()
        return self._speller(token)

    def decoder_settings(self) -> str:
        """How tokens are joined to text, as tokenizer.json has it: JSON."""
        decoder = self._backend.decoder
        return "null" if decoder is None else decoder.__getstate__().decode()

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def chat_template_text(self) -> str:
        """The source of all chat templates; empty if there is none."""
        return "" if self._chat_template is None else self._chat_template.text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that the model expects around it."""
        if not isinstance(text, str):
            raise RequestError(f"a prompt is a string, not {type(text).__name__}: pass text")
        try:
            ids = self._encode(text, add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            # Versions of the library differ in what they raise for a string that UTF-8 lacks.
            raise RequestError(
                "the text holds a lone surrogate, which is no character: pass valid Unicode"
            ) from error
        if add_special_tokens and self._prepends_bos and self.bos_token_id is not None:
            return [self.bos_token_id, *ids]
        return ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < LONG_TEXT:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        # The same ids, and other threads of Python go on meanwhile: a megabyte takes a second.
        (made,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return made.ids

    @cached_property
    def max_token_chars(self) -> int:
        """An upper bound on the characters of one token."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, or of a single one. Ids outside the vocabulary have no text."""
        try:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError):
            return self._backend.decode(_plain_ids(ids), skip_special_tokens=skip_special_tokens)

    def has_text(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Whether `decode` does not skip this id."""
        if skip_special_tokens and token_id in self.special_ids:
            return False
        return self._backend.id_to_token(token_id) is not None

    @cached_property
    def anchor_id(self) -> int | None:
        """A token of plain text; decoders treat what follows it as the middle of a text."""
        for letter in ("a", "e", "0", "."):
            ids = self.encode(letter, add_special_tokens=False)
            if ids and self.decode(ids[-1:]).endswith(letter):
                return ids[-1]
        return None

    @cached_property
    def anchor_length(self) -> int:
        """Characters of the anchor's text."""
        return 0 if self.anchor_id is None else len(self.decode([self.anchor_id]))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        **more_variables: Any,
    ) -> str:
        """The prompt that the model's chat template makes of messages.

        With `continue_final_message` the prompt ends inside the last message, whatever
        `add_generation_prompt` says, so that the model goes on with it. `variables` are those of
        the template, such as `enable_thinking`; they may also be passed by name.
        """
        if not isinstance(variables, Mapping | None):
            raise RequestError(
                f"the variables of a chat template are a dictionary, not {type(variables).__name__}"
            )
        template = self._chat_template or ChatTemplate({})
        known = {"bos_token": self.bos_token or "", "eos_token": self.eos_token or ""}
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=chat_template,
            variables={**known, **(variables or {}), **more_variables},
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        **options: Any,
    ) -> list[int]:
        """Token ids of `render_chat`; the template writes its own bos, so none is added."""
        text = self.render_chat(
            messages, add_generation_prompt, continue_final_message, tools, **options
        )
        return self.encode(text, add_special_tokens=False)

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any:
        """As transformers' tokenizers do: token ids, or text if not `tokenize`.

        Returns a list for several conversations. Further arguments are variables of the template.
        With `return_dict=True` ids come as {"input_ids": ..., "attention_mask": ...}.
        """
        as_dict = variables.pop("return_dict", False)
        for name in _TENSOR_ARGUMENTS:
            if variables.pop(name, None):
                raise RequestError(f"apply_chat_template returns plain lists: leave out {name}")
        conversations = as_conversations(conversation)
        texts = [
            self.render_chat(
                each,
                add_generation_prompt,
                continue_final_message,
                tools,
                chat_template=chat_template,
                variables=variables,
            )
            for each in conversations
        ]
        one = conversations[0] is conversation
        if not tokenize:
            return texts[0] if one else texts
        ids = [self.encode(text, add_special_tokens=False) for text in texts]
        masks = [[1] * len(each) for each in ids]
        if as_dict:
            return {
                "input_ids": ids[0] if one else ids,
                "attention_mask": masks[0] if one else masks,
            }
        return ids[0] if one else ids

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)

    def _adds_bos_itself(self) -> bool:
        # Any character works: only what the post-processor puts in front matters.
        ids = self._backend.encode("a", add_special_tokens=True).ids
        return bool(ids) and ids[0] == self.bos_token_id


def _plain_ids(ids: Any) -> list[int]:
    """A list of ints from ids of numpy or torch, or from a single one."""
    ids = plain(ids)
    listed = [plain(each) for each in ids] if isinstance(ids, Sequence) else [ids]
    if not all(is_whole(token_id) and 0 <= token_id < 2**32 for token_id in listed):
        raise RequestError(f"decode takes token ids, not {shown(ids)}")
    return listed


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    import tokenizers

    file = folder / "tokenizer.json"
    if not file.is_file():
        return _build_backend(folder)
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for any broken file
        raise CheckpointError(
            f"{file} cannot be read ({_first_line(error)}): fetch the model again"
        ) from error


def _build_backend(folder: Path) -> tokenizers.Tokenizer:
    if not any((folder / name).is_file() for name in SLOW_TOKENIZER_FILES):
        raise CheckpointError(f"{folder} has no tokenizer.json: add the model's tokenizer files")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise CheckpointError(
            f"{folder} has no tokenizer.json and transformers is needed to build one: "
            "run 'pip install stoop[hf]'"
        ) from error
    try:
        backend: tokenizers.Tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    except Exception as error:  # third-party code: each tokenizer class fails in its own way
        raise CheckpointError(
            f"transformers could not build a tokenizer from {folder} ({_first_line(error)}): "
            "add a tokenizer.json"
        ) from error
    return backend


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: fetch the model again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} does not hold a JSON object: fetch the model again")
    return content


def _token_text(settings: dict[str, Any], name: str) -> str | None:
    """The text of a special token; older configs write it as an object with its content."""
    given = settings.get(name)
    text = given.get("content") if isinstance(given, dict) else given
    if text is None:
        return None
    try:
        text.encode()
    except (AttributeError, UnicodeEncodeError):  # no string, or one with lone surrogates
        raise _wrong_setting(name, given, "the text of a token") from None
    return str(text)


def _wrong_setting(name: str, given: Any, needed: str) -> CheckpointError:
    return CheckpointError(
        f"tokenizer_config.json has {name}={ascii(given)[:80]} where {needed} is needed: fix it or "
        "fetch the model again"
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
