"""Run the scripts of examples/ on several ranks."""

import json
from subprocess import CompletedProcess

from tests.examples.conftest import EXAMPLES
from tests.harness import run_script

# The trainings of a job share its start, which takes longer than a short training.
_IN_TURN = """
import json, os, runpy, sys

_, script, trainings = sys.argv
sys.path.insert(0, os.path.dirname(script))
for arguments in json.loads(trainings):
    sys.argv = [script, "--json", *arguments]
    runpy.run_path(script, run_name="__main__")
"""


def run(name: str, size: int, *arguments: object, timeout: float = 240) -> CompletedProcess[str]:
    """Run a script as its user would."""
    return run_script(EXAMPLES / name, size, ["--json", *map(str, arguments)], timeout=timeout)


def train(name: str, size: int, *arguments: object, **options: object) -> dict:
    """Run a script that has to succeed, and return what it reports."""
    (result,) = _results(run(name, size, *arguments, **options), size, 1)
    return result


def train_in_turn(name: str, size: int, *trainings: tuple, env: dict | None = None) -> list[dict]:
    """Run a script several times in one job, each time with other arguments."""
    lists = json.dumps([[str(argument) for argument in each] for each in trainings])
    job = run_script(_IN_TURN, size, [EXAMPLES / name, lists], env=env)
    return _results(job, size, len(trainings))


def _results(job: CompletedProcess[str], size: int, trainings: int) -> list[dict]:
    assert job.returncode == 0, job.stderr
    lines = [line for line in job.stdout.splitlines() if '"weights_sha256"' in line]
    assert len(lines) == trainings, "only rank 0 reports"
    results = [json.loads(line) for line in lines]
    for result in results:
        assert result["processes"] == size
        assert result["identical"] is True
    return results
