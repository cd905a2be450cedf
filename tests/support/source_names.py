"""What source files define, by their syntax trees."""

import ast
import functools
from pathlib import Path


def members(node: ast.ClassDef) -> set[str]:
    """The methods and fields of a class, those that its methods assign included."""
    names: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef):
            names.add(each.name)
        elif isinstance(each, ast.AnnAssign | ast.Assign):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            names |= {t.id for t in targets if isinstance(t, ast.Name)}
            names |= {t.attr for t in targets if isinstance(t, ast.Attribute)}
    return names


@functools.cache
def defined_names(file: Path) -> frozenset[str]:
    """What a module defines at its top level, and `Class.member` for each class."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {t.id for t in targets if isinstance(t, ast.Name)}
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{member}" for member in members(node)}
    return frozenset(names)


def words(file: Path) -> set[str]:
    """Identifiers, and constants that are strings: options, modes, names of buffers."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found
