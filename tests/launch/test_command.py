from __future__ import annotations

import sys

import pytest

from hvdlite.launch.command import check, resolve
from hvdlite.launch.errors import LaunchError


@pytest.fixture
def path(tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return {"PATH": str(tmp_path)}


def test_python_on_path_is_used_as_it_is(path):
    assert resolve(["python", "train.py"], path) == (["python", "train.py"], path)


def test_python_of_an_environment_that_is_not_activated(tmp_path):
    command, environment = resolve(["python", "train.py"], {"PATH": str(tmp_path)})
    assert command == [sys.executable, "train.py"]
    assert environment["PATH"].endswith(f":{tmp_path}")
    check(command[:1], environment)


def test_other_commands_are_left_alone(tmp_path):
    assert resolve(["python3.99"], {"PATH": str(tmp_path)})[0] == ["python3.99"]


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("missing", 127, "missing: command not found"),
        ("{0}/missing", 127, "missing: command not found"),
        ("{0}", 126, "is a folder"),
        ("{0}/train.py", 126, r"train.py is not executable; .*python .*train.py"),
    ],
)
def test_commands_that_cannot_run(tmp_path, path, name, code, words):
    (tmp_path / "train.py").write_text("")
    with pytest.raises(LaunchError, match=words) as caught:
        check([name.format(tmp_path)], path)
    assert caught.value.code == code


def test_script_that_does_not_exist(tmp_path, path):
    with pytest.raises(LaunchError, match=r"nosuch\.py: no such file") as caught:
        check(["python", "nosuch.py"], path)
    assert caught.value.code == 2
    check(["python", "-c", "pass"], path)
    check(["python", "-m", "nosuch"], path)
