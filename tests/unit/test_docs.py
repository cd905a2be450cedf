"""What the documents name exists."""

import ast
import functools
import re
import tomllib
from pathlib import Path

import pytest

from support.source_names import members
from support.vllm_reports import ABSENT

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
DOCUMENTS = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        ROOT / "examples" / "README.md",
        *ROOT.glob("docs/*.md"),
    ]
)


def str_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_test_named_by_a_document_exists() -> None:
    named = [
        match
        for document in DOCUMENTS
        for match in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", document.read_text())
    ]
    assert len(named) > 15
    missing = [f"{file}::{name}" for file, name in named if name not in functions(ROOT / file)]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=str_of)
def test_every_file_linked_by_a_document_exists(document: Path) -> None:
    links = re.findall(r"\]\(([\w./-]+)\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=str_of)
def test_every_heading_linked_by_a_document_exists(document: Path) -> None:
    assert missing_headings(document, document.read_text()) == []


def test_a_link_to_a_missing_heading_is_seen() -> None:
    document = ROOT / "README.md"
    right = "[a](#from-python) [b](docs/graphs.md#the-five-mechanisms) [c](https://x.org/y#z)"
    assert missing_headings(document, right) == []
    wrong = ["#from-perl", "docs/graphs.md#the-six-mechanisms", "docs/nothing.md#the-sanitizer"]
    assert missing_headings(document, " ".join(f"[a]({link})" for link in wrong)) == wrong


def test_anchors_are_those_of_github() -> None:
    text = """# What works, and what does not
## `Phase` and [cut](graphs.md#cut) in step_phases
```
# a comment
```
## Twice
## 1. Load -> run
## Twice
"""
    assert anchors(text) == {
        "what-works-and-what-does-not",
        "phase-and-cut-in-step_phases",
        "twice",
        "1-load---run",
        "twice-1",
    }


def missing_headings(document: Path, text: str) -> list[str]:
    """The links to a heading, of this or another document of ours, that lead nowhere."""
    missing = []
    for path, anchor in re.findall(r"\]\(([\w./-]*)#([^)\s]+)\)", text):
        target = document.parent / path if path else document
        if not target.is_file() or anchor not in anchors(target.read_text()):
            missing.append(f"{path}#{anchor}")
    return missing


def anchors(text: str) -> set[str]:
    """The headings of a document as GitHub names them: lower case, without markup and punctuation,
    hyphens for spaces, and a number after the name of a heading that came before."""
    prose = "".join(text.split("```")[::2])
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", prose, flags=re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.append(re.sub(r"[^\w -]", "", shown.lower()).replace(" ", "-"))
    numbers = [found[:place].count(name) for place, name in enumerate(found)]
    return {f"{name}-{n}" if n else name for name, n in zip(found, numbers, strict=True)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=str_of)
def test_every_python_file_named_by_a_document_exists(document: Path) -> None:
    """A path is relative to the document, the repository or the package; a bare name may be that of
    any file."""
    named = named_files(document.read_text())
    known = {path.name for folder in ("stoop", "tests", "tools") for path in files(folder)}
    roots = (ROOT, ROOT / "stoop", document.parent)
    missing = {
        name
        for name in named
        if not any((root / name).exists() for root in roots) and name not in known
    }
    assert missing == set()


def named_files(text: str) -> set[str]:
    """Of this project; those of vLLM are named from its root."""
    found = re.findall(r"(?<![\w./*-])((?:[\w-]+/)*\w+\.py)\b", text)
    return {name for name in found if not name.startswith("vllm/")}


def test_every_path_named_in_the_code_exists() -> None:
    """In docstrings, comments and messages; with a folder, so that it is a path of ours."""
    sources = [*files("stoop"), *files("tests"), *files("tools"), *files("examples")]
    roots = (ROOT, ROOT / "stoop", ROOT / "tests")
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources
        if path != Path(__file__)
        for name in named_files(path.read_text())
        if "/" in name and not any((root / name).exists() for root in roots)
    }
    assert missing == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=str_of)
def test_every_class_named_by_a_document_exists(document: Path) -> None:
    """`CamelCase` in code marks, and the method or field after its dot."""
    named = re.findall(r"`([A-Z][a-z]+[A-Z]\w+)(?:\.(\w+))?[`(]", document.read_text())
    known = definitions()
    foreign = FOREIGN | ABSENT if document.name == "reports.md" else FOREIGN
    missing = {
        f"{name}.{member}" if member else name
        for name, member in named
        if name not in foreign and f"{name}.{member}" not in foreign
        if name not in known or (member and member not in known[name])
    }
    assert missing == set()


# Of other projects, or of checkpoints.
FOREIGN = {"NotImplementedError", "KeyError", "LlamaForCausalLM"}


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@functools.cache
def definitions() -> dict[str, set[str]]:
    """Classes and type aliases by name, with the names that stand in their bodies."""
    found: dict[str, set[str]] = {}
    for path in (*files("stoop"), *files("tests/support"), *files("examples")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(members(node))
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found.setdefault(node.targets[0].id, set())
    return found


def test_the_layer_diagram_is_what_import_contracts_hold() -> None:
    text = ARCHITECTURE.read_text()
    diagram = text.split("## Layers")[1].split("```")[1].strip().splitlines()
    drawn = [re.split(r"\s{2,}", line)[0].split(" | ") for line in diagram]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (each["layers"] for each in contracts["contracts"] if each["type"] == "layers")
    held = [[name.removeprefix("stoop.") for name in line.split(" | ")] for line in layers]
    assert drawn == held
    packages = {path.parent.name for path in ROOT.glob("stoop/*/__init__.py")}
    assert packages | {"llm", "async_llm"} == {name for line in held for name in line}


def test_every_file_in_the_architectures_picture_exists() -> None:
    text = ARCHITECTURE.read_text()
    picture = text.split("## The picture")[1].split("## 1.")[0]
    files = set(re.findall(r"\b((?:[a-z_]+/)+[a-z_]+\.py)", picture))
    assert len(files) >= 10
    assert [name for name in files if not (ROOT / "stoop" / name).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=str_of)
def test_every_flag_of_a_command_in_a_document_is_known(document: Path) -> None:
    from typer.testing import CliRunner

    from stoop.cli.main import app

    blocks = "\n".join(document.read_text().replace("\\\n", " ").split("```")[1::2])
    found = r"^(?:\.venv/bin/)?stoop ((?:bench |models )?[a-z][\w-]*)(.*?)(?:#|$)"
    commands = re.findall(found, blocks, flags=re.MULTILINE)
    assert len(commands) >= NUM_COMMANDS.get(str_of(document), 0)
    for command, rest in commands:
        help_text = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200"})
        assert help_text.exit_code == 0, command
        for flag in re.findall(r"(?<!\S)(--?[a-z][a-z-]*)", rest):
            assert flag in help_text.output, (command, flag)


# At least: a pattern that finds none would pass.
NUM_COMMANDS = {"README.md": 10, "docs/training.md": 8, "docs/performance.md": 6, "docs/cpu.md": 3}
