from __future__ import annotations

from pathlib import Path

from hvdlite.launch.cli import with_paths
from hvdlite.launch.hosts import Host, on_this_host
from hvdlite.launch.mpirun import exported


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


def test_the_hosts_of_batch_jobs():
    here, there = [Host("localhost", 2)], [Host("localhost", 1), Host("no-such-host", 1)]
    assert not on_this_host([], {"SLURM_JOB_ID": "7"})
    assert on_this_host([], {"SLURM_CONF": "/etc/slurm.conf"})
    for environment in ({}, {"SLURM_JOB_ID": "7"}):
        assert on_this_host(here, environment)
        assert not on_this_host(there, environment)


def test_own_package_where_a_folder_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert with_paths({"A": "b"}) == {"A": "b"}
    (tmp_path / "hvdlite").mkdir()
    root = str(Path(__file__).parents[2])
    assert with_paths({"PYTHONPATH": "/first"}) == {"PYTHONPATH": f"/first:{root}"}
    (tmp_path / "hvdlite" / "__init__.py").touch()
    assert with_paths({}) == {}
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()  # of which mpirun tells
    assert with_paths({}) == {}
