"""Ranks that stop, die or fail while others need them, and the cost of waiting for them."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.collectives.allreduce import Allreduce, describe_allreduce
from hvdlite.compression import Compression, Parameter, Reduction
from hvdlite.engine import runtime
from hvdlite.gradients.exchange import GradientExchange
from hvdlite.launch.mpirun import detect
from hvdlite.transport.shared_memory import futex
from tests.harness import mpirun, ranks

linux = pytest.mark.skipif(not futex.is_supported(), reason="needs Linux on x86-64")


PROLOGUE = """
import json, os, pathlib, signal, sys, time
import numpy as np
import hvdlite as hvd
from hvdlite.engine import runtime
from hvdlite.compression import Compression, Parameter, Reduction
from hvdlite.gradients.exchange import GradientExchange
from hvdlite.transport.shared_memory.barrier import Barrier

folder, victim = pathlib.Path(sys.argv[1]), int(sys.argv[2])
hvd.init()

def die():
    (folder / "victim").write_text(json.dumps({"when": time.time(), "pid": os.getpid()}))
    os.kill(os.getpid(), signal.SIGKILL)

def die_at_meeting(number):
    "In the midst of what the ranks do together, from now on."
    arrive = Barrier.arrive
    left = [number]
    def patched(barrier):
        left[0] -= 1
        if not left[0]:
            die()
        return arrive(barrier)
    if hvd.rank() == victim:
        Barrier.arrive = patched

def survive(action):
    hvd.barrier()
    try:
        while True:
            action()
    except hvd.HorovodInternalError as error:
        found = {"when": time.time(), "message": str(error)}
        (folder / str(hvd.rank())).write_text(json.dumps(found))
        time.sleep(1)  # An end that came before the others were told would tell them.
        os._exit(0)
"""


def check_survivors(body, size, victim, *words):
    """Run a job in which a rank kills itself: the others notice soon, and name it."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        (folder / "script.py").write_text(PROLOGUE + inspect.getsource(_exchange_step) + body)
        program, *rest = mpirun.command(size, folder / "script.py", folder, str(victim))
        with open(folder / "log", "w+b") as log:
            process = subprocess.Popen(
                [program, "--with-ft", "ulfm", *rest],
                env=mpirun.environment({"HVDLITE_SHUTDOWN_TIMEOUT_SECONDS": "2"}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            others = [folder / str(rank) for rank in range(size) if rank != victim]
            try:
                deadline = time.monotonic() + 50
                while not all(path.exists() for path in others) and time.monotonic() < deadline:
                    time.sleep(0.05)
                time.sleep(0.1)  # for what is being written
            finally:
                mpirun.end(process)
        written = (folder / "log").read_bytes().decode(errors="replace")
        missing = [path.name for path in others if not path.exists()]
        assert not missing, f"ranks {missing} noticed nothing\n{written}"
        death = json.loads((folder / "victim").read_text())
        for path in others:
            found = json.loads(path.read_text())
            assert found["when"] - death["when"] < 2, found
            assert all(word in found["message"] for word in (f"rank {victim} ", *words)), found


STREAMS = {
    "allreduce": """
array = np.ones(10**6)
action = lambda: hvd.allreduce(array, op=hvd.Max, out=array)
""",
    "small allreduce": "action = lambda: hvd.allreduce(np.ones(3))",
    "bucket": "action = _exchange_step(hvd.size(), 8, 100_000)",
    "broadcast": "array = np.ones(10**6)\naction = lambda: hvd.broadcast(array, 0)",
    "allgather": "action = lambda: hvd.allgather(np.ones((hvd.rank() + 1, 10**5)))",
    "alltoall": "action = lambda: hvd.alltoall(np.ones(10**6 // 12 * 12))",
}


@linux
@pytest.mark.skipif(not detect(mpirun.command(1)[0]).elastic, reason="needs Open MPI 5")
class TestKilled:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("stream", "size", "victim", "meeting"),
        [*((stream, 3, 1, 7) for stream in STREAMS), ("bucket", 4, 0, 13), ("allreduce", 2, 0, 6)],
    )
    def test_in_an_exchange(self, stream, size, victim, meeting):
        """At one of the meetings that an operation consists of."""
        body = f"{STREAMS[stream]}\naction()\ndie_at_meeting({meeting})\nsurvive(action)"
        check_survivors(body, size, victim, "has died")

    def test_while_the_others_wait_in_a_barrier(self):
        body = """
def action():
    if hvd.rank() == victim:
        time.sleep(1)
        die()
    hvd.barrier()
survive(action)
"""
        check_survivors(body, 3, 0)

    @pytest.mark.slow
    @pytest.mark.parametrize("busy", ["computing", "stopped"])
    def test_while_a_third_rank_keeps_the_others_waiting(self, busy):
        """It dies where rank 0 waits for rank 1 first, which comes late or not at all."""
        body = f"""
def action():
    if hvd.rank() == 2:
        time.sleep(0.5)
        die()
    if hvd.rank() == 1:
        (folder / "1").write_text(json.dumps({{"when": 0, "message": "rank 2 "}}))
        time.sleep(8) if {busy!r} == "computing" else os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    hvd.barrier()
survive(action)
"""
        check_survivors(body, 3, 2)


@linux
class TestStopped:
    @pytest.mark.slow
    @ranks(3)
    @pytest.mark.parametrize("stream", ["allreduce", "buckets"])
    def test_a_rank_that_stops_for_five_seconds_only_delays(self, stream, size):
        hvd.init()
        rank = hvd.rank()
        step = _exchange_step(size) if stream == "buckets" else _allreduce_step(size)
        step(0)
        if rank == 1:
            here = os.getpid()
            script = f"sleep 0.5; kill -STOP {here}; sleep 5; kill -CONT {here}"
            subprocess.Popen(["sh", "-c", script], start_new_session=True)
        start, longest, number, going_on = time.monotonic(), 0.0, 0, True
        while going_on:
            number += 1
            began = time.monotonic()
            step(number)
            left = np.array([time.monotonic() - start < 6.5], np.int32)
            going_on = bool(hvd.allreduce(left, op=hvd.Max, name="going on")[0])
            longest = max(longest, time.monotonic() - began)
        assert number > 10
        assert 4.5 < longest < 6.5


def _allreduce_step(size):
    array = np.arange(300_000, dtype=np.float32)

    def step(number):
        total = hvd.allreduce(array + number, op=hvd.Sum, name="array")
        np.testing.assert_array_equal(total, size * (array + number))

    return step


def _exchange_step(size, buckets=4, elements=50_000):
    parameters = [Parameter(f"p{n}", (elements,), np.dtype("float32")) for n in range(buckets)]
    engine = runtime.engine()
    label = f"stopped {engine.unnamed('test')}"
    made = GradientExchange(engine, label, parameters, Compression.none, Reduction())

    def step(number=1):
        for parameter in reversed(range(buckets)):
            made.buckets.slot(parameter)[...] = np.full(elements, number + hvd.rank(), np.float32)
            made.mark(parameter)
        made.finish()
        expected = np.float32(number + (size - 1) / 2)
        assert all((made.buckets.result_slot(n) == expected).all() for n in range(buckets))

    return step


class TestFailed:
    @pytest.mark.slow
    @ranks(3, fresh=True, timeout=30, env={"HVDLITE_SHUTDOWN_TIMEOUT_SECONDS": "1"})
    @pytest.mark.parametrize("elements", [1, 10**6])
    def test_a_rank_that_raises_between_meeting_and_data(self, monkeypatch, elements):
        hvd.init()
        array = np.ones(elements)
        hvd.allreduce(array, name="a")

        def fail(*_):
            raise MemoryError("no room")

        if hvd.rank() == 1:
            monkeypatch.setattr(Allreduce, "execute", fail)
            with pytest.raises(hvd.HorovodInternalError, match="rank 1: 'a' failed: MemoryError"):
                hvd.allreduce(array, name="a")
            time.sleep(3)  # it lives on
        else:
            start = time.monotonic()
            if elements == 1:  # what is small has come with the meeting
                hvd.allreduce(array, name="a")
            with pytest.raises(hvd.HorovodInternalError, match="rank 1 has ended"):
                hvd.allreduce(array, name="a")
            assert time.monotonic() - start < 2

    @ranks(2, 3, settings={"HVDLITE_SHARED_MEMORY": "0"})
    @pytest.mark.parametrize("count", [1, 4])
    def test_a_rank_that_cannot_allocate_for_a_sum_over_mpi(self, monkeypatch, count, size):
        hvd.init()
        empty = np.empty

        def no_room(shape, dtype=float, *_):
            if np.dtype(dtype) == np.uint8 and shape > 5000:
                raise MemoryError("no room")
            return empty(shape, dtype)

        names = [f"array {number}" for number in range(count)]
        operations = [describe_allreduce(np.ones(999), name, hvd.Sum) for name in names]

        def totals():  # by the same operations each time, which adapters keep
            return [runtime.engine().named.submit(operation) for operation in operations]

        for handle in totals():
            assert handle.wait().tolist() == [size] * 999
        start = time.monotonic()
        with monkeypatch.context() as patch:
            if hvd.rank() == 1:
                patch.setattr(np, "empty", no_room)
            for handle in totals():
                with pytest.raises(hvd.HorovodInternalError, match=r"rank 1: 'a.*no room'"):
                    handle.wait()
        assert time.monotonic() - start < 5
        for handle in totals():
            assert handle.wait().tolist() == [size] * 999

    @pytest.mark.slow
    @ranks(3, fresh=True, timeout=30, env={"HVDLITE_SHUTDOWN_TIMEOUT_SECONDS": "1"})
    def test_it_is_heard_of_by_who_waits_for_a_third_rank(self, monkeypatch):
        hvd.init()
        hvd.barrier()
        if hvd.rank() == 1:
            time.sleep(4)  # computes
        elif hvd.rank() == 2:
            monkeypatch.setattr(Allreduce, "digest", property(lambda self: 1 / 0))
            with pytest.raises(hvd.HorovodInternalError, match="ZeroDivisionError"):
                hvd.allreduce(1.0, name="a")
            time.sleep(4)
        else:
            start = time.monotonic()
            with pytest.raises(hvd.HorovodInternalError, match="rank 2 has ended"):
                hvd.allreduce(1.0, name="a")
            assert time.monotonic() - start < 2


class TestProcessorTime:
    @pytest.mark.slow
    @ranks(2)
    def test_an_idle_job_uses_less_than_a_hundredth_of_a_core(self):
        hvd.init()
        step, reduce = _exchange_step(2), _allreduce_step(2)
        for number in range(20):
            step(number)
            reduce(number)
        handles = [hvd.allreduce_async(np.ones(1000), name=f"t{n}") for n in range(100)]
        for handle in handles:
            hvd.synchronize(handle)
        hvd.barrier()
        time.sleep(0.2)
        before = time.process_time()
        time.sleep(4)
        assert time.process_time() - before < 0.04

    @pytest.mark.slow
    @ranks(2)
    @pytest.mark.parametrize("how", ["run", "submit", "bucket", "another operation"])
    def test_a_rank_that_waits_two_seconds_uses_less_than_a_twentieth_of_a_core(self, how, size):
        hvd.init()
        step = _exchange_step(size)
        step(0)

        def wait_differently():
            mine, other = (f"{rank}" for rank in (hvd.rank(), 1 - hvd.rank()))
            handle = hvd.allreduce_async(np.ones(3), name=mine)
            time.sleep(1)
            hvd.allreduce(np.ones(3), name=other)
            handle.wait()

        wait = {
            "run": lambda: hvd.allreduce(np.ones(3), name="late"),
            "submit": lambda: hvd.allreduce_async(np.ones(3), name="late").wait(),
            "bucket": lambda: step(1),
            "another operation": wait_differently,
        }[how]
        hvd.barrier()
        if hvd.rank() == 1:
            time.sleep(2)
        before = time.process_time()
        wait()
        assert time.process_time() - before < 0.1
