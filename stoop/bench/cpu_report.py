"""The table and the JSON line of `stoop bench cpu`."""

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoop.bench.cpu import CpuReport, EngineResult, Round, Together, is_busy
from stoop.bench.cpu_process import LLAMA_CPP
from stoop.bench.json_line import print_json

MIB = 1 << 20
MARK = "*"


def print_cpu(
    report: CpuReport,
    setting: Mapping[str, Any],
    say: Callable[[str], None],
    out: Path | None = None,
) -> None:
    console = Console(stderr=True)
    console.print(_table(report, setting))
    for line in _notes(report):  # a caption would be broken at the width of the table
        console.print(Text(line))
    if report.together:
        console.print(_together_table(report.together))
    console.print(
        "[dim]medians of rounds, and below them the range; TTFT: time to first token; import and "
        "load: of the second start; equal: answers that equal plain stoop's token for token; "
        "several at once: tokens/s with prompts included, and from when all have a token[/dim]"
    )
    for line in warnings(report):
        say(line)
    print_json(as_record(report, setting), out)


def _table(report: CpuReport, setting: Mapping[str, Any]) -> Table:
    threads = report.engines[0].threads
    title = (
        f"{setting['model']} without a GPU, {threads} threads: {setting['num_questions']} "
        f"questions, {setting['max_tokens']} tokens each"
    )
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), min_width=60)
    table.add_column("")
    for result in report.engines:
        table.add_column(result.name + MARK * bool(result.disturbed), justify="right")
    for label, cell in _rows(report, setting["prompt_len"]):
        cells = [cell(result) for result in report.engines]
        if any(cells):
            table.add_row(label, *cells)
    return table


def _notes(report: CpuReport) -> list[str]:
    found = [f"{name}: {why}" for name, why in report.missing.items()]
    if any(each.disturbed for each in report.engines):
        found.append(
            f"{MARK} others used the cores in some rounds; 'of {LLAMA_CPP}' leaves those out"
        )
    return found


def _rows(report: CpuReport, prompt_len: int) -> list[tuple[str, Callable[[EngineResult], str]]]:
    def ratio(place: int) -> Callable[[EngineResult], str]:
        return lambda each: f"{found[place]:.2f}x" if (found := report.ratios(each)) else ""

    def equal(each: EngineResult) -> str:
        share = report.equal_share(each.name)
        return "" if share is None else f"{share:.0%}"

    def mib(part: str) -> Callable[[EngineResult], str]:
        return lambda each: _figure(_over(each.memory(part), MIB), 0)

    return [
        ("decode, tok/s", lambda each: f"{each.decode_tokens_per_s:.1f}"),
        ("", lambda each: _spread(each, lambda one: one.decode_tokens_per_s, 1)),
        (f" of {LLAMA_CPP}", ratio(0)),
        ("tokens/step", lambda each: _figure(each.median(lambda one: one.tokens_per_step), 2)),
        (f"TTFT {prompt_len}, ms", lambda each: f"{each.ttft_s * 1000:.0f}"),
        ("", lambda each: _spread(each, lambda one: one.ttft_s * 1000, 0)),
        ("prefill, tok/s", lambda each: f"{each.prefill_tokens_per_s:.0f}"),
        (f" of {LLAMA_CPP}", ratio(1)),
        ("import, s", lambda each: f"{each.import_s:.2f}"),
        ("load, s", lambda each: f"{each.load_s:.2f}"),
        ("RSS, MiB", mib("rss")),
        (" files", mib("file")),
        (" anonymous", mib("anon")),
        ("equal", equal),
        ("busy rounds", lambda each: str(len(each.disturbed) or "")),
    ]


def _spread(each: EngineResult, figure: Callable[[Round], float], digits: int) -> str:
    values = [figure(one) for one in each.rounds]
    return f"{min(values):.{digits}f}-{max(values):.{digits}f}"


def _figure(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _over(value: float | None, divisor: float) -> float | None:
    return None if value is None else value / divisor


def _together_table(results: list[Together]) -> Table:
    table = Table(title="several requests at once")
    for column in ("", "requests", "tokens/s", "range", "decoding, tokens/s"):
        table.add_column(column, justify="left" if not column else "right")
    for each in results:
        speeds = each.tokens_per_s
        table.add_row(
            each.name,
            str(each.num_requests),
            f"{statistics.median(speeds):.1f}",
            f"{min(speeds):.1f}-{max(speeds):.1f}",
            f"{statistics.median(each.decode_tokens_per_s):.1f}",
        )
    return table


def warnings(report: CpuReport) -> list[str]:
    """What makes figures doubtful, a sentence each."""
    found = []
    late = [each.name for each in report.engines if is_busy(each.start_others)]
    if late:
        found.append(
            f"other processes used the cores while {', '.join(map(repr, late))} started, after "
            "repeats: import and load times are too long"
        )
    measured: list[tuple[str, list[float | None]]] = [
        *((each.name, each.others) for each in report.engines),
        *((f"{each.name}, {each.num_requests} at once", each.others) for each in report.together),
    ]
    for name, others in measured:
        busy = [cores for cores in others if cores is not None and is_busy(cores)]
        if busy:
            found.append(
                f"{name}: other processes used up to {max(busy):.2f} cores in {len(busy)} of "
                f"{len(others)} rounds, after repeats: run it again on an idle machine"
            )
    return found


def as_record(report: CpuReport, setting: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "bench": "cpu",
        **setting,
        "threads": report.engines[0].threads,
        "engines": [_engine_record(report, each) for each in report.engines],
        "missing": report.missing,
        "concurrency": [_together_record(each) for each in report.together],
    }


def _engine_record(report: CpuReport, each: EngineResult) -> dict[str, Any]:
    ratios = report.ratios(each) or (None, None)
    return {
        "engine": each.name,
        "version": each.version,
        "drafts": each.drafts,
        "num_questions": len(each.rounds[0].answers),
        "decode_tokens_per_s": each.decode_tokens_per_s,
        "decode_tokens_per_s_by_round": [one.decode_tokens_per_s for one in each.rounds],
        "decode_of_llama_cpp": ratios[0],
        "tokens_per_step": each.median(lambda one: one.tokens_per_step),
        "ttft_ms": each.ttft_s * 1000,
        "ttft_ms_by_round": [one.ttft_s * 1000 for one in each.rounds],
        "prefill_tokens_per_s": each.prefill_tokens_per_s,
        "prefill_of_llama_cpp": ratios[1],
        "import_s": each.import_s,
        "load_s": each.load_s,
        "memory_mib": {part: _over(each.memory(part), MIB) for part in ("rss", "file", "anon")},
        "equal_share": report.equal_share(each.name),
        "others_cores_at_start": each.start_others,
        "others_cores_by_round": each.others,
        "disturbed_rounds": each.disturbed,
    }


def _together_record(each: Together) -> dict[str, Any]:
    return {
        "engine": each.name,
        "requests": each.num_requests,
        "tokens_per_s": statistics.median(each.tokens_per_s),
        "tokens_per_s_by_round": each.tokens_per_s,
        "decode_tokens_per_s": statistics.median(each.decode_tokens_per_s),
        "decode_tokens_per_s_by_round": each.decode_tokens_per_s,
        "others_cores_by_round": each.others,
    }
