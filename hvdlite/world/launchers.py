"""Which launcher has started this process, and whether it is a rank of its own.

Two mistakes are detected: a launcher whose processes MPI does not connect (N jobs of one rank), and
processes of one identity, since those that a rank has started inherit that rank's.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import os
import re
import shlex
import socket
import sys
import zlib
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

from hvdlite.errors import LauncherError

_SETTING = "HVDLITE_CHECK_LAUNCHER"
_OTHER_MPI = "with the mpirun that belongs to the library that mpi4py loads"
_SLURM = (
    "with `srun --mpi=pmix` (`srun --mpi=list` shows what Slurm has; MPICH takes pmi2), or inside "
    "the allocation"
)

_PARENT = "HVDLITE_LAUNCHED_BY"
# What process managers know a rank by. Hydra gives all its jobs the same names, and the connection
# behind PMI_FD differs.
_IDENTITY = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK", "PMI_FD", "PALS_APID", "PALS_RANKID")
# One of these is in the identity if no rank of another job has the same.
_NAMES_OF_A_JOB = ("PMIX_NAMESPACE", "PALS_APID", "socket:")
_place = -1  # the descriptor of the socket that holds this rank's place, see `_take`
# Variables of a rank of another job, or of an MPI that runs in this process: an mpirun that sees
# them takes itself for a part of that job, and MPI takes the process for that rank.
_OF_A_RANK = re.compile(
    r"(?:OMPI_(?!MCA_|ALLOW_)|PRTE_(?!MCA_)|PMIX_(?!MCA_)|PMI_|PALS_|HVDLITE_LAUNCH|TORCHELASTIC_)\w+"
    r"|(?:LOCAL_|GROUP_|ROLE_)?RANK"
)
# What is for the job of a rank alone: how it goes on, and the file that it writes.
_OF_A_JOB = re.compile(r"(?:HVDLITE|HOROVOD)_(?:ELASTIC|SPARES|TIMELINE)|OMPI_MCA_mpi_ft_enable")


class Launcher(NamedTuple):
    """A launcher, and the variables that tell its processes their number.

    Attributes:
        sizes: variables with the number of processes.
        rank: the variable with the process's rank. Without it the others mean nothing: batch
            systems and users also set them for single processes.
        otherwise: another way to start the script, beside hvdliterun.
        rank_counts: whether a rank above 0 is enough, because not all versions set a size.
    """

    name: str
    sizes: tuple[str, ...]
    rank: str
    otherwise: str = ""
    rank_counts: bool = False


# The most specific first: Flux, PALS and srun set PMI_SIZE as well.
_LAUNCHERS = (
    Launcher("Flux", ("FLUX_JOB_SIZE",), "FLUX_TASK_RANK", "with `flux run -o mpi=...`"),
    Launcher("PALS", ("PALS_SIZE", "PALS_LOCAL_SIZE"), "PALS_RANKID", _OTHER_MPI, True),
    Launcher("jsrun", ("JSM_NAMESPACE_SIZE",), "JSM_NAMESPACE_RANK", _OTHER_MPI),
    Launcher("MVAPICH", ("MV2_COMM_WORLD_SIZE",), "MV2_COMM_WORLD_RANK", _OTHER_MPI),
    Launcher("MVAPICH", ("MVP_COMM_WORLD_SIZE",), "MVP_COMM_WORLD_RANK", _OTHER_MPI),
    Launcher("srun", ("SLURM_STEP_NUM_TASKS",), "SLURM_PROCID", _SLURM),
    Launcher("mpirun", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_RANK", _OTHER_MPI),
    Launcher("mpiexec", ("PMI_SIZE",), "PMI_RANK", _OTHER_MPI),
    Launcher("PMIx", (), "PMIX_RANK", _OTHER_MPI, True),
    Launcher("horovodrun", ("HOROVOD_SIZE",), "HOROVOD_RANK"),
    Launcher("a launcher such as torchrun", ("WORLD_SIZE",), "RANK"),
)


def check(size: int, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to be one of several processes that MPI takes for separate jobs.

    Each would train alone, silently, and write the same files as the others.

    Raises:
        LauncherError: they tell of more processes, and MPI of one; the message has the right
            command.
    """
    if size > 1 or _is_one(environment):
        return
    for launcher in _LAUNCHERS:
        if launcher.rank not in environment:
            continue
        counts = {name: _number(environment, name) for name in launcher.sizes}
        if launcher.rank_counts:
            counts[launcher.rank] = _number(environment, launcher.rank) + 1
        variable = max(counts, key=counts.__getitem__)
        if (count := counts[variable]) > 1:
            otherwise = f", or {launcher.otherwise}" if launcher.otherwise else ""
            exact = variable != launcher.rank
            raise LauncherError(
                f"{launcher.name} started {'' if exact else 'at least '}{count} processes "
                f"({variable}={environment[variable]}), but MPI knows of one: they would be "
                "separate jobs that overwrite each other's files; start the script with "
                f"`{_command(count if exact else 0, environment)}`{otherwise} (or set {_SETTING}=0 "
                "where this process is to train alone)"
            )


class Parent(NamedTuple):
    """The rank that has started this process.

    Attributes:
        place: its place in the world, as given to `note_rank`.
    """

    pid: int
    rank: int
    place: Any


def note_rank(rank: int, place: Any, environment: MutableMapping[str, str] = os.environ) -> None:
    """Tell the processes that this rank starts whose identity they inherit.

    Args:
        place: its place in the world, which JSON can carry.
    """
    if identity := _identity(environment):
        text = json.dumps([identity, os.getpid(), rank, place])
        environment[_PARENT] = base64.b64encode(zlib.compress(text.encode())).decode()


def find_parent(environment: Mapping[str, str] = os.environ) -> Parent | None:
    """Return the rank whose identity this process has inherited; None: it has its own, or none.

    A rank may start a launcher, whose processes have identities of their own.
    """
    if _PARENT not in environment:
        return None
    identity, *noted = json.loads(zlib.decompress(base64.b64decode(environment[_PARENT])))
    parent, own = Parent(*noted), _identity(environment)
    if not own.get("PMI_FD", "").startswith("socket:"):  # which is closed in most children
        own["PMI_FD"] = identity.get("PMI_FD", "")
    is_own = parent.pid == os.getpid() or any(own.get(name) != identity[name] for name in identity)
    return None if is_own else parent


def take_place(
    parent: Parent | None, is_refused: bool, environment: MutableMapping[str, str] = os.environ
) -> bool:
    """Make this process the rank that its identity says, or, if another process is, a job of one.

    Returns:
        Whether it is that rank.

    Raises:
        LauncherError: the latter is refused; the message says what to do.
    """
    if parent is None and _take(_identity(environment)):
        return True
    if is_refused:
        whose = "a process of the same rank that has called it before"
        if parent is not None:
            whose = f"rank {parent.rank} (process {parent.pid}), which has started it"
        raise LauncherError(
            f"process {os.getpid()} calls hvd.init() and would take the place in the job of "
            f"{whose}; call it in the rank itself, before that starts processes, start ranks of "
            f"another job with hvdliterun or hvdlite.run, or set {_SETTING}=0 where this process "
            "is to be a job of one rank"
        )
    for name in environment.keys() - without_rank(environment):
        del environment[name]
    return False


def _take(identity: Mapping[str, str]) -> bool:
    """Take a rank's place until this process ends; return False if another process has it.

    With two of them MPI would end the job, or hang. No two sockets can have one name.
    """
    global _place
    key = json.dumps(identity)
    if _place < 0 and any(name in key for name in _NAMES_OF_A_JOB):
        # Containers on the host's network may have jobs of one name, and see each other's sockets.
        with contextlib.suppress(OSError):  # there is no /proc
            key += os.readlink("/proc/self/ns/pid")
        place = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            place.bind(f"\0hvdlite {hashlib.sha256(key.encode()).hexdigest()}")
        except OSError as error:
            place.close()
            return error.errno != errno.EADDRINUSE
        _place = place.detach()
    return True


def _leave() -> None:
    """Leave the rank's place, in a forked child, which may outlive the rank."""
    global _place
    if _place >= 0:
        os.close(_place)
        _place = -1


os.register_at_fork(after_in_child=_leave)


def without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables by which this process is a rank of a job."""
    kept = {name: text for name, text in environment.items() if not _OF_A_RANK.fullmatch(name)}
    if _identity(environment):
        return {name: text for name, text in kept.items() if not _OF_A_JOB.fullmatch(name)}
    return kept


def _identity(environment: Mapping[str, str]) -> dict[str, str]:
    found = {name: environment[name] for name in _IDENTITY if name in environment}
    with contextlib.suppress(KeyError, OSError):
        found["PMI_FD"] = os.readlink(f"/proc/self/fd/{found['PMI_FD']}")
    return found


def _is_one(environment: Mapping[str, str]) -> bool:
    """Return whether an mpirun has started this process as a job of one."""
    names = environment.keys() & {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}
    # torchrun's processes inherit the variables of an mpirun that has started torchrun.
    is_alone = bool(names) and all(_number(environment, name) <= 1 for name in names)
    return is_alone and "TORCHELASTIC_RUN_ID" not in environment


def _number(environment: Mapping[str, str], variable: str) -> int:
    value = environment.get(variable, "")
    return int(value) if value.isdecimal() else 0


def _command(count: int, environment: Mapping[str, str]) -> str:
    """Return the command line for this process's script on ``count`` ranks (0: unknown)."""
    here = _number(environment, "LOCAL_WORLD_SIZE")
    hosts = ["-H", f"host1:{here},host2:{here},..."] if 0 < here < count else []
    program, *arguments = getattr(sys, "orig_argv", None) or ["python", "train.py"]
    # torchrun adds it.
    arguments = arguments[1:] if arguments[:1] == ["-u"] else arguments
    words = [os.path.basename(program), *arguments]
    if any("\n" in word for word in words) or sum(map(len, words)) > 1000:
        words = [words[0], "..."]
    return " ".join(["hvdliterun", "-np", str(count or "N"), *hosts, shlex.join(words)])
