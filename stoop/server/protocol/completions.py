"""`/v1/completions`, `/tokenize` and `/detokenize`."""

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from stoop.core.sampling_params import MAX_LOGPROBS
from stoop.server.errors import refuse
from stoop.server.protocol.base import (
    COMMON_FOREIGN,
    ApiRequest,
    Count,
    GenerationFields,
    TokenId,
    refused,
)
from stoop.server.protocol.chat import Message, Tool

TokenIds = Annotated[list[TokenId], Field(min_length=1)]


class CompletionRequest(GenerationFields):
    """Text, or token ids, to be continued."""

    foreign: ClassVar = {
        **COMMON_FOREIGN,
        "suffix": refused("stoop's models cannot fill in the middle: leave it out", ""),
        "prompt_embeds": refused("a prompt is text or token ids"),
        "add_special_tokens": refused("send token ids to control them", True),
    }
    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[TokenIds], Field(min_length=1)]
    )
    max_tokens: Count | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @model_validator(mode="after")
    def _some_tokens(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise refuse("`max_tokens` is 0: use at least 1, or set `echo`", "max_tokens")
        if self.echo and self.stream and self.max_tokens == 0:
            raise refuse("`max_tokens` is 0: streams need at least 1", "max_tokens")
        return self


class TokenizeRequest(ApiRequest):
    """A text, or chat messages, as token ids."""

    foreign: ClassVar = {
        **COMMON_FOREIGN,
        "chat_template": refused("start the server with --chat-template FILE instead"),
        "mm_processor_kwargs": refused("stoop reads text only: leave it out"),
    }
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None  # true for a prompt, false for messages
    return_token_strs: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise refuse("send either `prompt` or `messages`", "prompt")
        return self


class DetokenizeRequest(ApiRequest):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=2**32)]]
