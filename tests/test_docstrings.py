"""Docstrings: public methods have one, whose first line names a thing or is an imperative."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# torch says what the methods of its functions, groups and works are.
_OF_TORCH = [Path(f"adapters/torch/{name}.py") for name in ("autograd", "distributed", "work")]
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


def test_public_methods_are_described_by_their_class_or_a_base():
    """Where another base describes it, an override has a docstring only to say more."""
    kinds, bases, described = [], defaultdict(set), defaultdict(set)
    for path in sorted([*(ROOT / "hvdlite").rglob("*.py"), *(ROOT / "adapters").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                kinds.append((path.relative_to(ROOT), node))
                bases[node.name] |= {ast.unparse(base).split("[")[0] for base in node.bases}
                described[node.name] |= {
                    each.name for each in _methods(node) if ast.get_docstring(each)
                }

    def is_described(kind, method):
        outer = (name.rpartition(".")[2] for name in bases[kind])
        return method in described[kind] or any(
            is_described(base, method) for base in outer if base != kind
        )

    found = [
        f"{path}: {kind.name}.{method.name}"
        for path, kind in kinds
        if path not in _OF_TORCH
        and not any(name.startswith("_") for name in (path.stem.removeprefix("__"), kind.name))
        for method in _methods(kind)
        if not is_described(kind.name, method.name)
    ]
    assert found == []


def _methods(kind):
    """Return the public methods, without what sets or deletes a property."""
    return [
        node
        for node in kind.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        and not any(
            ast.unparse(each).endswith((".setter", ".deleter", "overload"))
            for each in node.decorator_list
        )
    ]
