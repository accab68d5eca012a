"""Run the scripts of examples/ on several ranks."""

import json
import re
from subprocess import CompletedProcess

from tests.examples.conftest import EXAMPLES
from tests.harness import run_script

# The scripts of a job share its start, which takes longer than a short training. Those for one
# process run on rank 0.
_IN_TURN = """
import json, os, runpy, sys
from mpi4py import MPI

_, folder, runs = sys.argv
sys.path.insert(0, folder)
for script, *arguments in json.loads(runs):
    if MPI.COMM_WORLD.Get_rank() == 0 or not script.endswith("_sequential.py"):
        print("run", script) if MPI.COMM_WORLD.Get_rank() == 0 else None
        sys.argv = [script, *arguments]
        runpy.run_path(os.path.join(folder, script), run_name="__main__")
"""


def run(name: str, size: int, *arguments: object, timeout: float = 240) -> CompletedProcess[str]:
    """Run a script as its user would."""
    return run_script(EXAMPLES / name, size, ["--json", *map(str, arguments)], timeout=timeout)


def run_in_turn(size: int, *runs: tuple) -> list[list[str]]:
    """Run scripts with their arguments in one job, and return the lines of each."""
    texts = json.dumps([[str(word) for word in each] for each in runs])
    job = run_script(_IN_TURN, size, [EXAMPLES, texts])
    assert job.returncode == 0, job.stderr
    parts = re.split(r"^run .*\n", job.stdout, flags=re.MULTILINE)[1:]
    assert len(parts) == len(runs)
    return [part.splitlines() for part in parts]


def train(name: str, size: int, *arguments: object, **options: object) -> dict:
    """Run a script that has to succeed, and return what it reports."""
    job = run(name, size, *arguments, **options)
    assert job.returncode == 0, job.stderr
    return _result(job.stdout.splitlines(), size)


def train_in_turn(name: str, size: int, *trainings: tuple) -> list[dict]:
    """Run a script several times in one job, each time with other arguments."""
    runs = [(name, "--json", *arguments) for arguments in trainings]
    return [_result(lines, size) for lines in run_in_turn(size, *runs)]


def _result(lines: list[str], size: int) -> dict:
    (line,) = [line for line in lines if '"weights_sha256"' in line]  # only rank 0 reports
    result = json.loads(line)
    assert result["processes"] == size
    assert result["identical"] is True
    return result
