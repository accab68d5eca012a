"""The options of ``hvdliterun``: a table, the parser made of it, and horovodrun's config file.

All options of horovodrun are among them. Those that mean something here act; one line names the
others, and the job goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from hvdlite.base import settings
from hvdlite.errors import SettingsError, StartError
from hvdlite.launch.job import say
from hvdlite.version import __version__


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of the command line.

    Attributes:
        usage: its names and those of its values; a flag has none. ``--[no-]x`` has an opposite.
        help: what it does.
        parse: makes the value of the text; None: as the setting demands.
        setting: the variable of `hvdlite.base.settings`, without its prefix, that it sets.
        variables: environment variables that it sets, ``{}`` being the value (1 and 0 of a flag).
        ssh: arguments that it adds to those of ssh, ``{}`` being the value.
        joined: whether it may be given several times, for one value with commas.
    """

    usage: str
    help: str
    parse: Callable[[str], Any] | None = None
    setting: str = ""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ssh: str = ""
    joined: bool = False

    def of(self, options: argparse.Namespace) -> Any:
        """Return the value on a command line; None: it was not given."""
        value = getattr(options, self.name)
        return ",".join(value) if self.joined and value is not None else value

    @property
    def spellings(self) -> list[str]:
        """Return its names."""
        return [w.replace("[no-]", "") for w in self.usage.split() if w.startswith("-")]

    @property
    def values(self) -> tuple[str, ...]:
        """Return the names of its values in ``--help``."""
        return tuple(word for word in self.usage.split() if not word.startswith("-"))

    @property
    def flag(self) -> str:
        """Return the last of its names."""
        return self.spellings[-1]

    @property
    def opposite(self) -> str:
        """Return the flag for the opposite; empty: there is none."""
        return self.flag.replace("--", "--no-", 1) if "[no-]" in self.usage else ""

    @property
    def name(self) -> str:
        """Return the attribute of parsed options that holds its value."""
        return self.flag.lstrip("-").replace("-", "_")


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"found {text}, expected a number from {least} on")
        return int(text)

    return parse


def _megabytes(text: str) -> int:
    return _at_least(0)(text) * 2**20


def _as_setting(name: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        try:
            settings.read({f"HVDLITE_{name}": text})
        except SettingsError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return parse


_TCP_ONLY = {
    "NCCL_IB_DISABLE": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "^openib,ofi,uct,usnic",
    "FI_PROVIDER": "tcp",
    "UCX_TLS": "tcp,self,sm",
}
# Options of horovodrun that have no effect here.
_WITHOUT_EFFECT = (
    "--[no-]hierarchical-allreduce",
    "--[no-]hierarchical-allgather",
    "--[no-]torus-allreduce",
    "--[no-]autotune",
    "--autotune-log-file F",
    "--autotune-warmup-samples N",
    "--autotune-steps-per-sample N",
    "--autotune-bayes-opt-max-samples N",
    "--autotune-gaussian-process-noise N",
    "--[no-]mpi-threads-disable",
    "--num-nccl-streams N",
    "--thread-affinity N",
    "--gloo-timeout-seconds N",
    "--log-with-timestamp",
    "--log-without-timestamp",
    "--[no-]log-hide-timestamp",
    "--disable-cache",
    "--gloo",
    "--mpi",
    "--jsrun",
)
_GROUPS: dict[str, Sequence[Option]] = {
    "the job": (
        Option("-np --num-proc N", "number of processes", _at_least(1)),
        Option("-H --hosts HOSTS", "host1:2,host2:2; default: this host, or the batch job's"),
        Option("-hostfile --hostfile F", "file with one 'host slots=N' or 'host:N' per line"),
        Option(
            "--restarts N",
            "start the job again, up to N times, when a rank fails",
            _at_least(0),
        ),
        Option("--horovod", "have `import horovod` find hvdlite in all of the command"),
        Option("--config-file F", "horovodrun's YAML file; the command line comes first"),
    ),
    "elastic jobs": (
        Option(
            "--elastic",
            "go on without a rank that has died, in the same step (Open MPI 5)",
            setting="ELASTIC",
        ),
        Option(
            "--spares N",
            "start N more processes, which take the places of ranks that die (--elastic)",
            _at_least(0),
            setting="SPARES",
        ),
        Option(
            "--min-num-proc --min-np N",
            "wait for hosts when there are fewer ranks; default: -np",
            _at_least(1),
        ),
        Option(
            "--max-num-proc --max-np N",
            "take in hosts until there are so many ranks; default: -np",
            _at_least(1),
        ),
        Option(
            "--host-discovery-script F",
            "command that prints the hosts that there are, one 'host:slots' per line",
        ),
        Option(
            "--slots-per-host N",
            "slots of a host that it prints without them; default: 1",
            _at_least(1),
        ),
        Option(
            "--blacklist-cooldown-range MIN MAX",
            "seconds for which a host on which a rank has died gets no other; default: forever",
            _at_least(0),
        ),
        Option(
            "--reset-limit N",
            "how often the ranks may form their world anew; default: without limit",
            _at_least(0),
            setting="ELASTIC_RESET_LIMIT",
        ),
        Option(
            "--elastic-timeout N",
            "seconds to meet again after a failure, and to wait for hosts; default: 600",
            setting="ELASTIC_TIMEOUT",
        ),
    ),
    "output": (
        Option("--output-filename D", "write what rank N prints to D/rank.N/stdout and stderr"),
        Option(
            "-prefix-timestamp --prefix-output-with-timestamp",
            "put the time before each line of output (Open MPI)",
        ),
        Option(
            "--log-level LEVEL",
            "of hvdlite's logger: trace, debug, info, warning, error, fatal",
            setting="LOG_LEVEL",
        ),
        Option("--verbose", "print mpirun's command line"),
    ),
    "communication": (
        Option(
            "--fusion-threshold-mb N",
            "size of a gradient bucket in MiB",
            _megabytes,
            setting="FUSION_THRESHOLD",
        ),
        Option("--cycle-time-ms N", "time in which operations come together", setting="CYCLE_TIME"),
        Option(
            "--cache-capacity N",
            "number of named operations kept ready",
            setting="CACHE_CAPACITY",
        ),
        Option("--tcp", "use TCP only, for MPI and for NCCL", variables=_TCP_ONLY),
        Option(
            "--network-interface --network-interfaces NAMES",
            "networks to use between hosts: eth0,eth1",
            variables={"NCCL_SOCKET_IFNAME": "{}"},
            joined=True,
        ),
    ),
    "other hosts": (
        Option("-p --ssh-port N", "port of ssh", _at_least(1), ssh="-p {}"),
        Option("-i --ssh-identity-file F", "private key for ssh", ssh="-i {}"),
        Option(
            "--start-timeout N",
            "seconds in which a host must answer",
            _at_least(1),
            ssh="-o ConnectTimeout={}",
        ),
        Option("--mpi-args A", 'more arguments for mpirun: --mpi-args="--map-by ppr:2:node"'),
        Option("--binding-args A", 'where mpirun binds ranks: --binding-args="--bind-to core"'),
    ),
    "timeline and stalls": (
        Option("--timeline-filename F", "write what the ranks do when to F, for Perfetto"),
        Option(
            "--[no-]timeline-mark-cycles",
            "mark each round in it",
            setting="TIMELINE_MARK_CYCLES",
        ),
        Option("--[no-]stall-check", "report long waits (the default)"),
        Option(
            "--stall-check-warning-time-seconds N",
            "report waits of N seconds",
            setting="STALL_CHECK_TIME_SECONDS",
        ),
        Option(
            "--stall-check-shutdown-time-seconds N",
            "make waits of N seconds an error",
            setting="STALL_SHUTDOWN_TIME_SECONDS",
        ),
    ),
    "instead of a job": (Option("-cb --check-build", "print what is installed, and exit"),),
    "options of horovodrun without effect here": [
        Option(usage, "ignored") for usage in _WITHOUT_EFFECT
    ],
}
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

OPTIONS = [option for options in _GROUPS.values() for option in options]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line, and the config file that it names.

    The last occurrence of an option counts; the command line overrides the file.

    Raises:
        StartError: the file cannot be read.
        SystemExit: a mistake in either, of which the user has been told; or a request for help.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    options = parser.parse_args(words)
    if options.config_file is not None:
        configured = list(_configured(options.config_file))
        parser.source = f"--config-file {options.config_file}: "
        parser.parse_args(configured)
        parser.source = ""
        options = parser.parse_args([*configured, *words])
    return options


def without_effect(options: argparse.Namespace) -> list[str]:
    """Return the options that were given and have no effect."""
    given = (each for each in OPTIONS if each.of(options) is not None)
    return [option.flag for option in given if option.usage in _WITHOUT_EFFECT]


def variables(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables that the options set."""
    found = {}
    for option in OPTIONS:
        value = option.of(options)
        if value is not None:
            text = str(int(value)) if isinstance(value, bool) else str(value)
            if option.setting:
                found[f"HVDLITE_{option.setting}"] = text
            for name, form in option.variables.items():
                found[name] = form.format(text)
    if options.stall_check is not None:
        found["HVDLITE_STALL_CHECK_DISABLE"] = str(int(not options.stall_check))
    return found


def ssh_arguments(options: argparse.Namespace) -> str:
    """Return the arguments for ssh that the options set."""
    values = ((option, option.of(options)) for option in OPTIONS if option.ssh)
    return " ".join(option.ssh.format(value) for option, value in values if value is not None)


def mpirun_arguments(options: argparse.Namespace) -> list[str]:
    """Return the arguments for mpirun that the user has given.

    Raises:
        StartError: a quotation mark is missing.
    """
    words = []
    for name in ("mpi_args", "binding_args"):
        text = getattr(options, name) or ""
        try:
            words += shlex.split(text)
        except ValueError as error:
            raise StartError(f"--{name.replace('_', '-')}={text}: {error}") from None
    return words


class Parser(argparse.ArgumentParser):
    """A parser that reports each mistake in one line.

    Attributes:
        source: where the words come from, if not from the command line.
    """

    source = ""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        _, is_unknown, found = message.partition("unrecognized arguments: ")
        known = [name for option in OPTIONS for name in (*option.spellings, option.opposite)]
        hint = did_you_mean(found.split(" ")[0].partition("=")[0], known) if is_unknown else ""
        say(f"{self.source}{message}{hint} (see hvdliterun --help)")
        sys.exit(StartError.USAGE)


def did_you_mean(found: str, known: Sequence[str]) -> str:
    """Return a hint at the known word that is most like the one that was found, or nothing."""
    bare = {name.lstrip("-"): name for name in reversed(known)}
    similar = difflib.get_close_matches(found.lstrip("-"), bare, 1, 0.7)
    return f"; did you mean {bare[similar[0]]}?" if similar else ""


def make_parser() -> Parser:
    """Return the parser of ``hvdliterun``, as it is before a config file is read."""
    parser = Parser(
        prog="hvdliterun",
        usage="hvdliterun -np N [options] COMMAND [ARGUMENTS]",
        description="Run a command on N processes through mpirun.",
        allow_abbrev=False,
    )
    for title, options in _GROUPS.items():
        group = parser.add_argument_group(title)
        for option in options:
            _add(group, option)
    parser.add_argument("-v", "--version", action="version", version=__version__)
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="what each process runs, with its arguments"
    )
    return parser


def _add(group: Any, option: Option) -> None:
    text, values = option.help.replace("%", "%%"), option.values
    if values:
        group.add_argument(
            *option.spellings,
            dest=option.name,
            action="append" if option.joined else "store",
            type=option.parse or _as_setting(option.setting),
            nargs=len(values) if len(values) > 1 else None,
            metavar=values if len(values) > 1 else values[0],
            help=text,
        )
        return
    on = {"dest": option.name, "action": "store_const", "const": True}
    group.add_argument(*option.spellings, help=text, **on)
    if option.opposite:
        text = f"the opposite of {option.flag}"
        group.add_argument(option.opposite, help=text, **{**on, "const": False})


def _configured(path: str) -> Iterator[str]:
    """Yield the words of a command line that is equivalent to a config file."""
    known = {option.name: option for option in OPTIONS}
    for section, key, value in _entries(path):
        name = _SECTIONS[section] + key if section in _SECTIONS else ""
        option = known.get(_OTHER_NAMES.get(name, name))
        if option is None:
            say(f"--config-file {path}: {section}.{key} has no effect: hvdlite does not know it")
        elif option.values:
            yield f"{option.flag}={value}"
        elif not isinstance(value, bool):
            raise StartError(
                f"--config-file {path}: {section}.{key} is {value!r}, expected true or false"
            )
        elif value:
            yield option.flag
        elif option.opposite:
            yield option.opposite


def _entries(path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the sections, keys and values of a config file."""
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
