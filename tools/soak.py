"""Puts mixed load on a server for as long as asked, and shows whether it is where it began.

    python tools/soak.py --seconds 600
    python tools/soak.py --seconds 600 --model smollm2-135m --seed 3

Starts `stoop serve` itself, on a free port of the loopback: of a tiny model in float64 whose greedy
answers are compared throughout, or of a model that you name.
"""

import argparse
import asyncio
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.server import ServerProcess, write_served_model  # noqa: E402
from support.soak import Soak, SoakReport, Vitals  # noqa: E402

# So small that requests are preempted, and the queue is full now and then.
TINY = (
    *("--device", "cpu", "--dtype", "float64", "--kv-cache-memory", "1MiB"),
    *("--max-num-seqs", "6", "--max-model-len", "512"),
    "-sc",
    '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}',
)
NAMED = ("--max-num-seqs", "6", "--max-model-len", "512")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="of load, after the warm-up")
    parser.add_argument("--warm-seconds", type=float, default=60.0)
    parser.add_argument("--model", help="a model to serve, instead of a tiny one")
    parser.add_argument("--seed", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stoop-soak-") as folder:
        model = options.model or write_served_model(Path(folder, "tiny"))
        engine = NAMED if options.model else TINY
        with ServerProcess(model, "--max-queue", "8", "--no-log-requests", engine=engine) as server:
            soak = Soak(server.url, server.process.pid, seed=options.seed, exact=not options.model)
            report = asyncio.run(soak.run(options.seconds, options.warm_seconds))
            traceback = "Traceback" in server.log
    show(report)
    if report.failures or traceback:
        print(report.describe() + ("\nthe server's log has a traceback" if traceback else ""))
        return 1
    return 0


def show(report: SoakReport) -> None:
    by_kind: dict[str, dict[str, int]] = defaultdict(dict)
    for (kind, outcome), count in report.outcomes.items():
        by_kind[kind][outcome] = count
    table = Table(title=f"{report.num_requests} requests in {report.seconds:.0f} s")
    table.add_column("kind")
    table.add_column("requests", justify="right")
    table.add_column("outcomes")
    for kind, outcomes in sorted(by_kind.items()):
        shown = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
        table.add_row(kind, str(sum(outcomes.values())), shown)
    console = Console()
    console.print(table)
    assert report.before is not None and report.after is not None
    state = Table(title="the server, idle")
    for column in ("", "before", "after"):
        state.add_column(column, justify="right")
    for name, before, after in zip(NAMES, values(report.before), values(report.after), strict=True):
        state.add_row(name, before, after)
    console.print(state)
    stats = report.stats
    console.print(
        f"{stats['num_preemptions']} preemptions, {stats['num_generated_tokens']} tokens, "
        f"{stats['spec_decode_num_accepted_tokens']} drafts accepted, "
        f"{len(report.failures)} failures, seed {report.seed}"
    )


NAMES = ("running", "waiting", "KV used", "server files", "core files", "server MiB", "core MiB")


def values(vitals: Vitals) -> list[str]:
    return [
        str(vitals.num_running),
        str(vitals.num_waiting),
        f"{vitals.kv_usage:.1%}",
        *(str(vitals.files[name]) for name in ("server", "core")),
        *(f"{vitals.memory[name] / 2**20:.1f}" for name in ("server", "core")),
    ]


if __name__ == "__main__":
    sys.exit(main())
