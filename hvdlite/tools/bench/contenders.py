"""The contenders of each benchmark, and what they need."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from hvdlite.errors import StartError
from hvdlite.launch.check_build import ask
from hvdlite.tools.bench.compression_ranks import CANDIDATES

#: On PyTorch's interface, hvdlite's backend or hook beside gloo; measured where they are named.
BACKENDS = ("ddp-hvdlite", "ddp-hook", "fsdp", "fsdp-hvdlite")
#: By benchmark and framework, in the order of the tables.
KNOWN = {
    "allreduce": {
        "torch": ("hvdlite", "bucket", "mpi", "gloo", "horovod", "memcpy"),
        "numpy": ("hvdlite", "bucket", "mpi", "memcpy"),
    },
    "compression": dict.fromkeys(("torch", "tensorflow"), tuple(CANDIDATES)),
    "training": {
        "torch": ("alone", "hvdlite", "mpi", "ddp", "ddp-no-buffers", "horovod", *BACKENDS),
        "tensorflow": ("alone", "hvdlite", "mpi", "horovod"),
    },
}
#: All others are compared with these.
ALWAYS = {"allreduce": ("hvdlite",), "compression": ("none",), "training": ("alone", "hvdlite")}
_TITLES = {"torch": "PyTorch", "tensorflow": "TensorFlow"}


def choose_framework(benchmark: str, asked: str | None) -> str:
    """Return the framework to measure with; without a wish, the first that is installed."""
    names = list(KNOWN[benchmark]) if asked is None else [asked]
    for name in names:
        if find_spec(name) is not None:
            return name
    missing = " and ".join(f"{_TITLES[name]} (pip install 'hvdlite[{name}]')" for name in names)
    raise StartError(f"the {benchmark} benchmark needs {missing}, which cannot be found")


def choose(benchmark: str, framework: str, asked: Sequence[str] | None) -> tuple[list[str], str]:
    """Return the contenders, and a remark on one that is left out; without a wish, all there are.

    Raises:
        StartError: a contender is unknown, or cannot be imported.
    """
    known = KNOWN[benchmark][framework]
    for name in asked or ():
        if name not in known:
            raise StartError(
                f"--contenders: found {name!r}, expected some of {', '.join(known)}, which "
                f"`hvdlite bench {benchmark} --framework {framework}` knows"
            )
    usual = (name for name in known if name not in BACKENDS)
    wanted = {*(usual if asked is None else asked), *ALWAYS[benchmark]}
    remark = ""
    if "horovod" in wanted and (reason := _no_horovod(framework)):
        if asked is not None:
            raise StartError(f"--contenders horovod: {reason}; install Horovod, or leave it out")
        wanted.remove("horovod")
        remark = f"without horovod: {reason}"
    return [name for name in known if name in wanted], remark


def _no_horovod(framework: str) -> str:
    """Return why Horovod cannot be imported; empty: it can. An import may crash, so elsewhere."""
    if find_spec("horovod") is None:
        return "it is not installed"
    code = f"import sys; sys.path[:] = {sys.path!r}; import horovod.{framework}"
    works, line = ask([sys.executable, "-c", code])
    return "" if works else line
