"""The options of ``hvdliterun``: a table, the parser made of it, and horovodrun's config file.

All options of horovodrun are among them. Those that mean something here act; the others print one
line with their replacement, and the job goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from hvdlite import __version__
from hvdlite.launch import job
from hvdlite.launch.errors import USAGE, LaunchError

_LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of the command line.

    Attributes:
        spellings: its names.
        help: what it does; empty where ``instead`` says it.
        values: the names of its values in ``--help``; none: it is a flag.
        parse: makes the value of the text.
        off: names of the flag that says the opposite.
        variables: environment variables that it sets, ``{}`` being the value (1 and 0 of a flag).
        ssh: arguments that it adds to those of ssh, ``{}`` being the value.
        instead: for an option without effect, what to use instead.
        config: its keys in a config file, ``section.key``.
        joined: whether it may be given several times, for one value with commas.
    """

    spellings: tuple[str, ...]
    help: str = ""
    values: tuple[str, ...] = ()
    parse: Callable[[str], Any] = str
    off: tuple[str, ...] = ()
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ssh: str = ""
    instead: str = ""
    config: tuple[str, ...] = ()
    joined: bool = False

    def of(self, options: argparse.Namespace) -> Any:
        """Return the value on a command line; None: it was not given."""
        value = getattr(options, self.name)
        return ",".join(value) if self.joined and value is not None else value

    @property
    def name(self) -> str:
        """The attribute of parsed options with its value."""
        return self.spellings[-1].lstrip("-").replace("-", "_")


def _at_least(kind: type[int] | type[float], least: int) -> Callable[[str], Any]:
    def parse(text: str) -> int | float:
        try:
            number = kind(text)
        except ValueError:
            number = kind(least - 1)
        if not number >= least:
            raise argparse.ArgumentTypeError(f"found {text}, expected a number from {least} on")
        return number

    return parse


def _megabytes(text: str) -> int:
    return int(_at_least(int, 0)(text)) * 2**20


def _log_level(text: str) -> str:
    if text.lower() not in _LOG_LEVELS:
        known = ", ".join(_LOG_LEVELS)
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {known})")
    return text.lower()


_AUTOTUNE = "hvdlite measures a few sizes at the start, once for each machine (HVDLITE_AUTOTUNE)"
_ELASTIC = "the number of ranks stays the same while a job runs; give it by -np and -H"
_HIERARCHICAL = "hvdlite always reduces within a node first, and then across nodes"
_TIMES = "hvdlite logs through Python's logging, whose format has the time if you want it"

GROUPS: dict[str, Sequence[Option]] = {
    "the job": (
        Option(("-np", "--num-proc"), "number of processes", ("N",), _at_least(int, 1)),
        Option(
            ("-H", "--hosts"),
            "hosts and their slots: host1:2,host2:2; default: this host, or the batch job's",
            ("HOSTS",),
        ),
        Option(
            ("-hostfile", "--hostfile"),
            "file with one 'host slots=N' or 'host:N' per line",
            ("F",),
        ),
        Option(
            ("--horovod",), "let every Python of the command find hvdlite where it imports horovod"
        ),
        Option(
            ("--config-file",),
            "options in a YAML file, as horovodrun takes it; the command line comes first",
            ("F",),
        ),
    ),
    "output": (
        Option(
            ("--output-filename",),
            "write the output of rank N to D/rank.N/stdout and D/rank.N/stderr",
            ("D",),
        ),
        Option(
            ("-prefix-timestamp", "--prefix-output-with-timestamp"),
            "put the time before each line of output (Open MPI)",
        ),
        Option(
            ("--log-level",),
            f"of hvdlite's logger: {', '.join(_LOG_LEVELS)}",
            ("LEVEL",),
            _log_level,
            variables={"HVDLITE_LOG_LEVEL": "{}"},
            config=("logging.level",),
        ),
        Option(("--verbose",), "print mpirun's command line"),
    ),
    "communication": (
        Option(
            ("--fusion-threshold-mb",),
            "megabytes after which a gradient bucket is closed",
            ("N",),
            _megabytes,
            variables={"HVDLITE_FUSION_THRESHOLD": "{}"},
            config=("params.fusion_threshold_mb",),
        ),
        Option(
            ("--cycle-time-ms",),
            "milliseconds in which operations come together before a round",
            ("N",),
            _at_least(float, 0),
            variables={"HVDLITE_CYCLE_TIME": "{}"},
            config=("params.cycle_time_ms",),
        ),
        Option(
            ("--cache-capacity",),
            "number of named operations that are kept ready",
            ("N",),
            _at_least(int, 0),
            variables={"HVDLITE_CACHE_CAPACITY": "{}"},
            config=("params.cache_capacity",),
        ),
        Option(
            ("--autotune",),
            "measure at the start which sizes suit this machine (the default)",
            off=("--no-autotune",),
            variables={"HVDLITE_AUTOTUNE": "{}"},
            config=("autotune.enabled",),
        ),
        Option(
            ("--tcp",),
            "use TCP only, for MPI and for NCCL",
            variables={
                "NCCL_IB_DISABLE": "1",
                "OMPI_MCA_pml": "ob1",
                "OMPI_MCA_btl": "^openib,ofi,uct,usnic",
                "FI_PROVIDER": "tcp",
                "UCX_TLS": "tcp,self,sm",
            },
        ),
        Option(
            ("--network-interface", "--network-interfaces"),
            "networks to use between hosts: eth0,eth1",
            ("NAMES",),
            variables={"NCCL_SOCKET_IFNAME": "{}"},
            joined=True,
        ),
        Option(
            ("--elastic-timeout",),
            "seconds in which the ranks come together again after a failure",
            ("N",),
            _at_least(float, 0),
            variables={"HVDLITE_ELASTIC_TIMEOUT": "{}"},
        ),
    ),
    "other hosts": (
        Option(("-p", "--ssh-port"), "port of ssh", ("N",), _at_least(int, 1), ssh="-p {}"),
        Option(("-i", "--ssh-identity-file"), "private key for ssh", ("F",), ssh="-i {}"),
        Option(
            ("--start-timeout",),
            "seconds in which another host must answer to ssh",
            ("N",),
            _at_least(int, 1),
            ssh="-o ConnectTimeout={}",
        ),
        Option(
            ("--mpi-args",), 'more arguments for mpirun: --mpi-args="--map-by ppr:2:node"', ("A",)
        ),
        Option(
            ("--binding-args",), 'where mpirun binds ranks: --binding-args="--bind-to core"', ("A",)
        ),
    ),
    "timeline and stalls": (
        Option(
            ("--timeline-filename",),
            "write what the ranks do when to F, for Perfetto (HVDLITE_TIMELINE)",
            ("F",),
            config=("timeline.filename",),
        ),
        Option(
            ("--timeline-mark-cycles",),
            "mark each round in it",
            off=("--no-timeline-mark-cycles",),
            variables={"HVDLITE_TIMELINE_MARK_CYCLES": "{}"},
            config=("timeline.mark_cycles",),
        ),
        Option(
            ("--stall-check",),
            "report ranks that wait for others (the default)",
            off=("--no-stall-check",),
            config=("stall_check.enabled",),
        ),
        Option(
            ("--stall-check-warning-time-seconds",),
            "seconds of waiting until it is reported",
            ("N",),
            _at_least(float, 0),
            variables={"HVDLITE_STALL_CHECK_TIME_SECONDS": "{}"},
            config=("stall_check.warning_time_seconds",),
        ),
        Option(
            ("--stall-check-shutdown-time-seconds",),
            "seconds of waiting until it is an error",
            ("N",),
            _at_least(float, 0),
            variables={"HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "{}"},
            config=("stall_check.shutdown_time_seconds",),
        ),
    ),
    "instead of a job": (
        Option(
            ("--check-compression",),
            "measure on N processes which compression pays on these links, and exit",
        ),
        Option(("-cb", "--check-build"), "print what is installed, and exit"),
    ),
    "options of horovodrun without effect here": (
        Option(
            ("--hierarchical-allreduce",),
            off=("--no-hierarchical-allreduce",),
            instead=_HIERARCHICAL,
            config=("params.hierarchical_allreduce",),
        ),
        Option(
            ("--hierarchical-allgather",),
            off=("--no-hierarchical-allgather",),
            instead=_HIERARCHICAL,
            config=("params.hierarchical_allgather",),
        ),
        Option(
            ("--torus-allreduce",),
            off=("--no-torus-allreduce",),
            instead=_HIERARCHICAL,
            config=("params.torus_allreduce",),
        ),
        Option(
            ("--autotune-log-file",),
            values=("F",),
            instead="hvdlite logs what it has measured, see --log-level debug",
            config=("autotune.log_file",),
        ),
        *(
            Option(
                (f"--autotune-{name.replace('_', '-')}",),
                values=("N",),
                instead=_AUTOTUNE,
                config=(f"autotune.{name}",),
            )
            for name in (
                "warmup_samples",
                "steps_per_sample",
                "bayes_opt_max_samples",
                "gaussian_process_noise",
            )
        ),
        Option(("--min-np", "--min-num-proc"), values=("N",), instead=_ELASTIC),
        Option(("--max-np", "--max-num-proc"), values=("N",), instead=_ELASTIC),
        Option(("--slots-per-host",), values=("N",), instead=_ELASTIC),
        Option(("--host-discovery-script",), values=("F",), instead=_ELASTIC),
        Option(("--blacklist-cooldown-range",), values=("MIN", "MAX"), instead=_ELASTIC),
        Option(
            ("--reset-limit",),
            values=("N",),
            instead="HVDLITE_ELASTIC_RETRIES limits the failures in a row without a commit",
        ),
        Option(
            ("--mpi-threads-disable",),
            off=("--no-mpi-threads-disable",),
            instead="hvdlite needs MPI in several threads",
            config=("library_options.mpi_threads_disable",),
        ),
        Option(
            ("--num-nccl-streams",),
            values=("N",),
            instead="hvdlite uses one stream for each of its lanes",
            config=("library_options.num_nccl_streams",),
        ),
        Option(
            ("--thread-affinity",),
            values=("N",),
            instead="hvdlite binds no thread; --binding-args binds ranks",
            config=("library_options.thread_affinity", "library_options.ccl_bgt_affinity"),
        ),
        Option(
            ("--gloo-timeout-seconds",),
            values=("N",),
            instead="there is no Gloo; see --stall-check-shutdown-time-seconds",
            config=("library_options.gloo_timeout_seconds",),
        ),
        Option(
            ("--log-without-timestamp",),
            off=("--log-with-timestamp",),
            instead=_TIMES,
        ),
        Option(
            ("--log-hide-timestamp",),
            off=("--no-log-hide-timestamp",),
            instead=_TIMES,
            config=("logging.hide_timestamp",),
        ),
        Option(
            ("--disable-cache",),
            instead="hvdliterun keeps no results of its checks",
        ),
        Option(
            ("--gloo",), instead="ranks exchange through MPI and NCCL", config=("controller.gloo",)
        ),
        Option(("--mpi",), instead="this is the default", config=("controller.mpi",)),
        Option(("--jsrun",), instead="mpirun starts the ranks; see -H for their hosts"),
    ),
}
# What Horovod has as the opposite of one of the above.
_CONFIG_OFF = {"logging.with_timestamp": "--log-without-timestamp"}

_ALL = [option for options in GROUPS.values() for option in options]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line, and the config file that it names.

    An option that is given several times counts as the last one says; what the command line says
    counts more than the file.

    Raises:
        LaunchError: the file cannot be read.
        SystemExit: a mistake in either, of which the user has been told; or a request for help.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    options = parser.parse_args(words)
    if options.config_file is not None:
        configured = list(_configured(options.config_file))
        parser.source = f"--config-file {options.config_file}: "
        parser.parse_args(configured)
        parser.source = ""
        options = parser.parse_args([*configured, *words])
    return options


def without_effect(options: argparse.Namespace) -> Iterator[str]:
    """Yield a line for each option that was given and has no effect."""
    for option in _ALL:
        if option.instead and option.of(options) is not None:
            yield f"{option.spellings[0]} has no effect: {option.instead}"


def variables(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables that the options stand for."""
    settings = {}
    for option in _ALL:
        value = option.of(options)
        if value is not None:
            text = str(int(value)) if isinstance(value, bool) else str(value)
            for name, form in option.variables.items():
                settings[name] = form.format(text)
    if options.stall_check is not None:
        settings["HVDLITE_STALL_CHECK_DISABLE"] = str(int(not options.stall_check))
    return settings


def ssh_arguments(options: argparse.Namespace) -> str:
    """Return the arguments for ssh that the options stand for."""
    values = ((option, option.of(options)) for option in _ALL if option.ssh)
    return " ".join(option.ssh.format(value) for option, value in values if value is not None)


def mpirun_arguments(options: argparse.Namespace) -> list[str]:
    """Return the arguments for mpirun that the user has given.

    Raises:
        LaunchError: a quotation mark is missing.
    """
    words = []
    for name in ("mpi_args", "binding_args"):
        text = getattr(options, name) or ""
        try:
            words += shlex.split(text)
        except ValueError as error:
            raise LaunchError(f"--{name.replace('_', '-')}={text}: {error}") from None
    return words


class _Parser(argparse.ArgumentParser):
    """A mistake on the command line takes one line, whoever notices it.

    Attributes:
        source: where the words come from, if not from the command line.
    """

    source = ""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        job.say(f"{self.source}{message} (see hvdliterun --help)")
        sys.exit(USAGE)


def _parser() -> _Parser:
    parser = _Parser(
        prog="hvdliterun",
        usage="hvdliterun -np N [options] COMMAND [ARGUMENTS]",
        description="Run a command on N processes through mpirun.",
        allow_abbrev=False,
    )
    for title, options in GROUPS.items():
        group = parser.add_argument_group(title)
        for option in options:
            _add(group, option)
    parser.add_argument("-v", "--version", action="version", version=__version__)
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="what each process runs, with its arguments"
    )
    return parser


def _add(group: Any, option: Option) -> None:
    text = (option.help or option.instead).replace("%", "%%")
    if option.values:
        group.add_argument(
            *option.spellings,
            dest=option.name,
            action="append" if option.joined else "store",
            type=option.parse,
            nargs=len(option.values) if len(option.values) > 1 else None,
            metavar=option.values if len(option.values) > 1 else option.values[0],
            help=text,
        )
        return
    on = {"dest": option.name, "action": "store_const", "const": True}
    group.add_argument(*option.spellings, help=text, **on)
    if option.off:
        text = f"the opposite of {option.spellings[0]}"
        group.add_argument(*option.off, help=text, **{**on, "const": False})


def _configured(path: str) -> Iterator[str]:
    """Yield the words of a command line that says what a config file does."""
    known = {key: option for option in _ALL for key in option.config}
    for key, value in _entries(path):
        option = known.get(key)
        if key in _CONFIG_OFF and isinstance(value, bool):
            yield _CONFIG_OFF[key]
        elif option is None:
            job.say(f"--config-file {path}: {key} has no effect: hvdlite does not know it")
        elif option.values:
            yield f"{option.spellings[-1]}={value}"
        elif not isinstance(value, bool):
            raise LaunchError(f"--config-file {path}: {key} is {value!r}, expected true or false")
        elif value:
            yield option.spellings[-1]
        else:
            yield from option.off[-1:]


def _entries(path: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys, as ``section.key``, and the values of a config file."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise LaunchError(
            f"--config-file {path}: YAML files need PyYAML; install it with `pip install pyyaml`"
        ) from None
    try:
        with open(path, encoding="utf-8") as file:
            sections = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise LaunchError(f"--config-file {path}: {reason}") from None
    if not isinstance(sections, dict):
        found = type(sections).__name__
        raise LaunchError(f"--config-file {path}: found {found}, expected sections, as `params:`")
    for section, entries in sections.items():
        if not isinstance(entries, dict):
            # As in `controller: mpi`, which has no keys.
            entries = {str(entries).lower(): True} if entries is not None else {}
        for key, value in entries.items():
            if value is not None:
                yield f"{section}.{key}", value
