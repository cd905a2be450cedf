"""`/v1/chat/completions`."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stoop.core.sampling_params import MAX_LOGPROBS
from stoop.server.errors import refuse
from stoop.server.protocol.base import (
    COMMON_FOREIGN,
    Count,
    GenerationFields,
    Wire,
    check_tool_names,
    ignored,
    refused,
)

MAX_TOOLS = 128


class Message(BaseModel):
    """One message. Further keys reach the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None

    def as_dict(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class Function(Wire):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Wire):
    type: Literal["function"]
    function: Function

    def as_dict(self) -> dict[str, Any]:
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": function}


class NamedFunction(Wire):
    name: str


class NamedTool(Wire):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(GenerationFields):
    """Chat messages to be answered."""

    foreign: ClassVar = {
        **COMMON_FOREIGN,
        "audio": refused("stoop writes text only: leave it out"),
        "modalities": refused("stoop writes text only: leave it out", ["text"]),
        "prediction": refused("stoop drafts by itself: leave it out"),
        "web_search_options": refused("stoop cannot search the web: leave it out"),
        "functions": refused("use tools"),
        "function_call": refused("use tool_choice", "none", "auto"),
        "verbosity": refused("ask for it in a message", "medium"),
        "chat_template": refused("start the server with --chat-template FILE instead"),
        "documents": refused("put documents into a message, or into chat_template_kwargs"),
        "mm_processor_kwargs": refused("stoop reads text only: leave it out"),
        "moderation": refused("stoop moderates nothing: leave it out"),
        "include_reasoning": refused("skip `reasoning_content` in the answer", True),
        **ignored("chat_template_content_format"),
        "add_special_tokens": refused("the template writes special tokens", False),
    }
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: Literal[False] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None  # reaches the template
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def token_limit(self) -> Count | None:
        both = [self.max_tokens, self.max_completion_tokens]
        return min((limit for limit in both if limit is not None), default=None)

    @model_validator(mode="after")
    def _consistent(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise refuse("`top_logprobs` needs `logprobs`: true", "top_logprobs")
        if self.stream and self.prompt_logprobs is not None:
            raise refuse(
                "`prompt_logprobs` has no place in a chat stream: leave out `stream`, or use "
                "/v1/completions",
                "prompt_logprobs",
                "unsupported_parameter",
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise refuse(
                "`continue_final_message` and `add_generation_prompt` exclude each other: "
                "set one of them",
                "continue_final_message",
            )
        check_tool_names([tool.function.name for tool in self.tools or ()])
        forced = self.tool_choice not in (None, "none", "auto")
        if forced and not self.tools:
            raise refuse("`tool_choice` needs `tools`", "tool_choice")
        if isinstance(self.tool_choice, NamedTool) and self.tools:
            name = self.tool_choice.function.name
            if all(tool.function.name != name for tool in self.tools):
                raise refuse(f"`tool_choice` names {name!r}, which no tool has", "tool_choice")
        return self
