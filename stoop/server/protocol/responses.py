"""`/v1/responses`, for text and without state."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from stoop.core.sampling_params import MAX_LOGPROBS
from stoop.server.errors import refuse
from stoop.server.protocol.base import (
    COMMON_FOREIGN,
    SamplingFields,
    StreamOptions,
    Wire,
    check_tool_names,
    refused,
)

NO_STATE = "stoop keeps no state between requests: send the whole conversation as `input`"
LOGPROBS = "message.output_text.logprobs"


class TextFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(Wire):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class FunctionTool(Wire):
    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_chat_tool(self) -> dict[str, Any]:
        function = self.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
        return {"type": "function", "function": function}


class NamedFunctionTool(Wire):
    type: Literal["function"]
    name: str


class ReasoningSettings(Wire):
    effort: str | None = None  # reaches the template
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponsesRequest(SamplingFields):
    """A text, or a conversation, to be answered."""

    foreign: ClassVar = {
        **COMMON_FOREIGN,
        "previous_response_id": refused(NO_STATE),
        "conversation": refused(NO_STATE),
        "prompt": refused("stoop stores no prompts: send `input`"),
        "background": refused("stoop answers while the client waits: leave it out", False),
        "max_tool_calls": refused("stoop runs no tools itself: leave it out"),
        "truncation": refused("shorten the input yourself", "disabled"),
        "context_management": refused(NO_STATE),
        "moderation": refused("stoop moderates nothing: leave it out"),
        "n": refused("send the request several times", 1),
        "structural_tag": refused("use structured_outputs"),
    }
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextSettings | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningSettings | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    metadata: dict[str, str] | None = None  # comes back in the response
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.include) or bool(self.top_logprobs)

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, given: Any) -> Any:
        """Say by name which tool or part of an answer stoop lacks."""
        if not isinstance(given, dict):
            return given
        tools = given.get("tools")
        for tool in tools if isinstance(tools, list) else ():
            kind = tool.get("type") if isinstance(tool, dict) else None
            if isinstance(kind, str) and kind != "function":
                raise refuse(
                    f"`tools` has a tool of type {kind[:80]!r}: stoop takes functions only",
                    "tools",
                    "unsupported_parameter",
                )
        include = given.get("include")
        for each in include if isinstance(include, list) else ():
            if each != LOGPROBS:
                raise refuse(
                    f"`include` has {str(each)[:80]!r}: stoop has only {LOGPROBS}",
                    "include",
                    "unsupported_parameter",
                )
        return given

    @model_validator(mode="after")
    def _consistent(self) -> "ResponsesRequest":
        for name in ("prompt_logprobs", "return_draft_positions"):
            value = getattr(self, name)
            if value is not None and value is not False:
                raise refuse(
                    f"`{name}` has no place in a response: use /v1/chat/completions",
                    name,
                    "unsupported_parameter",
                )
        check_tool_names([tool.name for tool in self.tools or ()])
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise refuse("`tool_choice` needs `tools`", "tool_choice")
        if isinstance(self.tool_choice, NamedFunctionTool):
            name = self.tool_choice.name
            if all(tool.name != name for tool in self.tools or ()):
                raise refuse(f"`tool_choice` names {name!r}, which no tool has", "tool_choice")
        return self
