"""The variables that the ranks get."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from hvdlite.launch.hosts import Host, all_local

_PACKAGE = Path(__file__).resolve().parents[1]
_NAME = re.compile(r"[A-Za-z_]\w*")

# Variables of one shell, one login or one host, and those that the MPI library carries itself.
_STAYS = re.compile(
    r"_|PWD|OLDPWD|SHLVL|HOSTNAME|HOST|HOME|USER|LOGNAME|SHELL|MAIL|TERM|TERMCAP|TTY|DISPLAY"
    r"|LS_COLORS|PS[1-4]|PROMPT_COMMAND|HIST\w*|COLUMNS|LINES|TMPDIR"
    r"|(?:SSH|XDG|DBUS|OMPI|PRTE|PMIX|PMI|HYDRA|HYDI|SLURM|PBS|LSB)_\w*"
)

# Variables that say that a batch system may have given mpirun other hosts.
BATCH = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "COBALT_JOBID")


def exported(environment: Mapping[str, str]) -> list[str]:
    """Return the sorted names of the variables that the ranks on other hosts get.

    Left out are those that describe this shell, login or host, those that mpirun carries itself,
    and those that mpirun cannot carry: values of several lines.
    """
    return sorted(
        name
        for name, value in environment.items()
        if _NAME.fullmatch(name) and not _STAYS.fullmatch(name) and "\n" not in value
    )


def on_this_host(hosts: Sequence[Host], environment: Mapping[str, str]) -> bool:
    """Return whether all ranks run here; without named hosts, a batch system may choose others."""
    return all_local(hosts) and (bool(hosts) or not any(name in environment for name in BATCH))


def with_horovod(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which ``import horovod`` finds hvdlite in every Python.

    `hvdlite/horovod/bootstrap` has a ``sitecustomize`` that does it.
    """
    folder = str(_PACKAGE / "horovod" / "bootstrap")
    # An empty entry is the current folder, an empty variable is none.
    paths = [folder, *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


def with_own_package(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which ``import hvdlite`` finds hvdlite in this folder, too.

    In the folder that holds a checkout called hvdlite, ``python -c`` and ``python -m`` take that
    for the package, unless its own folder is on the path: an editable install comes last.
    """
    spec = PathFinder.find_spec("hvdlite", [os.getcwd()])
    if spec is None or spec.origin is not None:
        return dict(environment)
    paths = [*filter(None, [environment.get("PYTHONPATH")]), str(_PACKAGE.parent)]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}
