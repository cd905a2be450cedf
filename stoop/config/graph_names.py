"""vLLM's options for CUDA graphs, translated to `graph_mode` and the sizes to capture.

They may be arguments by themselves, or keys of a `compilation_config`: a dictionary, JSON text, or
an object with attributes. Keys that are not about graphs only say how vLLM compiles, which changes
nothing here; `vllm_names.py` lists them.
"""

import dataclasses
import enum
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stoop.config.errors import ConfigError
from stoop.config.values import is_whole, plain, shown, unknown_name
from stoop.config.vllm_names import COMPILATION_ARGS, COMPILATION_LEVEL, check_foreign

GRAPH_MODES = ("none", "piecewise", "full", "full_decode_only", "full_and_piecewise", "step")
_THEIR_MODES = GRAPH_MODES[:-1]  # by the same names in upper case
# Options of vLLM's by themselves, and those of them that are also keys of a compilation_config.
GRAPH_OPTIONS = (
    "enforce_eager",
    "cudagraph_mode",
    "cudagraph_capture_sizes",
    "cuda_graph_sizes",
    "max_cudagraph_capture_size",
    "compilation_config",
)
KEYS = (
    "cudagraph_mode",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
    "use_cudagraph",
    "full_cuda_graph",
)


class VllmSizes(list[int]):
    """Sizes under a name of vLLM's: ignored if there are no graphs, as vLLM does."""


class VllmLimit(int):
    """The largest size under a name of vLLM's: ignored likewise."""


class Setting(NamedTuple):
    """An option of stoop's, with what the user wrote for it."""

    name: str
    value: Any
    source: str


def graph_settings(given: Mapping[str, Any]) -> Iterator[Setting]:
    """What vLLM's options say about graphs. None counts as not given."""
    for name in GRAPH_OPTIONS:
        value = plain(given.get(name))
        if value is None:
            continue
        if name == "compilation_config":
            yield from _of_config(value)
        else:
            yield from _translated(name, name, value)


def mode_name(value: Any) -> Any:
    """A graph mode in lower case; a member of an enum by its name."""
    value = value.name if isinstance(value, enum.Enum) else value
    return value.lower() if isinstance(value, str) else value


def parse_sizes(given: object) -> tuple[int, ...]:
    """The sizes in rising order; empty if one of them is not a whole number."""
    if isinstance(given, str):
        given = [
            int(part) if re.fullmatch(" *[0-9]{1,9} *", part) else part for part in given.split(",")
        ]
    if not isinstance(given, Sequence | set | frozenset):
        return ()
    sizes = [size for size in map(plain, given) if is_whole(size)]
    return tuple(sorted(set(sizes))) if len(sizes) == len(given) else ()


def _translated(name: str, label: str, value: Any) -> Iterator[Setting]:
    """label: the name as a message shows it"""
    source = f"{label}={shown(value)}"
    if name == "cudagraph_mode":
        mode = mode_name(value)
        if mode not in _THEIR_MODES:
            known = ", ".join(mode.upper() for mode in _THEIR_MODES)
            raise ConfigError(f"{source}: use {known}, or graph_mode for stoop's own modes")
        yield Setting("graph_mode", mode, source)
    elif name in ("enforce_eager", "use_cudagraph", "full_cuda_graph"):
        if not isinstance(value, bool):
            raise ConfigError(f"{source}: use True or False")
        if value is not (name == "use_cudagraph"):
            mode = "full" if name == "full_cuda_graph" else "none"
            yield Setting("graph_mode", mode, name if name == "enforce_eager" else source)
    elif name == "max_cudagraph_capture_size":
        limit = VllmLimit(value) if is_whole(value) else value  # others are refused later
        yield Setting("max_capture_size", limit, source)
    elif name == "cuda_graph_sizes" and len(parse_sizes(_as_list(value))) == 1:
        # vLLM takes a single number for the largest of its own sizes.
        yield Setting("max_capture_size", VllmLimit(parse_sizes(_as_list(value))[0]), source)
    else:
        sizes = VllmSizes(parse_sizes(value))
        if not sizes:
            raise ConfigError(f"{source}: use whole numbers, such as [1, 2, 4]")
        yield Setting("capture_sizes", sizes, source)


def _as_list(value: Any) -> Any:
    return [value] if is_whole(value) else value


def _of_config(config: Any) -> Iterator[Setting]:
    said = _contents(config)
    if not isinstance(said, Mapping):
        _refuse(
            check_foreign({"compilation_config": COMPILATION_LEVEL}, {"compilation_config": said})
        )
        return
    others = {}
    for name, value in said.items():
        label = f"compilation_config.{name}"
        if name in COMPILATION_ARGS:
            others[label] = value
        elif name not in KEYS:
            raise ConfigError(unknown_name("key of compilation_config", name, KEYS))
        elif plain(value) is not None:
            yield from _translated(name, label, plain(value))
    table = {f"compilation_config.{name}": each for name, each in COMPILATION_ARGS.items()}
    _refuse(check_foreign(table, others))


def _refuse(refusal: str | None) -> None:
    if refusal is not None:
        raise ConfigError(refusal)


def _contents(config: Any) -> Any:
    """A mapping of what the user set, or the value itself."""
    if isinstance(config, str):
        try:
            return json.loads(config)
        except ValueError:
            raise ConfigError(
                f"compilation_config={shown(config)} is not JSON: write an object, such as "
                '{"cudagraph_mode": "FULL"}'
            ) from None
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        # vLLM's own class has dozens of fields: those left at their defaults say nothing.
        fields = {f.name: f for f in dataclasses.fields(config)}
        values = {name: getattr(config, name, None) for name in fields}
        return {
            name: value for name, value in values.items() if not _is_default(fields[name], value)
        }
    if any(hasattr(config, name) for name in KEYS):
        return {n: v for n, v in vars(config).items() if not n.startswith("_")}
    return config


def _is_default(field: "dataclasses.Field[Any]", value: Any) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return field.default is not dataclasses.MISSING and bool(value == field.default)
