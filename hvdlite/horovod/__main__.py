"""``python -m hvdlite.horovod script.py``: run a script that imports Horovod, with hvdlite."""

from __future__ import annotations

import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

from hvdlite.horovod.finder import install

_USAGE = (
    "python -m hvdlite.horovod SCRIPT | -m MODULE | -c CODE [ARGUMENTS]: run Python, with "
    "hvdlite for everything that is imported from horovod"
)


def main(arguments: list[str]) -> dict[str, Any]:
    """Run a script, module or code as Python itself would; return its global names."""
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
    if option == "-m":
        sys.argv = rest
        return runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    # Python has put the current folder first because of `-m hvdlite.horovod`; not with `-P`.
    own_folder = not getattr(sys.flags, "safe_path", False)
    if option == "-c":
        sys.argv = ["-c", *rest[1:]]
        if own_folder:
            sys.path[0] = ""
        return _run(rest[0], "<string>", ModuleType("__main__"))
    sys.argv = arguments
    path = os.path.abspath(option)
    if own_folder:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    if not path.endswith((".py", ".pyw")):
        return runpy.run_path(option, run_name="__main__")  # A folder or a zip file, for example.
    module = ModuleType("__main__")
    module.__file__, module.__loader__ = path, SourceFileLoader("__main__", path)
    return _run(module.__loader__.get_data(path), path, module)


def _run(source: str | bytes, name: str, module: ModuleType) -> dict[str, Any]:
    """Run code as the main module, with the path that Python gives it; runpy sets another."""
    sys.modules["__main__"] = module
    exec(compile(source, name, "exec", dont_inherit=True), vars(module))
    return vars(module)


if __name__ == "__main__":
    # Kept to the end, as the names of a script are: what runs at exit may use them.
    _names = main(sys.argv[1:])
