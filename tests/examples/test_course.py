"""The scripts of the supercomputing course, in a short form."""

import difflib
import json
import math
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.examples.conftest import EXAMPLES
from tests.examples.scripts import run_in_turn
from tests.harness import mpirun

PAGE = mpirun.ROOT / "docs" / "tutorials" / "course.md"
PI = re.compile(r"2 ranks: pi = ([\d.]+), error ([+-][\d.]+) \(standard deviation ([\d.]+)\)")
EPOCH = re.compile(r"epoch (\d+): [\d.]+ s, loss ([\d.]+), .*test accuracy ([\d.]+)")


@pytest.fixture
def batch_job(tmp_path):
    """Run a job script in an environment like that of a batch system."""
    activate = tmp_path / "venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    here = f"{Path(sys.executable).parent}:{activate.parent}"
    # The launcher of this checkout, wherever the tests find it.
    launcher = activate.parent / "hvdliterun"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} -m hvdlite.launch "$@"\n')
    launcher.chmod(0o755)
    activate.write_text(f'export PATH="{activate.parent}:{here}:$PATH"\n')

    def run(name, *arguments, **variables):
        known = {k: v for k, v in os.environ.items() if not k.startswith(("PBS_", "SLURM_"))}
        environment = {**known, "PYTHONPATH": str(mpirun.ROOT), "VENV": str(tmp_path / "venv")}
        return subprocess.run(
            ["bash", EXAMPLES / name, *arguments],
            env={**environment, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
        )

    return run


def check_pi(output, samples):
    value, error, deviation = map(float, PI.search(output).groups())
    assert deviation == pytest.approx(math.sqrt(math.pi * (4 - math.pi) / samples), abs=1e-6)
    assert error == pytest.approx(value - math.pi, abs=2e-6)
    assert 0 < abs(error) < 4 * deviation


def test_pbs_job_runs_a_rank_on_each_slot(batch_job, tmp_path):
    """PBS names a host once for each slot."""
    nodes = tmp_path / "nodes"
    nodes.write_text("localhost\nlocalhost\n")
    job = batch_job(
        "course_pbs.sh",
        PBS_NODEFILE=str(nodes),
        PBS_O_WORKDIR=str(mpirun.ROOT),
        SCRIPT="examples/course_pi.py --samples 200000",
    )
    assert job.returncode == 0, job.stderr
    assert "ranks: 2, nodes: 1" in job.stdout
    check_pi(job.stdout, 200000)


@pytest.mark.slow
def test_slurm_job_runs_a_rank_for_each_task(batch_job):
    # Only what the script reads: with SLURM_JOB_ID, mpirun would ask Slurm for its hosts.
    job = batch_job(
        "course_slurm.sh",
        *("examples/course_pi.py", "--samples", "100001"),
        SLURM_SUBMIT_DIR=str(mpirun.ROOT),
        SLURM_NTASKS="2",
        SLURM_JOB_NUM_NODES="1",
    )
    assert job.returncode == 0, job.stderr
    check_pi(job.stdout, 100001)


@pytest.mark.parametrize(
    ("name", "command"), [("course_pbs.sh", "qsub"), ("course_slurm.sh", "sbatch")]
)
def test_job_script_outside_its_batch_system(name, command, batch_job):
    """The script is valid, and says in one line by which command to start it."""
    assert subprocess.run(["bash", "-n", EXAMPLES / name], check=False).returncode == 0
    job = batch_job(name)
    assert job.returncode != 0
    assert f"start this script by {command}" in job.stderr
    assert job.stderr.count("\n") == 1


def difference(framework):
    """Return the difference of the two scripts, as `diff -U1` shows it."""
    names = [f"course_mnist_{framework}{suffix}.py" for suffix in ("_sequential", "")]
    texts = [(EXAMPLES / name).read_text().splitlines() for name in names]
    paths = [f"examples/{name}" for name in names]
    return [line.rstrip() for line in difflib.unified_diff(*texts, *paths, n=1, lineterm="")]


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_parallel_script_differs_by_the_eight_steps(framework):
    lines = difference(framework)[2:]
    removed = [line for line in lines if line.startswith("-")]
    added = [line for line in lines if line.startswith("+")]
    steps = sorted(re.search(r"# (\d)\. [A-Z]", line)[1] for line in added if "# " in line)
    assert steps == list("12345678")
    # The docstring's three lines are among them.
    assert len(removed) <= 12
    assert len(added) <= 30


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_page_shows_the_difference(framework):
    blocks = re.findall(r"^```diff\n(.*?)\n```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (shown,) = [block for block in blocks if f"course_mnist_{framework}.py" in block]
    assert shown.splitlines() == "\n".join(difference(framework)).strip().splitlines()


@pytest.mark.parametrize(
    ("name", "language", "first", "last"),
    [
        ("course_pi.py", "python", "    comm = MPI", "    seconds ="),
        ("course_pbs.sh", "shell", "#PBS -N", "    python ${SCRIPT"),
        ("course_slurm.sh", "shell", "#SBATCH --job-name", "exec hvdliterun"),
    ],
)
def test_page_shows_what_is_in_the_script(name, language, first, last):
    """A code host does not show files that a page includes."""
    script, page = (EXAMPLES / name).read_text(), PAGE.read_text()
    part = re.search(f"^{re.escape(first)}.*?^{re.escape(last)}.*?$", script, re.M | re.S)[0]
    assert f"```{language}\n{textwrap.dedent(part)}\n```" in page
    assert f"(../../examples/{name})" in page


def test_missing_data_and_missing_matplotlib(example, monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        example("course_common").load_digits(str(tmp_path / "none"))
    assert stop.value.code == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "found nothing, expected a folder" in message
    assert "leave out --data-dir" in message

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="run `pip install matplotlib`"):
        example("course_plot").check_matplotlib()


def check_learned(lines, epochs):
    """The last epoch is better than the first, and good."""
    found = [EPOCH.match(line) for line in lines if line.startswith("epoch")]
    numbers, losses, accuracies = zip(*(match.groups() for match in found), strict=True)
    assert numbers == tuple(str(1 + epoch) for epoch in range(epochs)), "only rank 0 prints"
    assert float(losses[-1]) < float(losses[0]) / 2
    assert float(accuracies[-1]) > 0.8


def check_rates(lines, size, steps):
    reported = json.loads(lines[-1])
    rates = [float(line.split()[-2]) for line in lines if line.startswith("step ")]
    assert len(rates) == steps
    mean = sum(rates) / steps
    variance = sum((rate - mean) ** 2 for rate in rates) / steps
    assert reported["ranks"] == size
    # The steps' lines have one decimal.
    assert reported["images_per_s"] == pytest.approx(mean, abs=0.1)
    assert reported["deviation"] == pytest.approx(math.sqrt(variance), abs=0.1)


def check_homework(lines, size, folder):
    rows = [line.strip("| ").split(" | ") for line in lines[2:]]
    assert [row[:2] for row in rows] == [[str(size), "0"], [str(size), "0.5"]]
    assert all(0 < float(row[-1]) <= 1 for row in rows)
    # On one rank, there is nothing to warm up to.
    assert (rows[0][-2:] != rows[1][-2:]) == (size > 1)
    assert (folder / f"accuracy_{size}.pdf").read_bytes().startswith(b"%PDF")
    assert (folder / f"accuracy_{size}.png").read_bytes().startswith(b"\x89PNG")


HOMEWORK = ("--epochs", 1, "--warmup-epochs", 0, 0.5, "--formats", "pdf", "png")
RESNET = ("--num_steps", 3, "--batch_size", 2, "--image_size", 32, "--width", 4, "--json")
TRAINING = ("--epochs", 3, "--lr", 0.05)


def check_all(framework, size, folder, suffix):
    """Run the scripts of a framework, and return the checkpoints of both trainings."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    homework = "course_homework.py" if framework == "torch" else f"course_homework_{framework}.py"
    both = folder / f"parallel{suffix}", folder / f"sequential{suffix}"
    parallel, resnet, homework, sequential = run_in_turn(
        size,
        (f"course_mnist_{framework}.py", *TRAINING, "--checkpoint", both[0]),
        (f"course_resnet_{framework}.py", *RESNET),
        (homework, *HOMEWORK, "--output-dir", folder),
        (f"course_mnist_{framework}_sequential.py", *TRAINING, "--checkpoint", both[1]),
    )
    check_learned(parallel, 3)
    check_learned(sequential, 3)
    check_rates(resnet, size, 3)
    check_homework(homework, size, folder)
    return both


@pytest.mark.slow
def test_pytorch(tmp_path):
    torch = pytest.importorskip("torch")
    shapes = [
        {name: tensor.shape for name, tensor in torch.load(path)["model"].items()}
        for path in check_all("torch", 2, tmp_path, ".pt")
    ]
    assert shapes[0] == shapes[1]


def test_homework_without_mnist_has_steps_enough_for_a_warm_up(example, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    comparison = example("course_comparison")

    def options(*arguments):
        folder = ("--output-dir", str(tmp_path))
        monkeypatch.setattr(sys, "argv", ["course_homework.py", *folder, *arguments])
        found = comparison.parse_options("Solve the homework.")
        return found.epochs, found.warmup_epochs, found.lr

    assert options() == (30, [0, 15], 0.05)
    assert options("--data-dir", "mnist") == (6, [0, 3], 0.05)
    assert options("--epochs", "2", "--warmup-epochs", "1") == (2, [1], 0.05)


@pytest.mark.slow
def test_tensorflow(tmp_path):
    """On one rank: `test_training` runs a script with the same calls on two."""
    pytest.importorskip("tensorflow")
    for path in check_all("tensorflow", 1, tmp_path, ".keras"):
        assert path.exists()
