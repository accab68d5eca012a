"""Runs at the start of each Python that has this folder on its PYTHONPATH.

It imports nothing of hvdlite until a script calls ``torch.distributed.init_process_group``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).resolve().parent


class _Door:
    """Changes the module of ``init_process_group`` before others take names from it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Return the spec of that module; None: it is another one."""
        if name != "torch.distributed.distributed_c10d":
            return None
        spec = PathFinder.find_spec(name, path)
        if spec and (loader := spec.loader):
            execute = loader.exec_module

            def execute_and_change(module: Any) -> None:
                execute(module)
                _change(module)

            loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def _change(module: Any) -> None:
    from functools import wraps
    from multiprocessing import parent_process

    original = module.init_process_group

    @wraps(original)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        if parent_process() is None:  # else one of the script's own, which MPI does not know
            if find_spec("hvdlite") is None:
                # It may be on the path of the process that started this one only.
                sys.path.append(str(_FOLDER.parents[2]))
            import_module("hvdlite.torch.distributed").substitute()
        # Torch takes MPI for a backend without a store.
        original("gloo" if str(backend).lower() == "mpi" else backend, *args, **kwargs)

    module.init_process_group = init_process_group
    module._MPI_AVAILABLE = True  # which libraries ask for before they call


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
