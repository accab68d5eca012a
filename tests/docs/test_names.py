"""The files, calls and environment variables that the pages name exist."""

import ast
import functools
import re

import pytest

import hvdlite
from tests import api_table
from tests.docs import pages

FOLDERS = ("hvdlite", "adapters", "tests", "examples", "docs")
# A path in backticks, also with the name of a test: `torch/test_optimizer.py::test_steps`.
PATH = re.compile(r"`([\w./-]+\.py)(?:::[\w*]+)?`")
CALL = re.compile(r"\bhvd\.((?:Compression\.|Schedule\.|elastic\.|callbacks\.)?\w+)")
VARIABLE = re.compile(r"\bHVDLITE_[A-Z_]*[A-Z]\b")


@functools.cache
def python_files():
    """Return the paths of all Python files, relative to the root, with slashes in front."""
    return [
        f"/{path.relative_to(pages.ROOT).as_posix()}"
        for folder in FOLDERS
        for path in (pages.ROOT / folder).rglob("*.py")
    ]


@functools.cache
def public_names():
    """Return the names that ``hvd`` has in one adapter or another, without importing these."""
    names = {"__version__", *hvdlite.__all__}
    for adapter in (pages.ROOT / "adapters").rglob("*.py"):
        tree = ast.parse(adapter.read_text())
        if adapter.name in ("__init__.py", "_public.py"):
            names |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    inner = ("Compression", "Schedule", "elastic", "callbacks")
    for module, _, calls in api_table.SECTIONS:
        prefix = module.rpartition(".")[2]
        names |= {f"{prefix}.{name}" if prefix in inner else name for name in calls.split()}
    for kind in ("Compression", "Schedule"):
        names |= {f"{kind}.{name}" for name in dir(getattr(hvdlite, kind))}
    return names | {f"elastic.{name}" for name in hvdlite.elastic.__all__}


def missing_files(text, files):
    """Return the paths in a text that no file ends with; folders in front may be left out."""
    found = [path for path in PATH.findall(text) if path not in pages.OWN_SCRIPTS]
    return [path for path in found if not any(file.endswith(f"/{path}") for file in files)]


def missing_calls(text, names):
    """Return the calls in a text that no adapter has; a capital may begin a class's method."""
    return [call for call in CALL.findall(text) if call not in names]


@functools.cache
def variables_in_the_code():
    """Return the variables in the code: in strings, since docstrings may have a placeholder."""
    source = "\n".join(
        path.read_text()
        for folder in ("hvdlite", "adapters")
        for path in (pages.ROOT / folder).rglob("*.py")
    )
    return {*re.findall(r"[\"'](HVDLITE_[A-Z_]*[A-Z])[\"']", source)}


@pytest.fixture(scope="module")
def known_variables():
    return {*VARIABLE.findall(api_table.ENVIRONMENT.read_text())}


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_files_calls_and_variables_exist(page, known_variables):
    text = page.read_text()
    assert missing_files(text, python_files()) == []
    assert missing_calls(text, public_names()) == []
    assert {*VARIABLE.findall(text)} <= known_variables


def test_the_page_of_variables_has_all_that_the_code_reads(known_variables):
    assert variables_in_the_code() <= known_variables
    assert {"HVDLITE_MPIRUN", "HVDLITE_LAUNCH_KEY"} <= variables_in_the_code()


def test_a_file_and_a_call_that_do_not_exist_are_found():
    text = "`engine/lane.py`, `lane.py`, `engine/gone.py`, `ne.py`, `torch/gone.py::test_steps`"
    assert missing_files(text, python_files()) == ["engine/gone.py", "ne.py", "torch/gone.py"]
    text = "hvd.rank(), hvd.gone(), `hvd.Compression.TopK`, hvd.callbacks.Gone, hvd.elastic.run"
    assert missing_calls(text, public_names()) == ["gone", "callbacks.Gone"]
