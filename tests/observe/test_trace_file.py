"""The trace file stays valid JSON, whichever process writes to it and however it ends."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import threading
import time

import numpy as np
import pytest

from hvdlite.observe import trace_file
from hvdlite.observe.trace_file import Run, TraceFile

RUN = Run("a job", 1)
FIRST = {"name": "first", "ph": "M", "pid": 3, "args": {"name": "rank 3"}}


def event(number, **args):
    return {"name": f"event {number}", "args": args}


def names(path):
    return [event["name"] for event in json.loads(path.read_text())]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.json"


@pytest.fixture
def file(path):
    file = TraceFile(str(path), RUN, FIRST)
    yield file
    file.close()


def test_it_is_whole_after_every_event(path):
    file = TraceFile(str(path), RUN, FIRST)
    expected = ["first"]
    assert names(path) == expected
    for number in range(20):
        file.append([event(number, other=i) for i in range(number % 3 + 1)])
        expected += [f"event {number}"] * (number % 3 + 1)
        assert names(path) == expected
    file.close()
    assert names(path) == expected


def test_a_reader_with_a_lock_never_sees_a_part(path):
    TraceFile(str(path), RUN, FIRST).close()
    count, lengths = 100, (1, 7, 40, 120)

    def write(writer):
        file = TraceFile(str(path), RUN, {**FIRST, "pid": writer})
        for number in range(count):
            file.append([event(number, writer=writer)] * lengths[writer])
        file.close()

    writers = [threading.Thread(target=write, args=[writer]) for writer in range(4)]
    for thread in writers:
        thread.start()
    readings = 0
    with open(path) as reader:
        while any(thread.is_alive() for thread in writers):
            fcntl.flock(reader, fcntl.LOCK_SH)
            reader.seek(0)
            text = reader.read()
            fcntl.flock(reader, fcntl.LOCK_UN)
            json.loads(text)
            readings += 1
    assert readings > 0
    events = json.loads(path.read_text())
    for writer, length in enumerate(lengths):
        mine = [e["name"] for e in events if e["args"].get("writer") == writer]
        assert mine == [f"event {number}" for number in range(count) for _ in range(length)]


@pytest.mark.parametrize(
    ("run", "kept"),
    [(RUN, True), (Run("a job", 0), True), (Run("a job", 2), False), (Run("another", 1), False)],
)
def test_a_new_run_replaces_the_file(path, run, kept):
    old = TraceFile(str(path), RUN, FIRST)
    old.append([event(0, text="x" * 5000)])
    new = TraceFile(str(path), run, {**FIRST, "name": "second"})
    before = ["first", "event 0"] if kept else []
    assert names(path) == [*before, "second"]
    # A slow process of the run before does no harm.
    old.append([event(1)])
    new.append([event(2)])
    assert names(path) == [*before, "second", "event 1", "event 2"]
    for file in (old, new):
        file.close()


def test_whatever_was_there_is_replaced(path):
    nothing = ["", "\n", "[]", "[\n]\n", "[\n1\n]\n", '[\n{"args": 1}\n]\n', "\0" * 9000, "[\n{"]
    for content in nothing:
        path.write_text(content)
        TraceFile(str(path), RUN, FIRST).close()
        assert names(path) == ["first"]


@pytest.mark.parametrize("before", [0, 2])
def test_what_a_killed_process_leaves_half_is_cut_off(path, before, file):
    for number in range(before):
        file.append([event(number), event(number)])
    old = path.read_bytes()
    expected = names(path)
    file.append([event(8, text="}\n,{"), event(8)])
    new = path.read_bytes()
    end = len(old) - len("\n]\n")
    for written in range(len(new) - end - 1):  # bytes of the last write, without its end
        path.write_bytes(old[:end] + new[end : end + written] + old[end + written :])
        file.append([event(9)])
        assert names(path) == [*expected, "event 9"]


def test_a_file_that_somebody_else_has_emptied_is_left_alone(path):
    file = TraceFile(str(path), RUN, FIRST)
    path.write_text("")
    with pytest.raises(OSError, match="Something else has written to it"):
        file.append([event(1)])
    file.close()
    assert path.read_text() == ""


def test_who_keeps_it_locked_is_not_waited_for_without_end(path, file, monkeypatch):
    monkeypatch.setattr(trace_file, "_SECONDS_TO_LOCK", 0.3)
    with open(path) as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        for write in (lambda: file.append([event(1)]), lambda: TraceFile(str(path), RUN, FIRST)):
            start = time.monotonic()
            with pytest.raises(OSError, match=r"Another process has locked it for 0.3 s"):
                write()
            assert 0.3 <= time.monotonic() - start < 2
        threading.Timer(0.1, fcntl.flock, [reader, fcntl.LOCK_UN]).start()
        file.append([event(2)])
    assert names(path) == ["first", "event 2"]


def test_on_a_full_disk_the_file_stays_as_it_was(path, file):
    file.append([event(1)])
    old = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # No event fits, or a part of them.
    for limit in (len(old), len(old) + 1, len(old) + 100):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(OSError):
                file.append([event(2, text="x" * 50_000)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.read_bytes() == old
    file.append([event(3)])
    assert names(path) == ["first", "event 1", "event 3"]


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    for place, reason in (
        ("missing/trace.json", "No such file"),
        ("file/trace.json", "Not a dir"),
        ("", "Is a dir"),
        ("/dev/null", "Not a regular file"),
    ):
        with pytest.raises(OSError, match=reason):
            TraceFile(str(tmp_path / place), RUN, FIRST)


def test_any_name_makes_strict_json(path):
    file = TraceFile(str(path), RUN, FIRST)
    odd = 'a "name"\\\n,{]\t\0 \u2028 gewöhnlich 梯度 \ud800'
    # What is given, and what is written.
    values = {
        "odd": (odd, odd),
        "numpy": (np.int64(5), 5),
        "none": (None, None),
    }
    args = {name: given for name, (given, _) in values.items()}
    file.append([{"name": odd, "args": args}, event(1, fine=1.5)])
    file.append([event(2)])
    file.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    _, first, second, third = json.loads(path.read_text(), parse_constant=refuse)
    assert first["name"] == first["args"]["odd"] == odd
    assert first["args"] == {name: written for name, (_, written) in values.items()}
    assert (second, third) == (event(1, fine=1.5), event(2))
    assert os.path.getsize(path) == len(path.read_text(encoding="ascii"))
