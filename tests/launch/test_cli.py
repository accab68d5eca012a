"""The command line of hvdliterun: mistakes take one line, and the command is checked first."""

from __future__ import annotations

import os
import shlex
import sys

import pytest

from hvdlite.errors import StartError
from hvdlite.launch.cli import check, main, resolve, with_paths
from tests.launch.launcher import ROOT


def failure(capsys, *arguments):
    """The code and the only line of a command line that is refused."""
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = ended.code
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert len(lines) == 1
    assert lines[0].startswith("hvdliterun: ")
    return code, lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("-np 0 true", "found '0', expected a number from 1 on"),
        ("-np two true", "found 'two'"),
        ("-np 1 --restarts -1 true", "--restarts: found '-1', expected a number from 0 on"),
        ("true", "-np is missing"),
        ("-np 2", "no command to run"),
        ("-np 2 --", "no command to run"),
        ("-np 2 -H node:x true", "-H node:x: expected host1:slots"),
        ("-np 3 -H localhost:2 true", "-np 3 is more than the 2 slots of localhost:2"),
        ("-np 2 --hostfile /no/hosts true", "--hostfile /no/hosts: No such file"),
        ("-np 1 -H a --hostfile b true", "not allowed with"),
        ("-np 1 --log-level loud true", "HVDLITE_LOG_LEVEL='loud' is not trace, debug, "),
        ("-np 1 --elastic-timeout 0 true", "'0' is not a number of seconds above 0"),
        ("-np 1 --fusion-threshold-mb -1 true", "found '-1', expected a number from 0 on"),
        ("-np 1 --output-filename /dev/null/out true", "--output-filename /dev/null/out"),
        ("-np 1 --timeline-filename /dev true", "--timeline-filename /dev: found a folder"),
        ("-np 1 --timeline-filename new/ true", "--timeline-filename new/: found a folder"),
        ("-np 1 --timeline-filename /dev/null/t.json true", "--timeline-filename /dev/null: File"),
        ("-np 1 --nosuch true", "--nosuch"),
        ("-np 1 echo a : b", "an argument ':' cannot be passed on"),
        ("-np 2 --spares 1 true", "--spares needs --elastic: without it, a rank that dies ends"),
        ("--max-np 2 true", "-np is missing: give the number of processes"),
        ("-np 4 --max-np 2 true", "--min-np 4 -np 4 --max-np 2: found them out of order"),
        ("-np 1 --min-np 2 true", "--min-np 2 -np 1 --max-np 2: found them out of order"),
        (
            "-np 1 --host-discovery-script 'echo a' -H a:1 true",
            "-H and --hostfile are not allowed with --host-discovery-script: give one of them",
        ),
        (
            "-np 1 --max-np 2 --blacklist-cooldown-range 5 3 true",
            "--blacklist-cooldown-range 5 3: expected MIN <= MAX",
        ),
        (
            "-np 1 --host-discovery-script 'echo no >&2; exit 3' true",
            "--host-discovery-script echo no >&2; exit 3: exit code 3 (no)",
        ),
        (
            "-np 1 --host-discovery-script 'echo a b' true",
            "--host-discovery-script echo a b: printed 'a b', expected 'host:slots' or 'host'",
        ),
    ],
)
def test_bad_arguments_take_one_line(capsys, arguments, words):
    code, line = failure(capsys, *shlex.split(arguments))
    assert code == 2
    assert words in line


@pytest.mark.parametrize(("command", "code"), [("no-such-command", 127), ("/", 126)])
def test_bad_command_takes_one_line(capsys, command, code):
    assert failure(capsys, "-np", "4", "--restarts", "3", command)[0] == code


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
    assert environment == {"PATH": f"{os.path.dirname(sys.executable)}:{tmp_path}"}
    check(command[:1], environment)


def test_other_commands_are_left_alone(tmp_path):
    assert resolve(["python3.99"], {"PATH": str(tmp_path)})[0] == ["python3.99"]


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("missing", 127, "missing: command not found"),
        ("{0}/missing", 127, "missing: command not found"),
        ("train.py", 127, "train.py: command not found; did you mean `python train.py`"),
        ("{0}", 126, "is a folder"),
        ("{0}/train.py", 126, r"train.py is not executable; .*python .*train.py"),
    ],
)
def test_commands_that_cannot_run(tmp_path, path, name, code, words):
    (tmp_path / "train.py").write_text("")
    with pytest.raises(StartError, match=words) as caught:
        check([name.format(tmp_path)], path)
    assert caught.value.code == code


def test_script_that_does_not_exist(tmp_path, path):
    with pytest.raises(StartError, match=r"nosuch\.py: no such file") as caught:
        check(["python", "nosuch.py"], path)
    assert caught.value.code == 2
    check(["python", "-c", "pass"], path)
    check(["python", "-m", "nosuch"], path)


@pytest.mark.parametrize("arguments", [[], ["-"], ["-", "--lr", "1"]])
def test_a_script_that_only_rank_0_could_read(tmp_path, path, arguments):
    check(["python", *arguments], path, ranks=1)
    with pytest.raises(StartError, match=r"standard input.*rank 0 alone of 3 has.*give a file"):
        check(["python", *arguments], path, ranks=3)
    (tmp_path / "python_train").symlink_to(tmp_path / "python")
    check(["python_train", *arguments], path, ranks=3)  # it may read what it likes


def test_own_package_where_a_folder_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert with_paths({"A": "b"}) == {"A": "b"}
    (tmp_path / "hvdlite").mkdir()
    assert with_paths({"PYTHONPATH": "/first"}) == {"PYTHONPATH": f"/first:{ROOT}"}
    (tmp_path / "hvdlite" / "__init__.py").touch()
    assert with_paths({}) == {}
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()  # of which mpirun tells
    assert with_paths({}) == {}
