from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite import mpi, runtime, tuning, tuning_cache
from hvdlite.compression import Compression, Parameter, Reduction
from hvdlite.errors import RankGoneError
from hvdlite.gradients import GradientExchange
from hvdlite.reduction import Sum
from hvdlite.settings import Settings
from hvdlite.transport import Loopback
from hvdlite.transport.shared_memory import futex
from hvdlite.transport.shared_memory.barrier import LARGEST_CHUNK, Barrier
from hvdlite.transport.shared_memory.segment import Arena
from hvdlite.transport.shared_memory.transport import (
    CHUNK_OF_TWO,
    DEFAULT_CHUNK,
    SharedMemoryTransport,
)
from hvdlite.transport.simulated import Simulation
from hvdlite.tuning import CAPS, CHUNKS, Tuning, choose, measure, tune
from tests.harness import ranks
from tests.harness.mpirun import environment
from tests.simulation import on_all_ranks
from tests.transport.worlds import connected, threads

MIB = 2**20
DEFAULT = Tuning(25 * MIB, MIB)
OF_TWO = Tuning(25 * MIB, MIB // 2)
shared_memory = pytest.mark.skipif(not futex.is_supported(), reason="needs Linux on x86-64")


def test_what_is_tried_is_allowed_and_has_the_defaults():
    assert Tuning(Settings().fusion_threshold, DEFAULT_CHUNK) == DEFAULT
    assert Tuning(Settings().fusion_threshold, CHUNK_OF_TWO) == OF_TWO
    assert DEFAULT.chunk in CHUNKS
    assert OF_TWO.chunk in CHUNKS
    assert DEFAULT.bucket_cap in CAPS
    assert list(CHUNKS) == sorted(CHUNKS)
    assert min(CHUNKS) > 0
    assert max(CHUNKS) <= LARGEST_CHUNK


def table(chunks, caps, size=2, rounds=5):
    """Times that do not vary."""
    row = np.array([*chunks, *caps], float)
    return np.broadcast_to(row, (size, rounds, row.size)).copy()


EQUAL = ([1, 1, 1, 1], [1, 1, 1])


class TestChoice:
    @pytest.mark.parametrize(
        ("times", "index"),
        [
            ([1, 1, 1, 1], 2),
            ([0.91, 1, 1, 1], 2),  # not by more than a tenth
            ([0.89, 1, 1, 1], 0),
            ([0.5, 0.4, 1, 0.45], 1),
            ([0.5, 0.5, 1, 0.5], 0),
            ([9, 5, 1, 0.1], 3),
            ([0, 0, 0, 0], 2),
            ([2, 2, 1, 2], 2),
        ],
    )
    def test_another_chunk_has_to_be_clearly_faster(self, times, index):
        assert choose(table(times, [1, 1, 1]), DEFAULT).chunk == CHUNKS[index]

    @pytest.mark.parametrize(
        ("times", "index"),
        [
            ([1, 1, 1], 0),
            ([1.09, 1, 1], 0),
            ([1.11, 1.09, 1], 1),
            ([1.5, 1.2, 1], 2),
            ([1.5, 1, 1.2], 1),
            ([1, 2, 3], 0),
            ([0, 0, 0], 0),
        ],
    )
    def test_the_smallest_bucket_that_is_not_clearly_slower(self, times, index):
        assert choose(table([1, 1, 1, 1], times), DEFAULT).bucket_cap == CAPS[index]

    def test_the_slowest_rank_counts(self):
        seconds = table(*EQUAL, size=3)
        seconds[1, :, :2] = 0.1  # fast, but on one rank only
        assert choose(seconds, DEFAULT).chunk == MIB
        seconds[:, :, :2] = 0.1
        seconds[2, :, 0] = 3
        assert choose(seconds, DEFAULT).chunk == CHUNKS[1]

    @pytest.mark.parametrize("absurd", [0, 1e-9, 1e9, np.inf])
    def test_one_absurd_time_changes_nothing(self, absurd):
        times = ([0.5, 1, 1, 1], [1.5, 1, 1])
        expected = Tuning(CAPS[1], CHUNKS[0])
        for rank, number, candidate in np.ndindex(2, 5, 7):
            seconds = table(*times)
            seconds[rank, number, candidate] = absurd
            assert choose(seconds, DEFAULT) == expected
            seconds[:, number, candidate] = absurd
            assert choose(seconds, DEFAULT) == expected

    def test_whatever_makes_most_rounds_slower_changes_nothing(self):
        generator = np.random.default_rng(0)
        for _ in range(100):
            seconds = table([1, 0.5, 1, 1], [1.3, 1, 1], size=3)
            for times in seconds.transpose(2, 0, 1):
                disturbed = generator.permutation(5)[:3]
                times[:, disturbed] += generator.exponential(1, (3, 3))
            assert choose(seconds, DEFAULT) == Tuning(CAPS[1], CHUNKS[1])

    def test_too_few_rounds_tell_nothing(self):
        for rounds in range(5):
            found = choose(table(*EQUAL)[:, :rounds], DEFAULT)
            assert found == (Tuning(CAPS[0], MIB) if rounds >= 2 else None)


class Clock:
    """Goes on by a step whenever it is looked at."""

    def __init__(self, step=0.0):
        self.now, self.step, self.looks = 1000.0, step, 0

    def __call__(self):
        self.looks += 1
        self.now += self.step
        return self.now


class Probed:
    """The chunks that a transport was set to, and the bytes that it has reduced."""

    def __init__(self, transport):
        self.transport, self.done, self.broadcasts = transport, [], 0
        self._allreduce, self._broadcast = transport.allreduce, transport.broadcast
        transport.allreduce, transport.broadcast = self.allreduce, self.broadcast

    def allreduce(self, send, result, op, scaling):
        assert send is result
        assert op is Sum
        self.done.append((self.transport.chunk, send.nbytes))
        self._allreduce(send, result, op, scaling)

    def broadcast(self, array, root):
        self.broadcasts += 1
        self._broadcast(array, root)


def small(monkeypatch):
    """Probes that take next to no time."""
    monkeypatch.setattr(tuning, "_ARRAY_BYTES", 4096)
    monkeypatch.setattr(tuning, "_MODEL_BYTES", 16384)
    monkeypatch.setattr(tuning, "CAPS", (4096, 8192, Settings.fusion_threshold))


@shared_memory
class TestMeasurement:
    def test_each_size_is_timed_in_turn(self, monkeypatch):
        small(monkeypatch)
        transports = threads(2)
        probed = [Probed(transport) for transport in transports]
        found = on_all_ranks(lambda made: measure(made, Clock(0.001)), transports)
        assert found[0].shape == (2, 5, 7)
        assert (found[0] == found[1]).all()
        assert found[0] == pytest.approx(0.001)
        a_round = [(chunk, 4096) for chunk in CHUNKS]
        a_round += [(CHUNKS[-1], nbytes) for nbytes in [4096] * 4 + [8192] * 2 + [16384]]
        untimed = [(CHUNKS[-1], 4096), (CHUNKS[-1], 16384)]
        assert probed[0].done == probed[1].done == untimed + 5 * a_round

    @pytest.mark.parametrize("size", [2, 3])
    def test_every_rank_has_the_times_of_all(self, monkeypatch, size):
        small(monkeypatch)
        transports = threads(size)
        clocks = [Clock(0.001 * (rank + 1)) for rank in range(size)]
        found = on_all_ranks(lambda made: measure(made, clocks[made.rank]), transports)
        for seconds in found:
            assert seconds == pytest.approx(
                0.001 * np.arange(1, size + 1)[:, None, None] * np.ones((size, 5, 7))
            )

    def test_none_begins_after_the_deadline_of_rank_0(self, monkeypatch):
        small(monkeypatch)
        transports = threads(2)
        probed = [Probed(transport) for transport in transports]
        # 7 probes a round, 3 looks a probe: 0.21 s a round.
        clocks = [Clock(0.01), Clock(1e6)]
        found = on_all_ranks(lambda made: measure(made, clocks[made.rank]), transports)
        assert [seconds.shape for seconds in found] == [(2, 1, 7)] * 2
        # Looks are at 1 for the start, and at 2, 5, 8, ... before a probe, which may not be
        # later than 0.3 s.
        assert clocks[0].looks == 3 * 10 + 2
        # Four arrays, and a model in four, two and one buckets; then three arrays more.
        assert [len(each.done) for each in probed] == [2 + 4 + 7 + 3] * 2

    def test_the_deadline_may_be_over_at_once(self, monkeypatch):
        small(monkeypatch)
        transports = threads(2)
        found = on_all_ranks(lambda made: measure(made, Clock(1)), transports)
        assert [seconds.shape for seconds in found] == [(2, 0, 7)] * 2
        assert choose(found[0], DEFAULT) is None


DIES = """
import os, signal, sys
from hvdlite import tuning
from hvdlite.transport.shared_memory.segment import Arena
from hvdlite.transport.shared_memory.transport import SharedMemoryTransport
from hvdlite.transport.shared_memory.barrier import Barrier

arena = Arena()
print(*arena.key, flush=True)
pid, *key = map(int, input().split())
table = Barrier(1, [0, 1], arena, [(pid, tuple(key)), (os.getpid(), arena.key)])
transport = SharedMemoryTransport(table, 1)
allreduce = transport.allreduce
left = int(sys.argv[1])

def dying(*arguments):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    allreduce(*arguments)

transport.allreduce = dying
tuning.measure(transport)
"""


@shared_memory
@pytest.mark.parametrize("number", [1, 6])
def test_a_rank_that_is_killed_is_not_waited_for(number):
    child = subprocess.Popen(
        [sys.executable, "-c", DIES, str(number)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        arena = Arena()
        theirs = tuple(map(int, child.stdout.readline().split()))
        print(os.getpid(), *arena.key, file=child.stdin, flush=True)
        processes = [(os.getpid(), arena.key), (child.pid, theirs)]
        transport = SharedMemoryTransport(Barrier(0, [0, 1], arena, processes), 0)
        with pytest.raises(RankGoneError, match=rf"rank 1 \(process {child.pid}\) has died"):
            measure(transport, Clock(0.001))
    finally:
        child.kill()
        child.communicate()


class Node:
    """Ranks of one node as threads, which can make transports for themselves.

    Args:
        size: the number of ranks.
        prepare: called with each transport that is made to be measured.
    """

    def __init__(self, size, prepare=lambda made: None):
        tuning._settled.clear()  # as in a new process
        self.size = size
        self.transports = threads(size)
        self.meeting = threading.Barrier(size, self._make)
        self.prepare = prepare
        self.made = []
        self.closed = 0

    def _make(self):
        self.made = [*self.made, threads(self.size)]
        for transport in self.made[-1]:
            transport.close = self._close
            self.prepare(transport)

    def _close(self):
        self.closed += 1

    def connect(self, rank):
        self.meeting.wait(10)
        return self.made[-1][rank]

    def tune(self, *settings, step=0.001):
        """What each rank gets.

        Args:
            *settings: those of each rank, or of all.
            step: of every rank's clock; so all that is timed takes equally long.
        """
        settings = settings or (Settings(),)
        each = settings if len(settings) > 1 else settings * self.size

        def one(made):
            connect = functools.partial(self.connect, made.rank)
            return tune(made, connect, each[made.rank], Clock(step))

        return on_all_ranks(one, self.transports)


def files():
    return sorted(Path(os.environ["XDG_CACHE_HOME"]).rglob("*"))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small(monkeypatch)
    return tmp_path / "cache" / "hvdlite"


@shared_memory
class TestTuning:
    @pytest.mark.parametrize("size", [2, 3])
    def test_all_ranks_get_the_same(self, cache, size):
        node = Node(size)
        found = node.tune()
        assert len(set(found)) == 1
        # All times are equal on these clocks: the default chunk, the smallest cap.
        assert found[0] == Tuning(4096, OF_TWO.chunk if size == 2 else DEFAULT.chunk)
        assert len(node.made) == 1
        assert node.closed == size

    def test_lanes_transports_are_left_as_they_are(self, cache):
        node = Node(2)
        node.tune()
        assert [made.chunk for made in node.transports] == [OF_TWO.chunk] * 2

    def test_the_second_start_measures_nothing(self, cache):
        first = Node(2).tune()
        node = Node(2)
        probed = [Probed(made) for made in node.transports]
        assert node.tune() == first
        assert node.made == []
        assert [each.done for each in probed] == [[]] * 2
        assert [each.broadcasts for each in probed] == [1] * 2

    def test_only_rank_0_reads_and_writes(self, cache, monkeypatch):
        threads_used = set()

        def note(function, *arguments):
            threads_used.add(threading.current_thread().name)
            return function(*arguments)

        for name in ("load", "store"):
            function = getattr(tuning_cache, name)
            monkeypatch.setattr(tuning_cache, name, functools.partial(note, function))
        Node(3).tune()
        assert threads_used == {"rank 0"}

    def test_another_number_of_ranks_is_measured_anew(self, cache):
        Node(2).tune()
        node = Node(3)
        node.tune()
        assert len(node.made) == 1
        assert len(list(cache.iterdir())) == 2

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{",
            "\0\xff",
            "null",
            "[]",
            "3",
            '{"machine": 1, "result": 2}',
            "RESULT null",
            "RESULT []",
            'RESULT {"bucket_cap": 4096}',
            'RESULT {"bucket_cap": "4096", "chunk": 1048576}',
            'RESULT {"bucket_cap": 4096, "chunk": 1000000000}',
            'RESULT {"bucket_cap": -1, "chunk": 1048576}',
            'RESULT {"bucket_cap": [4096], "chunk": {"a": 1}}',
        ],
    )
    def test_a_damaged_file_is_replaced(self, cache, text, caplog):
        Node(2).tune()
        (file,) = cache.iterdir()
        good = file.read_text()
        if text.startswith("RESULT"):
            result = json.loads(text.removeprefix("RESULT"))
            text = json.dumps({**json.loads(good), "result": result})
        file.write_bytes(text.encode("latin-1"))
        node = Node(2)
        with caplog.at_level(logging.INFO, "hvdlite"):
            assert node.tune() == [Tuning(4096, OF_TWO.chunk)] * 2
        assert len(node.made) == 1
        assert {record.levelno for record in caplog.records} == {logging.INFO}
        assert list(cache.iterdir()) == [file]
        assert file.read_text() == good

    def test_a_folder_that_cannot_be_had_costs_the_measurement_only(self, cache, caplog):
        cache.parent.write_text("a file where a folder should be")
        for _ in range(2):
            node = Node(2)
            with caplog.at_level(logging.DEBUG, "hvdlite"):
                assert node.tune() == [Tuning(4096, OF_TWO.chunk)] * 2
            assert len(node.made) == 1
        assert not [record for record in caplog.records if record.levelno > logging.INFO]
        assert "the tuning was not stored" in caplog.text

    def test_a_cap_that_is_given_stays(self, cache):
        given = Settings(fusion_threshold=5)
        assert Node(2).tune(given) == [Tuning(5, OF_TWO.chunk)] * 2
        # What has been stored knows nothing of it.
        assert Node(2).tune() == [Tuning(4096, OF_TWO.chunk)] * 2
        same = Settings(given=frozenset({"fusion_threshold"}))
        assert Node(2).tune(same) == [OF_TWO] * 2

    def test_a_cap_that_is_given_on_one_rank_stays_there(self, cache):
        found = Node(2).tune(Settings(), Settings(fusion_threshold=5))
        assert found == [Tuning(4096, OF_TWO.chunk), Tuning(5, OF_TWO.chunk)]

    def test_switched_off(self, cache):
        Node(2).tune()  # what is stored is not used, either
        node = Node(2)
        assert node.tune(Settings(autotune=False)) == [OF_TWO] * 2
        found = node.tune(Settings(autotune=False, fusion_threshold=5))
        assert found == [Tuning(5, OF_TWO.chunk)] * 2
        assert node.made == []

    @pytest.mark.parametrize("wanted", [(True, False), (False, True)])
    def test_rank_0_decides_whether(self, cache, wanted):
        node = Node(2)
        found = node.tune(*(Settings(autotune=each) for each in wanted))
        assert found == [Tuning(4096, OF_TWO.chunk) if wanted[0] else OF_TWO] * 2
        assert len(node.made) == wanted[0]

    def test_too_little_time_gives_the_defaults_and_is_not_stored(self, cache):
        assert Node(2).tune(step=0.01) == [OF_TWO] * 2
        assert not cache.exists()

    @pytest.mark.parametrize("step", [0.001, 0.01], ids=["measured", "too little time"])
    def test_a_process_keeps_to_what_it_has_settled(self, cache, step):
        node = Node(2)
        first = node.tune(step=step)
        for file in cache.glob("*"):
            file.unlink()
        assert node.tune() == first
        assert len(node.made) == 1
        assert first[0] == (OF_TWO if step == 0.01 else Tuning(4096, OF_TWO.chunk))

    def test_a_rank_that_fails_is_not_waited_for(self, cache):
        def prepare(made):
            if made.rank == 1:
                made.allreduce = fail

        def fail(*_):
            raise MemoryError

        node = Node(3, prepare)
        failures = {}

        def one(made):
            connect = functools.partial(node.connect, made.rank)
            try:
                tune(made, connect, Settings(), Clock(0.001))
            except Exception as error:
                failures[made.rank] = error

        on_all_ranks(one, node.transports)
        assert isinstance(failures.pop(1), MemoryError)
        assert sorted(failures) == [0, 2]
        for error in failures.values():
            assert isinstance(error, RankGoneError)
            assert "has ended" in str(error)

    def test_what_is_chosen_is_told(self, cache, caplog):
        with caplog.at_level(logging.INFO, "hvdlite"):
            Node(2).tune()
            Node(2).tune()
        first, second = (record.getMessage() for record in caplog.records)
        assert "buckets of 4096 bytes" in first
        assert "chunks of 524288 bytes: measured" in first
        assert second.endswith("as measured before")


class TestNothingToTune:
    def test_one_rank(self, cache):
        assert tune(Loopback(), pytest.fail, Settings()) == Tuning(25 * MIB, None)
        assert tune(Loopback(), pytest.fail, Settings(fusion_threshold=5)) == Tuning(5, None)
        assert not cache.exists()

    def test_a_transport_without_chunks(self, cache):
        found = on_all_ranks(
            lambda made: tune(made, pytest.fail, Settings()), Simulation(2).transports
        )
        assert found == [Tuning(25 * MIB, None)] * 2

    @ranks(4, timeout=30)
    @pytest.mark.parametrize("options", [{"local_size": 2}, {"shared_memory": False}])
    def test_a_network(self, options, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with connected(**options) as made:
            assert tune(made, pytest.fail, Settings()) == Tuning(25 * MIB, None)
        assert files() == []


class TestCache:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        return tmp_path

    def test_what_is_stored_is_found_by_the_same_machine(self):
        one, other = tuning_cache.machine(2), tuning_cache.machine(3)
        assert tuning_cache.load(one) is None
        tuning_cache.store(one, {"a": 1})
        tuning_cache.store(other, {"a": 2})
        assert tuning_cache.load(one) == {"a": 1}
        assert tuning_cache.load(other) == {"a": 2}
        tuning_cache.store(one, {"a": 3})
        assert tuning_cache.load(one) == {"a": 3}

    def test_a_machine_is_what_the_result_depends_on(self):
        machine = tuning_cache.machine(2)
        assert machine["ranks"] == 2
        assert machine["hvdlite"] == hvd.__version__
        assert machine["numpy"] == np.__version__
        assert machine["cores"] >= machine["usable cores"] >= 1
        assert machine["processor"]
        paths = {tuning_cache.path({**machine, name: "other"}) for name in machine}
        assert len(paths | {tuning_cache.path(machine)}) == len(machine) + 1

    def test_a_file_of_another_machine_is_not_used(self):
        one, other = tuning_cache.machine(2), tuning_cache.machine(3)
        tuning_cache.store(one, {"a": 1})
        tuning_cache.path(one).rename(tuning_cache.path(other))
        assert tuning_cache.load(other) is None

    @pytest.mark.parametrize("step", ["write", "replace"])
    def test_a_store_that_fails_leaves_the_old_file_and_no_other(self, monkeypatch, folder, step):
        machine = tuning_cache.machine(2)
        tuning_cache.store(machine, {"a": 1})

        def fail(*_):
            raise OSError("no space left")

        if step == "write":
            monkeypatch.setattr(os, "fsync", fail)
        else:
            monkeypatch.setattr(os, "replace", fail)
        tuning_cache.store(machine, {"a": 2})
        assert tuning_cache.load(machine) == {"a": 1}
        assert len(list((folder / "hvdlite").iterdir())) == 1

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_a_folder_that_is_read_only(self, folder):
        folder.chmod(0o500)
        tuning_cache.store(tuning_cache.machine(2), {"a": 1})
        assert tuning_cache.load(tuning_cache.machine(2)) is None

    def test_in_the_home_by_default(self, monkeypatch):
        for value in (None, ""):
            monkeypatch.setenv("HOME", "/somewhere")
            monkeypatch.setenv("XDG_CACHE_HOME", "")
            if value is None:
                monkeypatch.delenv("XDG_CACHE_HOME")
            path = tuning_cache.path(tuning_cache.machine(1))
            assert path.parent == Path("/somewhere/.cache/hvdlite")

    def test_a_user_without_a_home(self, monkeypatch):
        def fail():
            raise RuntimeError("could not determine home directory")

        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", fail)
        tuning_cache.store(tuning_cache.machine(2), {"a": 1})
        assert tuning_cache.load(tuning_cache.machine(2)) is None


def shared_mappings():
    """The segments that this process has mapped, its own and others'."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:hvdlite" in line for line in lines)


@shared_memory
class TestInJobs:
    @ranks(2, 3, fresh=True, timeout=60, env={"HVDLITE_AUTOTUNE": "1"})
    def test_the_engine_uses_what_was_measured_and_stores_it(self, size, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        # As much time as a busy machine may need.
        monkeypatch.setattr(tuning, "_SECONDS", 30.0)
        calls = []

        def counted(*arguments):
            calls.append("once more")
            return measure(*arguments)

        monkeypatch.setattr(tuning, "measure", counted)
        found = []
        for start in range(2):
            hvd.init()
            # Nothing of what was measured is still mapped: a place for each rank and lane.
            assert start or shared_mappings() == 2 * size
            engine = runtime.engine()
            found += hvd.allgather_object(engine.tuning)
            assert engine.settings.fusion_threshold == engine.tuning.bucket_cap
            for lane in (engine.gradients, engine.named):
                assert lane._transport.chunk == engine.tuning.chunk
            x = np.full(10**6, hvd.rank() + 1, np.float32)
            assert (hvd.allreduce(x, op=hvd.Sum) == size * (size + 1) / 2).all()
            hvd.shutdown()
            tuning._settled.clear()
        assert len(calls) == 1
        assert len(set(found)) == 1
        assert found[0].bucket_cap in CAPS
        assert found[0].chunk in CHUNKS
        assert len([path for path in files() if path.is_file()]) == 1

    @ranks(2, fresh=True, timeout=60, env={"HVDLITE_AUTOTUNE": "1"})
    def test_lanes_and_plans_follow_what_is_stored_but_not_against_the_environment(
        self, size, tmp_path, monkeypatch
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        stored = {"bucket_cap": CAPS[0], "chunk": CHUNKS[0]}
        if mpi.load().COMM_WORLD.rank == 0:
            tuning_cache.store(tuning_cache.machine(size), stored)
        for name in (None, "HVDLITE_FUSION_THRESHOLD", "HOROVOD_FUSION_THRESHOLD"):
            if name:
                monkeypatch.setenv(name, str(25 * MIB))
            hvd.init()
            engine = runtime.engine()
            cap = 25 * MIB if name else CAPS[0]
            assert engine.tuning == Tuning(cap, CHUNKS[0])
            for lane in (engine.gradients, engine.named):
                assert lane._transport.chunk == CHUNKS[0]
            parameters = [Parameter(f"p{n}", (MIB,), np.dtype("float32")) for n in range(5)]
            made = GradientExchange(engine, "model", parameters, Compression.none, Reduction())
            assert len(made.plan) == (2 if name else 5)
            hvd.shutdown()
            if name:
                monkeypatch.delenv(name)

    @ranks(1, 2, fresh=True, timeout=60)
    def test_switched_off(self, tmp_path, monkeypatch):
        assert os.environ["HVDLITE_AUTOTUNE"] == "0"  # by the harness
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        hvd.init()
        assert runtime.engine().settings.fusion_threshold == 25 * MIB
        assert files() == []
        hvd.shutdown()
