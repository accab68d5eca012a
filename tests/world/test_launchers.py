"""Processes that a launcher started together, and that MPI takes for separate jobs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from hvdlite.errors import LauncherError
from hvdlite.world import launchers
from tests.harness.mpirun import ROOT

# The variables of rank 1 of 4 processes on two hosts.
TORCHRUN = {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
FOREIGN = {
    "torchrun": TORCHRUN,
    "by hand": {"WORLD_SIZE": "4", "RANK": "1"},
    "MVAPICH": {"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "1"},
    "MVAPICH 4": {"MVP_COMM_WORLD_SIZE": "4", "MVP_COMM_WORLD_RANK": "1"},
    "Flux": {"FLUX_JOB_SIZE": "4", "FLUX_TASK_RANK": "1", "PMI_SIZE": "4", "PMI_RANK": "1"},
    "jsrun": {"JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_RANK": "1"},
    "srun": {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"},
    "PALS": {"PALS_SIZE": "4", "PALS_RANKID": "1"},
    "horovodrun": {"HOROVOD_SIZE": "4", "HOROVOD_RANK": "1"},
    "mpirun": {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},
    "mpiexec": {"PMI_SIZE": "4", "PMI_RANK": "1"},
}
ALONE = {
    "nothing": {},
    "one process": {"WORLD_SIZE": "1", "RANK": "0"},
    "no rank": {"WORLD_SIZE": "4"},
    "no number": {"WORLD_SIZE": "four", "RANK": "0"},
    "in an allocation": {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"},
    "in a step of one": {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    "an mpirun of one in a step": {**FOREIGN["srun"], "OMPI_COMM_WORLD_SIZE": "1"},
    "an mpirun of one in a pod": {**FOREIGN["by hand"], "PMI_SIZE": "1", "PMI_RANK": "0"},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_several_processes_that_mpi_does_not_join_are_refused(name, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "-u", "train.py", "--name", "a b"])
    environment = FOREIGN[name]
    with pytest.raises(LauncherError) as caught:
        launchers.check(1, environment)
    text = str(caught.value)
    launcher = "a launcher such as torchrun" if "WORLD_SIZE" in environment else name.split()[0]
    assert text.startswith(f"{launcher} started 4 processes (")
    hosts = " -H host1:2,host2:2,..." if name == "torchrun" else ""
    assert f"`hvdliterun -np 4{hosts} python3 train.py --name 'a b'`" in text
    assert "HVDLITE_CHECK_LAUNCHER=0" in text
    assert "\n" not in text
    # Scripts set WORLD_SIZE for torch.distributed, under an mpirun that knows it.
    launchers.check(4, environment)


def test_a_process_that_is_meant_to_be_alone_is_not():
    for environment in ALONE.values():
        launchers.check(1, environment)


def test_a_torchrun_that_an_mpirun_of_one_started_and_a_rank_without_a_size_are_refused():
    with pytest.raises(LauncherError, match="such as torchrun"):
        launchers.check(1, {**TORCHRUN, "OMPI_COMM_WORLD_SIZE": "1"})
    with pytest.raises(LauncherError, match=r"at least 3 processes \(PALS_RANKID=2\).*-np N "):
        launchers.check(1, {"PALS_RANKID": "2"})


@pytest.mark.parametrize("found", [None, [], ["python", "-c", "first\nsecond"]])
def test_the_command_takes_one_line_whatever_is_known_of_it(found, monkeypatch):
    if found is None:
        monkeypatch.delattr(sys, "orig_argv")
    else:
        monkeypatch.setattr(sys, "orig_argv", found)
    with pytest.raises(LauncherError, match=r"^[^\n]*`hvdliterun -np 4 python [^\n]*$"):
        launchers.check(1, FOREIGN["by hand"])


def test_init_refuses_in_one_line_unless_told_otherwise():
    code = """if True:
        import os
        import hvdlite as hvd
        hvd.init([0])
        hvd.shutdown()
        os.environ["HVDLITE_CHECK_LAUNCHER"] = "0"
        hvd.init()
        print(hvd.size(), flush=True)
        hvd.shutdown()
        del os.environ["HVDLITE_CHECK_LAUNCHER"]
        hvd.init()
        """
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **FOREIGN["by hand"]},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout) == (1, "1\n")
    assert done.stderr.startswith("hvdlite: a launcher such as torchrun started 4 processes")
    assert len(done.stderr.splitlines()) == 1


RANKS = {
    "Open MPI": {"PMIX_NAMESPACE": "prterun-7@1", "PMIX_RANK": "1", "OMPI_MCA_btl": "self"},
    "Hydra": {"PMI_RANK": "1", "PMI_FD": "0"},
}


@pytest.mark.parametrize("name", RANKS)
def test_the_child_of_a_rank_is_known(name, monkeypatch):
    environment = {**RANKS[name]}
    launchers.note_rank(1, "place", environment)
    assert launchers.find_parent(environment) is None  # this process
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    assert launchers.find_parent(environment) == (own, 1, "place")
    with pytest.raises(LauncherError, match=f"of rank 1 .process {own}., which has"):
        launchers.take_place((parent := launchers.find_parent(environment)), True, environment)
    environment |= {"HVDLITE_ELASTIC": "1", "HVDLITE_SPARES": "1", "OMPI_MCA_mpi_ft_enable": "1"}
    environment["HOROVOD_TIMELINE"] = "t.json"
    assert not launchers.take_place(parent, False, environment)
    assert environment.keys() <= {"OMPI_MCA_btl"}


def test_what_a_user_sets_for_a_job_reaches_it():
    environment = {"HVDLITE_ELASTIC": "1", "HVDLITE_TIMELINE": "a", "OMPI_MCA_btl": "self"}
    assert launchers.without_rank(environment) == environment


def test_a_process_with_an_identity_of_its_own_is_no_child(monkeypatch):
    first, second = socket.socketpair()
    with first, second:
        pmix, hydra = RANKS["Open MPI"], {"PMI_RANK": "1", "PMI_FD": str(first.fileno())}
        others = [{**pmix, "PMIX_RANK": "0"}, {**hydra, "PMI_FD": str(second.fileno())}, {}]
        for identity, other in zip((pmix, hydra, {}), others, strict=True):
            environment = {**identity}
            launchers.note_rank(1, "place", environment)
            monkeypatch.setattr(os, "getpid", lambda: -1)
            assert bool(launchers.find_parent(environment)) == bool(identity)
            assert launchers.find_parent({**environment, **other}) is None
            monkeypatch.undo()


def test_a_forked_child_that_outlives_its_rank_does_not_keep_the_ranks_place():
    take = f"print(m._take({{'PMIX_NAMESPACE': 'fork-{os.getpid()}@1'}}), flush=True)"
    start = "from hvdlite.world import launchers as m; import os, sys"
    fork = "os.fork() or (sys.stdin.read(), os._exit(0))"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c"]
    with subprocess.Popen([*command, f"{start}; {take}; {fork}"], **pipes) as first:
        assert first.stdout.readline() == "True\n"
        assert first.wait(60) == 0  # its child waits for the end of the input
        second = subprocess.run([*command, f"{start}; {take}"], **pipes, timeout=60)
        assert second.stdout == "True\n"


@pytest.mark.parametrize("apart", [[], ["--pid", "--fork"]])
def test_an_identity_is_one_process_of_a_pid_namespace(apart):
    # Containers on the host's network have the same names of jobs, and one space of sockets.
    code = (
        "from hvdlite.world import launchers as m; import sys; "
        f"print(m._take({{'PMIX_NAMESPACE': 'here-{os.getpid()}@1'}}), flush=True); "
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as first:
        assert first.stdout.readline() == "True\n"
        second = subprocess.run(
            ["unshare", *apart, *command], input="", capture_output=True, text=True, timeout=60
        )
        first.communicate("")
    if "Operation not permitted" in second.stderr:
        pytest.skip("may not make a PID namespace")
    assert second.stdout == f"{bool(apart)}\n", second.stderr
