from __future__ import annotations

import os
import sys

from hvdlite.launch.environment import exported, in_batch_job, with_own_programs


def test_exported():
    environment = {
        "PATH": "/bin",
        "LD_LIBRARY_PATH": "/lib",
        "HVDLITE_LOG_LEVEL": "debug",
        "FOO": "a b;c='d'",
        "EMPTY": "",
        # Of this shell, login or host, or mpirun's own:
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


def test_batch_jobs():
    assert in_batch_job({"SLURM_JOB_ID": "7"})
    assert not in_batch_job({"SLURM_CONF": "/etc/slurm.conf"})


def test_own_programs_come_first():
    assert with_own_programs({"PATH": "/bin", "A": "b"}) == {
        "PATH": f"{os.path.dirname(sys.executable)}:/bin",
        "A": "b",
    }
