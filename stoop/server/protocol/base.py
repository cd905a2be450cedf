"""What requests share: known and refused fields, sampling options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stoop.config.values import shown
from stoop.core.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_IDS,
    SamplingParams,
)
from stoop.server.errors import ApiError, refuse

MAX_INT = 2**31 - 1
MAX_STOPS = 64
Count = Annotated[int, Field(ge=0, le=MAX_INT)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]


@dataclass(frozen=True)
class Foreign:
    """A field of OpenAI's or vLLM's that does nothing here.

    advice: refuses every value but the harmless ones; empty if all are harmless
    """

    advice: str = ""
    harmless: tuple[Any, ...] = ()

    def accepts(self, value: Any) -> bool:
        if value is None or not self.advice:
            return True
        return any(type(value) is type(one) and value == one for one in self.harmless)


def ignored(*names: str) -> dict[str, Foreign]:
    """Fields whose every value is harmless: they change no answer."""
    return dict.fromkeys(names, Foreign())


def refused(advice: str, *harmless: Any) -> Foreign:
    return Foreign(advice, harmless)


COMMON_FOREIGN: Mapping[str, Foreign] = {
    **ignored("user", "metadata", "safety_identifier", "prompt_cache_key"),
    **ignored("prompt_cache_retention", "prompt_cache_options", "request_id"),
    "service_tier": refused("stoop has one tier: leave it out", "auto", "default"),
    "store": refused("stoop stores no answers: leave it out", False),
    "best_of": refused("ask for n answers and take the best", 1),
    "use_beam_search": refused("stoop has no beam search: sample n answers", False),
    "length_penalty": refused("it belongs to beam search, which stoop lacks", 1, 1.0),
    "allowed_token_ids": refused("use structured_outputs or logit_bias"),
    "truncate_prompt_tokens": refused("shorten the prompt yourself", -1),
    "spaces_between_special_tokens": Foreign(),
    "cache_salt": refused("cached prefixes are shared by all requests: leave it out"),
    "kv_transfer_params": refused("stoop cannot move its KV cache: leave it out"),
    "vllm_xargs": refused("stoop has no plugins: leave it out"),
    "logits_processors": refused("stoop has no plugins: leave it out"),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        refused("use structured_outputs, as current vLLM does"),
    ),
    **ignored("guided_decoding_backend", "guided_whitespace_pattern"),
    "return_token_ids": refused("use /tokenize", False),
    "return_tokens_as_token_ids": refused("use /tokenize", False),
}


class Wire(BaseModel):
    """Types are strict: "1" is not a number."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class ApiRequest(Wire):
    """A request body. Fields that stoop cannot honour are refused by name."""

    foreign: ClassVar[Mapping[str, Foreign]] = COMMON_FOREIGN

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            raise refuse("the body is not a JSON object: send one", code="invalid_json")
        known = {}
        for name, value in given.items():
            if name in cls.model_fields:
                known[name] = value
            else:
                check_foreign(cls.foreign, name, value)
        return known


def check_foreign(table: Mapping[str, Foreign], name: str, value: Any) -> None:
    rule = table.get(name)
    if rule is None:
        raise refuse(
            f"stoop does not know `{name[:80]}`: leave it out", name[:80], "unknown_parameter"
        )
    if not rule.accepts(value):
        raise ApiError(
            400,
            f"`{name}` = {shown(value)} is not supported: {rule.advice}",
            param=name,
            code="unsupported_parameter",
        )


def check_tool_names(names: Sequence[str]) -> None:
    """A call or a `tool_choice` says which tool is meant by its name alone."""
    for name in names:
        if names.count(name) > 1:
            raise refuse(
                f"`tools` has {shown(name)} more than once: give each its own name", "tools"
            )


class StreamOptions(Wire):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage in every chunk
    include_obfuscation: bool | None = None  # ignored: chunks are never padded


class JsonSchema(Wire):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Wire):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None  # of a structural_tag


class SamplingFields(ApiRequest):
    """Sampling options under OpenAI's and vLLM's names."""

    model: str | None = None
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=MAX_INT)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_LOGIT_BIAS)
        ]
        | None
    ) = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_BAD_WORDS)] | None = None
    prompt_logprobs: int | None = Field(default=None, ge=-1, le=MAX_LOGPROBS)
    priority: int | None = Field(default=None, ge=-(2**31), le=MAX_INT)
    num_speculative_tokens: Count | None = None
    return_draft_positions: bool | None = None
    structured_outputs: dict[str, Any] | None = None

    def sampling(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        """The parameters of this request; fields that it leaves out are the model's defaults."""
        options = {name: getattr(self, name) for name in _PASSED}
        options |= {name: value for name, value in more.items() if name != "max_tokens"}
        given = {name: value for name, value in options.items() if value is not None}
        return defaults.replace(max_tokens=more.get("max_tokens"), **given)


_PASSED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens", "ignore_eos",
    "skip_special_tokens", "include_stop_str_in_output", "bad_words", "prompt_logprobs",
    "num_speculative_tokens",
)  # fmt: skip


class GenerationFields(SamplingFields):
    """What chat and text completions share."""

    n: int | None = Field(default=None, ge=1, le=MAX_N)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_chunks(self) -> bool:
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "GenerationFields":
        if self.stream_options is not None and not self.stream:
            raise refuse("`stream_options` needs `stream`: true", "stream_options")
        return self
