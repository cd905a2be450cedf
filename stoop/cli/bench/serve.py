"""`stoop bench serve`: load against a server with OpenAI's interface."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoop.cli.bench.common import check_file, say
from stoop.cli.bench.questions import Out
from stoop.cli.bench.serve_options import LoadOptions, PromptOptions, serve_flags
from stoop.cli.progress import StageProgress

if TYPE_CHECKING:
    from stoop.bench.serve import Load, Outcome, Plan

Url = Annotated[str, typer.Option(help="the server: stoop's, vLLM's, SGLang's, llama.cpp's ...")]
ServedModel = Annotated[
    str | None, typer.Option(help="name of the model; default: the first that the server lists")
]
Goodput = Annotated[
    str | None,
    typer.Option(
        help="count the requests within limits in ms: ttft, itl (99th percentile of the request), "
        "tpot, e2e, such as ttft:200,itl:30"
    ),
]


@serve_flags
def serve(
    url: Url = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(help="sent as a bearer token")] = None,
    model: ServedModel = None,
    goodput: Goodput = None,
    seed: Annotated[int, typer.Option(help="seed of arrivals and random prompts")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="write a plot to this PNG file; needs matplotlib")
    ] = None,
    out: Out = None,
    load: LoadOptions = LoadOptions(),
    prompt: PromptOptions = PromptOptions(),
) -> None:
    """Measure a server's latency and throughput under load, open loop or closed loop.

    Works with any server of OpenAI's interface. Time to first token runs from the start of a
    request. Inter-token latency is the gap before a chunk divided evenly among the chunk's tokens,
    which the server counts (usage in every chunk where it can). To repeat a run, change --seed:
    the server may still have the prompts of the last run in its prefix cache.
    """
    from stoop.bench.serve import Plan
    from stoop.bench.serve_http import Server
    from stoop.bench.serve_report import draw_loads, print_loads
    from stoop.bench.serve_summary import Summary, parse_goodput

    loads = load.loads(seed)
    limits = {} if goodput is None else parse_goodput(goodput)
    check_file("--plot", plot, needs="matplotlib")
    check_file("--out", out)
    server, prompts = Server.parse(url, api_key), prompt.prompts(model or "", seed)
    plan = Plan(server, prompts, loads[0], load.timeout)
    plan, outcomes = _measure(plan, loads, load.warmup, load.processes)
    summaries = [
        Summary(each, outcome, load.processes, limits)
        for each, outcome in zip(loads, outcomes, strict=True)
    ]
    setting = {
        "url": server.url,
        "model": plan.prompts.model,
        "endpoint": prompt.endpoint,
        "input_len": None if prompts.questions else prompt.input_len,
        "questions": str(prompt.questions) if prompts.questions else None,
        "output_len": prompt.output_len,
        "extra": prompts.extra,
        "goodput": limits or None,
        "seed": seed,
    }
    print_loads(summaries, setting, say, out)
    if plot is not None:
        draw_loads(summaries, plot, say)
    if not any(summary.complete for summary in summaries):
        say("error: no request was answered completely: see the errors above")
        raise typer.Exit(1)


def _measure(
    plan: "Plan", loads: list["Load"], warmup: int, processes: int
) -> tuple["Plan", list["Outcome"]]:
    from stoop.bench.serve import agree, find_model, run_load, warm_up

    if not plan.prompts.model:
        plan = replace(plan, prompts=replace(plan.prompts, model=find_model(plan.server)))
    outcomes: list[Outcome] = []
    with StageProgress() as report:
        report("warm-up", 0, warmup + 1)
        plan = agree(plan)
        warm_up(plan, warmup)
        report("warm-up", warmup + 1, warmup + 1)
        first = 0
        for load in loads:
            total = load.num_requests
            if load.rate is not None:
                total = len(load.arrivals())

            def tell(done: int, stage: str = load.name, total: int | None = total) -> None:
                report(stage, done, total)

            tell(0)
            outcomes.append(run_load(replace(plan, load=load, first=first), processes, tell))
            first = max((a.index + 1 for a in outcomes[-1].answers), default=first)
    return plan, outcomes
