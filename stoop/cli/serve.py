"""`stoop serve`: an OpenAI-compatible HTTP server."""

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoop.cli.options import Model, check_engine, text_engine_flags
from stoop.cli.progress import StageProgress
from stoop.cli.start import print_started
from stoop.config.errors import ConfigError
from stoop.config.schema import DEFAULT_MODEL

if TYPE_CHECKING:
    from stoop.async_llm import AsyncLLM
    from stoop.server.service import Service
    from stoop.server.settings import ServerSettings

LIMITS, ANSWERS, LOGS = "limits", "tools and reasoning", "logs and metrics"


def _option(text: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


@text_engine_flags
def serve(
    model: Model = DEFAULT_MODEL,
    host: Annotated[
        str, _option("address to listen on; 0.0.0.0 for all, and then set an API key")
    ] = "127.0.0.1",
    port: Annotated[int, _option("port to listen on; 0 picks a free one")] = 8000,
    uds: Annotated[
        str | None, _option("listen on this Unix socket instead of a host and port")
    ] = None,
    served_model_name: Annotated[
        list[str],
        _option("name of the model in the API; may be repeated; default: the model as given"),
    ] = [],  # noqa: B006
    api_key: Annotated[
        list[str],
        _option(
            "key that clients must send as a bearer token; may be repeated; STOOP_API_KEY holds "
            "more, separated by commas, and does not show in the list of processes"
        ),
    ] = [],  # noqa: B006
    allow_origin: Annotated[
        list[str],
        _option("web origin whose pages may call the API, such as https://example.org; * for all"),
    ] = [],  # noqa: B006
    max_queue: Annotated[
        int,
        _option(
            "answers that may wait besides the --max-num-seqs that run; more get status 429",
            panel=LIMITS,
        ),
    ] = 1024,
    max_answers: Annotated[
        int, _option("most answers of one request: its prompts times n", panel=LIMITS)
    ] = 256,
    max_body_bytes: Annotated[
        int, _option("largest request body; larger ones get status 413", panel=LIMITS)
    ] = 16 << 20,
    request_timeout: Annotated[
        float, _option("seconds that one request may take; 0 for no limit", panel=LIMITS)
    ] = 600.0,
    drain_timeout: Annotated[
        float,
        _option("seconds that open requests get after SIGTERM or Ctrl-C", panel=LIMITS),
    ] = 30.0,
    max_restarts: Annotated[
        int, _option("times that a dead engine process is restarted in ten minutes", panel=LIMITS)
    ] = 3,
    tool_call_parser: Annotated[
        str,
        _option(
            "format of tool calls: auto (from the chat template), hermes, llama3_json or pythonic",
            panel=ANSWERS,
        ),
    ] = "auto",
    reasoning_parser: Annotated[
        str | None,
        _option(
            "put <think>...</think> into reasoning_content: think, or vLLM's names deepseek_r1 "
            "and qwen3",
            panel=ANSWERS,
        ),
    ] = None,
    log_format: Annotated[str, _option("log lines of requests: text or json", panel=LOGS)] = "text",
    log_requests: Annotated[
        bool, _option("write one line per request to standard error", panel=LOGS)
    ] = True,
    log_prompts: Annotated[bool, _option("put prompts into these lines", panel=LOGS)] = False,
    metrics_names: Annotated[
        str, _option("names of the metrics at /metrics: stoop or vllm", panel=LOGS)
    ] = "stoop",
    otlp_traces_endpoint: Annotated[
        str | None,
        _option("send OpenTelemetry traces here, such as http://localhost:4317", panel=LOGS),
    ] = None,
    engine: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Serve a model over HTTP with OpenAI's API, at http://127.0.0.1:8000/v1 by default."""
    check_engine(model, engine)
    modules = _import_server()
    if metrics_names not in ("stoop", "vllm"):
        raise ConfigError(f"--metrics-names {metrics_names!r}: use stoop or vllm")
    settings = modules.settings.ServerSettings(
        model_names=tuple(served_model_name) or _names(model),
        host=host,
        port=port,
        uds=uds,
        api_keys=(*api_key, *modules.settings.environment_keys()),
        allow_origins=tuple(allow_origin),
        max_queue=max_queue,
        max_answers=max_answers,
        max_body_bytes=max_body_bytes,
        request_timeout=request_timeout,
        drain_timeout=drain_timeout,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        log_format=log_format,
        log_requests=log_requests,
        log_prompts=log_prompts,
        vllm_metric_names=metrics_names == "vllm",
        otlp_traces_endpoint=otlp_traces_endpoint,
    )
    _set_up_request_log()
    raise typer.Exit(_run(modules.run, settings, model, engine, max_restarts))


def _names(model: str) -> tuple[str, ...]:
    """The model as given; a folder or a file also by its own name, which comes first."""
    path = Path(model)
    if path.exists() and path.resolve().name != model:
        return (path.resolve().name, model)
    return (model,)


class _Modules:
    """The server's modules, which need packages that other commands do not."""

    def __init__(self) -> None:
        from stoop.server import run, settings

        self.run, self.settings = run, settings


def _import_server() -> _Modules:
    try:
        return _Modules()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "stoop":
            raise
        raise ConfigError(
            f"stoop serve needs {error.name}: install it with pip install 'stoop[serve]'"
        ) from None


def _set_up_request_log() -> None:
    """One line per request, as it is, whatever `STOOP_LOG` says."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger("stoop.server.requests")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)


def _run(
    run: Any, settings: "ServerSettings", model: str, engine: dict[str, Any], max_restarts: int
) -> int:
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

            llm = await AsyncLLM.start(model, report=report, max_restarts=max_restarts, **engine)
        print_started(model, llm.config, llm.metrics(), report.seconds)
        return llm

    def announce(service: "Service", address: str) -> None:
        drafts = service.num_drafts
        speed = f", {drafts} drafts a step" if drafts > 1 else ", 1 draft a step" if drafts else ""
        names = " and ".join(settings.model_names)
        print(f"serving {names} at {address}/v1{speed}; Ctrl-C stops", file=sys.stderr, flush=True)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        code: int = runner.run(run.serve(start, settings, bound, announce))
    return code


def _loop_factory() -> Any:
    """uvloop's if it is installed; asyncio's own otherwise."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
