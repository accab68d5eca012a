"""The command line of ``hvdliterun``."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import socket
import stat
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.machinery import PathFinder
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any

from hvdlite.base.settings import Settings
from hvdlite.errors import StartError
from hvdlite.launch import check_build, hosts, rank
from hvdlite.launch.discovery import Discovery, Plan, Sizes
from hvdlite.launch.job import End, Job, run, say
from hvdlite.launch.options import (
    folder,
    make_job,
    parse,
    report_ignored,
    ssh_arguments,
    variables,
)
from hvdlite.launch.server import Server
from hvdlite.observe import protocol
from hvdlite.observe.protocol import Part
from hvdlite.world.launchers import without_rank

_PACKAGE = Path(__file__).resolve().parents[1]
# Seconds before ranks that could not take the state of the run before are started once more.
_PAUSE = 5.0
# Exit codes of a wrong command line (Python, argparse), and of a program that cannot be started.
_HOPELESS = (StartError.USAGE, StartError.NOT_EXECUTABLE, StartError.NOT_FOUND)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``hvdliterun`` with arguments, or with this process's; return its exit code."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            # Closed: the next file that is opened would get its number, and mpirun print there.
            os.set_inheritable(null := os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(null, "w", closefd=False))
    try:
        options = parse(argv)
        if options.check_build:
            print(check_build.report())
            return 0
        return _launch(options)
    except StartError as error:
        say(str(error))
        return error.code
    except KeyboardInterrupt:
        return 130


def horovodrun() -> Any:
    """Run Horovod's own ``horovodrun`` where that is installed, else ``hvdliterun --horovod``."""
    for command in metadata.entry_points(group="console_scripts", name="horovodrun"):
        if command.dist and command.dist.name == "horovod":
            return command.load()()
    return main(["--horovod", *sys.argv[1:]])


def _launch(options: argparse.Namespace) -> int:
    report_ignored(options)
    sizes = _sizes(options)
    if sizes is None:
        return _launch_on(options, Plan(_hosts(options), options.num_proc), None)
    with sizes.discovery.running():
        return _launch_on(options, sizes.wait(options.num_proc), sizes)


def _launch_on(options: argparse.Namespace, plan: Plan, sizes: Sizes | None) -> int:
    """Run the job as often as it takes, first as planned, and return its exit code."""
    job = _prepare(options, plan)
    # Elastic jobs do without a host that does not answer, and other programs than ssh ask it.
    others = {*job.program.agent_variables, *hosts.BATCH}
    uses_ssh = sizes is None and job.settings.keys().isdisjoint(others)
    remote = [each.name for each in plan.hosts if uses_ssh and not hosts.all_local([each])]
    ssh = shlex.split(ssh_arguments(options))
    hosts.check_names(remote, ssh)
    restarts = options.restarts or 0
    runs = failures = 0
    state: Sequence[Part] = ()
    deadline: float | None = None  # for ranks that have the state
    while True:
        end = _run(options, job, plan, runs, sizes, state)
        runs += 1
        has_stopped, state = bool(end.state) and end.state is not state, end.state
        if sizes is not None and (has_stopped or (state and end.code)):
            deadline = None if has_stopped else deadline
            why = "the hosts have changed"
            if end.code:
                deadline = deadline or time.monotonic() + sizes.seconds
                if time.monotonic() > deadline:
                    say(
                        f"no run has taken the ranks' state within {sizes.seconds:.0f} s "
                        "(--elastic-timeout), so it is lost"
                    )
                    break
                say(f"{end.text}; the ranks' state is kept, and the job starts once more")
                why = "one more start"
                time.sleep(_PAUSE)
            plan = sizes.wait(sizes.most)
            ranks = "1 rank" if plan.ranks == 1 else f"{plan.ranks} ranks"
            say(f"{why}; the job goes on with {ranks} on {hosts.listed(plan.hosts)}")
        elif end.text and end.code not in _HOPELESS and failures < restarts:
            failures += 1
            say(f"{end.text}; restart {failures} of {restarts}")
            plan = sizes.wait(sizes.most) if sizes is not None else plan
        else:
            break
    if end.text:
        say(end.text)
    for host in remote if end.text.startswith("mpirun ") else ():
        if reason := hosts.login(host, ssh):
            say(f"host {host} does not answer: {reason}")
    return end.code


def _prepare(options: argparse.Namespace, plan: Plan) -> Job:
    settings = {**without_rank(os.environ), **variables(options)}
    command, settings = resolve(_command(options), settings)
    if hosts.all_local(plan.hosts):
        check(command, settings, plan.ranks)
    settings = with_paths(settings, *(n for n in ("horovod", "torch") if getattr(options, n)))
    if options.torch:
        settings["TORCHELASTIC_RUN_ID"] = os.urandom(16).hex()
    job = make_job(options, plan.hosts, settings)
    output, settings = "", dict(job.settings)
    if options.output_filename is not None:
        output = folder("--output-filename", options.output_filename)
    else:
        # A rank's standard error is a pipe. A terminal of unknown width has 0 columns.
        if sys.stderr.isatty():
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            settings.setdefault(protocol.COLUMNS, str(columns))
        if job.is_here and _columns(settings) and not options.prefix_output_with_timestamp:
            output = rank.TO_LAUNCHER if sys.stdout.isatty() else rank.ERRORS_TO_LAUNCHER
    return job._replace(command=command, output=output, settings=settings)


def _run(
    options: argparse.Namespace,
    job: Job,
    plan: Plan,
    number: int,
    sizes: Sizes | None,
    state: Sequence[Part],
) -> End:
    """Run the job once more, after so many runs, from the state of the last one.

    `sizes` has the run stop to have another size; None: the size is fixed.
    """
    settings = {**job.settings, "HVDLITE_RESTART": str(number)}
    here = hosts.on_this_host(plan.hosts, settings)
    if options.torch:
        settings |= torch_variables(plan.hosts, here) | {
            "TORCHELASTIC_RESTART_COUNT": str(number),
            "TORCHELASTIC_MAX_RESTARTS": str(options.restarts or 0),
        }
    # Other hosts need not reach this one, except to tell of changes.
    addresses = None
    if not here and sizes is not None:
        addresses = hosts.own_addresses(plan.hosts, ",".join(options.network_interfaces or ()))
    stdin = _stdin()
    if stdin == rank.NOTHING or (stdin and here):
        settings[rank.STDIN] = stdin
    elif stdin:
        say(
            "mpirun may hang when much is piped into it (prrte issue 2373); with hosts, let "
            "the script read a file, or give `< /dev/null`"
        )
    with Server(addresses, ranks=plan.ranks, spares=options.spares or 0) as server:
        server.state = state
        server.columns = _columns(settings)
        if sizes is not None:
            settings[protocol.ADDRESS] = server.address
        job = job._replace(hosts=plan.hosts, is_here=here, settings=settings)
        if sizes is None:
            return run(job, server)
        end = run(job, server, sizes.follow(server))
        if bad := sizes.note_end(plan, server, bool(end.text)):
            say(
                f"no process has started on {', '.join(bad)}; such a host gets no more of them "
                "(--blacklist-cooldown-range)"
            )
        return end


def torch_variables(places: Sequence[hosts.Host], is_here: bool) -> dict[str, str]:
    """Return what torchrun sets and all ranks share; `rank.torch_variables` has the rest."""
    slots: Counter[str] = Counter()
    for host in places:
        slots[hosts.host_key(host.name)] += host.slots
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    return {
        rank.NODES: ",".join(map(str, [0, *accumulate(slots.values())][:-1])),
        "MASTER_ADDR": "127.0.0.1" if is_here else _first(places),
        "MASTER_PORT": str(port),
        "ROLE_NAME": "default",
    }


def _first(places: Sequence[hosts.Host]) -> str:
    """Return the address of the host of rank 0, as the others reach it."""
    if places and not hosts.all_local(places[:1]):
        return places[0].name
    others = [host for host in places if not hosts.all_local([host])]
    # A Slurm job that is started on a login node: node[07-09,12] begins with node07.
    nodes = "" if places else os.environ.get("SLURM_JOB_NODELIST", "")
    first = re.sub(r"\[(\w+).*", r"\1", nodes.partition(",")[0])
    return first or next(iter(hosts.own_addresses(others)), socket.gethostname())


def _columns(settings: Mapping[str, str]) -> int:
    """Return the columns of the terminal that shows what the ranks print; 0: none does."""
    text = settings.get(protocol.COLUMNS, "")
    return int(text) if text.isdecimal() else 0


def _stdin() -> str:
    """Return the position and the path of the file or pipe that this process reads; empty: none."""
    path = f"/proc/{os.getpid()}/fd/0"
    with contextlib.suppress(OSError):  # it is closed, or belongs to another user
        is_closed = sys.__stdin__ is None  # then a library's own file may have its number
        if is_closed or os.path.samestat(found := os.fstat(0), os.stat(os.devnull)):
            return rank.NOTHING
        kind = found.st_mode
        if stat.S_ISFIFO(kind) or stat.S_ISREG(kind):
            os.close(os.open(path, os.O_RDONLY))
            return f"{os.lseek(0, 0, os.SEEK_CUR) if stat.S_ISREG(kind) else 0} {path}"
    return ""


def _sizes(options: argparse.Namespace) -> Sizes | None:
    """Return what decides the number of ranks; None: the command line has fixed it."""
    least = options.min_np or options.num_proc
    if least is None:
        raise StartError("-np is missing: give the number of processes, e.g. -np 2")
    if not any((options.min_np, options.max_np, options.host_discovery_script)):
        return None
    options.elastic = True
    options.num_proc = options.num_proc or least
    most = options.max_np or max(options.num_proc, least)
    if not least <= options.num_proc <= most:
        raise StartError(
            f"--min-np {least} -np {options.num_proc} --max-np {most}: found them out of order, "
            "expected min <= np <= max"
        )
    spares = options.spares or 0
    first: list[hosts.Host] = []
    if options.host_discovery_script is None:
        first = _hosts(options) or [hosts.Host("localhost", most + spares)]
    elif options.hosts or options.hostfile:
        raise StartError(
            "-H and --hostfile are not allowed with --host-discovery-script: give one of them"
        )
    cooldown = options.blacklist_cooldown_range or (inf, inf)
    if cooldown[0] > cooldown[1]:
        raise StartError(
            f"--blacklist-cooldown-range {cooldown[0]} {cooldown[1]}: expected MIN <= MAX"
        )
    return Sizes(
        Discovery(first, options.host_discovery_script or "", options.slots_per_host or 1),
        least,
        most,
        spares,
        float(options.elastic_timeout or Settings().elastic_timeout),
        (cooldown[0], cooldown[1]),
    )


def _hosts(options: argparse.Namespace) -> list[hosts.Host]:
    if options.hosts is not None and options.hostfile is not None:
        raise StartError("-H is not allowed with --hostfile: give one of them")
    if options.spares and not options.elastic:
        raise StartError("--spares needs --elastic: without it, a rank that dies ends the job")
    return hosts.choose_hosts(
        options.hosts, options.hostfile, options.num_proc + (options.spares or 0)
    )


def _command(options: argparse.Namespace) -> list[str]:
    command: list[str] = options.command
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise StartError("there is no command to run, e.g. hvdliterun -np 2 python train.py")
    if ":" in command:
        raise StartError("an argument ':' cannot be passed on: mpirun takes it for its own")
    return command


def resolve(
    command: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command and its environment, with a ``python`` that exists.

    Where ``python`` is not on ``PATH`` (an environment that is not activated), it is the one
    that runs the launcher, and the programs beside it are found first.
    """
    path = environment.get("PATH", os.defpath)
    if command[0] == "python" and shutil.which("python", path=path) is None:
        path = os.pathsep.join([os.path.dirname(sys.executable), path])
        return [sys.executable, *command[1:]], {**environment, "PATH": path}
    return list(command), dict(environment)


def with_paths(environment: Mapping[str, str], *names: str) -> dict[str, str]:
    """Return the environment in which Python finds hvdlite, for scripts of horovod or torch, too.

    In the folder that holds a checkout called hvdlite, ``python -c`` and ``python -m`` take that
    for the package, unless its own folder is on the path: an editable install comes last.
    """
    first = [str(_PACKAGE / "launch" / "bootstrap")] if names else []
    first += [str(_PACKAGE / "horovod" / "metadata")] if "horovod" in names else []
    spec = PathFinder.find_spec("hvdlite", [""])
    last = [str(_PACKAGE.parent)] if spec is not None and spec.origin is None else []
    # An empty entry is the current folder, an empty variable is none.
    paths = [*first, *filter(None, [environment.get("PYTHONPATH")]), *last]
    return {**environment, **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}


def check(command: Sequence[str], environment: Mapping[str, str], ranks: int = 1) -> None:
    """Refuse a command that cannot be started on this host.

    Raises:
        StartError: there is no such program (code 127), it is not executable (126), the Python
            script does not exist (2, as Python itself has it), or only rank 0 would have it.
    """
    program = command[0]
    if shutil.which(program, path=environment.get("PATH", os.defpath)) is None:
        if os.path.isdir(program):
            raise StartError(f"{program} is a folder, not a program", StartError.NOT_EXECUTABLE)
        if os.path.exists(program) and os.sep in program:
            raise StartError(
                f"{program} is not executable; for a Python script: "
                f"hvdliterun ... python {program}",
                StartError.NOT_EXECUTABLE,
            )
        hint = f"; did you mean `python {program}`?" if program.endswith(".py") else ""
        raise StartError(f"{program}: command not found{hint}", StartError.NOT_FOUND)
    if re.fullmatch(r"python[\d.]*[dt]*", os.path.basename(program)):
        script, *_ = [*command[1:], "-"]
        if script.endswith(".py") and not os.path.exists(script):
            raise StartError(f"{script}: no such file")
        if script == "-" and ranks > 1:
            raise StartError(
                f"{program} reads its script from the standard input, which rank 0 alone of "
                f"{ranks} has, and would wait for the others; give a file: {program} train.py"
            )
