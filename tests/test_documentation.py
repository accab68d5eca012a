"""The files that the documentation names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("hvdlite", "adapters", "tests", "examples")
DOCUMENTS = [*sorted(ROOT.glob("docs/*.md")), ROOT / "README.md"]
# A path in backticks, also with the name of a test: `torch/test_optimizer.py::test_steps`.
PATH = re.compile(r"`([\w./-]+\.py)(?:::[\w*]+)?`")


def python_files():
    """Return the paths of all Python files, relative to the root, with slashes in front."""
    return [
        f"/{path.relative_to(ROOT).as_posix()}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    ]


def missing(text, files):
    """Return the paths in a text that no file ends with; folders in front may be left out."""
    return [path for path in PATH.findall(text) if not any(f.endswith(f"/{path}") for f in files)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_named_in_the_documentation_exist(document):
    assert missing(document.read_text(), python_files()) == []


def test_a_file_that_does_not_exist_is_found():
    text = "`engine/lane.py`, `lane.py`, `engine/gone.py`, `ne.py`, `torch/gone.py::test_steps`"
    assert missing(text, python_files()) == ["engine/gone.py", "ne.py", "torch/gone.py"]
