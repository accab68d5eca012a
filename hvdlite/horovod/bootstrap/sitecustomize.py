"""Runs at the start of each Python that has this folder on its PYTHONPATH.

It imports nothing of hvdlite until something looks for horovod, for most of the processes that a
script starts do not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).resolve().parent


class _Door:
    """Asks hvdlite's finder when something looks for horovod."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of Horovod's; None: the module is not Horovod's."""
        if name.partition(".")[0] != "horovod":
            return None
        if find_spec("hvdlite") is None:
            # It may be on the path of the process that started this one only.
            sys.path.append(str(_FOLDER.parents[2]))
        from hvdlite.horovod.finder import Finder

        return Finder().find_spec(name, path, target)


def _run_the_hidden_one() -> None:
    """Run the sitecustomize that Python would have found without this one."""
    entries = globals().get("_PATH", sys.path)
    others = [entry for entry in entries if os.path.realpath(entry) != str(_FOLDER)]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec and spec.loader:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        # Another bootstrap, which is hidden, would find this one.
        vars(module)["_PATH"] = others
        spec.loader.exec_module(module)


sys.meta_path.insert(0, _Door())
_run_the_hidden_one()
