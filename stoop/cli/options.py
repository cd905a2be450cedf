"""Flags shared by several commands, generated from the option dataclasses."""

import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from stoop.cli.streams import as_text
from stoop.config.check import check_options
from stoop.config.errors import ConfigError, RequestError
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
    "top_k": "sample from the k most likely tokens; 0 means all",
    "min_p": "drop tokens less likely than this fraction of the most likely one",
    "repetition_penalty": "above 1 penalizes tokens that occur in the prompt or the answer",
    "presence_penalty": "above 0 penalizes tokens that occur in the answer",
    "frequency_penalty": "above 0 penalizes tokens by how often they occur in the answer",
    "logit_bias": 'JSON object that maps token ids to biases, such as {"42": -100}',
    "seed": "random seed; the same seed gives the same answer",
    "stop": "stop when this text is generated; may be repeated",
    "stop_token_ids": "stop at this token id; may be repeated",
    "bad_words": "never generate this text; may be repeated",
    "include_stop_str_in_output": "keep the stop text in the answer",
    "ignore_eos": "keep generating after the end-of-text token",
    "max_tokens": "maximum length of an answer, in tokens",
    "min_tokens": "minimum length of an answer, in tokens",
    "logprobs": "print log probabilities of each token and this many top tokens; needs --json",
    "skip_special_tokens": "leave special tokens out of the text",
    "num_speculative_tokens": "draft tokens per step, at most what -sc sets; 0 means none",
}


# Name, type, default and help of flags that vLLM's users know; `translate` takes them.
VLLM_FLAGS: tuple[tuple[str, Any, Any, str], ...] = (
    ("enforce_eager", bool, False, "the same as --graph-mode none"),
    (
        "cudagraph_mode",
        str | None,
        None,
        "the same as --graph-mode, for the modes that vLLM has, such as FULL_AND_PIECEWISE",
    ),
    (
        "compilation_config",
        str | None,
        None,
        "JSON; only cudagraph_mode, cudagraph_capture_sizes and max_cudagraph_capture_size are "
        "used",
    ),
)


def engine_flags(
    command: Command, without: tuple[str, ...] = (), defaults: Mapping[str, Any] | None = None
) -> Command:
    """Add a flag for every field of `EngineOptions`; the command gets them as `engine`.

    defaults: those of this command that differ from the engine's
    """
    chosen = defaults or {}
    fields = [f for f in dataclasses.fields(EngineOptions) if f.name not in ("model", *without)]
    hints = typing.get_type_hints(EngineOptions)
    parameters = [
        _parameter(
            "engine",
            f.name,
            _flag_type(hints[f.name]),
            chosen.get(f.name, f.default),
            f.metadata["help"],
        )
        for f in fields
    ]
    if "graph_mode" not in without:
        parameters += [_vllm_flag(name, *rest) for name, *rest in VLLM_FLAGS]
    return gather_flags(command, "engine", parameters, _engine_options)


def _vllm_flag(name: str, kind: Any, default: Any, text: str) -> inspect.Parameter:
    return _parameter("engine", name, kind, default, text, panel="names from vLLM")


def _engine_options(values: dict[str, Any]) -> dict[str, Any]:
    """vLLM's names only if they were used."""
    unused = {name for name, _, default, _ in VLLM_FLAGS if values.get(name) == default}
    return {name: value for name, value in values.items() if name not in unused}


def text_engine_flags(command: Command) -> Command:
    """Engine flags for commands that work with text only."""
    return engine_flags(command, without=("skip_tokenizer_init",))


def engine_help(name: str) -> str:
    """The help text of a field of `EngineOptions`."""
    (found,) = [f for f in dataclasses.fields(EngineOptions) if f.name == name]
    return str(found.metadata["help"])


def check_engine(model: str, engine: dict[str, Any]) -> None:
    """Refuse invalid engine options before torch is imported, which takes seconds."""
    check_options(make_options(model, engine))


def given_options(context: typer.Context) -> set[str]:
    """The engine options that the user gave, whatever their values."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source and source.name != "DEFAULT"]
    return {name.removeprefix("engine_") for name in given if name.startswith("engine_")}


def choose_names(flag: str, text: str, known: Sequence[str]) -> list[str]:
    """Names separated by commas, in any case."""
    given = text.split(",")
    for name in given:
        if name.lower() not in known:
            raise ConfigError(f"{flag} has {name!r}: use {', '.join(known)}")
    return [name.lower() for name in given]


def sampling_flags(hidden: Sequence[str] = (), **defaults: Any) -> Callable[[Command], Command]:
    """Add a flag for every sampling option; the command gets them as `sampling`.

    hidden: options left out of `--help` since the command refuses them
    """
    fields = {f.name: f.default for f in dataclasses.fields(SamplingParams)}
    hints = typing.get_type_hints(SamplingParams)
    parameters = []
    for name, text in SAMPLING_HELP.items():
        kind, default = _flag_type(hints[name]), defaults.get(name, fields[name])
        if name in ("stop", "stop_token_ids", "bad_words"):
            kind, default = list[int] if name == "stop_token_ids" else list[str], []
        elif name == "logit_bias":
            kind = str | None
        flag = _parameter("sampling", name, kind, default, text, hidden=name in hidden)
        parameters.append(flag)
    return lambda command: gather_flags(command, "sampling", parameters, _sampling_params)


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
    """Return the type of a flag. A union, other than with None, is read as text."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        return (kinds[0] if len(kinds) == 1 else str) | None
    return hint


# Both groups have a seed; --seed is the request's.
_OTHER_FLAGS = {("engine", "seed"): "--engine-seed", ("sampling", "n"): "-n"}
_SHORT_FLAGS = {
    ("engine", "speculative_config"): "-sc",
    ("engine", "compilation_config"): "-cc",
}


def _parameter(
    bundle: str,
    name: str,
    kind: Any,
    default: Any,
    text: str,
    hidden: bool = False,
    panel: str | None = None,
) -> inspect.Parameter:
    """Make a flag whose parameter name starts with its bundle, so that bundles do not clash."""
    names = [_OTHER_FLAGS.get((bundle, name), flag_name(name))]
    if (bundle, name) in _SHORT_FLAGS:
        names.insert(0, _SHORT_FLAGS[bundle, name])
    panel = panel or f"{bundle} options"
    made = make_flag(name, kind, default, text, panel=panel, names=names, hidden=hidden)
    return made.replace(name=f"{bundle}_{name}")


def gather_flags(
    command: Command,
    bundle: str,
    parameters: list[inspect.Parameter],
    make: Callable[[dict[str, Any]], Any],
) -> Command:
    """Show `parameters` as flags and pass them to the command as one argument, `bundle`."""

    def call(**values: Any) -> None:
        prefix = len(bundle) + 1
        bundled = {p.name[prefix:]: values.pop(p.name) for p in parameters}
        command(**values, **{bundle: make(bundled)})

    return show_flags(command, call, (bundle,), parameters)


# ---- flags from option dataclasses, for any command ----


def flag_name(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


def make_flag(
    name: str,
    kind: Any,
    default: Any,
    text: str,
    *,
    panel: str,
    names: Sequence[str] = (),
    hidden: bool = False,
) -> inspect.Parameter:
    """Make a parameter that typer shows as a flag; a boolean also gets a flag that turns it off.

    names: flags to use instead of the field's own, the long one last
    """
    *short, flag = names or (flag_name(name),)
    option = typer.Option(
        *short,
        f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
        help=text,
        rich_help_panel=panel,
        show_default=default not in ([], None),
        hidden=hidden,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, option],
    )


def show_flags(
    command: Command, call: Command, hidden: Sequence[str], flags: Sequence[inspect.Parameter]
) -> Command:
    """Make `call` look like `command` to typer, with `flags` in place of the `hidden` arguments."""
    signature = inspect.signature(command)
    own = [p for p in signature.parameters.values() if p.name not in hidden]
    shown = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + list(flags)
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in shown}
    return call
