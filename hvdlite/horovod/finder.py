"""The import hook that finds Horovod's modules in hvdlite."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from hvdlite.horovod.names import MODULES, REASONS, VERSION

#: A folder for PYTHONPATH, in which `importlib.metadata` finds Horovod's version.
METADATA = str(Path(__file__).with_name("metadata"))
#: The folders for PYTHONPATH with which Python installs the finder at its start.
FOLDERS = [str(Path(__file__).parents[1] / "launch" / "bootstrap"), METADATA]


def install() -> None:
    """Make ``import horovod`` find hvdlite, in this process and in those that it starts.

    An installed Horovod is ignored. Processes that are started with another environment,
    or a Python that ignores PYTHONPATH (``-I``, ``-E``), are not reached.

    Raises:
        ImportError: this process has imported another Horovod already.
    """
    loaded = sys.modules.get("horovod")
    if loaded is not None and not isinstance(getattr(loaded, "__loader__", None), Finder):
        raise ImportError(
            f"horovod has been imported already ({getattr(loaded, '__file__', None)}); "
            "install hvdlite's before that"
        )
    package = sys.modules["hvdlite"]
    if package.__file__ is None:
        # With an editable install Python looks for it last.
        raise ImportError(
            f"Python takes the folder {next(iter(package.__path__))} for the package hvdlite; "
            "start in another folder than the one that holds it"
        )
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
    if METADATA not in sys.path:
        sys.path.insert(1, METADATA)  # where PYTHONPATH has it
        # An empty entry is the current folder, an empty variable is none.
        others = filter(None, [os.environ.get("PYTHONPATH")])
        os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, *others])


class Finder(MetaPathFinder, Loader):
    """Finds and loads ``horovod`` and everything in it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of one of Horovod's modules; None for any other module.

        Raises:
            ModuleNotFoundError: hvdlite has no answer for it.
        """
        if fullname.partition(".")[0] != "horovod":
            return None
        if fullname not in MODULES:
            parent = sys.modules.get(fullname.rpartition(".")[0])
            # Without the name, by which `from horovod.x import y` would take it for its own
            # question and answer it with a shorter message.
            raise ModuleNotFoundError(_not_provided(fullname, parent))
        # All are packages, and what lies in them is for the finder to say.
        origin = f"hvdlite ({next(iter(MODULES[fullname]), '')})"
        return ModuleSpec(fullname, self, origin=origin, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module with the names that hvdlite provides.

        Raises:
            ImportError: the module of hvdlite cannot be imported, or has none of it.
        """
        provided = MODULES[module.__name__]
        found: dict[str, Any] = {}
        for source, names in provided.items():
            found |= _names_of(module.__name__, source, names)
        if module.__name__ in ("horovod", "horovod.version"):
            found["__version__"] = VERSION
        module.__file__ = sys.modules[next(iter(provided), "hvdlite")].__file__
        module.__doc__ = f"The part of {module.__name__} that hvdlite provides."
        vars(module).update(found)
        vars(module)["__all__"] = [name for name in found if not name.startswith("_")]
        vars(module)["__getattr__"] = functools.partial(_missing, module)
        if module.__name__ == "horovod.torch":
            from hvdlite.torch import wrapping

            wrapping.alias = "horovod.torch.optimizer"


def _names_of(name: str, module: str, names: str) -> dict[str, Any]:
    wanted = names.split()
    try:
        source = importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"hvdlite has no answer for {name}: {module} cannot be imported ({error})", name=name
        ) from error
    public = getattr(source, "__all__", [word for word in vars(source) if word[0] != "_"])
    found = {word: getattr(source, word) for word in wanted or public if hasattr(source, word)}
    if not found:
        raise ImportError(
            f"hvdlite has no answer for {name}: found none of {', '.join(wanted)} in {module}",
            name=name,
        )
    return found


def _missing(module: ModuleType, name: str) -> Any:
    """Return a module inside another, which Horovod would have imported; else raise."""
    inner = f"{module.__name__}.{name}"
    if inner in MODULES:
        try:
            return importlib.import_module(inner)
        except ImportError as error:
            raise AttributeError(str(error), name=name, obj=module) from error
    if name.startswith("__"):
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
    raise AttributeError(_not_provided(inner, module), name=name, obj=module)


def _not_provided(name: str, parent: ModuleType | None) -> str:
    above = [name.rsplit(".", count)[0] for count in range(name.count("."))]
    reason = next((REASONS[known] for known in above if known in REASONS), "")
    text = f"hvdlite has no answer for {name}"
    if reason:
        return f"{text}; {reason}"
    there = sorted(getattr(parent, "__all__", ()))
    outer = name.rpartition(".")[0]
    inner = [known for known in MODULES if known.rpartition(".")[0] == outer]
    words = ", ".join([*there, *sorted(inner)])
    return f"{text}; in {outer} there is: {words}" if words else text
