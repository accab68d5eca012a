"""The notebook after nnabla's tutorial on its communicator."""

import contextlib
import re
import time
import uuid
from pathlib import Path

import pytest

from tests.examples.conftest import EXAMPLES
from tests.harness import mpirun

NOTEBOOK = EXAMPLES / "nnabla_communicator.ipynb"
MARK = "HVDLITE_TEST_NOTEBOOK"
NUMBER = re.compile(r"-?\d+\.\d+")


def outputs(notebook):
    """Return what each cell of code printed or returned, progress bars left out."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            texts = [each.get("text") or each["data"]["text/plain"] for each in cell.outputs]
            found.append("".join(text for text in texts if "\r" not in text).strip())
    return found


def processes_with(variable, value):
    """Return the processes in whose environment a variable has a value."""
    found, wanted = [], f"{variable}={value}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                found.append(path.parent.joinpath("cmdline").read_bytes().replace(b"\0", b" "))
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of Jupyter's packages, which run in this process
def test_the_notebook_prints_what_is_stored_in_it_and_leaves_no_process(monkeypatch):
    for package in ("torch", "ipyparallel", "ipykernel"):
        pytest.importorskip(package)
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    mark = uuid.uuid4().hex
    for name, value in {**mpirun.environment(), MARK: mark}.items():
        monkeypatch.setenv(name, value)

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    stored = outputs(notebook)
    nbclient.NotebookClient(
        notebook, timeout=60, resources={"metadata": {"path": str(EXAMPLES)}}
    ).execute()
    printed = outputs(notebook)
    for was, now in zip(stored, printed, strict=True):
        assert NUMBER.sub("#", now) == NUMBER.sub("#", was)
        numbers = [[float(number) for number in NUMBER.findall(text)] for text in (was, now)]
        assert numbers[1] == pytest.approx(numbers[0], abs=2e-4)

    # Gradients and, after each way to step, weights that are equal; four of the whole batch.
    assert [text.split() for text in printed if "True" in text] == [
        ["True"],
        ["True"] * 4,
        ["True"],
        ["True"],
    ]
    until = time.monotonic() + 10
    while (left := processes_with(MARK, mark)) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == []
