from __future__ import annotations

import fcntl
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.engine import Handle
from hvdlite.observe import timeline
from hvdlite.observe.timeline import Timeline
from hvdlite.observe.trace_file import Run
from tests.forks import run_forked
from tests.harness import ranks, run_script
from tests.harness.mpirun import ROOT

RUN = Run("a job", 1)
HOST = socket.gethostname()


def parsed(path):
    """The events; with the lock of readers, as other ranks may be writing."""
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        return json.load(file)


def rows(events):
    """The names of the rows, by process and thread."""
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }


def recorded(events):
    return [event for event in events if event["ph"] != "M"]


def note(trace, name, **args):
    """Record an event without duration."""
    now = trace.now()
    trace.complete("named", name, now, now, **args)


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for(name):
    """Wait 10 ms for an operation."""

    class Lane:
        def drive(self, handle):
            time.sleep(0.01)
            handle.finish()

    handle = Handle(name)
    handle.driver = Lane()
    handle.wait()


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "trace.json")


@pytest.fixture
def trace(path):
    trace = Timeline(path, 3, RUN)
    yield trace
    trace.close()


class TestEvents:
    def test_what_an_event_becomes(self, trace):
        start = trace.now()
        wall = time.time_ns() // 1000
        trace.complete("step", timeline.STEP, start, start + 5_000_000, bytes=12, name="w")
        trace.overlapping("named", timeline.QUEUE, start, start + 7_000_000, row="x")
        trace.overlapping("named", timeline.QUEUE, start, start + 7_000_000)
        trace.mark_cycles = True
        trace.observe("meet", "named")
        trace.close()
        name, order, row_1, step, row_2, *queue, cycle = parsed(trace.path)
        assert name["args"] == {"name": f"rank 3 on {HOST}", "job": "a job", "start": 1}
        assert order["args"] == {"sort_index": 3}
        assert (row_1["args"], row_2["args"]) == ({"name": "step"}, {"name": "named"})
        assert {event["pid"] for event in parsed(trace.path)} == {3}
        assert row_1["tid"] == step["tid"] != row_2["tid"] == cycle["tid"]
        assert (step["ph"], step["name"]) == ("X", "STEP")
        assert step["args"] == {"bytes": 12, "name": "w"}
        assert abs(step["ts"] - wall) < 5000
        assert step["dur"] in (5000, 5001)  # between whole microseconds
        assert [event["ph"] for event in queue] == ["b", "e", "b", "e"]
        assert queue[0]["id"] == queue[1]["id"] != queue[2]["id"] == queue[3]["id"]
        assert queue[1]["ts"] - queue[0]["ts"] in (7000, 7001)
        assert queue[0]["args"] == {"row": "x"}
        assert (cycle["ph"], cycle["s"]) == ("i", "t")
        assert cycle["ts"] >= step["ts"]

    def test_what_was_nested_stays_nested(self, trace):
        chosen = random.Random(0)
        now = trace.now()
        for _ in range(300):
            times = sorted(now + chosen.randrange(20_000) for _ in range(4))
            trace.complete("named", "outer", times[0], times[3])
            trace.complete("named", "inner", times[1], times[2])
        trace.close()
        events = recorded(parsed(trace.path))
        for outer, inner in zip(events[::2], events[1::2], strict=True):
            assert outer["ts"] <= inner["ts"]
            assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]

    def test_many_events_from_several_threads(self, trace):
        def work(row):
            for number in range(1000):
                trace.complete(row, "e", number, number, number=number)

        threads = [threading.Thread(target=work, args=[f"row {i}"]) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        trace.close()
        events = parsed(trace.path)
        assert len(recorded(events)) == 3000
        for (_, thread), _ in rows(events).items():
            numbers = [e["args"]["number"] for e in recorded(events) if e["tid"] == thread]
            assert numbers == list(range(1000))

    def test_a_wait_blocks_the_thread_that_waits(self, path):
        timeline.start(path, 0, RUN)
        thread = threading.Thread(target=wait_for, args=["aside"])
        thread.start()
        thread.join()
        wait_for("in the main thread")
        ended = Handle("ended")
        ended.finish()
        ended.wait()
        timeline.stop()
        events = recorded(parsed(path))
        assert {event["name"] for event in events} == {"SYNCHRONIZE"}
        found = [(event["ph"], event["args"]["tensor"]) for event in events]
        assert found == [("b", "aside"), ("e", "aside"), ("X", "in the main thread")]
        assert min(events[1]["ts"] - events[0]["ts"], events[2]["dur"]) >= 10_000

    def test_every_name_is_explained(self):
        text = timeline.__doc__
        names = {
            value
            for name, value in vars(timeline).items()
            if name.isupper() and not name.startswith("_") and isinstance(value, str)
        }
        names.remove(timeline.NEGOTIATE)
        operations = ("ALLREDUCE", "ALLGATHER", "BROADCAST", "BARRIER")
        names |= {timeline.NEGOTIATE + name for name in operations}
        assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "STEP"} < names
        for name in names:
            shown = name if name in text else name.replace("NEGOTIATE_", "..._")
            assert re.search(rf"(?<![A-Z_]){re.escape(shown)}\b", text), name


class TestProcess:
    def test_a_killed_process_leaves_a_whole_file(self, path):
        code = (
            "import os, sys\n"
            "from hvdlite.observe.timeline import Timeline\n"
            "from hvdlite.observe.trace_file import Run\n"
            "trace = Timeline(sys.argv[1], 0, Run('a job', 1))\n"
            "for number in range(2000):\n"
            "    trace.complete('named', 'kept', 0, 0)\n"
            "while open(sys.argv[1]).read().count('kept') < 2000: pass\n"
            "for number in range(10**7):\n"
            "    trace.complete('named', 'last', 0, 0)\n"
            "    if number == 5000: os.kill(os.getpid(), 9)\n"
        )
        done = subprocess.run([sys.executable, "-c", code, path], cwd=ROOT, timeout=240)
        assert done.returncode == -signal.SIGKILL
        # Whoever writes next finds the end of what the other has written.
        other = Timeline(path, 1, RUN)
        note(other, "mine")
        other.close()
        names = [event["name"] for event in recorded(parsed(path))]
        assert names.count("kept") == 2000
        assert names[-1] == "mine"

    def test_a_full_disk_ends_the_timeline_and_nothing_else(self, path, caplog):
        timeline.start(path, 3, RUN)
        trace = timeline.current
        note(trace, "before")
        wait_until(lambda: '"before"' in Path(path).read_text())
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path), hard))
        try:
            note(trace, "after", text="x" * 2**20)
            wait_until(lambda: timeline.current is None)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert timeline.current is None
        timeline.stop()
        assert [event["name"] for event in recorded(parsed(path))] == ["before"]
        assert f"rank 3: the timeline {path} ends here: " in caplog.text

    def test_a_forked_child_writes_nothing(self, path):
        timeline.start(path, 0, RUN)
        trace = timeline.current
        note(trace, "parent")

        def child():
            note(trace, "child")
            assert timeline.current is None
            assert path not in {os.path.realpath(f"/proc/self/fd/{n}") for n in range(64)}
            timeline.stop()

        run_forked(child)
        note(trace, "parent again")
        timeline.stop()
        names = [event["name"] for event in recorded(parsed(path))]
        assert names == ["parent", "parent again"]


class TestInAJob:
    @ranks(1)
    def test_the_order_of_calls(self, tmp_path):
        hvd.shutdown()
        with pytest.raises(hvd.NotInitializedError):
            hvd.start_timeline(tmp_path / "none.json")
        hvd.stop_timeline()
        hvd.init()
        hvd.stop_timeline()
        for mark in (False, True):
            hvd.start_timeline(tmp_path / "trace.json", mark_cycles=mark)
            assert timeline.current.mark_cycles == mark
            with pytest.raises(ValueError, match="rank 0: a timeline is being written to /"):
                hvd.start_timeline(tmp_path / "other.json")
            hvd.stop_timeline()
            assert timeline.current is None
            hvd.stop_timeline()
        assert os.listdir(tmp_path) == ["trace.json"]

    @ranks(1, 2)
    def test_off_it_does_nothing(self, monkeypatch):
        def refuse(*args, **kwargs):
            raise AssertionError("the timeline is off")

        hvd.init()
        for name in ("__init__", "now", "complete", "overlapping"):
            monkeypatch.setattr(Timeline, name, refuse)
        assert timeline.current is None
        assert hvd.allreduce(np.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3
        assert hvd.allgather(np.ones(1)).shape == (hvd.size(),)
        hvd.barrier()
        assert "hvdlite-timeline" not in {thread.name for thread in threading.enumerate()}

    @ranks(2, 4)
    def test_all_ranks_write_one_file(self, path, size):
        hvd.init()
        for _ in range(3):
            hvd.start_timeline(path)
            for number in range(50):
                now = timeline.current.now()
                timeline.current.complete("gradients", "mine", now, now, number=number)
                if number == 25:
                    parsed(path)
            timeline.current.complete("step", "mine", now, now)
            hvd.stop_timeline()
            parsed(path)
            hvd.barrier()
            events = parsed(path)
            hvd.barrier()
            names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
            assert names == {other: f"rank {other} on {HOST}" for other in range(size)}
            named = rows(events)
            assert len({thread for _, thread in named}) == len(named) == 2 * size
            for other in range(size):
                mine = [e for e in events if e["pid"] == other and e["name"] == "mine"]
                assert [e["args"].get("number") for e in mine] == [*range(50), None]
                assert {named[other, e["tid"]] for e in mine} == {"gradients", "step"}
            assert {e["args"]["start"] for e in events if e["name"] == "process_name"} == {
                events[0]["args"]["start"]
            }

    @ranks(2)
    def test_a_rank_that_is_ahead_is_not_overwritten(self, path):
        hvd.init()
        if hvd.rank() == 1:
            hvd.barrier(name="ahead")
        for number in range(2):
            hvd.start_timeline(path)
            note(timeline.current, f"start {number}")
            hvd.stop_timeline()
        if hvd.rank() == 0:
            hvd.barrier(name="ahead")
        hvd.barrier(name="done")
        events = parsed(path)
        kept = {(e["pid"], e["name"]) for e in recorded(events)}
        assert kept == {(0, "start 1"), (1, "start 0"), (1, "start 1")}
        assert {e["pid"] for e in events if e["name"] == "process_name"} == {0, 1}

    @ranks(2)
    def test_the_variables(self, path, monkeypatch):
        hvd.shutdown()
        for prefix in ("HVDLITE", "HOROVOD"):
            monkeypatch.setenv(f"{prefix}_TIMELINE", path)
            monkeypatch.setenv(f"{prefix}_TIMELINE_MARK_CYCLES", "1")
            hvd.init()
            assert timeline.current.mark_cycles
            note(timeline.current, prefix)
            hvd.shutdown()
            assert timeline.current is None
            monkeypatch.delenv(f"{prefix}_TIMELINE")
            monkeypatch.delenv(f"{prefix}_TIMELINE_MARK_CYCLES")
            hvd.init()
            assert timeline.current is None
            hvd.barrier()
            marks = [(e["pid"], e["name"]) for e in parsed(path) if e["name"] == prefix]
            assert sorted(marks) == [(0, prefix), (1, prefix)]
            hvd.shutdown()

    @ranks(1, 2)
    @pytest.mark.parametrize("place", ["missing/trace.json", ""])
    def test_a_place_that_cannot_be_written(self, tmp_path, place, monkeypatch):
        path = tmp_path / place
        expected = f"timeline {re.escape(str(path))} cannot be written: .*; name a file in a folder"
        hvd.shutdown()
        monkeypatch.setenv("HVDLITE_TIMELINE", str(path))
        with pytest.raises(OSError, match=rf"rank \d on {HOST}: the {expected}"):
            hvd.init()
        assert not hvd.is_initialized()
        monkeypatch.delenv("HVDLITE_TIMELINE")
        hvd.init()
        with pytest.raises(OSError, match=rf"rank {hvd.rank()} on {HOST}: the {expected}"):
            hvd.start_timeline(path)
        assert timeline.current is None
        hvd.start_timeline(tmp_path / "good.json")
        hvd.stop_timeline()
        hvd.barrier()

    @ranks(1, 2)
    def test_clocks_of_a_node_agree_and_tensors_have_the_names_of_horovod(self, path):
        hvd.init()
        # A moment that all ranks can name: the clock is the same, the timelines are not.
        moment = hvd.broadcast_object(time.monotonic_ns(), 0)
        hvd.start_timeline(path)
        timeline.current.complete("named", "moment", moment, moment)
        hvd.allreduce(np.ones(3), name="test_allreduce")
        hvd.broadcast(np.ones(3), 0, name="broadcast.weights")
        hvd.broadcast(np.ones(3), 0, name="broadcast")
        hvd.allreduce(np.ones(3))
        hvd.stop_timeline()
        hvd.barrier(name="written")
        events = recorded(parsed(path))
        times = [event["ts"] for event in events if event["name"] == "moment"]
        assert len(times) == hvd.size()
        assert max(times) - min(times) <= 50
        tensors = {"ALLREDUCE": [], "BROADCAST": []}
        for event in events:
            tensor = event["args"].get("tensor", "")
            if event["pid"] == 0 and event["name"] in tensors:
                tensors[event["name"]].append(tensor)
        assert tensors["ALLREDUCE"][0] == "allreduce.test_allreduce"
        assert re.fullmatch(r"allreduce\.noname\.\d+", tensors["ALLREDUCE"][1])
        assert tensors["BROADCAST"] == ["broadcast.weights", "broadcast.broadcast"]

    @ranks(2)
    def test_a_forked_child_cannot_start_one(self, path):
        hvd.init()

        def child():
            with pytest.raises(hvd.HorovodInternalError):
                hvd.start_timeline(path)

        run_forked(child)
        assert not os.path.exists(path)


@pytest.mark.parametrize("end", ["pass", "raise ValueError('the reason')"])
def test_what_is_recorded_before_the_end_of_a_script(path, end):
    script = (
        "import hvdlite as hvd\n"
        "from hvdlite.observe import timeline\n"
        "hvd.init()\n"
        "hvd.barrier()\n"
        "timeline.current.complete('step', 'the last', 0, 0)\n"
        "if hvd.rank() == 1:\n"
        f"    {end}\n"
    )
    done = run_script(script, 2, env={"HVDLITE_TIMELINE": path})
    assert (done.returncode == 0) == (end == "pass"), done.stderr
    last = {event["pid"] for event in parsed(path) if event["name"] == "the last"}
    assert 1 in last
