"""docs/reports.md leads from vLLM's names to places that exist, and to every mutant of a report."""

import re
import shlex
from pathlib import Path

import pytest

from stoop.check.mutants.base import Mutant
from stoop.check.mutants.harness import MUTANTS, choose_mutants
from support.mutants import documented_rows
from support.source_names import defined_names, words
from support.vllm_reports import ABSENT, MENTIONS, RELATED, REPORTS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reports.md").read_text()
TEXT = re.sub(r"`[^`]*`", "", PAGE)  # without code
SPANS = set(re.findall(r"`([^`\n]+)`", PAGE))
SOURCES = sorted((ROOT / "stoop").rglob("*.py"))
PULL_REQUESTS = "https://github.com/vllm-project/vllm/pull/"
ONLY = ["stoop", "check", "--mutants", "--only"]


def section(report: int) -> str:
    return PAGE.split(f"\n## PR {report}\n")[1].split("## ")[0]


def row(mutant: Mutant) -> str:
    place = "drafter" if mutant.drafter else "target"
    return f"| {' | '.join((mutant.label, place, *mutant.cells))} |"


def place_problem(span: str) -> str | None:
    """What is wrong with `file.py::name`."""
    path, _, name = span.partition("::")
    file = ROOT / path if path.startswith("tests/") else ROOT / "stoop" / path
    if not file.is_file():
        return f"{span}: no such file"
    return None if name in defined_names(file) else f"{span}: the file does not define it"


def test_every_place_exists() -> None:
    places = [span for span in SPANS if "::" in span]
    assert len(places) > 60
    assert [problem for span in places if (problem := place_problem(span))] == []


@pytest.mark.parametrize(
    "span",
    [
        "nowhere.py::cut",
        "graph/phases.py::cuts",
        "graph/phases.py::Phase.jump",
        "graph/phases.py::joins",  # a method without its class
        "tests/graph/test_modes.py::test_nothing",
    ],
)
def test_a_wrong_place_is_seen(span: str) -> None:
    assert place_problem(span) is not None


def test_every_other_name_in_code_marks_is_ours_or_the_reports() -> None:
    """Ours: an identifier, an option, a mode, a buffer."""
    known = {symbol for symbols in REPORTS.values() for symbol in symbols}
    for file in SOURCES:
        known |= words(file)
    others = {span for span in SPANS if "::" not in span and not span.startswith("stoop check")}
    buffers = {mutant.buffer for mutant in MUTANTS}
    fields = {span for span in others if span.startswith("--") and as_field(span) in known}
    assert others - fields - known - buffers == set()


def as_field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


@pytest.mark.parametrize("report", REPORTS)
def test_every_symbol_of_a_report_is_on_the_page(report: int) -> None:
    assert [symbol for symbol in REPORTS[report] if symbol not in SPANS] == []
    table = PAGE.split("## Symbols")[1]
    assert [symbol for symbol in REPORTS[report] if symbol not in table] == NOT_IN_TABLE[report]


# Of the risks that reports name.
NOT_IN_TABLE: dict[int, list[str]] = {number: [] for number in REPORTS}
NOT_IN_TABLE |= {40410: ["KeyError"], 38311: [".clamp_"]}


def test_pull_requests_that_reports_refer_to_are_in_the_table() -> None:
    table = PAGE.split("## Symbols")[1]
    rows = {number: f"| [PR {number}]({PULL_REQUESTS}{number}), " for number in RELATED}
    assert [number for number, start in rows.items() if start not in table] == []


def test_every_pull_request_is_linked() -> None:
    """In the table of reports, in its section, and wherever else the text names one."""
    for report in REPORTS:
        assert f"| [{report}]({PULL_REQUESTS}{report}) | " in PAGE
        assert f"([pull request]({PULL_REQUESTS}{report}))" in section(report)
    assert re.findall(r"(?<!# )(?<!\[)PR \d+", PAGE) == []


def test_what_is_said_to_be_absent_is() -> None:
    defined = {name for file in SOURCES for name in defined_names(file)}
    assert sorted(ABSENT & defined) == []


@pytest.mark.parametrize("name", MENTIONS)
def test_a_search_in_the_code_finds_the_counterpart(name: str) -> None:
    found = [file for file in SOURCES if re.search(rf"vLLM\b.*{re.escape(name)}", joined(file))]
    assert ROOT / "stoop" / MENTIONS[name] in found


def joined(file: Path) -> str:
    """The text with the lines of a paragraph on one line."""
    return re.sub(r"(?<=\S)\n *(?:# )?(?=\S)", " ", file.read_text())


@pytest.mark.parametrize("report", REPORTS)
def test_every_mutant_of_a_report_is_in_its_section(report: int) -> None:
    rows = [row(mutant) for mutant in MUTANTS if mutant.report == report]
    assert rows
    header = "| mutant | in | equality | sanitizer |"
    assert documented_rows(section(report), header) == rows


def test_mutants_have_reports_of_this_page_only() -> None:
    assert {mutant.report for mutant in MUTANTS} == {*REPORTS, None}


@pytest.mark.parametrize("report", REPORTS)
def test_the_command_of_a_section_runs_its_mutants_and_no_others(report: int) -> None:
    (command,) = re.findall(r"`(stoop check [^`]+)`", section(report))
    *start, only = shlex.split(command)
    assert start == ONLY
    chosen, left_out = choose_mutants(only, "cpu")
    own = {mutant for mutant in MUTANTS if mutant.report == report}
    assert set(chosen) == {mutant for mutant in own if mutant.backend != "flashinfer"}
    assert bool(left_out) == (len(chosen) < len(own))


def test_every_mutant_in_quotation_marks_exists() -> None:
    quoted = re.findall(r'"([^"]+)"', TEXT)
    assert len(quoted) > 15
    assert set(quoted) - {mutant.name for mutant in MUTANTS} == set()
