"""The process around a rank; this process takes the role of mpirun."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdlite.launch import rank
from hvdlite.launch.server import Server
from hvdlite.observe import protocol
from tests.launch.launcher import serve_until, survivors

HOST = os.uname().nodename


def shim(
    *command, address="", output="", stdin=None, program=rank.__file__, around=(), **variables
):
    environment = {"PATH": os.environ["PATH"], "OMPI_COMM_WORLD_RANK": "2", **variables}
    return subprocess.Popen(
        [*around, sys.executable, "-I", "-S", program, str(address), str(output), *command],
        env=environment,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As process managers do: the rank and what it starts are one process group.
        start_new_session=True,
    )


def result(process):
    out, err = process.communicate(timeout=10)
    return process.returncode, out, err


def python(code):
    return sys.executable, "-u", "-c", code


@pytest.fixture
def server():
    with Server() as opened:
        yield opened


def test_success_is_silent():
    assert result(shim("echo", "a b", "")) == (0, "a b \n", "")


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("raise SystemExit(3)", 3, "exited with code 3"),
        ("import os; os.kill(os.getpid(), 9)", -9, "was killed by signal 9 (SIGKILL)"),
        ("import os; os.kill(os.getpid(), 11)", -11, "was killed by signal 11 (SIGSEGV)"),
        ("import os; os.kill(os.getpid(), 15)", -15, "was killed by signal 15 (SIGTERM)"),
    ],
)
def test_failure_without_a_launcher(code, status, text):
    message = f"hvdliterun: rank 2 on host {HOST} {text}\n"
    assert result(shim(*python(code), address="/no/launcher")) == (status, "", message)


def test_a_real_time_signal_has_a_number_only():
    assert rank.describe("rank 0", -40) == "rank 0 was killed by signal 40"


def test_failure_is_reported_then_the_end_is_asked_for(server):
    process = shim(*python("raise SystemExit(3)"), address=server.address)
    serve_until(server, lambda: server.exited)
    assert server.exited == (2, 3, f"rank 2 on host {HOST} exited with code 3", b"")
    serve_until(server, lambda: server.wants_end)
    assert process.poll() is None  # It waits for the launcher to end the job.
    process.terminate()
    assert result(process) == (3, "", "")


def test_no_end_is_asked_for_where_the_manager_has_begun(server, tmp_path):
    source = Path(rank.__file__).read_text()
    assert source.count("_PASS_ON = 0.3") == 1
    package = Path(rank.__file__).parents[1]
    for name in ("launch/folders.py", "observe/protocol.py", "base/memory_file.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(package / name, tmp_path / name)
    program = tmp_path / "launch/rank.py"  # It gives this process, on a busy machine, more time.
    program.write_text(source.replace("_PASS_ON = 0.3", "_PASS_ON = 1.0"))
    process = shim(*python("raise SystemExit(7)"), address=server.address, program=program)
    serve_until(server, lambda: server.exited)
    assert server.exited.text == f"rank 2 on host {HOST} exited with code 7"
    process.send_signal(signal.SIGCONT)  # Open MPI's first sign of an end.
    time.sleep(1.5)
    process.terminate()
    assert result(process)[0] == 7
    server.finish()
    assert not server.wants_end


def test_the_manager_of_mpich_is_asked_to_abort():
    reader, writer = os.pipe()
    try:
        with subprocess.Popen(
            [sys.executable, "-I", "-S", rank.__file__, "", "", "sh", "-c", "exit 5"],
            env={"PATH": os.environ["PATH"], "PMI_RANK": "0", "PMI_FD": str(writer)},
            pass_fds=[writer],
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.wait(10) == 5
        assert os.read(reader, 100) == b"cmd=abort exitcode=5\n"
    finally:
        os.close(reader)
        os.close(writer)


_LEAVES = """
import os, struct, sys, time
with open(os.environ["HVDLITE_LAUNCHER_STEPS"], "r+b") as notes:
    notes.write(struct.pack("4q", 0, 0, 0, time.monotonic_ns()))
print("leaving", flush=True)
sys.stdin.readline()
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_rank_that_began_to_leave_before_is_named_before(server, monkeypatch):
    """Also where its message is taken later, by a thread that the launcher runs for it."""
    put = server._put

    def put_slowly(message):
        if message[:2] == (0, protocol.REPORT):
            time.sleep(0.5)
        put(message)

    monkeypatch.setattr(server, "_put", put_slowly)

    def leaving(rank, code):
        process = shim(
            *python(_LEAVES),
            str(code),
            address=server.address,
            stdin=subprocess.PIPE,
            OMPI_COMM_WORLD_RANK=rank,
        )
        assert process.stdout.readline() == "leaving\n"
        return process

    first, second = leaving("0", 3), leaving("1", 4)
    third = shim(*python("raise SystemExit(5)"), address=server.address)
    second.stdin.close()  # They end in another order than they began in.
    time.sleep(0.5)
    server.serve(0)
    assert server.failures == {}
    first.stdin.close()
    try:
        serve_until(server, lambda: len(server.failures) == 3)
        assert server.exited.text == f"rank 0 on host {HOST} exited with code 3"
        assert {failure.code for failure in server.failures.values()} == {3, 4, 5}
    finally:
        for process in (first, second, third):
            process.terminate()
            process.stdin = None
            process.communicate()


_TELL_SIGNALS = """
import signal, sys
def note(number, frame):
    print(signal.Signals(number).name)
    if number == signal.SIGTERM:
        sys.exit(4)
for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
print("ready")
while True:
    signal.pause()
"""


def test_an_end_that_the_manager_asks_for_is_silent():
    process = shim(*python(_TELL_SIGNALS))
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGUSR1)
    assert process.stdout.readline() == "SIGUSR1\n"  # Once: the group has it, no need to pass on.
    os.killpg(process.pid, signal.SIGTERM)
    assert result(process) == (4, "SIGTERM\n", "")


def test_signals_from_others_are_passed_on():
    process = shim(*python(_TELL_SIGNALS))
    assert process.stdout.readline() == "ready\n"
    for name in ("USR1", "INT", "TERM"):
        subprocess.run(["sh", "-c", f"kill -{name} {process.pid}"], check=True)
        assert process.stdout.readline() == f"SIG{name}\n"
    status, _, err = result(process)
    assert status == 4
    assert err.endswith("exited with code 4\n")


def test_the_command_gets_default_signals():
    out = result(shim("cat", "/proc/self/status"))[1]
    own, found = signal_masks(Path("/proc/self/status").read_text()), signal_masks(out)
    assert found["SigBlk"] == 0
    python_ignores = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1
    # The process that started this one wants the other ignored signals ignored.
    assert found["SigIgn"] == own["SigIgn"] & ~python_ignores


def signal_masks(status):
    lines = [line.split(":\t") for line in status.splitlines() if line.startswith("Sig")]
    return {name: int(mask, 16) for name, mask in lines if "/" not in mask}


_SHOW_FAMILY = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "60"])
print(os.getpid(), child.pid)
time.sleep(60)
"""


def test_the_command_dies_with_its_shim():
    process = shim(*python(_SHOW_FAMILY))
    command, grandchild = map(int, process.stdout.readline().split())
    try:
        process.kill()
        process.wait()
        assert survivors([command]) == []
    finally:
        os.kill(grandchild, signal.SIGKILL)
        process.communicate()


_ABANDON = """
import multiprocessing, os, subprocess, sys, time
worker = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,))
worker.start()
sleep = {"args": ["sleep", "60"], "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
child, apart = subprocess.Popen(**sleep), subprocess.Popen(**sleep, start_new_session=True)
print(worker.pid, child.pid, apart.pid, flush=True)
os._exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 1])
def test_workers_end_with_a_command_that_leaves_them(code):
    """Otherwise the job of a rank that was killed would not end: they keep its output open."""
    process = shim(*python(_ABANDON), str(code))
    status, out, _ = result(process)
    worker, child, apart = map(int, out.split())
    ended, left = ([worker, child], [apart]) if code else ([worker], [child, apart])
    try:
        assert (status, survivors(ended), survivors(left, seconds=0)) == (code, [], left)
    finally:
        for each in left:
            os.kill(each, signal.SIGKILL)


@pytest.mark.slow
def test_the_command_dies_some_time_after_the_launcher():
    with Server() as server:
        process = shim(*python(_SHOW_FAMILY), address=server.address)
        pids = list(map(int, process.stdout.readline().split()))
    try:
        assert survivors(pids, seconds=15) == []  # its manager, this process, does not end it
    finally:
        process.kill()
        process.communicate()


def test_memory_that_ranks_share_lies_in_a_folder_of_the_rank():
    name = "OMPI_MCA_btl_sm_backing_directory"
    status, out, err = result(shim(*python(f"import os; print(os.environ['{name}'])")))
    folder = out.strip()
    assert (status, err, Path(folder).parent) == (0, "", Path("/dev/shm"))
    assert not Path(folder).exists()
    assert result(shim(*python(f"import os; print(os.environ['{name}'])"), **{name: "/x"})) == (
        *(0, "/x\n", ""),
    )


def test_ranks_share_memory_in_the_job_s_folder_where_the_shm_mount_is_small(server):
    """Open MPI refuses it, and would have no way from rank to rank on one host."""
    small = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
    small += ['mount -t tmpfs -o size=20m none /dev/shm && exec "$@"', "sh"]
    trial = subprocess.run([*small, "true"], capture_output=True, text=True)
    if trial.returncode:
        pytest.skip(f"cannot mount here: {trial.stderr.strip()}")
    code = "import os; print(os.environ['OMPI_MCA_btl_sm_backing_directory'])"
    places = {1: Path("/dev/shm"), 2: Path(server.folder, "rank.2")}
    for ranks, place in places.items():
        for address, parent in ((server.address, place), ("", Path("/dev/shm"))):
            process = shim(
                *python(code),
                address=address,
                around=small,
                OMPI_COMM_WORLD_RANK=str(ranks),
                OMPI_COMM_WORLD_LOCAL_SIZE=str(ranks),
            )
            status, out, err = result(process)
            assert (status, err, Path(out.strip()).parent) == (0, "", parent)
            assert not Path(out.strip()).exists()


def test_notes_are_kept_in_a_python_that_is_built_for_older_systems(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    path = Path(rank._make_notes(""))
    assert path.stat().st_size == protocol.NOTES_SIZE
    os.close(int(path.name))


def test_everything_dies_with_the_manager():
    manager = """
import json, os, subprocess, sys, time
subprocess.Popen(json.loads(sys.argv[1]), start_new_session=True)
time.sleep(60)
"""
    command = [sys.executable, "-I", "-S", rank.__file__, "", "", *python(_SHOW_FAMILY)]
    with subprocess.Popen(
        [*python(manager), json.dumps(command)], stdout=subprocess.PIPE, text=True
    ) as process:
        pids = list(map(int, process.stdout.readline().split()))
        process.kill()
        assert survivors(pids) == []


def test_ranks_above_0_read_nothing():
    """MPICH 5.0.2 gives them a pipe that nobody closes."""
    reader, writer = os.pipe()
    process = shim(*python("import sys; print(repr(sys.stdin.read()))"), stdin=reader)
    assert result(process) == (0, "''\n", "")
    os.close(reader)
    os.close(writer)


def test_output_files(tmp_path):
    process = shim(
        "sh",
        "-c",
        "echo out; echo err >&2",
        output=tmp_path,
        OMPI_COMM_WORLD_SIZE="11",
    )
    assert result(process) == (0, "", "")
    assert (tmp_path / "rank.02" / "stdout").read_text() == "out\n"
    assert (tmp_path / "rank.02" / "stderr").read_text() == "err\n"


def test_output_folder_that_cannot_be_made():
    status, _, err = result(shim("true", output="/dev/null/out"))
    assert status == 127
    assert err.splitlines()[0] == f"hvdliterun: /dev/null/out on host {HOST}: Not a directory"


def test_missing_command():
    status, _, err = result(shim("no-such-command", PATH="/bin"))
    assert status == 127
    assert err.splitlines()[0] == (
        f"hvdliterun: no-such-command on host {HOST}: No such file or directory"
    )


def test_a_rank_can_see_that_it_has_a_launcher():
    assert result(shim("sh", "-c", "echo $HVDLITE_LAUNCHER"))[1] == "hvdliterun\n"


@pytest.mark.parametrize("variable", ["PMIX_RANK", "PMI_RANK", "SLURM_PROCID"])
def test_rank_under_other_managers(variable):
    environment = {"PATH": os.environ["PATH"], variable: "5"}
    process = subprocess.run(
        [sys.executable, "-I", "-S", rank.__file__, "", "", "sh", "-c", "exit 1"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert process.stderr == f"hvdliterun: rank 5 on host {HOST} exited with code 1\n"
