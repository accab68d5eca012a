import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

import hvdlite as hvd
from hvdlite.engine import runtime
from tests.harness import mpirun, ranks, run_script

HEADER = """
import os, time
import pytest
from tests.harness import ranks

def world():  # imported late, so that collecting the tests starts no MPI
    from mpi4py import MPI
    return MPI.COMM_WORLD

def wait_for_the_other():
    world().Barrier()

def sleep_for_ever():
    time.sleep(1000)
"""


def pytest_command(path, *arguments):
    return [sys.executable, "-m", "pytest", "-p", "tests.harness.plugin", *arguments, str(path)]


@pytest.fixture
def run_tests(tmp_path):
    """Run the source of tests in a pytest of its own; return its output."""

    def run(source, *arguments, failed=0, passed=0, skipped=0):
        path = tmp_path / "test_inner.py"
        path.write_text(HEADER + source)
        process = subprocess.run(
            pytest_command(path, "-rA", "--no-fold-skipped", "--strict-markers", *arguments),
            env=mpirun.environment(),
            cwd=tmp_path,
            text=True,
            capture_output=True,
            timeout=240,
        )
        output = process.stdout + process.stderr
        expected = {"failed": failed, "passed": passed, "skipped": skipped}
        lines = [line.split(" ")[0].lower() for line in output.splitlines()]
        assert {word: lines.count(word) for word in expected} == expected, output
        return output

    return run


class Point:
    """A type of this module, to be pickled by name."""

    def __init__(self, x):
        self.x = x


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("factor", [2, 5])
def test_every_rank_runs_the_test(size, factor, tmp_path):
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    assert MPI.COMM_WORLD.size == size
    assert MPI.COMM_WORLD.allreduce(factor * rank) == factor * size * (size - 1) // 2
    (tmp_path / str(rank)).touch()
    MPI.COMM_WORLD.Barrier()
    assert {path.name for path in tmp_path.iterdir()} == {str(r) for r in range(size)}


class TestInClass:
    @ranks(2)
    @pytest.mark.parametrize("point", [Point(3)])
    def test_method_with_fixtures(self, point, monkeypatch):
        monkeypatch.setenv("HARNESS_TEST", "1")
        assert isinstance(point, Point)
        assert point.x == 3

    @ranks(2)
    def test_monkeypatch_was_undone(self):
        assert "HARNESS_TEST" not in os.environ


@ranks(2)
def test_warnings_are_errors():
    with pytest.raises(UserWarning, match="wrong"):
        warnings.warn("wrong", stacklevel=1)


@ranks(2)
@pytest.mark.filterwarnings("ignore:wrong")
def test_marks_filter_warnings():
    warnings.warn("wrong", stacklevel=1)


@ranks(2, settings={"HVDLITE_CYCLE_TIME": "7"})
def test_settings():
    hvd.init()
    assert runtime.engine().settings.cycle_time == 7.0


@ranks(2)
def test_settings_were_those_of_one_test():
    assert not hvd.is_initialized()
    assert "HVDLITE_CYCLE_TIME" not in os.environ


@ranks(2, fresh=True, env={"HARNESS_TEST": "fresh"})
def test_fresh_job_has_its_environment():
    assert os.environ["HARNESS_TEST"] == "fresh"


@ranks(2)
def test_mpi_shares_memory_in_a_folder_of_the_job():
    from mpi4py import MPI

    maps = Path("/proc/self/maps").read_text().split("\n")
    folders = {os.path.dirname(line.split()[-1]) for line in maps if "/sm_segment" in line}
    assert "/dev/shm" not in folders
    assert bool(folders) == ("Open MPI" in MPI.Get_library_version())


CHOICE = """
@ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_two(dtype): pass

@ranks(1, 3, fast=(3,))
def test_odd(): pass

@ranks(3, 4)
def test_more(): pass

@ranks(2)
@pytest.mark.slow
def test_slow_on_ranks(): pass

@pytest.mark.slow
def test_slow(): pass

def test_plain(): pass
"""
BOTH = ["two[2ranks-float32]", "two[2ranks-float64]"]
# The names that are left of these tests by an option.
LEFT = {
    "--ranks=2": ["two[2ranks-float32]", "two[2ranks-float64]", "slow_on_ranks[2ranks]"],
    "--fast": [
        "two[2ranks-float32]",
        "two[2ranks-float64]",
        "odd[3ranks]",
        "more[3ranks]",
        "plain",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("option", LEFT)
def test_ids_and_choice_of_ranks(run_tests, option):
    output = run_tests(CHOICE, option, passed=len(LEFT[option]))
    for name in LEFT[option]:
        assert f"::test_{name}" in output
    assert f"{13 - len(LEFT[option])} deselected" in output


@pytest.mark.slow
def test_tests_that_share_a_job_or_a_fixture_of_their_module_run_in_one_process(run_tests):
    output = run_tests(
        """
@pytest.fixture(scope="module")
def made(): pass

def test_one(made): pass

@ranks(2)
def test_two(): pass

def test_three(): pass
""",
        "-n2",
        "--dist=loadgroup",
        passed=3,
    )
    assert "::test_one@test_inner\n" in output
    assert "::test_two[2ranks]@2 ranks\n" in output
    assert "::test_three\n" in output


def test_failure_shows_rank_values_and_output(run_tests):
    output = run_tests(
        """
@ranks(3)
def test_it():
    print("written by", world().rank)
    value = 10 + world().rank
    assert value != 11
""",
        failed=1,
    )
    assert "rank 1 failed: assert 11 != 11" in output
    assert "test_inner.py:20: in test_it" in output
    assert "rank 0 passed" in output
    for rank in range(3):
        assert f"written by {rank}" in output


# Each in a job that works, although the test before has ended its own.
FAILING = """
import atexit

@ranks(2, timeout=2)
def test_hang():
    sleep_for_ever() if world().rank == 1 else wait_for_the_other()

@ranks(2, timeout=500)  # much longer than this pytest may run
def test_wait_for_one_that_has_failed():
    assert world().rank == 1
    wait_for_the_other()

@ranks(2)
@pytest.mark.parametrize("how", ["os._exit(3)", "world().Abort(5)", "os.kill(os.getpid(), 9)"])
def test_death(how):
    if world().rank == 1:
        exec(how)
    wait_for_the_other()

@ranks(2)
def test_exit(): raise SystemExit(0)

@ranks(2)
@pytest.mark.parametrize("f", [lambda: 0])
def test_pickle(f): pass

@ranks(2, fresh=True)
def test_bad_end(): atexit.register(os._exit, 4)

@ranks(2, fresh=True, timeout=2)
def test_no_end(): atexit.register(sleep_for_ever)

@ranks(2, fresh=True, env={"OMPI_COMM_WORLD_SIZE": "2", "PYTHONHOME": "/nowhere"})
def test_no_start(): pass

@ranks(2)
def test_next():
    assert world().allreduce(1) == 2

@ranks(2)
def test_skip(): pytest.skip("no such device")

@ranks(2)
def test_skip_one():
    if world().rank == 1: pytest.importorskip("no_such_module")
"""
# In what is printed of a failure; behind "not", what is not.
SAID = {
    "hang": [
        *("rank 0 did not report in 2 s", "in wait_for_the_other"),
        *("rank 1 did not report in 2 s", "in sleep_for_ever"),
    ],
    "wait_for_one_that_has_failed": [
        *("rank 0 failed: assert 0 == 1\n", "rank 1 did not report", "in wait_for_the_other"),
    ],
    "death[2ranks-os._exit(3)]": ["rank 1 died", "Exit code:    3", "not rank 0 died"],
    "death[2ranks-world().Abort(5)]": [
        *("rank 1 died", "MPI_ABORT was invoked on rank 1", "not rank 0 died"),
    ],
    "death[2ranks-os.kill(os.getpid(), 9)]": ["rank 1 died", "Killed", "not rank 0 died"],
    "exit": ["rank 0 failed: SystemExit", "rank 1 failed: SystemExit"],
    "pickle[2ranks-<lambda>]": ["the argument 'f' (function) cannot be sent to the ranks"],
    "bad_end": ["passed, but left with exit code 4"],
    "no_end": ["passed, but did not leave in", "in sleep_for_ever"],
    "no_start": ["a job of 2 ranks did not start: ranks [0, 1] are missing", "encodings"],
}


@pytest.mark.slow
def test_failures_say_what_has_happened_and_the_next_test_passes(run_tests):
    output = run_tests(FAILING, failed=len(SAID), passed=1, skipped=2)
    failures = re.split(r"^_+ test_(.+) _+$", output, flags=re.MULTILINE)[1:]
    said = dict(zip(failures[::2], failures[1::2], strict=True))
    for name, words in SAID.items():
        text = said.get(name) or said[f"{name}[2ranks]"]
        for word in words:
            wanted = word.removeprefix("not ")
            assert (wanted in text) == (wanted == word), (name, word, text)
    assert "rank 0: no such device" in output
    assert "rank 1: could not import 'no_such_module'" in output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_pytest(tmp_path, number):
    path = tmp_path / "test_inner.py"
    path.write_text(
        HEADER
        + f"""
@ranks(2)
def test_hangs():
    open({str(tmp_path)!r} + f"/{{world().rank}}.pid", "w").write(f"{{os.getpid()}}\\n")
    time.sleep(1000)
"""
    )
    command = pytest_command(path)
    files = [tmp_path / "0.pid", tmp_path / "1.pid"]
    with subprocess.Popen(
        command, env=mpirun.environment(), cwd=tmp_path, stdout=subprocess.DEVNULL
    ) as process:
        try:
            wait_until(lambda: all(file.exists() and "\n" in file.read_text() for file in files))
            process.send_signal(number)
            process.wait(20)
        finally:
            process.kill()
    pids = [file.read_text().strip() for file in files]
    wait_until(lambda: not any(Path("/proc", pid).exists() for pid in pids))


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("arguments", [(), (0,), (1, 0)])
def test_ranks_refuses_bad_numbers(arguments):
    with pytest.raises(ValueError, match="at least 1"):
        ranks(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
@ranks(2, env={"HARNESS_TEST": "shared"})
def test_jobs_are_shared_by_environment(number):
    assert os.environ["HARNESS_TEST"] == "shared"
    _seen.append(number)
    assert _seen == [1, 2][:number]


_seen = []


def test_run_script_returns_code_and_output():
    source = """
import os, sys
from mpi4py import MPI
print("rank", MPI.COMM_WORLD.rank, sys.argv[1], os.environ["HARNESS_TEST"])
MPI.COMM_WORLD.Barrier()
sys.exit(7 * MPI.COMM_WORLD.rank)
"""
    done = run_script(source, 2, args=["word"], env={"HARNESS_TEST": "here"})
    assert done.returncode == 7
    assert "rank 0 word here" in done.stdout
    assert "rank 1 word here" in done.stdout


def test_run_script_ends_a_script_that_hangs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import time\nprint('before', flush=True)\ntime.sleep(1000)\n")
    with pytest.raises(TimeoutError, match=r"(?s)longer than 1 s.*before"):
        run_script(script, 2, timeout=1)
