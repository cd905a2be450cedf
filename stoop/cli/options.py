"""Flags that several commands share, made from the option groups that define them."""

import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from stoop.config.errors import RequestError
from stoop.config.schema import EngineOptions
from stoop.core.sampling_params import SamplingParams

Command = Callable[..., None]
DEFAULT_MODEL = "smollm2-135m"
Model = Annotated[str, typer.Argument(help="smollm2-135m, a folder, a GGUF file or a hub id")]

SAMPLING_HELP = {
    "n": "answers for each prompt",
    "temperature": "0 is greedy",
    "top_p": "sample from the fewest tokens that reach this probability together",
    "top_k": "sample from this many likeliest tokens; 0: all",
    "min_p": "drop tokens less likely than this share of the likeliest",
    "repetition_penalty": "above 1 discourages tokens of prompt and answer",
    "presence_penalty": "above 0 discourages tokens of the answer",
    "frequency_penalty": "above 0 discourages tokens of the answer, by count",
    "logit_bias": 'JSON of token id to bias, such as {"42": -100}',
    "seed": "fixes every random draw of an answer",
    "stop": "stop at this text; may be repeated",
    "stop_token_ids": "stop at this token id; may be repeated",
    "bad_words": "never generate this text; may be repeated",
    "include_stop_str_in_output": "keep the stop text in the answer",
    "ignore_eos": "go on past the end-of-text token",
    "max_tokens": "longest answer, in tokens",
    "min_tokens": "no stop before this many tokens",
    "logprobs": "log-probabilities of the token and of this many best ones",
    "skip_special_tokens": "leave special tokens out of the text",
    "num_speculative_tokens": "drafts a step, at most the engine's; 0: none",
}


def engine_flags(command: Command, without: tuple[str, ...] = ()) -> Command:
    """Add a flag for every field of `EngineOptions`; the command gets them as `engine`."""
    fields = [f for f in dataclasses.fields(EngineOptions) if f.name not in ("model", *without)]
    hints = typing.get_type_hints(EngineOptions)
    parameters = [
        _parameter("engine", f.name, _flag_type(hints[f.name]), f.default, f.metadata["help"])
        for f in fields
    ]
    return _gather(command, "engine", parameters, dict)


def text_engine_flags(command: Command) -> Command:
    """For commands that deal in text alone."""
    return engine_flags(command, without=("skip_tokenizer_init",))


def sampling_flags(**defaults: Any) -> Callable[[Command], Command]:
    """Add a flag for every sampling option; the command gets them as `sampling`."""
    fields = {f.name: f.default for f in dataclasses.fields(SamplingParams)}
    hints = typing.get_type_hints(SamplingParams)
    parameters = []
    for name, text in SAMPLING_HELP.items():
        kind, default = _flag_type(hints[name]), defaults.get(name, fields[name])
        if name in ("stop", "stop_token_ids", "bad_words"):
            kind, default = list[int] if name == "stop_token_ids" else list[str], []
        elif name == "logit_bias":
            kind = str | None
        parameters.append(_parameter("sampling", name, kind, default, text))
    return lambda command: _gather(command, "sampling", parameters, _sampling_params)


def _sampling_params(values: dict[str, Any]) -> SamplingParams:
    if values["logit_bias"] is not None:
        try:
            values["logit_bias"] = json.loads(values["logit_bias"])
        except json.JSONDecodeError:
            raise RequestError(
                f"--logit-bias {values['logit_bias']!r} is not JSON: write token ids and biases, "
                'such as {"42": -100}'
            ) from None
    return SamplingParams(**values)


def _flag_type(hint: Any) -> Any:
    """The type of a flag: unions other than with None are read as text."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        return (kinds[0] if len(kinds) == 1 else str) | None
    return hint


def _parameter(bundle: str, name: str, kind: Any, default: Any, text: str) -> inspect.Parameter:
    flag = _OTHER_FLAGS.get((bundle, name), "--" + name.replace("_", "-"))
    short = _SHORT_FLAGS.get((bundle, name))
    option = typer.Option(
        *([short] if short else []),
        f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
        help=text,
        rich_help_panel=f"{bundle} options",
        show_default=default not in ([], None),
    )
    return inspect.Parameter(
        f"{bundle}_{name}",
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, option],
    )


# Both groups have a seed; the one of an answer is what people mean.
_OTHER_FLAGS = {("engine", "seed"): "--engine-seed", ("sampling", "n"): "-n"}


_SHORT_FLAGS = {("engine", "speculative_config"): "-sc"}


def _gather(
    command: Command,
    bundle: str,
    parameters: list[inspect.Parameter],
    make: Callable[[dict[str, Any]], Any],
) -> Command:
    """Show `parameters` instead of `bundle`, and hand them over in one piece."""
    signature = inspect.signature(command)
    own = [p for p in signature.parameters.values() if p.name != bundle]

    def wrapped(**values: Any) -> None:
        prefix = len(bundle) + 1
        bundled = {p.name[prefix:]: values.pop(p.name) for p in parameters}
        command(**values, **{bundle: make(bundled)})

    wrapped.__name__ = command.__name__
    wrapped.__doc__ = command.__doc__
    shown = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + parameters
    wrapped.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in shown}
    return wrapped
