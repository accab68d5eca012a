"""The command ``hvdlite``: its subcommands, and what they share."""

from __future__ import annotations

import argparse
import errno
import importlib
import sys
from collections.abc import Sequence

from hvdlite.errors import StartError
from hvdlite.launch import cli as launcher
from hvdlite.launch import options as launcher_options
from hvdlite.version import __version__

#: The modules of the subcommands beside ``run`` and ``completion``. Each has ``HELP``, a line;
#: ``EXAMPLES``; ``add_arguments(parser)``; and ``main(options)``, which returns the exit code, or
#: raises `StartError` for a mistake on the command line, and for what cannot be done here.
COMMANDS = ("check", "bench", "scale", "timeline", "rehearse")

_SHELLS = ("bash", "zsh", "tcsh")
_EXAMPLES = """\
examples:
  hvdlite check                                  what works here, and the remedy for what does not
  hvdlite run -np 4 python train.py              train on four processes (hvdliterun does the same)
  hvdlite bench allreduce                        how fast, beside PyTorch and plain MPI
  hvdlite timeline trace.json --html page.html   who waited for whom
  hvdlite rehearse -np 4 --elastic train.py      what it does about the death of a rank
  eval "$(hvdlite completion bash)"              complete these commands in this shell

`hvdlite COMMAND --help` has more.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``hvdlite`` with arguments, or with this process's; return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["run"]:  # hvdliterun splits its options from those of the command itself
        return launcher.main(words[1:])
    options = make_parser().parse_args(words)
    try:
        return int(options.main(options))
    except StartError as error:
        print(f"hvdlite {options.command}: {error}", file=sys.stderr, flush=True)
        return error.code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, head for instance, has enough
        sys.stderr.close()
        return 141
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename:
            raise
        print(f"hvdlite {options.command}: standard output: {error.strerror}", file=sys.stderr)
        return 1


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands."""
    parser = launcher_options.Parser(
        prog="hvdlite",
        description="Train on many processes, and see how well that goes.",
        epilog=_EXAMPLES,
    )
    parser.commands = ("run", *COMMANDS, "completion")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True
    )
    own = launcher_options.make_parser()
    commands.add_parser(
        "run",
        help="run a command on N processes, as hvdliterun does",
        parents=[own],
        add_help=False,
        usage=own.usage,
        description=own.description,
    )
    for name in COMMANDS:
        module = importlib.import_module(f"hvdlite.tools.cli.{name}")
        command = commands.add_parser(name, help=module.HELP, epilog=module.EXAMPLES)
        module.add_arguments(command)
        command.set_defaults(main=module.main)
    command = commands.add_parser(
        "completion",
        help="print a script that completes these commands in a shell",
        description="Print a script that completes the words of hvdlite's commands.",
        epilog='example: eval "$(hvdlite completion bash)", also in ~/.bashrc',
    )
    command.add_argument("shell", choices=_SHELLS)
    command.set_defaults(main=_complete)
    return parser


def _complete(options: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise StartError("shtab is missing; install it with `pip install 'hvdlite[cli]'`") from None
    print(shtab.complete(make_parser(), shell=options.shell))
    return 0
