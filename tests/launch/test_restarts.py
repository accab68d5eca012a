"""hvdliterun --restarts: which jobs start again, and what the user is told."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from hvdlite.launch import cli
from hvdlite.launch.job import End
from tests.campaigns import restarts
from tests.launch.launcher import hvdliterun

HOST = socket.gethostname()
# Each life appends its number to the file that the first argument names.
_LIVES = """
import os, sys
life = int(os.environ["HVDLITE_RESTART"])
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    with open(sys.argv[1], "a") as file:
        print(life, file=file)
"""


@pytest.fixture
def lives(tmp_path):
    """The lives that a job has had; called with what rank 1 does in each of them."""
    path = tmp_path / "lives"

    def run(code, *options):
        script = f"{_LIVES}    {code}\n"
        result = hvdliterun("-np", 2, *options, sys.executable, "-c", script, path)
        return [int(line) for line in path.read_text().split()], result

    return run


def test_a_job_starts_again_until_it_succeeds(lives):
    found, result = lives(
        "life == 0 and os.kill(os.getpid(), 9); life == 1 and sys.exit(3)", "--restarts", 4
    )
    assert (found, result.returncode) == ([0, 1, 2], 0)
    assert result.stderr.splitlines() == [
        f"hvdliterun: rank 1 on host {HOST} was killed by signal 9 (SIGKILL); restart 1 of 4",
        f"hvdliterun: rank 1 on host {HOST} exited with code 3; restart 2 of 4",
    ]


@pytest.mark.parametrize(
    ("codes", "options", "said"),
    [
        ([3, 4], "--restarts 1", ["failed with 3; restart 1 of 1", "failed with 4"]),
        ([2], "--restarts 3", ["failed with 2"]),  # argparse's: the command line stays wrong
        ([127], "--restarts 3", ["failed with 127"]),  # a program that does not exist
        ([1], "--restarts 0", ["failed with 1"]),
        ([1], "", ["failed with 1"]),
        ([0], "--restarts 3", []),
        ([1, 130], "--restarts 5", ["failed with 1; restart 1 of 5"]),  # a signal to the launcher
    ],
)
def test_which_jobs_start_again(codes, options, said, monkeypatch, capsys):
    ends = (End(code, f"failed with {code}" if code not in (0, 130) else "") for code in codes)
    monkeypatch.setattr(cli, "_run", lambda *_: next(ends))
    assert cli.main(["-np", "1", *options.split(), "true"]) == codes[-1]
    assert next(ends, None) is None
    assert capsys.readouterr().err.splitlines() == [f"hvdliterun: {line}" for line in said]


def test_output_files_keep_what_earlier_runs_printed(lives, tmp_path):
    code = "print('life', life); print('err', file=sys.stderr); life == 0 and sys.exit(1)"
    _, result = lives(code, "--restarts", 1, "--output-filename", tmp_path / "logs")
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr == (
        f"hvdliterun: rank 1 on host {HOST} exited with code 1; restart 1 of 1\n"
    )
    assert (tmp_path / "logs" / "rank.1" / "stdout").read_text() == "life 0\nlife 1\n"
    assert (tmp_path / "logs" / "rank.1" / "stderr").read_text() == "err\n" * 2
    again = hvdliterun("-np", 1, "--output-filename", tmp_path / "logs", "echo", "new")
    assert again.returncode == 0
    assert (tmp_path / "logs" / "rank.0" / "stdout").read_text() == "new\n"


@pytest.mark.slow
def test_nothing_is_left_between_runs(lives, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    found, result = lives(
        f"print(os.listdir({str(tmp_path / 'tmp')!r})); os.kill(os.getpid(), 9)",
        *("--restarts", 2),
    )
    assert found == [0, 1, 2]
    assert os.listdir(tmp_path / "tmp") == []
    assert result.returncode == 128 + signal.SIGKILL


@pytest.mark.slow
def test_the_last_step_is_named_without_restarts_too():
    """Tests of the optimizers, such as tests/torch/test_optimizer.py, look at what they count."""
    code = (
        "import os, hvdlite as hvd\n"
        "from hvdlite.observe import status\n"
        "hvd.init()\n"
        "for step in range(3):\n"
        "    status.count_step(0)\n"
        "if hvd.rank() == 1: os._exit(7)\n"
        "hvd.barrier()\n"
    )
    result = hvdliterun("-np", 2, sys.executable, "-c", code)
    assert result.returncode == 7
    assert f"rank 1 on host {HOST} exited with code 7 after step 3\n" in result.stderr


def test_a_rank_without_the_file_of_its_steps_trains(tmp_path):
    """The process around it may be in another container."""
    code = (
        "from hvdlite import init; from hvdlite.observe import status; init(); status.count_step(0)"
    )
    variables = {**os.environ, "HVDLITE_LAUNCHER_STEPS": str(tmp_path / "missing")}
    result = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True)
    assert (result.returncode, result.stderr) == (0, b"")


# In TensorFlow, too, and at random: python -m tests.campaigns.restarts
@pytest.mark.slow
def test_a_training_ends_with_the_weights_of_an_undisturbed_one(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(restarts, "EPOCHS", 2)
    expected, _, _ = restarts.train("torch")
    restarts.compare("torch", expected, rank=1, step=30)
