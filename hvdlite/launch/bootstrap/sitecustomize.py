"""Runs at the start of each Python that has this folder on its PYTHONPATH.

Where Horovod's metadata are on the path, too, ``import horovod`` finds hvdlite; where the
launcher's variable is set (``--torch``), ``torch.distributed.init_process_group`` does. Before
that, it imports nothing of hvdlite: most of the processes that a script starts do neither.
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
_METADATA = _FOLDER.parents[1] / "horovod" / "metadata"


def _import(name: str) -> Any:
    """Import a module of hvdlite."""
    if find_spec("hvdlite") is None:
        # It may be on the path of the process that started this one only.
        sys.path.append(str(_FOLDER.parents[2]))
    return import_module(name)


class _Alias:
    """Asks hvdlite's finder when something looks for horovod."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of Horovod's; None: the module is not Horovod's."""
        if name.partition(".")[0] != "horovod":
            return None
        found: ModuleSpec = _import("hvdlite.horovod.finder").Finder().find_spec(name, path, target)
        return found


class _Torchrun:
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
            _import("hvdlite.torch.distributed").substitute()
        # Torch takes MPI for a backend without a store.
        original("gloo" if str(backend).lower() == "mpi" else backend, *args, **kwargs)

    module.init_process_group = init_process_group
    module._MPI_AVAILABLE = True  # which libraries ask for before they call


def _run_the_hidden_one() -> None:
    """Run the sitecustomize that Python would have found without this one."""
    others = [entry for entry in sys.path if os.path.realpath(entry) != str(_FOLDER)]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec and spec.loader:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


if str(_METADATA) in map(os.path.realpath, sys.path):
    sys.meta_path.insert(0, _Alias())
if "HVDLITE_LAUNCH_NODES" in os.environ:
    sys.meta_path.insert(0, _Torchrun())
_run_the_hidden_one()
