"""hvdliterun with the real mpirun: exit codes, names, output, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hvdlite.observe import protocol
from tests.launch import launcher
from tests.launch.launcher import ROOT, command, environment, hvdliterun, running, survivors

HOST = socket.gethostname()

RANK = "int(os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK'])"


MPICH = os.environ.get("HVDLITE_TEST_MPICH")


@pytest.fixture(params=["default", *(["mpich"] if MPICH else [])], scope="module", autouse=True)
def python(request):
    """Every test runs with the mpirun that is found, and with MPICH's where one is named.

    The value is a Python whose mpi4py belongs to it.
    """
    if request.param == "default":
        yield sys.executable
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(launcher.EXTRA, "HVDLITE_MPIRUN", MPICH)
        own = Path(MPICH).with_name("python")
        yield str(own) if own.exists() else sys.executable


def test_with_mpich_too():
    if not MPICH:
        pytest.skip("HVDLITE_TEST_MPICH does not name MPICH's mpiexec")
    assert Path(MPICH).exists()


def script(code):
    """Arguments that run some Python which knows its rank."""
    return sys.executable, "-c", f"import os, sys, time\nrank = {RANK}\n{code}"


@pytest.mark.parametrize("options", [(), pytest.param(("--elastic",), marks=pytest.mark.slow)])
def test_a_rank_that_ends_before_init_is_named_where_others_wait_for_it(python, options):
    code = "if rank == 1: sys.exit(0)\nimport hvdlite\nhvdlite.init()"
    if MPICH and options:
        pytest.skip("elastic jobs need Open MPI")
    result = hvdliterun("-np", 2, *options, python, *script(code)[1:], timeout=60)
    assert result.returncode == 1
    assert result.stderr == (
        "hvdliterun: rank 1 ended with exit code 0 without hvd.init(), in which rank 0 waited for "
        "it; call it on all ranks, first of all\n"
    )


def test_a_rank_that_ends_as_soon_as_others_begin_to_wait_is_named(python):
    """mpirun of Open MPI ends the job then, and says so in many lines."""
    code = f"""
if rank == 1:
    path = os.path.dirname(os.environ[{protocol.FOLDER!r}]) + "/rank.0/{protocol.NOTES}"
    while not (os.path.exists(path) and any(open(path, "rb").read()[16:24])):
        time.sleep(0.01)
    time.sleep(0.2)
    sys.exit()
import hvdlite
hvdlite.init()
"""
    result = hvdliterun("-np", 2, python, *script(code)[1:], timeout=60)
    assert result.returncode == 1
    assert "hvdliterun: rank 1 ended with exit code 0 without hvd.init(), in" in result.stderr
    assert "mpirun exited" not in result.stderr


def test_rank_0_reads_what_is_piped_into_the_launcher(tmp_path, python):
    """mpirun hangs where that is much."""
    code = "read = sys.stdin.buffer.read(); print(rank, len(read), set(read))"
    size, file = 10_000_000, tmp_path / "file"
    file.write_bytes(b"first\n" + b"a" * size)
    with file.open("rb", buffering=0) as source:
        source.read(6)  # the launcher begins behind it, as behind a shell's read
        for sent in (None, b"a" * size):
            with subprocess.Popen(
                command("-np", 2, *script(code)),
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.PIPE if sent else source,
                stdout=subprocess.PIPE,
            ) as process:
                out, _ = process.communicate(sent, timeout=launcher.TIMEOUT)
            assert process.returncode == 0
            assert sorted(out.splitlines()) == [b"0 %d {97}" % size, b"1 0 set()"]


def test_rank_0_reads_nothing_where_the_launcher_has_nothing_to_read(python):
    """mpirun of Open MPI would have it wait for ever."""
    reading = script("print(rank, repr(sys.stdin.read()))")
    expected = 0, ["0 ''", "1 ''"]
    result = hvdliterun("-np", 2, *reading)
    assert (result.returncode, sorted(result.stdout.splitlines())) == expected
    # Closed, and a library has opened a file, which has got the number.
    main = (
        "import os; assert os.open(os.__file__, os.O_RDONLY) == 0; "
        "from hvdlite.launch.cli import main; raise SystemExit(main())"
    )
    result = subprocess.run(
        [sys.executable, "-c", main, "-np", "2", *reading],
        cwd=ROOT,
        env=environment(),
        preexec_fn=lambda: os.close(0),
        capture_output=True,
        text=True,
        timeout=launcher.TIMEOUT,
    )
    assert (result.returncode, sorted(result.stdout.splitlines())) == expected


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        ("raise ValueError('the reason')", 1, "exited with code 1"),
        ("os.kill(os.getpid(), 11)", 139, "was killed by signal 11 (SIGSEGV)"),
    ],
)
def test_the_rank_that_failed_is_named(end, code, text):
    fail = f"if rank == 1: time.sleep(0.3); {end}\nif rank: time.sleep(60)"
    started = time.monotonic()
    result = hvdliterun("-np", 3, *script(fail))  # Rank 0 leaves early, and well.
    assert time.monotonic() - started < 40
    assert result.returncode == code
    lines = result.stderr.splitlines()
    assert lines[-1] == f"hvdliterun: rank 1 on host {HOST} {text}"
    if code == 1:
        assert lines[-2] == "ValueError: the reason"
    else:
        assert len(lines) == 1  # Not a word from mpirun.
    assert result.stdout == ""


def test_the_last_lines_of_a_failing_rank_are_not_lost():
    fail = """
if rank == 0:
    sys.stdout.write("out\\n" * 20000)
    sys.stderr.write("err\\n" * 20000)
    sys.exit(3)
time.sleep(60)
"""
    result = hvdliterun("-np", 2, *script(fail))
    assert result.returncode == 3
    assert result.stdout.count("out") == 20000
    assert result.stderr.count("err") == 20000


@pytest.mark.slow
@pytest.mark.parametrize("end", ["MPI.COMM_WORLD.Abort(7)", "os._exit(7)"])
def test_failure_of_a_rank_that_uses_mpi(python, end):
    fail = f"from mpi4py import MPI\nif rank == 1: {end}\nMPI.COMM_WORLD.Barrier()"
    result = hvdliterun("-np", 3, python, *script(fail)[1:])
    assert result.returncode == 7
    if "HVDLITE_MPIRUN" in launcher.EXTRA and "Abort" in end:
        # MPICH kills all processes before its MPI_Abort returns, and names the rank itself.
        assert "(rank 1 in comm 0)" in result.stderr
    else:
        last = result.stderr.splitlines()[-1].lstrip("\0")  # Ends Open MPI's own account.
        assert last == f"hvdliterun: rank 1 on host {HOST} exited with code 7"


_LEAVES = """
import numpy, hvdlite as hvd
hvd.init()
failing, how = int(sys.argv[1]), sys.argv[2]
try:
    for step in range(4):
        if step == 3 and rank == failing:
            exec(how)
        hvd.allreduce(numpy.ones(3), name="x")
except RuntimeError:
    if rank == 0:
        sys.exit(9)  # Without a word to hvdlite's hook.
    raise
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_proc", "failing", "how", "code", "named"),
    [
        (3, 1, "sys.exit(3)", 3, 1),
        (2, 0, "hvd.shutdown(); time.sleep(0.5); raise SystemExit('reason')", 1, 0),
        (2, 1, "sys.exit()", 9, 0),  # The rank that leaves early has not failed.
    ],
)
def test_a_rank_that_leaves_while_the_others_go_on(python, num_proc, failing, how, code, named):
    result = hvdliterun("-np", num_proc, python, *script(_LEAVES)[1:], failing, how)
    assert result.returncode == code
    last = f"hvdliterun: rank {named} on host {HOST} exited with code {code}"
    assert result.stderr.splitlines()[-1] == last


@pytest.mark.slow
def test_files_of_killed_ranks_are_removed(python):
    code = """
import hvdlite as hvd
from multiprocessing.connection import Listener
hvd.init()
Listener(family="AF_UNIX")  # As a data loader has it.
hvd.barrier()
os.kill(os.getpid(), 9)
"""
    with tempfile.TemporaryDirectory() as folder:  # the paths of sockets have 107 bytes
        result = hvdliterun("-np", 2, python, *script(code)[1:], env={"TMPDIR": folder})
        assert result.returncode == 137
        assert [path for path in Path(folder).rglob("*") if "ompi" not in path.name] == []


def test_more_ranks_than_cores(python):
    code = "from mpi4py import MPI\nprint(MPI.COMM_WORLD.allreduce(1))"
    count = 2 * len(os.sched_getaffinity(0)) + 1
    result = hvdliterun("-np", count, python, "-c", code)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split() == [str(count)] * count


def test_environment_options_hosts_and_a_python_that_is_not_on_the_path(tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=2\n")
    show = "import os, sys; print(sys.executable, *map(os.environ.get, sys.argv[1:]), sep='|')"
    set_by_user = {"ODD": "a 'b' $c;d", "OMPI_MCA_mpi_yield_when_idle": "false"}
    names = (*set_by_user, "HVDLITE_LOG_LEVEL", "HVDLITE_FUSION_THRESHOLD", "-np")
    options = ["--hostfile", hostfile, "--log-level", "DEBUG", "--fusion-threshold-mb=2"]
    result = hvdliterun(
        *("-np", 2, "--verbose", *options, "--", "python", "-c", show, *names),
        env={**set_by_user, "PATH": "/nowhere"},
    )
    assert result.returncode == 0
    assert (
        result.stdout.splitlines() == [f"{sys.executable}|a 'b' $c;d|false|DEBUG|2097152|None"] * 2
    )
    (command_line,) = result.stderr.splitlines()
    assert command_line.startswith("hvdliterun: ")
    assert " -np 2 " in command_line
    assert command_line.endswith(f" {' '.join(names)}")


def test_timeline(python, tmp_path):
    path = tmp_path / "new" / "trace.json"
    mark = "os.environ['HVDLITE_TIMELINE_MARK_CYCLES']"
    code = f"import os, hvdlite as hvd\nhvd.init()\nprint({mark}, hvd.size())"
    options = ["--timeline-filename", path, "--timeline-mark-cycles"]
    result = hvdliterun("-np", 2, *options, python, "-c", code)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split() == ["1", "2"] * 2
    assert {event["pid"] for event in json.loads(path.read_text())} == {0, 1}


def test_what_a_killed_mpirun_left_does_not_keep_another_from_starting(tmp_path):
    """Open MPI's files are named by the process id, which another mpirun may get later."""
    for pid in range(os.getpid(), os.getpid() + 500):
        (tmp_path / f"ompi.{pid}").mkdir()
        for host in {HOST, HOST.split(".")[0]}:
            (tmp_path / f"ompi.{pid}" / f"pmix.{host}.tool").touch()
    result = hvdliterun("-np", 1, "true", env={"TMPDIR": str(tmp_path)})
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


_FAMILY = """
import subprocess
child = subprocess.Popen(["sleep", "60"])
print(os.getpid(), child.pid, flush=True)
time.sleep(60)
"""


def test_closed_standard_streams(tmp_path):
    code = f"open(f'{tmp_path}/{{rank}}', 'w'); print(rank); sys.exit(3 * rank)"
    line = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command("-np", 2, *script(code))]
    done = subprocess.run(
        line, cwd=ROOT, env=environment(), capture_output=True, timeout=launcher.TIMEOUT
    )
    assert (done.returncode, done.stderr) == (3, b"")
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at_terminal", "how", "code"),
    [
        (True, "group INT", 130),
        (True, "TERM", 143),
        (True, "KILL", -9),
        (False, "group TERM", 143),
        (False, "INT", 130),
    ],
)
def test_nothing_is_left_behind(at_terminal, how, code):
    controller, terminal = os.openpty()
    stdin = terminal if at_terminal else subprocess.DEVNULL
    number = getattr(signal, f"SIG{how.split()[-1]}")
    with running("-np", 3, *script(_FAMILY), stdin=stdin) as process:
        pids = [int(pid) for _ in range(3) for pid in process.stdout.readline().split()]
        assert len(pids) == 6
        started = time.monotonic()
        if how.startswith("group"):  # As Ctrl-C at a terminal.
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        assert process.wait(10) == code
        assert survivors(pids) == []
        assert time.monotonic() - started < 6
        assert "hvdlite/launch" not in process.stderr.read()  # No traceback of the launcher.
    os.close(controller)
    os.close(terminal)


def test_an_ordinary_user(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("the other tests run as one")
    user = {"user": 65534, "group": 65534, "extra_groups": []}
    try:
        subprocess.run(
            [sys.executable, "-c", "import hvdlite"], cwd=ROOT, check=True, stderr=-3, **user
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"an ordinary user cannot use this Python environment ({error})")
    result = hvdliterun("-np", 3, *script("print(os.geteuid()); sys.exit(rank)"), **user)
    assert result.stdout.split() == ["65534"] * 3
    assert result.returncode in (1, 2)
