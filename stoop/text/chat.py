"""Turns chat messages into a prompt with the Jinja template that ships with a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from stoop.config.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    import jinja2

# Marks the end of a message to be continued; the prompt is cut there.
CONTINUE_MARK = "\ue000stoop-continue\ue000"

# The most that a template may make with * and **: entries of a sequence, bits of a number.
MAX_REPEATED = 10**7
MAX_BITS = 4096


class ChatTemplate:
    """The templates of one model by name; `default` is used unless tools ask for `tool_use`."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = dict(sources)

    @property
    def text(self) -> str:
        """All of them, to look for what a family of models writes."""
        return "\n".join(self._sources.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: list[dict[str, Any]] | None,
        chat_template: str | None = None,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt for these messages. Raises `RequestError` if the template refuses them.

        chat_template: the text of another template, or the name of one of these
        """
        _check_tools(tools)
        checked = [_check_message(message) for message in _check_list(messages)]
        if continue_final_message:
            checked[-1] = _mark_end(checked[-1])
        context = {
            **variables,
            "messages": checked,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        source = self._source(tools, chat_template)
        if tools and "tools" not in source:
            raise RequestError(
                "this model's chat template has no place for tools: leave them out, describe them "
                "in a system message, or use another template (chat_template, --chat-template)"
            )
        text = _render(source, context)
        return _cut_at_mark(text) if continue_final_message else text

    def _source(self, tools: list[dict[str, Any]] | None, chosen: str | None) -> str:
        if chosen is not None:
            if not isinstance(chosen, str):
                raise RequestError(
                    f"chat_template is {type(chosen).__name__}: use the text of a Jinja template"
                )
            return self._sources.get(chosen, chosen)
        if not self._sources:
            raise RequestError(
                "this model has no chat template: pass chat_template, or use generate with a "
                "prompt instead of messages"
            )
        if tools and "tool_use" in self._sources:
            return self._sources["tool_use"]
        if "default" in self._sources:
            return self._sources["default"]
        return next(iter(self._sources.values()))


def as_conversations(messages: Any) -> list[Any]:
    """One conversation or several; each is checked when it is rendered."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise _no_messages(messages)
    if not messages or isinstance(messages[0], Mapping):
        return [messages]
    return list(messages)


def load_chat_template(folder: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
    """The template of a folder: chat_template.jinja, else `chat_template` of its settings."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return ChatTemplate({"default": file.read_text(encoding="utf-8")})
    template = settings.get("chat_template")
    if isinstance(template, str):
        return ChatTemplate({"default": template})
    if isinstance(template, list) and template:
        try:
            return ChatTemplate({entry["name"]: entry["template"] for entry in template})
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"chat_template in {folder / 'tokenizer_config.json'} is neither a string nor a "
                "list of named templates: correct it"
            ) from error
    return None


def _render(source: str, context: Mapping[str, Any]) -> str:
    import jinja2

    try:
        return _compile(source).render(context)
    except jinja2.TemplateError as error:
        raise RequestError(
            f"the chat template refused these messages: {_one_line(error)}"
        ) from error
    except Exception as error:
        # A template is a program from outside: on messages of a form that it does not expect
        # (a missing key, None for a string) it may fail in any way.
        raise RequestError(
            f"the chat template failed on these messages ({type(error).__name__}: "
            f"{_one_line(error)}): "
            "check the roles and contents"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(jinja2.ext.Extension):
        """`{% generation %}` marks text for training; here its body is just rendered."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Sandbox(ImmutableSandboxedEnvironment):
        """Besides what jinja2 keeps out: products and powers that would fill the memory."""

        intercepted_binops = frozenset(("*", "**"))

        def call_binop(
            self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
        ) -> Any:
            if _too_large(operator, left, right):
                raise OverflowError(f"a {operator} in the template has too large a result")
            return super().call_binop(context, operator, left, right)

    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _too_large(operator: str, left: Any, right: Any) -> bool:
    """Whether the result would be a huge number, text or list."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length()
        return bits + right.bit_length() > MAX_BITS
    for many, times in ((left, right), (right, left)):
        if isinstance(times, int) and hasattr(many, "__len__"):
            return len(many) * times > MAX_REPEATED
    return False


def _raise_exception(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML and non-ASCII, which models were not trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _check_list(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise _no_messages(messages)
    if not messages:
        raise RequestError("messages is empty: give at least one message")
    return messages


def _no_messages(given: object) -> RequestError:
    return RequestError(
        'messages is a list such as [{"role": "user", "content": "Hello"}], '
        f"not {type(given).__name__}"
    )


def _check_tools(tools: Any) -> None:
    if tools is None:
        return
    if not isinstance(tools, list | tuple) or not all(isinstance(t, Mapping) for t in tools):
        raise RequestError(
            'tools is a list of objects such as {"type": "function", "function": {...}}'
        )


def _check_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy whose content is a string, which is empty if there are only tool calls."""
    if not isinstance(message, Mapping):
        raise RequestError(
            f'each message is an object with "role" and "content", not {type(message).__name__}'
        )
    if not isinstance(message.get("role"), str):
        raise RequestError('each message needs a "role" that is a string, such as "user"')
    if not all(isinstance(key, str) for key in message):
        raise RequestError("the keys of a message are strings")
    return {**message, "content": _flatten(message.get("content"), message)}


def _flatten(content: Any, message: Mapping[str, Any]) -> str:
    if isinstance(content, str):
        return content
    if content is None and message.get("tool_calls"):
        return ""  # as vLLM does: many templates join contents without checking them
    if isinstance(content, list):
        # Clients send separate blocks as separate parts, so they stay on lines of their own.
        return "\n".join(_part_text(part) for part in content)
    raise RequestError(
        'the "content" of a message is a string or a list of {"type": "text", "text": ...} parts'
    )


def _part_text(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise RequestError(
        'only parts of the form {"type": "text", "text": "..."} can be in a message: '
        "this engine reads no images or audio"
    )


def _mark_end(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": (message["content"] or "") + CONTINUE_MARK}


def _cut_at_mark(text: str) -> str:
    position = text.rfind(CONTINUE_MARK)
    if position < 0:
        raise RequestError(
            "the chat template does not show the end of the last message: "
            "it cannot be continued, so drop continue_final_message"
        )
    return text[:position]
