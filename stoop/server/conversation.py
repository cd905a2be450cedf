"""A conversation becomes a plan: the prompt, the sampling parameters, how to read the answer.

Chat completions and responses differ in their shapes only; what they mean is decided here, and
how they begin.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request

from stoop.core.sampling_params import SamplingParams
from stoop.core.structured import StructuredOutputs
from stoop.server.errors import refuse
from stoop.server.generation import Generation
from stoop.server.pieces import OneCall, PlainReader, Reader
from stoop.server.prompts import EncodedPrompt
from stoop.server.protocol.base import ResponseFormat, SamplingFields
from stoop.server.reading import AnswerReader, ReasoningCount
from stoop.server.reasoning import (
    END,
    START,
    ReasoningReader,
    closed_reasoning,
    opens_reasoning,
)
from stoop.server.service import Service
from stoop.server.tools.forced import NamedCall, parameters
from stoop.server.transport import make_generation
from stoop.text.tokenizer import Tokenizer

Body = TypeVar("Body", bound=SamplingFields)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a client asks for, apart from sampling."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str = "none"  # auto, required, named
    tool_name: str = ""  # of a named choice
    parallel: bool = True
    structure: dict[str, Any] | None = None  # fields of StructuredOutputs
    variables: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def forced(self) -> bool:
        return self.tool_choice in ("required", "named")

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]


@dataclass(frozen=True)
class Plan:
    prompt: EncodedPrompt
    params: SamplingParams
    tokenizer: Tokenizer
    make_reader: Callable[[], AnswerReader] | None  # None: all text is content
    named: bool = False  # the answer is the arguments of one function


@dataclass(frozen=True)
class Turn:
    """A request whose answer is about to be generated."""

    model: str  # the name that the answer gives
    plan: Plan
    generation: Generation

    def make_reader(self) -> AnswerReader:
        """For one of the answers, whose reasoning is then counted."""
        make = self.plan.make_reader
        reader = make() if make is not None else AnswerReader(PlainReader())
        self.generation.readers.append(reader)
        return reader


async def begin(
    service: Service,
    request: Request,
    body: Body,
    read: Callable[[Body], Conversation],
    num_answers: int = 1,
    **sampling: Any,
) -> Turn:
    """Check the request and plan it; nothing is generated yet.

    sampling: what the endpoint sets of `SamplingParams` beyond the common fields
    """
    model = service.check_model(body.model)
    service.check_room(num_answers)
    plan = await _make_plan(service, read(body), body, **sampling)
    generation = make_generation(
        service,
        request,
        [plan.prompt],
        plan.params,
        priority=body.priority,
        operation="chat",
        shown=plan.prompt.text,
    )
    generation.splits_reasoning = service.settings.reasoning_parser is not None
    return Turn(model, plan, generation)


async def _make_plan(
    service: Service, talk: Conversation, fields: SamplingFields, **sampling: Any
) -> Plan:
    tools = talk.tools if talk.tool_choice != "none" else []
    prompt = await service.prompts.render(
        talk.messages,
        tools or None,
        talk.variables,
        add_generation_prompt=talk.add_generation_prompt,
        continue_final_message=talk.continue_final_message,
    )
    assert prompt.text is not None
    thinks = service.settings.reasoning_parser is not None and not closed_reasoning(prompt.text)
    structure = _structure(service, talk, fields)
    if structure is not None and thinks:
        structure = after_reasoning(structure, opens_reasoning(prompt.text))
    params = fields.sampling(service.llm.default_params, **sampling)
    params = with_structure(params, structure)
    await service.prompts.check_grammar(params)
    tokenizer = service.llm.tokenizer
    markers = (*(service.tool_format.markers if tools else ()), *((START, END) if thinks else ()))
    if _hides_any(tokenizer, markers):
        params = params.replace(skip_special_tokens=False)
    rest = _reader(service, talk)
    make: Callable[[], AnswerReader] | None = None
    if thinks:
        opened, skips = opens_reasoning(prompt.text), params.skip_special_tokens

        def make() -> AnswerReader:
            reader = ReasoningReader((rest or PlainReader)(), opened)
            return AnswerReader(reader, ReasoningCount(reader, tokenizer, skips))

    elif rest is not None:

        def make() -> AnswerReader:
            return AnswerReader(rest())

    return Plan(prompt, params, tokenizer, make, talk.tool_choice == "named")


def with_structure(params: SamplingParams, structure: dict[str, Any] | None) -> SamplingParams:
    """The same with a constraint; the one place that sets `structured_outputs`."""
    if structure is None:
        return params
    return params.replace(structured_outputs=StructuredOutputs.of(structure))


# What a model may write before an answer that must match something.
_THOUGHT: dict[str, Any] = {
    "type": "sequence",
    "elements": [
        {"type": "tag", "begin": START, "content": {"type": "any_text"}, "end": END},
        {"type": "regex", "pattern": "\\n{0,2}"},
    ],
}


def after_reasoning(structure: dict[str, Any], opened: bool) -> dict[str, Any]:
    """The same for an answer that may begin with reasoning.

    Where the prompt has begun the block, the constraint begins after it. Otherwise the model
    decides, so the grammar allows a block before the answer.
    """
    form = _as_format(structure)
    if opened or form is None or "after" in structure:
        return {"after": END, **structure}
    thought = {**_THOUGHT, "elements": [*_THOUGHT["elements"], form]}
    either = {"type": "or", "elements": [thought, form]}
    return {"structural_tag": {"type": "structural_tag", "format": either}}


def _as_format(structure: dict[str, Any]) -> dict[str, Any] | None:
    """A constraint as a part of a structural tag; None if it cannot be one."""
    given = [name for name, value in structure.items() if value]
    if len(given) != 1:
        return None
    (name,) = given
    value = structure[name]
    if name == "json_object":
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if name == "json":
        return {"type": "json_schema", "json_schema": _loaded(name, value)}
    if name == "regex":
        return {"type": "regex", "pattern": value}
    if name == "grammar":
        return {"type": "grammar", "grammar": value}
    if name == "choice" and isinstance(value, list):
        texts = [{"type": "const_string", "value": each} for each in value]
        return {"type": "or", "elements": texts}
    if name == "structural_tag":
        found = _loaded(name, value)
        return found.get("format") if isinstance(found, dict) else None
    return None


def _loaded(name: str, value: Any) -> Any:
    """A schema as text or as an object."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise refuse(f"`structured_outputs.{name}` is not JSON: correct it") from None


def format_structure(given: ResponseFormat | None) -> dict[str, Any] | None:
    """`response_format` as fields of StructuredOutputs."""
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"json_object": True}
    if given.type == "structural_tag":
        if given.format is None:
            raise refuse("`response_format.format` is missing: add it", "response_format.format")
        return {"structural_tag": {"type": "structural_tag", "format": given.format}}
    if given.json_schema is None or given.json_schema.schema_ is None:
        raise refuse(
            "`response_format.json_schema.schema` is missing: add it",
            "response_format.json_schema",
        )
    return schema_structure(given.json_schema.schema_)


def schema_structure(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """A schema of `true` or {} allows any JSON; xgrammar takes an object with content."""
    if schema is False:
        raise refuse("the JSON schema is false, which no answer matches: correct it")
    return {"json": schema} if isinstance(schema, dict) and schema else {"json": "{}"}


def one_structure(
    outputs: dict[str, Any] | None, formatted: dict[str, Any] | None
) -> dict[str, Any] | None:
    """`structured_outputs` or `response_format`, not both."""
    if outputs is not None and formatted is not None:
        raise refuse(
            "`structured_outputs` and `response_format` exclude each other: set one of them",
            "structured_outputs",
        )
    return dict(outputs) if outputs is not None else formatted


def _structure(
    service: Service, talk: Conversation, fields: SamplingFields
) -> dict[str, Any] | None:
    """What the whole answer must match, tool calls included."""
    own = one_structure(fields.structured_outputs, talk.structure)
    if talk.forced and own is not None:
        raise refuse(
            "a forced `tool_choice` and a response format exclude each other: set one of them",
            "tool_choice",
        )
    if talk.tool_choice == "named":
        (tool,) = [t for t in talk.tools if t["function"]["name"] == talk.tool_name]
        return schema_structure(parameters(tool))
    if talk.tool_choice == "required":
        return service.tool_format.forced(talk.tools, talk.parallel)
    if own is not None and talk.tool_choice == "auto" and talk.tools:
        return _calls_or(service, talk, own)
    return own


def _calls_or(service: Service, talk: Conversation, own: dict[str, Any]) -> dict[str, Any]:
    """Either tool calls or an answer in the response format."""
    calls = service.tool_format.forced(talk.tools, talk.parallel).get("structural_tag")
    schema = {"type": "object"} if own.get("json_object") else own.get("json")
    if calls is None or schema is None or len(own) > 1:
        raise refuse(
            "`tools` and this response format cannot be combined: set tool_choice to none, or "
            "leave out one of them",
            "tools",
        )
    answer = {"type": "json_schema", "json_schema": _loaded("json", schema)}
    either = {"type": "or", "elements": [calls["format"], answer]}
    return {"structural_tag": {"type": "structural_tag", "format": either}}


def _reader(service: Service, talk: Conversation) -> Callable[[], Reader] | None:
    if talk.tool_choice == "none" or not talk.tools:
        return None
    if talk.tool_choice == "named":
        return lambda: NamedCall(talk.tool_name)
    form = service.tool_format
    if talk.tool_choice == "required":
        return lambda: form.forced_reader(talk.names)
    if not talk.parallel:  # no grammar keeps the model from more
        return lambda: OneCall(form.reader(talk.names))
    return lambda: form.reader(talk.names)


def _hides_any(tokenizer: Tokenizer, markers: Sequence[str]) -> bool:
    """Whether the tokenizer takes one of these for a special token, which it leaves out."""
    for marker in markers:
        ids = tokenizer.encode(marker, add_special_tokens=False)
        if len(ids) == 1 and ids[0] in tokenizer.special_ids:
            return True
    return False
