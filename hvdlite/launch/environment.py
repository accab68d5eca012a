"""The variables that the ranks get."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from hvdlite.launch.hosts import Host, all_local

_NAME = re.compile(r"[A-Za-z_]\w*")

# What belongs to one shell, one login or one host, or is the MPI library's own to carry.
_STAYS = re.compile(
    r"_|PWD|OLDPWD|SHLVL|HOSTNAME|HOST|HOME|USER|LOGNAME|SHELL|MAIL|TERM|TERMCAP|TTY|DISPLAY"
    r"|LS_COLORS|PS[1-4]|PROMPT_COMMAND|HIST\w*|COLUMNS|LINES|TMPDIR"
    r"|(?:SSH|XDG|DBUS|OMPI|PRTE|PMIX|PMI|HYDRA|HYDI|SLURM|PBS|LSB)_\w*"
)

# Variables that say that a batch system may have given mpirun other hosts.
_BATCH = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "COBALT_JOBID")


def exported(environment: Mapping[str, str]) -> list[str]:
    """The names of the variables that go along to other hosts, sorted.

    Left at home is what describes this shell, login or host, what mpirun carries itself,
    and what mpirun cannot carry: a value of several lines.
    """
    return sorted(
        name
        for name, value in environment.items()
        if _NAME.fullmatch(name) and not _STAYS.fullmatch(name) and "\n" not in value
    )


def on_this_host(hosts: Sequence[Host], environment: Mapping[str, str]) -> bool:
    """Tell whether all ranks run here: where no host is named, a batch system may have others."""
    return all_local(hosts) and (bool(hosts) or not any(name in environment for name in _BATCH))


def with_own_package(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which ``import hvdlite`` finds hvdlite in this folder, too.

    In the folder that holds a checkout called hvdlite, ``python -c`` and ``python -m`` take that
    for the package, unless its own folder is on the path: an editable install comes last.
    """
    spec = PathFinder.find_spec("hvdlite", [os.getcwd()])
    if spec is None or spec.origin is not None:
        return dict(environment)
    paths = [environment.get("PYTHONPATH", ""), str(Path(__file__).resolve().parents[2])]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
