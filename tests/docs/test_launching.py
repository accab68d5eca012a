"""The files that the page of launching shows are right, as far as a parser can tell.

Nobody builds the image or starts the job here: there is no container engine and no cluster.
"""

import json
import re
import shlex
import subprocess

import pytest

from hvdlite.launch import hosts
from hvdlite.launch import options as launcher
from tests.docs import pages

TEXT = (pages.ROOT / "docs" / "guides" / "launching.md").read_text()
# Instructions of a Dockerfile, and the form of what follows.
INSTRUCTIONS = {
    "FROM": r"[\w./-]+:[\w.-]+",
    "RUN": r".+",
    "COPY": r"[\w.]+ \S+",
    "WORKDIR": r"/[\w/]+",
    "CMD": r"\[.+\]",
}


def blocks(language):
    """Return the blocks of a language on the page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def instructions(dockerfile):
    """Return pairs of an instruction and its arguments."""
    lines = re.sub(r"\\\n\s*", "", dockerfile).splitlines()
    return [tuple(line.split(" ", 1)) for line in lines]


def checked(arguments):
    """Return the options of ``hvdliterun``; a mistake is a failure."""
    options = launcher.parse(arguments)
    assert options.command[:1] == ["python"]
    return options


def shell_is_right(script):
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_dockerfile():
    (dockerfile,) = blocks("dockerfile")
    found = instructions(dockerfile)
    assert (found[0][0], found[-1][0]) == ("FROM", "CMD")
    for name, arguments in found:
        assert re.fullmatch(INSTRUCTIONS[name], arguments), (name, arguments)
        if name == "RUN":
            shell_is_right(arguments)
    (install,) = [arguments for name, arguments in found if "pip install" in arguments]
    source, extras = re.search(r"'(/\S+)\[([\w,]+)\]'", install).groups()
    assert f"COPY hvdlite {source}" in dockerfile
    assert f"{source}/constraints.txt" in install
    known = (pages.ROOT / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in known for extra in extras.split(","))
    program, *arguments = json.loads(dict(found)["CMD"])
    assert program == "hvdliterun"
    assert checked(arguments).num_proc == 2


def test_the_manifest(tmp_path):
    yaml = pytest.importorskip("yaml")
    (manifest,) = blocks("yaml")
    job = yaml.safe_load(manifest)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec = job["spec"]
    known = "slotsPerWorker runPolicy launcherCreationPolicy mpiImplementation mpiReplicaSpecs"
    assert set(spec) <= {*known.split(), "sshAuthMountPath"}
    launcher_pod, workers = (spec["mpiReplicaSpecs"][name] for name in ("Launcher", "Worker"))
    (container,) = launcher_pod["template"]["spec"]["containers"]
    (worker,) = workers["template"]["spec"]["containers"]
    assert container["image"] == worker["image"]
    program, *arguments = container["command"]
    assert program == "hvdliterun"
    options = checked(arguments)
    slots = spec["slotsPerWorker"]
    assert options.num_proc == workers["replicas"] * slots
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == slots
    # The operator writes such a file to the path that the launcher reads.
    assert options.hostfile == "/etc/mpi/hostfile"
    path = tmp_path / "hostfile"
    path.write_text("".join(f"train-worker-{n}.train.default.svc slots={slots}\n" for n in (0, 1)))
    assert len(hosts.choose_hosts(None, str(path), options.num_proc)) == 2


@pytest.mark.parametrize("script", blocks("shell"), ids=["slurm", "pbs"])
def test_a_job_script(script):
    shell_is_right(script)
    number = r"\"\$(SLURM_NTASKS|\(wc -l < \"\$PBS_NODEFILE\"\))\""
    (line,) = re.findall(rf"^hvdliterun -np {number}(.*)$", script, re.MULTILINE)
    assert checked(["-np", "8", *shlex.split(line[1])]).num_proc == 8
    assert script.startswith("#!/bin/bash\n#")
