"""Scripts that were written for torchrun run unchanged."""

from __future__ import annotations

import json
import os
import shlex
import sys

import pytest

from hvdlite.launch import cli, rank
from hvdlite.launch.hosts import parse_hosts
from tests.launch.launcher import ROOT, hvdliterun

pytestmark = pytest.mark.timeout(120)

# What torchrun of PyTorch 2.13 sets for a script, but for files and ways of its agent.
OF_TORCHRUN = """
GROUP_RANK GROUP_WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS RANK
ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RESTART_COUNT
TORCHELASTIC_RUN_ID WORLD_SIZE
"""
PRINT = f"import json, os; print(json.dumps({{n: os.getenv(n) for n in {OF_TORCHRUN.split()}}}))"


def found(*arguments, env=None):
    """The variables in each rank of a job, by rank, which a child of a shell prints."""
    line = shlex.join([sys.executable, "-c", PRINT])
    result = hvdliterun(*arguments, "sh", "-c", f"{line}; true", env=env)
    assert (result.returncode, result.stderr) == (0, "")
    return sorted(map(json.loads, result.stdout.splitlines()), key=lambda each: each["RANK"] or "")


def test_the_variables_of_torchrun():
    ranks = found("--torch", "-np", 3, "--restarts", 5)
    chosen = {(each.pop("TORCHELASTIC_RUN_ID"), int(each.pop("MASTER_PORT"))) for each in ranks}
    assert len(chosen) == 1
    for number, each in enumerate(ranks):
        assert each == {
            **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(number)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), "3"),
            **{"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default"},
            **{"TORCHELASTIC_MAX_RESTARTS": "5", "TORCHELASTIC_RESTART_COUNT": "0"},
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 3)),
        }


def test_only_then_and_the_launcher_s_own_rank_is_none_of_its_ranks():
    """It is a process of torchrun, or in a pod of a cluster that sets these for each pod."""
    before = {name: os.environ.get(name) for name in OF_TORCHRUN.split()}
    given = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "host"}
    ranks = found("-np", 2, env=given)
    assert ranks == [{**before, **given, "RANK": None, "LOCAL_RANK": None}] * 2


@pytest.mark.parametrize(
    ("hosts", "nodes"),
    [("a:2,b:1,c:2", [0, 0, 1, 2, 2]), ("a,a,b,b", [0, 0, 1, 1]), ("a:4,b:4", [0, 0, 0, 0, 1, 1])],
)
def test_the_node_of_each_rank(hosts, nodes, monkeypatch):
    (name, *_) = places = parse_hosts(hosts)
    common = cli.torch_variables(places, False)
    assert common["MASTER_ADDR"] == name.name
    for number, node in enumerate(nodes):
        variables = {
            rank.NODES: common[rank.NODES],
            "OMPI_COMM_WORLD_RANK": number,
            "OMPI_COMM_WORLD_LOCAL_RANK": nodes[:number].count(node),
            "OMPI_COMM_WORLD_LOCAL_SIZE": nodes.count(node),
        }
        for each, value in variables.items():
            monkeypatch.setenv(each, str(value))
        own = rank.torch_variables(len(nodes), os.getppid())
        assert (own["GROUP_RANK"], own["GROUP_WORLD_SIZE"]) == (str(node), str(max(nodes) + 1))
    monkeypatch.setenv(rank.NODES, "")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    # In a batch job, whose hosts the launcher does not know.
    own = rank.torch_variables(6, os.getppid())
    assert (own["GROUP_RANK"], own["GROUP_WORLD_SIZE"]) == ("1", "3")


def test_the_first_host_of_a_slurm_job(monkeypatch):
    for nodes, first in (("n[07-09,12],m1", "n07"), ("n1,m1", "n1")):
        monkeypatch.setenv("SLURM_JOB_NODELIST", nodes)
        assert cli.torch_variables([], False)["MASTER_ADDR"] == first


SCRIPT = """
import os, pickle, sys, types
import torch.distributed as dist
from torch.distributed import init_process_group
from torch.distributed.distributed_c10d import init_process_group as inner
from torch.multiprocessing import spawn

def run(rank, store):
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    dist.barrier()
    print("own", rank, "hvdlite" in sys.modules, flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    import hidden
    calls = []
    stand_in = types.ModuleType("hvdlite.torch.distributed")
    stand_in.substitute = lambda: calls.append(dist.is_initialized())
    assert "hvdlite" not in sys.modules
    assert dist.is_mpi_available()
    assert init_process_group is inner is dist.init_process_group
    assert pickle.loads(pickle.dumps(inner)) is inner
    sys.modules["hvdlite.torch.distributed"] = stand_in
    init_process_group("mpi")  # which would have no store
    import horovod.common.basics as hvd
    rank, size = dist.get_rank(), dist.get_world_size()
    print(rank, size, calls, hidden.found, hvd.size.__module__, flush=True)
    dist.destroy_process_group()
    if rank == 0:
        spawn(run, (sys.argv[1],), nprocs=2)
"""


def test_a_process_group_begins_with_hvdlite_and_those_of_own_processes_keep_gloo(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "sitecustomize.py").write_text("import hidden; hidden.found = True")
    (tmp_path / "hidden.py").write_text("found = False")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = sys.executable, tmp_path / "script.py", f"file://{tmp_path}/store"
    result = hvdliterun(
        *("--horovod", "--torch", "-np", 2, *command), env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(result.stdout.splitlines()) == [
        *[f"{rank} 2 [False] True hvdlite.world.world" for rank in range(2)],
        *["own 0 False", "own 1 False"],
    ]
