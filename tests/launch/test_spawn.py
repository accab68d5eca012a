"""`hvdlite.spawn` with the real mpirun."""

from __future__ import annotations

import pytest

import hvdlite
from tests.launch import functions
from tests.launch.test_run import user  # noqa: F401 - a fixture

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("num_proc", [1, 3])
def test_processes_are_the_ranks_of_one_world(num_proc, tmp_path):
    assert hvdlite.spawn(functions.numbered, num_proc, (tmp_path, "word")) is None
    total = num_proc * (num_proc - 1) / 2
    for index in range(num_proc):
        written = (tmp_path / str(index)).read_text()
        assert written == f"{index} {num_proc} {total} word"


def test_an_exception_is_raised_here():
    with pytest.raises(functions.PlainError, match="of process 1") as caught:
        hvdlite.spawn(functions.numbered_failure, 2)
    assert caught.value.__cause__.rank == 1


def test_output(capsys):
    hvdlite.spawn(print, 2, ("words",), env={"A": "b"})
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] 0 words", "[1] 1 words"]


def test_bad_arguments():
    with pytest.raises(ValueError, match="num_proc: found 0"):
        hvdlite.spawn(print, 0)
    with pytest.raises(TypeError, match="the function to run"):
        hvdlite.spawn("train", 2)
