"""The command line of ``hvdliterun``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NoReturn

from hvdlite import __version__
from hvdlite.launch import build, job, mpirun, rank
from hvdlite.launch.command import check, for_horovod, resolve
from hvdlite.launch.environment import exported, in_batch_job
from hvdlite.launch.errors import USAGE, LaunchError
from hvdlite.launch.hosts import Host, all_local, check_slots, parse_hostfile, parse_hosts

_LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``hvdliterun`` and return its exit code.

    Args:
        argv: the arguments; None: those of this process.
    """
    options = _parser().parse_args(argv)
    try:
        if options.check_build:
            print(build.report(os.environ))
            return 0
        return _launch(options)
    except LaunchError as error:
        job.say(str(error))
        return error.code
    except KeyboardInterrupt:
        return 130


def _launch(options: argparse.Namespace) -> int:
    hosts = _hosts(options)
    settings = {**os.environ, **_settings(options)}
    own = [sys.executable, "-m", "hvdlite.advice"] if options.check_compression else None
    command, settings = resolve(own or _command(options), settings)
    here = all_local(hosts)
    if here:
        check(command, settings)
    if options.horovod:
        command = for_horovod(command)
    program = mpirun.detect(mpirun.find(settings))
    added = program.settings(root=os.geteuid() == 0, here=here)
    output = _output_folder(options.output_filename)
    with job.inbox() as box:
        launch = mpirun.Launch(
            num_proc=options.num_proc,
            hosts=hosts,
            exported=[] if here and not in_batch_job(settings) else exported(settings),
            command=[sys.executable, "-I", "-S", rank.__file__, box.path, output, *command],
        )
        arguments = program.arguments(launch)
        if options.verbose:
            news = {name: value for name, value in added.items() if name not in settings}
            _show(arguments, {**news, **_settings(options)})
        return job.run(arguments, {**added, **settings}, box, program.quiet_end)


def _hosts(options: argparse.Namespace) -> list[Host]:
    if options.num_proc is None:
        raise LaunchError("-np is missing: give the number of processes, e.g. -np 2")
    hosts = []
    if options.hosts is not None:
        hosts = parse_hosts(options.hosts)
    elif options.hostfile is not None:
        hosts = parse_hostfile(options.hostfile)
    check_slots(hosts, options.num_proc)
    return hosts


def _command(options: argparse.Namespace) -> list[str]:
    command: list[str] = options.command
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise LaunchError("there is no command to run, e.g. hvdliterun -np 2 python train.py")
    if ":" in command:
        raise LaunchError("an argument ':' cannot be passed on: mpirun takes it for its own")
    return command


def _settings(options: argparse.Namespace) -> dict[str, str]:
    """The variables that options stand for."""
    settings = {}
    if options.log_level is not None:
        settings["HVDLITE_LOG_LEVEL"] = options.log_level
    if options.fusion_threshold_mb is not None:
        settings["HVDLITE_FUSION_THRESHOLD"] = str(options.fusion_threshold_mb * 2**20)
    if options.timeline_filename is not None:
        settings["HVDLITE_TIMELINE"] = _timeline(options.timeline_filename)
    if options.timeline_mark_cycles:
        settings["HVDLITE_TIMELINE_MARK_CYCLES"] = "1"
    return settings


def _timeline(name: str) -> str:
    path = os.path.abspath(name)
    if not os.path.basename(name) or os.path.isdir(path):
        raise LaunchError(f"--timeline-filename {name}: found a folder, expected a file")
    _make_folder("--timeline-filename", os.path.dirname(path))
    return path


def _output_folder(name: str | None) -> str:
    if name is None:
        return ""
    _make_folder("--output-filename", name)
    return os.path.abspath(name)


def _make_folder(option: str, name: str) -> None:
    try:
        os.makedirs(name, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"{option} {name}: {error.strerror}") from None


def _show(arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    job.say(shlex.join([*(f"{name}={value}" for name, value in variables.items()), *arguments]))


class _Parser(argparse.ArgumentParser):
    """A mistake on the command line takes one line, whoever notices it."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        job.say(f"{message} (see hvdliterun --help)")
        sys.exit(USAGE)


def _at_least(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"found {text}, expected a number from {least} on")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hvdliterun",
        usage="hvdliterun -np N [options] COMMAND [ARGUMENTS]",
        description="Run a command on N processes through mpirun.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "-np",
        "--num-proc",
        type=partial(_at_least, 1),
        metavar="N",
        help="number of processes",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "-H",
        "--hosts",
        metavar="HOSTS",
        help="hosts and their slots: host1:2,host2:2; default: this host, or the batch job's",
    )
    where.add_argument(
        "--hostfile", metavar="F", help="file with one 'host slots=N' or 'host:N' per line"
    )
    add(
        "--output-filename",
        metavar="D",
        help="write the output of rank N to D/rank.N/stdout and D/rank.N/stderr",
    )
    add(
        "--fusion-threshold-mb",
        type=partial(_at_least, 0),
        metavar="N",
        help="sets HVDLITE_FUSION_THRESHOLD (there in bytes)",
    )
    add(
        "--timeline-filename",
        metavar="F",
        help="write what the ranks do when to F, for Perfetto (sets HVDLITE_TIMELINE)",
    )
    add(
        "--timeline-mark-cycles",
        action="store_true",
        help="mark each round in it (sets HVDLITE_TIMELINE_MARK_CYCLES)",
    )
    add("--log-level", type=str.lower, choices=_LOG_LEVELS, help="sets HVDLITE_LOG_LEVEL")
    add(
        "--horovod",
        action="store_true",
        help="let the command's Python import hvdlite where it imports horovod",
    )
    add(
        "--check-compression",
        action="store_true",
        help="measure on N processes which compression pays on these links, and exit",
    )
    add("--check-build", action="store_true", help="print what is installed, and exit")
    add("--verbose", action="store_true", help="print mpirun's command line")
    add("--version", action="version", version=__version__)
    add("command", nargs=argparse.REMAINDER, help="what each process runs, with its arguments")
    return parser
