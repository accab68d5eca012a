"""The command ``hvdlite``: its commands, its help, and mistakes in one line."""

import errno
import os
import subprocess
import sys

import pytest

import hvdlite
from hvdlite.launch import options
from hvdlite.tools.cli import timeline
from hvdlite.tools.cli.main import COMMANDS, main, make_parser


def refused(capsys, *arguments):
    """Return the exit code and the only line of a command line that is refused."""
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = ended.code
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return code, line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "hvdlite: the following arguments are required: COMMAND (see hvdlite --help)"),
        ("trainn", "hvdlite: argument COMMAND: invalid choice: 'trainn'"),
        ("chek", "'completion'); did you mean check? (see hvdlite --help)"),
        ("timeline", "hvdlite timeline: the following arguments are required: FILE"),
        ("timeline --nosuch x", "unrecognized arguments: --nosuch"),
        ("completion powershell", "invalid choice: 'powershell'"),
        ("run --np 2 true", "unrecognized arguments: --np; did you mean -np? (see hvdliterun"),
        ("run --spare=2 -np 2 true", "--spare=2; did you mean --spares?"),
        ("run --nosuch 2 true", "unrecognized arguments: --nosuch (see hvdliterun --help)"),
        ("run -np 0 true", "found '0', expected a number from 1 on"),
    ],
)
def test_mistakes_take_one_line(capsys, arguments, words):
    code, line = refused(capsys, *arguments.split())
    assert code == 2
    assert words in line


def test_an_output_without_space(capsys, monkeypatch):
    def write(text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(timeline, "main", lambda options: print("much"))
    monkeypatch.setattr(sys.stdout, "write", write)
    assert main(["timeline", "trace.json"]) == 1
    expected = "hvdlite timeline: standard output: No space left on device\n"
    assert capsys.readouterr().err == expected


def test_run_is_hvdliterun(capfd):
    assert main(["run", "-np", "2", sys.executable, "-c", "print('rank')"]) == 0
    assert capfd.readouterr().out == "rank\nrank\n"
    assert main(["run", "-np", "2", sys.executable, "-c", "raise SystemExit(3)"]) == 3


def test_every_command_has_help_with_an_example(capsys):
    for name in ("run", *COMMANDS, "completion"):
        with pytest.raises(SystemExit) as ended:
            make_parser().parse_args([name, "--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert "hvdlite" in text
        assert name == "run" or "example" in text


def test_completion_knows_commands_and_options(capsys, tmp_path):
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)
    complete = (
        f"source {script}; COMP_WORDS=({{}}); COMP_CWORD=$((${{{{#COMP_WORDS[@]}}}} - 1)); "
        "$(complete -p hvdlite | sed 's/.*-F \\([^ ]*\\).*/\\1/'); echo ${{COMPREPLY[@]}}"
    )

    def completions(*words):
        text = " ".join(words) if words[-1] else " ".join([*words[:-1], "''"])
        done = subprocess.run(
            ["bash", "-c", complete.format(text)], capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    assert completions("hvdlite", "time") == ["timeline"]
    assert completions("hvdlite", "timeline", "--js") == ["--json"]
    flags = {flag for option in options.make_parser().options for flag in option.option_strings}
    assert set(completions("hvdlite", "run", "--time")) <= flags


def test_completion_without_its_library(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    code, line = refused(capsys, "completion", "bash")
    assert code == 2
    assert line.endswith("install it with `pip install 'hvdlite[cli]'`")


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "hvdlite", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{hvdlite.__version__}\n"
