"""The form of docstrings: the first line names a thing or is an imperative."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_NOT_AT_THE_BEGINNING = {"What", "Who", "Whether", "That", "Of"}


@pytest.mark.parametrize("folder", ["adapters", "examples", "hvdlite", "tests"])
def test_no_docstring_begins_with_a_relative_clause(folder):
    found = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node))
        and text.split()[0] in _NOT_AT_THE_BEGINNING
    ]
    assert found == []
