"""`stoop bench`: benchmarks that print a table and a JSON line."""

import typer

from stoop.cli.bench.cpu import cpu
from stoop.cli.bench.harm import harm
from stoop.cli.bench.overhead import overhead
from stoop.cli.bench.questions import acceptance, accuracy
from stoop.cli.bench.serve import serve
from stoop.cli.bench.speed import graphs, latency, spec
from stoop.cli.bench.steps import peer, profile, step
from stoop.cli.bench.throughput import throughput

COMMANDS = (
    *(throughput, latency, serve, overhead, cpu, step, profile, peer, graphs, spec),
    *(acceptance, accuracy, harm),
)

bench = typer.Typer(
    help="Run a benchmark. The last line of its output is JSON.", no_args_is_help=True
)
for command in COMMANDS:
    bench.command()(command)
