"""Flags that several commands share, made from the option groups that define them."""

import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from stoop.cli.streams import as_text
from stoop.config.check import check_options
from stoop.config.errors import RequestError
from stoop.config.resolve import make_options
from stoop.config.schema import EngineOptions
from stoop.core.sampling_params import SamplingParams

Command = Callable[..., None]
Model = Annotated[
    str, typer.Argument(help="smollm2-135m, a folder, a GGUF file or a Hugging Face model id")
]

SAMPLING_HELP = {
    "n": "number of answers per prompt",
    "temperature": "sampling temperature; 0 is greedy",
    "top_p": "sample from the smallest set of tokens whose probabilities add up to this",
    "top_k": "sample from this many most likely tokens; 0 means all",
    "min_p": "drop tokens less likely than this fraction of the most likely one",
    "repetition_penalty": "above 1 penalizes tokens of the prompt and the answer so far",
    "presence_penalty": "above 0 penalizes tokens of the answer so far",
    "frequency_penalty": "above 0 penalizes tokens of the answer so far by how often they occur",
    "logit_bias": 'JSON object of token ids and biases, such as {"42": -100}',
    "seed": "random seed; the same seed gives the same answer",
    "stop": "stop when this text has been generated; may be repeated",
    "stop_token_ids": "stop at this token id; may be repeated",
    "bad_words": "never generate this text; may be repeated",
    "include_stop_str_in_output": "keep the stop text in the answer",
    "ignore_eos": "keep generating after the end-of-text token",
    "max_tokens": "maximum length of an answer, in tokens",
    "min_tokens": "do not stop before this many tokens",
    "logprobs": "log probabilities of each token and of this many top tokens; needs --json",
    "skip_special_tokens": "leave special tokens out of the text",
    "num_speculative_tokens": "draft tokens per step, at most what -sc sets; 0 means none",
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


def engine_help(name: str) -> str:
    """What a field of `EngineOptions` says of itself."""
    (found,) = [f for f in dataclasses.fields(EngineOptions) if f.name == name]
    return str(found.metadata["help"])


def check_engine(model: str, engine: dict[str, Any]) -> None:
    """Refuse wrong engine options at once; to import torch alone takes seconds."""
    check_options(make_options(model, engine))


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
    for name in ("stop", "bad_words"):
        flag = f"--{name.replace('_', '-')}"
        values[name] = [as_text(text, f"{flag} {text!r}") for text in values[name]]
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
