"""``python -m hvdlite.horovod script.py``: run a script that imports Horovod, with hvdlite."""

from __future__ import annotations

import os
import sys

from hvdlite.horovod.finder import install

_USAGE = (
    "python -m hvdlite.horovod SCRIPT | -m MODULE | -c CODE [ARGUMENTS]: run Python, with "
    "hvdlite for everything that is imported from horovod"
)


def main(arguments: list[str]) -> None:
    """Have Python run a script, module or code in this process, with the alias on its path."""
    if arguments[:1] in ([], ["-h"], ["--help"]):
        print(_USAGE, file=sys.stdout if arguments else sys.stderr)
        sys.exit(0 if arguments else 2)
    option, *rest = arguments
    if option in ("-m", "-c"):
        if not rest:
            sys.exit(f"hvdlite.horovod: {option} needs an argument; {_USAGE}")
    elif option.startswith("-"):
        sys.exit(f"hvdlite.horovod: {option}: not known here; Python's options come before -m")
    elif not os.path.exists(option):
        print(f"hvdlite.horovod: {option}: no such file", file=sys.stderr)
        sys.exit(2)
    install()
    os.execv(sys.executable, [sys.executable, *_options(sys.orig_argv, arguments), *arguments])


def _options(command: list[str], arguments: list[str]) -> list[str]:
    """Return Python's own options: what stands before ``-m hvdlite.horovod`` and its arguments."""
    *options, module = command[1 : len(command) - len(arguments)]
    flags = module.removesuffix("hvdlite.horovod") or options.pop()
    return [*options, *([] if flags == "-m" else [flags.removesuffix("m")])]  # -um: -u


if __name__ == "__main__":
    main(sys.argv[1:])
