"""A function on N ranks: how they are started, and what came of it."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from hvdlite.errors import HorovodInternalError
from hvdlite.launch import job, mpirun, rank, wire, worker
from hvdlite.launch.account import Account
from hvdlite.launch.environment import exported, on_this_host
from hvdlite.launch.hosts import Host
from hvdlite.launch.parcel import Part
from hvdlite.launch.post import Post, Trouble, post

START_TIMEOUT = 120.0
_ROOT = str(Path(__file__).resolve().parents[2])
# What a rank of another job, or an MPI that runs in this process, has in its environment: an
# mpirun that sees it takes itself for a part of that.
_OF_A_RANK = re.compile(
    r"(?:OMPI_(?!MCA_|ALLOW_)|PRTE_(?!MCA_)|PMIX_(?!MCA_)|PMI_|HVDLITE_LAUNCH)\w+"
)


@dataclass(frozen=True)
class Options:
    """How ranks are started.

    Attributes:
        num_proc: how many.
        hosts: where; empty: here, or wherever the batch system says.
        output_folder: for files with what they print; empty: it is shown.
        env: environment variables on top of those of this process.
        start_timeout: seconds until all must have started.
        verbose: whether to print mpirun's command line.
    """

    num_proc: int
    hosts: Sequence[Host] = ()
    output_folder: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    start_timeout: float = START_TIMEOUT
    verbose: bool = False


def call(function: list[Part], options: Options, numbered: bool) -> dict[int, list[bytearray]]:
    """Call a function on all ranks, and return the parts of its results by rank.

    Args:
        function: the parts of the function and its arguments.
        options: how the ranks are started.
        numbered: whether the function gets the rank as its first argument, and brings no result.

    Raises:
        Exception: as `hvdlite.run`, for what goes wrong on the ranks.
    """
    # The folder of the script is its first entry; an interactive session has an empty one.
    path = [os.path.abspath(entry) for entry in sys.path]
    task = pickle.dumps(tuple(worker.Task(path, list(sys.argv), numbered)))
    kept = {name: value for name, value in os.environ.items() if not _OF_A_RANK.fullmatch(name)}
    settings = {**kept, **options.env}
    here = on_this_host(options.hosts, settings)
    program = mpirun.detect(mpirun.find(settings))
    settings = {**program.settings(root=os.geteuid() == 0, here=here), **settings}
    with post([] if here else _names(options.hosts), task, function) as opened:
        settings[wire.KEY] = opened.key.hex()
        names = [] if here else exported(settings)
        arguments = program.arguments(_description(opened, options, names))
        if options.verbose:
            job.say(shlex.join(arguments))
        box = _Starting(opened, options)
        streams = (subprocess.DEVNULL, opened.stdout, opened.stderr)
        try:
            ending = job.follow(arguments, settings, box, program.quiet_end, False, streams)
        except _TooLate:
            _raise_not_started(opened, options, f"did not start in {options.start_timeout:g} s")
        if not ending.received:
            _check(opened, options, ending)
    if ending.received:
        _obey(ending.received)
    return opened.results


def _description(opened: Post, options: Options, names: list[str]) -> mpirun.Launch:
    shim = [sys.executable, "-I", "-S", rank.__file__, opened.address, options.output_folder]
    command = [sys.executable, "-c", worker.PROGRAM.format(_ROOT), opened.address]
    return mpirun.Launch(options.num_proc, options.hosts, names, [*shim, *command])


class _TooLate(Exception):  # noqa: N818 - never seen outside
    """Not all ranks have started in time."""


class _Starting:
    """The post, and a limit to the time until all ranks have connected to it."""

    def __init__(self, opened: Post, options: Options) -> None:
        self._post = opened
        self._missing = options.num_proc
        self._deadline = time.monotonic() + options.start_timeout

    def wait(self, seconds: float) -> list[str]:
        """Wait for reports."""
        reports = self._post.wait(seconds)
        late = time.monotonic() > self._deadline
        if late and not reports and len(self._post.connected) < self._missing:
            raise _TooLate
        return reports

    def finish(self) -> list[str]:
        """The last reports."""
        return self._post.finish()


def _names(hosts: Sequence[Host]) -> list[str]:
    """What other hosts may know this one by: its addresses on the way to them, its name."""
    names = []
    for host in hosts:
        with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
            probe.connect((host.name, 9))  # Sends nothing, but chooses the way.
            names.append(str(probe.getsockname()[0]))
    return list(dict.fromkeys([*names, socket.getfqdn(), socket.gethostname()]))


def _obey(number: signal.Signals) -> NoReturn:
    """Do what the signal would have done without us, now that the job has ended."""
    signal.raise_signal(number)
    raise HorovodInternalError(f"the job was ended, because this process got {number.name}")


def _check(opened: Post, options: Options, ending: job.Ending) -> None:
    """Raise unless every rank has brought a result and the job has ended well."""
    if opened.troubles:
        raise _error(_first(opened.troubles))
    missing = sorted(set(range(options.num_proc)) - set(opened.results))
    if len(opened.connected) < options.num_proc:
        how = rank.describe("mpirun", ending.code)
        _raise_not_started(opened, options, f"did not start; {how}")
    if missing:
        how = rank.describe("mpirun", ending.code)
        raise HorovodInternalError(f"ranks {missing} brought no result; {how}{_said(opened)}")
    if ending.code:
        raise HorovodInternalError(
            f"{rank.describe('mpirun', ending.code)} after all ranks had returned{_said(opened)}"
        )


def _first(troubles: Sequence[Trouble]) -> Trouble:
    """The first trouble; one that only tells of another rank's end does not count before that."""
    return min(troubles, key=_is_consequence)


def _is_consequence(trouble: Trouble) -> bool:
    return bool(trouble.account) and Account(*pickle.loads(trouble.account)).is_consequence


def _error(trouble: Trouble) -> BaseException:
    if trouble.account:
        return Account(*pickle.loads(trouble.account)).error(trouble.rank)
    return HorovodInternalError(trouble.text)


def _raise_not_started(opened: Post, options: Options, how: str) -> NoReturn:
    missing = sorted(set(range(options.num_proc)) - opened.connected)
    raise HorovodInternalError(
        f"ranks {missing} of {options.num_proc} {how}; check the hosts and their slots, or raise "
        f"start_timeout{_said(opened)}"
    )


def _said(opened: Post) -> str:
    return "\n".join(["; mpirun printed:", *opened.said]) if opened.said else ""
