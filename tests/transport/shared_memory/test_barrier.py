from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from hvdlite.errors import RankGoneError
from hvdlite.transport.shared_memory import futex
from hvdlite.transport.shared_memory.barrier import LARGEST_CHUNK, MAX_DIGESTS, OUTPUTS, Barrier
from hvdlite.transport.shared_memory.segment import Arena
from hvdlite.transport.transport import DIGEST_SIZE
from tests.harness.mpirun import environment
from tests.simulation import on_all_ranks
from tests.transport.checks import on_wait
from tests.transport.worlds import barriers

pytestmark = pytest.mark.skipif(not futex.is_supported(), reason="needs Linux on x86-64")


@pytest.fixture
def slot():
    (barrier,) = barriers(1)
    return barrier.own


class TestSlot:
    def test_notes_of_two_generations_in_a_row_are_kept(self, slot):
        for generation in (5, 6):
            slot.write(generation, [generation, -generation], bytes([generation]) * DIGEST_SIZE)
        for generation in (5, 6):
            assert slot.numbers(generation) == (generation, -generation, 0, 0, 0, 0, 0, 0)
            assert slot.digests(generation) == bytes([generation]) * DIGEST_SIZE

    def test_a_note_replaces_all_of_an_older_one(self, slot):
        slot.write(1, range(8), b"\xff" * DIGEST_SIZE * MAX_DIGESTS)
        slot.write(3, [7])
        assert slot.numbers(1) == (7, 0, 0, 0, 0, 0, 0, 0)
        assert slot.digests(1) == b""

    def test_the_largest_numbers_and_the_most_digests(self, slot):
        numbers = [2**63 - 1, -(2**63)] * 4
        digests = np.random.default_rng(0).bytes(MAX_DIGESTS * DIGEST_SIZE)
        byte, word = np.dtype(np.uint8), np.dtype(np.int64)
        for generation in range(2):
            slot.write(generation, numbers, digests)
            slot.chunk(generation, LARGEST_CHUNK, byte)[...] = generation
        for number in range(OUTPUTS):
            slot.output(number, LARGEST_CHUNK, byte)[...] = 10 + number
        for generation in range(2):
            assert slot.numbers(generation) == tuple(numbers)
            assert slot.digests(generation) == digests
            assert (slot.chunk(generation, LARGEST_CHUNK // 8, word).view(byte) == generation).all()
        for number in range(OUTPUTS):
            output = slot.output(number, LARGEST_CHUNK // 8, word)
            assert (output.view(byte) == 10 + number).all()
        assert (slot.arrived.value, slot.gone.value) == (0, 0)

    @pytest.mark.parametrize("dtype", ["int8", "float16", "float64", "complex128"])
    def test_chunks_of_no_elements_and_of_some(self, slot, dtype):
        for size in (0, 1, 3):
            chunk = slot.chunk(0, size, np.dtype(dtype))
            assert (chunk.shape, chunk.dtype) == ((size,), dtype)
            assert chunk.flags.aligned


class TestGenerations:
    def test_a_rank_alone(self):
        (barrier,) = barriers(1)
        assert [barrier.meet() for _ in range(5)] == [1, 2, 3, 4, 5]
        assert barrier.absent() == []

    @pytest.mark.parametrize("size", [2, 3, 4])
    def test_all_ranks_see_what_each_has_written(self, size):
        def run(barrier):
            for _ in range(500):
                barrier.own.write(barrier.next, [barrier.next, barrier.own.rank])
                generation = barrier.meet()
                found = [slot.numbers(generation)[:2] for slot in barrier.slots]
                assert found == [(generation, 10 + rank) for rank in range(size)]

        on_all_ranks(run, barriers(size))

    @pytest.mark.parametrize("size", [2, 3, 4])
    def test_what_a_rank_reads_late_is_not_overwritten(self, size):
        """Others have arrived at the next generation, and go on as far as they may."""
        eight = np.dtype(np.int64)

        def run(barrier):
            random = np.random.default_rng(barrier.own.rank)
            for _ in range(400):
                barrier.own.chunk(barrier.next, 2000, eight)[...] = (
                    barrier.next * 10 + barrier.own.rank
                )
                mine = slice(500 * barrier.own.rank - 5000, 500 * barrier.own.rank - 4500)
                barrier.output(barrier.next, 500 * size, eight)[mine] = barrier.next * 20
                generation = barrier.arrive()
                if random.random() < 0.02:
                    time.sleep(0.001)
                if generation > 1:  # of the generation before, until this rank waits for the others
                    assert (
                        barrier.output(generation - 1, 500 * size, eight) == (generation - 1) * 20
                    ).all()
                barrier.wait(generation)
                for slot in barrier.slots:
                    if random.random() < 0.02:
                        time.sleep(0.001)
                    chunk = slot.chunk(generation, 2000, eight)
                    assert (chunk == generation * 10 + slot.rank).all()
                assert (barrier.output(generation, 500 * size, eight) == generation * 20).all()

        on_all_ranks(run, barriers(size))

    def test_generations_go_on_where_their_numbers_wrap_around(self):
        made = barriers(3)
        for barrier in made:
            barrier.last = 2**32 - 5
            barrier.own.arrived.value = barrier.last

        def run(barrier):
            for _ in range(20):
                barrier.own.write(barrier.next, [barrier.next])
                generation = barrier.meet()
                assert barrier.absent() == []
                assert {slot.numbers(generation)[0] for slot in barrier.slots} == {generation}
            return generation

        assert on_all_ranks(run, made) == [2**32 + 15] * 3
        assert [barrier.own.arrived.value for barrier in made] == [15] * 3

    @pytest.mark.parametrize("before", [0, 2**31 - 1, 2**32 - 1])
    def test_a_rank_that_is_late_is_waited_for_wherever_the_numbers_are(self, before):
        late, waiting = barriers(2)
        for barrier in (late, waiting):
            barrier.last = before
            barrier.own.arrived.value = before
        thread = threading.Thread(target=waiting.meet, daemon=True)
        thread.start()
        time.sleep(0.15)
        assert thread.is_alive()
        assert waiting.absent() == [10]
        late.meet()
        thread.join(5)
        assert not thread.is_alive()
        assert waiting.absent() == []


class TestWaiting:
    def test_a_wait_uses_no_processor(self):
        here, there = barriers(2)
        threading.Timer(1.0, there.arrive).start()
        before = time.thread_time()
        here.meet()
        assert time.thread_time() - before < 0.05

    def test_on_wait_gets_the_seconds_and_may_end_the_wait(self):
        here, _ = barriers(2)
        told = []

        def end(elapsed):
            told.append(elapsed)
            if elapsed > 0.25:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            here.wait(here.arrive(), end)
        assert told == sorted(told)
        assert 0.04 < told[0] < 0.2
        with pytest.raises(InterruptedError):  # it holds for later generations, too
            here.wait(here.arrive())

    def test_who_is_absent(self):
        made = barriers(4)
        for rank in (0, 2):
            made[rank].arrive()
        assert made[0].absent() == made[2].absent() == [11, 13]


class TestGone:
    def test_who_waits_is_told_at_once(self):
        here, there = barriers(2)
        threading.Timer(0.1, there.leave).start()
        start = time.monotonic()
        with pytest.raises(RankGoneError, match="rank 11 has ended while this rank waits"):
            here.meet()
        assert time.monotonic() - start < 1.0

    def test_who_comes_later_is_told(self):
        here, there = barriers(2)
        there.leave()
        with pytest.raises(RankGoneError, match="rank 11 has ended"):
            here.meet()

    def test_who_only_asks_is_told(self):
        """As a lane does that waits for a device's work."""
        here, there = barriers(2)
        here.check_alive()
        there.leave()
        with pytest.raises(RankGoneError, match="rank 11 has ended"):
            here.check_alive()

    def test_what_a_rank_has_brought_before_it_left_counts(self):
        here, there = barriers(2)
        there.own.write(there.next, [42])
        generation = there.arrive()
        assert here.arrive() == generation
        there.wait(generation)
        there.leave()
        here.wait(generation)
        assert here.slots[1].numbers(generation)[0] == 42
        with pytest.raises(RankGoneError, match="rank 11 has ended"):
            here.meet()

    def test_who_comes_to_a_meeting_that_another_has_given_up_is_told(self):
        """Its data are there, but it will not take part in what follows."""
        here, there = barriers(2)
        there.own.write(there.next, [42])
        there.arrive()
        there.leave()
        with pytest.raises(RankGoneError, match="rank 11 has ended"):
            here.meet()

    def test_who_waits_for_a_slow_rank_hears_of_another_that_has_left(self):
        """The slow one may be busy for an hour, and the generation cannot complete any more."""
        here, _, leaving = barriers(3)
        threading.Timer(0.1, leaving.leave).start()

        def end(elapsed):
            if elapsed > 2:
                raise TimeoutError("heard nothing of rank 12")

        with pytest.raises(RankGoneError, match="rank 12 has ended"):
            here.wait(here.arrive(), end)

    @pytest.mark.parametrize("position", [0, 1])
    def test_a_rank_whose_process_is_killed_is_named(self, position):
        code = (
            "from hvdlite.transport.shared_memory.segment import Arena; arena = Arena();"
            "print(*arena.key, flush=True); input()"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        arena = Arena()
        processes = [(os.getpid(), arena.key)]
        try:
            key = tuple(map(int, child.stdout.readline().split()))
            processes.insert(position, (child.pid, key))
            ranks = [4, 6]
            barrier = Barrier(1 - position, ranks, arena, processes)
            threading.Timer(0.2, child.kill).start()
            start = time.monotonic()
            expected = rf"rank {ranks[position]} \(process {child.pid}\) has died"
            with pytest.raises(RankGoneError, match=expected):
                barrier.wait(barrier.arrive(), on_wait)
            assert 0.2 <= time.monotonic() - start < 1.0
        finally:
            child.kill()
            child.communicate()


class TestMaking:
    def test_memory_that_cannot_be_opened_is_an_oserror(self):
        number, inode = Arena().key
        for wrong in ((number, inode + 10**6), (19_999, inode)):
            arena = Arena()
            with pytest.raises(OSError, match="/proc"):
                Barrier(0, [0, 1], arena, [(os.getpid(), arena.key), (os.getpid(), wrong)])
