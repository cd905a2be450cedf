"""`stoop serve`: an OpenAI-compatible HTTP server."""

import dataclasses
import logging
import sys
import typing
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import typer

from stoop.cli.logs import set_up_json_logging
from stoop.cli.options import (
    Command,
    Model,
    check_engine,
    engine_flags,
    gather_flags,
    make_flag,
)
from stoop.cli.progress import StageProgress
from stoop.cli.start import print_started
from stoop.config.errors import ConfigError
from stoop.config.schema import DEFAULT_MODEL
from stoop.server.settings import ServerSettings, environment_keys

if TYPE_CHECKING:
    from stoop.async_llm import AsyncLLM
    from stoop.server.service import Service

LISTS = ("model_names", "api_keys", "allow_origins", "allow_hosts")


def server_flags(command: Command) -> Command:
    """Add a flag for every field of `ServerSettings` that has a help text; the command gets them
    as `server`."""
    hints = typing.get_type_hints(ServerSettings)
    flags = []
    for field in dataclasses.fields(ServerSettings):
        if "help" in field.metadata:
            kind, default = hints[field.name], field.default
            if field.name in LISTS:
                kind, default = list[str], []
            made = make_flag(
                field.name,
                kind,
                default,
                field.metadata["help"],
                panel=field.metadata["panel"],
                names=[field.metadata["flag"]] if field.metadata["flag"] else (),
            )
            flags.append(made.replace(name=f"server_{field.name}"))
    return gather_flags(command, "server", flags, dict)


def serving_engine_flags(command: Command) -> Command:
    """Some requests will have a grammar, so their steps are captured, too."""
    defaults = {"capture_structured": True}
    return engine_flags(command, without=("skip_tokenizer_init",), defaults=defaults)


@serving_engine_flags
@server_flags
def serve(
    model: Model = DEFAULT_MODEL,
    engine: dict[str, Any] = {},  # noqa: B006
    server: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Serve a model over HTTP with OpenAI's API, at http://127.0.0.1:8000/v1 by default."""
    _set_up_request_log()  # to standard error as it is now: its lines are complete
    tell = set_up_json_logging() if server["log_format"] == "json" else None
    check_engine(model, engine)
    given: dict[str, Any]
    given = {name: tuple(value) if name in LISTS else value for name, value in server.items()}
    given["model_names"] = given["model_names"] or _names(model)
    given["api_keys"] += environment_keys()
    settings = ServerSettings(**given)
    run = _import_server()
    raise typer.Exit(_run(run, settings, model, engine, tell))


def _names(model: str) -> tuple[str, ...]:
    """The model as given; a folder or a file also by its own name, which comes first."""
    path = Path(model)
    if path.exists() and path.resolve().name != model:
        return (path.resolve().name, model)
    return (model,)


def _import_server() -> ModuleType:
    """The module that needs packages which other commands do not."""
    try:
        from stoop.server import run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "stoop":
            raise
        raise ConfigError(
            f"stoop serve needs {error.name}: install it with pip install 'stoop[serve]'"
        ) from None
    return run


def _set_up_request_log() -> None:
    """One line per request, as it is, whatever `STOOP_LOG` says."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger("stoop.server.requests")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)


def _run(
    run: Any,
    settings: ServerSettings,
    model: str,
    engine: dict[str, Any],
    tell: Callable[[str, str], None] | None = None,
) -> int:
    """tell: takes the lines that the engine's process prints, with a name for them"""
    import asyncio

    if not settings.loopback and not settings.api_keys:
        print(
            f"warning: {settings.host} is reachable from other machines and there is no --api-key: "
            "anyone there can use this server",
            file=sys.stderr,
        )
    bound = run.open_socket(settings)

    async def start() -> "AsyncLLM":
        with StageProgress() as report:
            report("starting", 0, None)
            from stoop.async_llm import AsyncLLM
            from stoop.grammar.parsing import import_early

            starting = AsyncLLM.start(
                model,
                report=report,
                max_restarts=settings.max_restarts,
                stall_timeout=settings.stall_timeout,
                on_printed=partial(tell, "stoop.engine.core_process") if tell else None,
                **engine,
            )
            if engine.get("capture_structured"):
                # Grammars are expected. The import overlaps with the start of the other process.
                llm, _ = await asyncio.gather(starting, asyncio.to_thread(import_early))
            else:
                llm = await starting
        print_started(model, llm.config, llm.metrics(), report.seconds)
        return llm

    def announce(service: "Service", address: str) -> None:
        names = " and ".join(settings.model_names)
        page = f", chat page at {address}/" if address.startswith("http") else ""
        drafts = drafts_a_step(service.num_drafts, "spec_decode_policy" in service.llm.metrics())
        line = f"serving {names} at {address}/v1{page}{drafts}; Ctrl-C stops"
        print(line, file=sys.stderr, flush=True)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        code: int = runner.run(run.serve(start, settings, bound, announce))
    return code


def drafts_a_step(most: int, varies: bool) -> str:
    """varies: whether steps may make fewer"""
    if most == 0:
        return ""
    return f", {'up to ' if varies else ''}{most} draft{'s' if most > 1 else ''} a step"


def _loop_factory() -> Any:
    """uvloop's if it is installed; asyncio's own otherwise."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
