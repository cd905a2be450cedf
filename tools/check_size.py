"""Checks the size limits of files and functions; `make lint` runs it."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
ROOT = Path(__file__).resolve().parent.parent


def oversize(path: Path) -> Iterator[str]:
    source = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT)
    num_lines = source.count("\n")
    if num_lines > MAX_FILE_LINES:
        yield f"{name}: {num_lines} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size > MAX_FUNCTION_LINES:
                where = f"{name}:{node.lineno}: {node.name}"
                yield f"{where} has {size} lines, at most {MAX_FUNCTION_LINES}"


def main() -> int:
    problems = [line for path in sorted(ROOT.glob("stoop/**/*.py")) for line in oversize(path)]
    print("\n".join(problems) or "all files and functions are within the size limits")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
