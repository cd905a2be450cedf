"""`--help` that shows every option name in full at any width, on a terminal and in a pipe."""

import functools
import inspect
import re
import shutil
import textwrap
from typing import Any

from typer.core import TyperGroup

MIN_WIDTH, MAX_WIDTH = 40, 100
NAMES_WIDTH = 28  # of the left column; longer names get a line of their own
NARROW = 64  # below this width there is one column
TIE = "\0"  # a non-breaking space
MAX_TIED = 30  # characters; a default this short stays on one line

# Typer's names of value types, in old and new versions.
_VALUES = (("int", "INT"), ("float", "FLOAT"), ("path", "PATH"), ("file", "PATH"))


class HelpfulGroup(TyperGroup):
    """A command group that uses this module's help for itself and all its subcommands."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        _adopt(self)


def _adopt(command: Any) -> None:
    command.format_help = functools.partial(_write_help, command)
    for below in getattr(command, "commands", {}).values():
        _adopt(below)


def _write_help(command: Any, ctx: Any, formatter: Any) -> None:
    width = max(MIN_WIDTH, min(shutil.get_terminal_size().columns, MAX_WIDTH))
    formatter.write(help_text(command, ctx, width) + "\n")


def help_text(command: Any, ctx: Any, width: int) -> str:
    """Format a command's usage, description, arguments, options and subcommands."""
    parts = [_usage(command, ctx, width), _description(command, width)]
    for title, rows in _groups(command, ctx).items():
        column = NAMES_WIDTH
        if title == "Commands":
            column = 2 + max(len(name) for name, _ in rows)
        if width < NARROW:
            column = 4
        parts.append("\n".join([f"{title}:", *(_row(*row, column, width) for row in rows)]))
    return "\n\n".join(part for part in parts if part)


def _usage(command: Any, ctx: Any, width: int) -> str:
    parts = ["[OPTIONS]"]
    for param in command.get_params(ctx):
        if _is_argument(param):
            name = _argument_name(param)
            parts.append(name if param.required else f"[{name}]")
    if hasattr(command, "commands"):
        parts.append("COMMAND [ARGS]...")
    return _wrap(f"Usage: {ctx.command_path} {' '.join(parts)}", width, hanging=4)


def _description(command: Any, width: int) -> str:
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    return "\n\n".join(_wrap(paragraph, width) for paragraph in paragraphs)


def _groups(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Collect names and help texts by heading: arguments, options, option groups, commands."""
    found: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for param in command.get_params(ctx):
        if getattr(param, "hidden", False):
            continue
        title = getattr(param, "rich_help_panel", None)
        title = title or ("Arguments" if _is_argument(param) else "Options")
        found.setdefault(title[0].upper() + title[1:], []).append(_explained(param, ctx))
    for name, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            found.setdefault("Commands", []).append((name, _first_sentence(below.help or "")))
    return {title: rows for title, rows in found.items() if rows}


def _explained(param: Any, ctx: Any) -> tuple[str, str]:
    if _is_argument(param):
        names = _argument_name(param)
    else:
        opts = sorted(param.opts, key=len)
        names = ", ".join([*opts, *param.secondary_opts])
        if not param.is_flag:
            names += f" {_value_name(param, ctx)}"
    text = "show this help and exit" if "--help" in param.opts else (param.help or "")
    text, _, stated = text.partition("; default: ")
    default = f"default: {stated}" if stated else _default(param)
    default = "required" if param.required else default
    if len(default) <= MAX_TIED:
        default = default.replace(" ", TIE)
    return names, f"{text} [{default}]".strip() if default else text


def _default(param: Any) -> str:
    """Format a default as a user would write it; empty if there is none to show."""
    value, show = param.default, getattr(param, "show_default", True)
    if isinstance(show, str):
        return f"default: {show}"
    if not show or value is None or value == [] or value == "" or callable(value):
        return ""
    if getattr(param, "is_flag", False):
        # A flag without an opposite is off by default; saying so would be noise.
        return f"default: {'on' if value else 'off'}" if param.secondary_opts else ""
    return f"default: {value}"


def _value_name(param: Any, ctx: Any) -> str:
    if param.metavar:
        return str(param.metavar)
    names, _ = param.get_help_record(ctx) or ("", "")
    kind = re.sub(r"(?<!\S)-[\w-]+", "", names).lower()
    return next((name for part, name in _VALUES if part in kind), "TEXT")


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


def _argument_name(param: Any) -> str:
    return str(param.metavar or param.name).upper()


def _first_sentence(text: str) -> str:
    paragraph = " ".join(inspect.cleandoc(text).split("\n\n")[0].split())
    return re.split(r"(?<=\w)\. ", paragraph)[0].rstrip(".")


def _row(names: str, text: str, column: int, width: int) -> str:
    """Format names and help text in two columns; the text goes below names that are too long."""
    indent = 2 + column
    lines = _wrap(text, width - indent).splitlines()
    head = f"  {names}"
    if lines and len(head) < indent - 1:
        head = f"{head:<{indent}}{lines.pop(0)}"
    return "\n".join([head, *(" " * indent + line for line in lines)])


def _wrap(text: str, width: int, hanging: int = 0) -> str:
    """Wrap text without breaking option names."""
    wrapped = textwrap.wrap(
        " ".join(text.split()),
        width,
        subsequent_indent=" " * hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(wrapped).replace(TIE, " ")
