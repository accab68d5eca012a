"""``python -m hvdlite.horovod script.py``: run a script that imports Horovod, with hvdlite."""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from hvdlite.horovod.finder import install

_USAGE = (
    "python -m hvdlite.horovod SCRIPT | -m MODULE | -c CODE [ARGUMENTS]: run Python, with "
    "hvdlite for everything that is imported from horovod"
)


def main(arguments: list[str]) -> dict[str, Any]:
    """Run what the arguments say as Python itself would; return its global names."""
    if arguments[:1] in ([], ["-h"], ["--help"]):
        print(_USAGE, file=sys.stdout if arguments else sys.stderr)
        sys.exit(0 if arguments else 2)
    option, *rest = arguments
    if option in ("-m", "-c") and not rest:
        sys.exit(f"hvdlite.horovod: {option} needs an argument; {_USAGE}")
    if option not in ("-m", "-c") and option.startswith("-"):
        sys.exit(f"hvdlite.horovod: {option}: not known here; Python's options come before -m")
    # Python has put the current folder first for our own sake; `-P` has it put nothing there.
    own_folder = not getattr(sys.flags, "safe_path", False)
    if option == "-m":
        sys.argv = rest
        install()
        return runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    if option == "-c":
        sys.argv = ["-c", *rest[1:]]
        if own_folder:
            sys.path[0] = ""
        install()
        return _run_code(rest[0])
    if not os.path.exists(option):
        print(f"hvdlite.horovod: {option}: no such file", file=sys.stderr)
        sys.exit(2)
    sys.argv = arguments
    if own_folder:
        # Of a folder or a zip file with a `__main__`, runpy puts the path first itself.
        sys.path[0] = os.path.dirname(os.path.realpath(option))
    install()
    return runpy.run_path(option, run_name="__main__")


def _run_code(code: str) -> dict[str, Any]:
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    exec(compile(code, "<string>", "exec"), vars(module))
    return vars(module)


if __name__ == "__main__":
    # Kept to the end, as the names of a script are: what runs at exit may use them.
    _names = main(sys.argv[1:])
