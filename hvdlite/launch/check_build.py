"""The installed software, for ``hvdliterun --check-build`` and ``hvdlite check``."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata

from hvdlite.errors import StartError
from hvdlite.launch import mpirun
from hvdlite.launch.programs import ask
from hvdlite.version import __version__

# By name: the distributions that bring it.
_DISTRIBUTIONS = {
    "numpy": ("numpy",),
    "mpi4py": ("mpi4py",),
    "PyTorch": ("torch",),
    "TensorFlow": ("tensorflow", "tensorflow-cpu", "tf-nightly"),
    "Keras": ("keras", "keras-nightly"),
    "CuPy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
}
_ASK_LIBRARY = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version().replace(chr(0), "").splitlines()[0])
"""


def report() -> str:
    """Describe the installation; a missing or broken part is a remark, not an error."""
    mpi = {"MPI library": ask_library(), "mpirun": find_mpirun()}
    rows = {name: found if works else f"none: {found}" for name, (works, found) in mpi.items()}
    return table({**software(), **rows})


def software() -> dict[str, str | None]:
    """Return the versions of the software here, by its names; None: it is not installed."""
    return {
        "hvdlite": __version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": str(len(os.sched_getaffinity(0))),
        **{name: _version(distributions) for name, distributions in _DISTRIBUTIONS.items()},
    }


def table(found: Mapping[str, str | None]) -> str:
    """Return a line for each name, with what has been found of it."""
    return "\n".join(f"{name:<12}{text or 'not installed'}" for name, text in found.items())


def _version(distributions: Sequence[str]) -> str | None:
    for distribution in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return None


def ask_library() -> tuple[bool, str]:
    """Load MPI in another process, which may crash; return whether it did, and its last line."""
    return ask([sys.executable, "-c", _ASK_LIBRARY])


def find_mpirun() -> tuple[bool, str]:
    """Return whether there is an mpirun, and its version and path, or what is wrong."""
    try:
        program = mpirun.detect(mpirun.find(os.environ))
    except StartError as error:
        return False, str(error)
    return True, f"{program.name} {program.version}, {program.path}"
