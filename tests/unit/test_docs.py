"""What the documents name exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])


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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_linked_by_a_document_exists(document: Path) -> None:
    links = re.findall(r"\]\(([\w./-]+)\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_every_file_in_the_architectures_picture_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    picture = text.split("## The picture")[1].split("## 1.")[0]
    files = set(re.findall(r"\b((?:[a-z_]+/)+[a-z_]+\.py)", picture))
    assert len(files) >= 10
    assert [name for name in files if not (ROOT / "stoop" / name).exists()] == []


def test_every_flag_in_the_readme_is_known() -> None:
    from typer.testing import CliRunner

    from stoop.cli.main import app

    blocks = "\n".join(README.split("```")[1::2])
    commands = re.findall(r"^stoop ((?:bench )?[\w-]+)(.*?)(?:#|$)", blocks, flags=re.MULTILINE)
    assert len(commands) >= 5
    for command, rest in commands:
        help_text = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200"})
        assert help_text.exit_code == 0, command
        for flag in re.findall(r"(?<!\S)(--?[a-z][a-z-]*)", rest):
            assert flag in help_text.output, (command, flag)


README = (ROOT / "README.md").read_text()
