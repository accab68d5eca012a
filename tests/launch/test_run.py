"""`hvdlite.run` and `spawn` with the real mpirun: results, exceptions, output, what is left."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import hvdlite
from hvdlite import HorovodInternalError
from hvdlite.errors import RankGoneError, StartError
from hvdlite.launch import function, options
from hvdlite.launch.server import Failure
from hvdlite.launch.worker import RemoteError, RemoteTraceback
from tests.launch import functions, launcher
from tests.launch.launcher import survivors

HOST = re.escape(functions.os.uname().nodename)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def user(monkeypatch):
    """The environment of a user who has set nothing about MPI."""
    expected = launcher.environment()
    for name in set(functions.os.environ) - set(expected):
        monkeypatch.delenv(name)
    for name, value in expected.items():
        monkeypatch.setenv(name, value)


def failure(*args, kind=HorovodInternalError, match=None, num_proc=3, **options):
    """The exception of a run that fails in bounded time."""
    started = time.monotonic()
    with pytest.raises(kind, match=match) as caught:
        hvdlite.run(*args, num_proc=num_proc, **options)
    assert time.monotonic() - started < 240
    return caught.value


def test_results_by_rank():
    results = hvdlite.run(functions.world, (5,), {"word": "x"}, 3)
    assert results == [(rank, 3, 3.0, (5,), {"word": "x"}) for rank in range(3)]


def test_the_processes_of_spawn_are_the_ranks_of_one_world(tmp_path, capsys):
    assert hvdlite.spawn(functions.numbered, 3, (tmp_path, "word"), env={"A": "b"}) is None
    for index in range(3):
        assert (tmp_path / str(index)).read_text() == f"{index} 3 3.0 word b"
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[{index}] word" for index in range(3)]


def test_in_a_process_without_standard_streams(monkeypatch):
    with monkeypatch.context() as patch:  # pytest itself needs them
        for name in ("stdin", "stdout", "stderr"):
            patch.setattr(sys, name, None)
        hvdlite.run(functions.print_lines, (1,), num_proc=2)


def test_a_function_reads_nothing_from_the_standard_input():
    """It would wait for ever if mpirun passed on its own, which is at its end."""
    assert hvdlite.run(functions.read_input, num_proc=2) == ["", ""]


def test_in_a_process_that_multiprocessing_has_spawned(tmp_path):
    """Its main module has another name, of which the ranks know nothing."""
    script = tmp_path / "script.py"
    script.write_text("""
import multiprocessing
import hvdlite

def value():
    return 7

def values():
    return hvdlite.run(value, num_proc=2)

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(values))
""")
    env = launcher.environment({"PYTHONPATH": str(launcher.ROOT)})
    done = subprocess.run([sys.executable, script], env=env, capture_output=True)
    assert (done.stdout, done.stderr) == (b"[7, 7]\n", b"")


def test_ranks_leave_nothing_open(capsys):
    assert hvdlite.run(functions.square_of_rank, np=2, env={"PYTHONDEVMODE": "1"}) == [0, 1]
    assert capsys.readouterr() == ("", "")


def test_an_exception_is_raised_here():
    error = failure(
        functions.raise_on, (1, functions.PlainError("the", "reason")), kind=functions.PlainError
    )
    assert type(error) is functions.PlainError
    assert error.args == ("the", "reason")
    assert isinstance(error.__cause__, RemoteTraceback)
    assert error.__cause__.rank == 1
    text = str(error.__cause__)
    assert text.startswith("on rank 1 (host ")
    assert "in raise_on\n    raise error\n" in text
    assert "worker.py" not in text
    assert hvdlite.run(functions.square_of_rank, num_proc=2) == [0, 1]


def test_a_disagreement_is_raised_here():
    error = failure(functions.mismatch, kind=hvdlite.MismatchError, match="x", num_proc=2)
    assert isinstance(error.__cause__, RemoteTraceback)


def described(error):
    """An exception as a rank sends it."""
    return RemoteError.of(error, "raised", True)


def test_the_first_exception_counts_and_what_only_tells_of_another_ranks_end_last():
    """A lane raises such an error when it notices that a rank is gone."""
    lost = HorovodInternalError("'x' failed: rank 1 has died")
    lost.__cause__ = RankGoneError("rank 1 has died")
    sent = map(described, (lost, KeyError("reason"), ValueError("later")))
    failures = [Failure(rank, 1, "", pickle.dumps(tuple(each))) for rank, each in enumerate(sent)]
    assert isinstance(function._first_error(failures), KeyError)
    failures[1] = Failure(1, 1, "rank 1 ended without a result")
    assert str(function._first_error(failures)) == "rank 1 ended without a result"
    assert str(function._first_error(failures[:1])) == str(lost)


def test_an_exception_that_cannot_be_pickled_or_unpickled():
    with_lock = KeyError("with a lock")
    with_lock.lock = threading.Lock()
    cannot = functions.TwoArgumentsError("nothing", "something")
    for error, words in (with_lock, "KeyError: 'with a lock'"), (cannot, "nothing because someth"):
        found = described(error).error(1)
        assert isinstance(found, HorovodInternalError)
        assert re.search(f"rank 1 on host {HOST} raised: .*{words}", str(found))
        assert type(error).__name__ in str(found.__cause__)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("_exit", "rank 1 ended without a result"),
        ("exit", "rank 1 on host .* left by sys.exit.. .*SystemExit: 3"),
    ],
)
def test_a_rank_that_does_not_return(how, words):
    failure(functions.end_on, (1, how), match=words)


@pytest.mark.slow
def test_what_cannot_be_pickled():
    failure(functions.unpicklable_result, match="rank 1 .*cannot send .*'_thread.lock'", num_proc=2)
    failure(
        functions.result_that_cannot_be_unpickled,
        match=r"on rank 0 cannot be unpickled here \(ValueError",
        num_proc=2,
    )
    failure(functions.returned, (threading.Lock(),), kind=TypeError, match="inside the function")
    lock = threading.Lock()
    failure(lambda: lock, kind=TypeError, match="cannot be pickled")
    failure("train", kind=TypeError, match="the function to run, not 'train'")
    failure(
        functions.returned, (functions.FailsToLoad(),), match="cannot load the function", num_proc=2
    )


def test_bad_arguments(tmp_path):
    def refused(match, kind=ValueError, **options):
        with pytest.raises(kind, match=match):
            hvdlite.run(functions.square_of_rank, **options)

    refused("both num_proc and np", num_proc=2, np=2)
    refused("num_proc: found 0, expected a number from 1 on", num_proc=0)
    refused("num_proc: found '2'", num_proc="2")
    refused("both hosts and hostfile", num_proc=1, hosts="a", hostfile="b")
    refused("is more than the 2 slots", num_proc=3, hosts="localhost:2")
    refused(r"hosts: found \['a:2'\], expected a string", TypeError, hosts=["a:2"])
    refused("No such file", num_proc=1, hostfile=tmp_path / "none")
    refused("write str", TypeError, env={"A": 1})
    refused("argument 'ssh_prot'; did you mean ssh_port", TypeError, ssh_prot=22)
    refused("argument 'elastic'", TypeError, elastic=True)
    refused("--ssh-port: found 'x', expected a number from 1 on", ssh_port="x")
    with pytest.raises(ValueError, match="num_proc: found 0"):
        hvdlite.spawn(print, 0)
    with pytest.raises(TypeError, match="the function to run"):
        hvdlite.spawn("train", 2)


def test_options_of_the_launcher(tmp_path, capsys):
    """As Horovod's examples give them, for other hosts too."""
    results = hvdlite.run(
        os.getenv,
        ("HVDLITE_STALL_CHECK_DISABLE",),
        num_proc=2,
        disable_cache=True,
        ssh_port=None,
        ssh_identity_file="key",
        mpi_args="--report-bindings",
        network_interface=["eth0", "eth1"],
        stall_check=False,
        log_level="error",
        timeline_filename=tmp_path / "trace.json",
        executable=sys.executable,
        verbose=True,
    )
    assert results == ["1", "1"]
    line = capsys.readouterr().err
    assert "without effect here: --disable-cache" in line
    for word in (" --report-bindings", "HVDLITE_LOG_LEVEL=error", "ssh_args=-i key", "=eth0,eth1"):
        assert word in line, word
    assert f"HVDLITE_TIMELINE={tmp_path}/trace.json" in line


def test_no_mpirun(monkeypatch):
    monkeypatch.setenv("HVDLITE_MPIRUN", "/no/mpirun")
    failure(functions.square_of_rank, kind=StartError, match="HVDLITE_MPIRUN=/no/mpirun")


def fake_mpirun(tmp_path, monkeypatch, commands):
    path = tmp_path / "mpirun"
    path.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "mpirun (Open MPI) 5.0.11" && exit\n' + commands
    )
    path.chmod(0o755)
    monkeypatch.setenv("HVDLITE_MPIRUN", str(path))


def test_ranks_that_do_not_start(tmp_path, monkeypatch, capsys):
    fake_mpirun(tmp_path, monkeypatch, "echo 'no such host: x' >&2; exit 5")
    failure(
        functions.square_of_rank,
        match=r"ranks \[0, 1\] of 2 did not start; mpirun exited with code 5[^$]*no such host: x",
        num_proc=2,
    )
    assert capsys.readouterr().err == "no such host: x\n"


def test_ranks_that_do_not_start_in_time(tmp_path, monkeypatch):
    fake_mpirun(tmp_path, monkeypatch, f"echo $$ > {tmp_path}/pid; exec sleep 60")
    words = r"ranks \[0, 1\] of 2 did not start in 0.5 s"
    failure(functions.square_of_rank, match=words, start_timeout=0.5, num_proc=2)
    assert survivors([int((tmp_path / "pid").read_text())]) == []


@pytest.mark.slow
def test_output_comes_in_whole_lines(capsys):
    count = 1000
    hvdlite.run(functions.print_lines, (count,), num_proc=3)
    captured = capsys.readouterr()
    for text, name in ((captured.out, "out"), (captured.err, "err")):
        lines = text.splitlines()
        for rank in range(3):
            own = [line for line in lines if line.startswith(f"[{rank}] ")]
            expected = [
                f"[{rank}] {name} {rank} {line} {'x' * (line % 200)}" for line in range(count)
            ]
            last = [f"[{rank}] without an end \N{REPLACEMENT CHARACTER}"] if name == "out" else []
            assert own == [*expected, *last]
        assert len(lines) == 3 * (count + (name == "out"))


def test_the_last_words_of_a_rank_that_is_killed(capsys):
    code = "import os, sys; os.write(2, b'y' * 200_000 + b'the end'); os.kill(os.getpid(), 9)"
    words = f"rank 0 on host {HOST} was killed by signal 9 .SIGKILL. before its function had"
    failure(exec, (code,), match=words, num_proc=1)
    err = capsys.readouterr().err
    assert err.count("y") == 200_000
    assert err.endswith("the end\n")


def test_output_files(tmp_path, capsys):
    hvdlite.run(functions.print_lines, (3,), num_proc=2, output_filename=tmp_path / "logs")
    assert capsys.readouterr() == ("", "")
    for rank in (0, 1):
        out = (tmp_path / "logs" / f"rank.{rank}" / "stdout").read_bytes()
        assert out.splitlines()[0] == f"out {rank} 0 ".encode()
        err = (tmp_path / "logs" / f"rank.{rank}" / "stderr").read_text()
        assert len(err.splitlines()) == 3


def test_environment_and_what_is_said(capsys, monkeypatch):
    # Left over from a job that this process is a rank of.
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "7")
    monkeypatch.setenv("PMIX_NAMESPACE", "other")
    names = ("ODD", "PATH", "HVDLITE_LAUNCHER", "PMIX_NAMESPACE", "HVDLITE_LAUNCH_KEY")
    ((odd, path, runner, namespace, key),) = hvdlite.run(
        functions.environment, names, verbose=True, env={"ODD": "a 'b' $c;d\ne"}
    )
    assert odd == "a 'b' $c;d\ne"
    assert path == functions.os.environ["PATH"]
    assert runner == "hvdliterun"
    assert namespace != "other"
    assert key is None
    assert " -np 1 " in capsys.readouterr().err


def test_a_process_that_a_rank_leaves_behind(capsys):
    started = time.monotonic()
    (pid,) = hvdlite.run(functions.grandchild)
    try:
        assert time.monotonic() - started < 15
        assert capsys.readouterr().out == "[0] before\n"
    finally:
        if not survivors([pid], 0):
            pytest.skip("mpirun has ended it")
        functions.os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_large_arguments_and_results():
    large = np.arange(12_500_000, dtype=np.float64)  # 100 MB
    results = hvdlite.run(functions.returned, (large,), num_proc=2)
    for result in results:
        np.testing.assert_array_equal(result, large)
        result[0] = 1  # An array of the caller's own.
    assert large[0] == 0


@pytest.mark.slow
def test_a_function_that_starts_workers():
    results = hvdlite.run(functions.with_workers, num_proc=2)
    assert results == [([(1, rank, 2)] * 3, 2.0) for rank in range(2)]


@pytest.mark.slow
def test_over_tcp_as_from_another_host(monkeypatch):
    monkeypatch.setattr(options, "on_this_host", lambda hosts, environment: False)
    results = hvdlite.run(functions.world, num_proc=2, hosts="localhost:2")
    assert [result[:3] for result in results] == [(0, 2, 1.0), (1, 2, 1.0)]
    failure(functions.raise_on, (1, KeyError("k")), kind=KeyError, num_proc=2)


def test_from_another_thread_than_the_main_one():
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(hvdlite.run, functions.square_of_rank, num_proc=2).result() == [0, 1]


# As a notebook has it: no guard, functions and classes of __main__, nothing to import.
_SCRIPT = """
import hvdlite, sys, time

class Result:
    def __init__(self, value):
        self.value = value

class OwnError(Exception):
    pass

offset = 10

def train(scale):
    import hvdlite as hvd
    hvd.init()
    if scale == 0:
        raise OwnError(hvd.rank())
    print("training")
    return Result(offset + scale * hvd.rank())

print("the script runs")
results = hvdlite.run(train, args=(2,), num_proc=2)
assert all(isinstance(result, Result) for result in results)
print([result.value for result in results])
try:
    hvdlite.run(train, args=(0,), num_proc=2)
except OwnError as error:
    print("caught", type(error).__name__, str(error.__cause__).splitlines()[-1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["file", "stdin"])
def test_a_script_is_not_run_again(how, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(_SCRIPT)
    done = subprocess.run(
        [sys.executable, path if how == "file" else "-"],
        input=_SCRIPT if how == "stdin" else "",
        env=launcher.environment({"PYTHONPATH": str(launcher.ROOT)}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "the script runs"
    assert sorted(lines[1:3]) == ["[0] training", "[1] training"]
    assert lines[3] == "[10, 12]"
    assert re.fullmatch(r"caught OwnError .*OwnError: [01]", lines[4])
    assert len(lines) == 5


_WAITS = """
import hvdlite, os, signal, subprocess, sys, time

def wait():
    child = subprocess.Popen(["sleep", "60"])
    print(os.getpid(), child.pid)
    time.sleep(60)

try:
    hvdlite.run(wait, num_proc=2)
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(5)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [("INT", 5), ("TERM", -15), ("KILL", -9)])
def test_nothing_is_left_behind(number, code, tmp_path):
    with subprocess.Popen(
        [sys.executable, "-u", "-c", _WAITS],
        env=launcher.environment({"PYTHONPATH": str(launcher.ROOT), "TMPDIR": str(tmp_path)}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        lines = [process.stdout.readline() for _ in range(2)]
        pids = [int(pid) for line in lines for pid in line.split()[1:]]
        assert len(pids) == 4
        started = time.monotonic()
        process.send_signal(getattr(signal, f"SIG{number}"))
        out, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert survivors(pids) == []
    assert time.monotonic() - started < 10
    assert out == ("interrupted\n" if number == "INT" else "")
    assert err == ""
    if number != "KILL":
        assert list(Path(tmp_path).glob("hvdlite-*")) == []
