from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from hvdlite.errors import RankGoneError
from hvdlite.transport.base import WORD_SIZE
from hvdlite.transport.shared_memory import futex
from hvdlite.transport.shared_memory.barrier import LARGEST_CHUNK, MOST_WORDS, SUMS, Barrier
from hvdlite.transport.shared_memory.segment import Arena
from tests.harness.mpirun import environment
from tests.simulation import on_all_ranks
from tests.transport.checks import NoPatience
from tests.transport.worlds import barriers

pytestmark = pytest.mark.skipif(not futex.is_supported(), reason="needs Linux on x86-64")


@pytest.fixture
def place():
    (barrier,) = barriers(1)
    return barrier.own


class TestPlace:
    def test_notes_of_two_meetings_in_a_row_are_kept(self, place):
        for meeting in (5, 6):
            place.write(meeting, [meeting, -meeting], bytes([meeting]) * WORD_SIZE)
        for meeting in (5, 6):
            assert place.numbers(meeting) == (meeting, -meeting, 0, 0, 0, 0, 0, 0)
            assert place.words(meeting) == bytes([meeting]) * WORD_SIZE

    def test_a_note_replaces_all_of_an_older_one(self, place):
        place.write(1, range(8), b"\xff" * WORD_SIZE * MOST_WORDS)
        place.write(3, [7])
        assert place.numbers(1) == (7, 0, 0, 0, 0, 0, 0, 0)
        assert place.words(1) == b""

    def test_the_largest_numbers_and_the_most_words(self, place):
        numbers = [2**63 - 1, -(2**63)] * 4
        words = np.random.default_rng(0).bytes(MOST_WORDS * WORD_SIZE)
        byte, word = np.dtype(np.uint8), np.dtype(np.int64)
        for meeting in range(2):
            place.write(meeting, numbers, words)
            place.chunk(meeting, LARGEST_CHUNK, byte)[...] = meeting
        for number in range(SUMS):
            place.reduced(number, LARGEST_CHUNK, byte)[...] = 10 + number
        for meeting in range(2):
            assert place.numbers(meeting) == tuple(numbers)
            assert place.words(meeting) == words
            assert (place.chunk(meeting, LARGEST_CHUNK // 8, word).view(byte) == meeting).all()
        for number in range(SUMS):
            reduced = place.reduced(number, LARGEST_CHUNK // 8, word)
            assert (reduced.view(byte) == 10 + number).all()
        assert (place.arrived.value, place.gone.value) == (0, 0)

    @pytest.mark.parametrize("dtype", ["int8", "float16", "float64", "complex128"])
    def test_chunks_of_no_elements_and_of_some(self, place, dtype):
        for size in (0, 1, 3):
            chunk = place.chunk(0, size, np.dtype(dtype))
            assert (chunk.shape, chunk.dtype) == ((size,), dtype)
            assert chunk.flags.aligned


class TestMeetings:
    def test_a_rank_alone(self):
        (barrier,) = barriers(1)
        assert [barrier.meet() for _ in range(5)] == [1, 2, 3, 4, 5]
        assert barrier.absent() == []

    @pytest.mark.parametrize("size", [2, 3, 4])
    def test_everybody_sees_what_everybody_has_brought(self, size):
        def run(barrier):
            for _ in range(500):
                barrier.own.write(barrier.next, [barrier.next, barrier.own.rank])
                meeting = barrier.meet()
                found = [place.numbers(meeting)[:2] for place in barrier.slots]
                assert found == [(meeting, 10 + rank) for rank in range(size)]

        on_all_ranks(run, barriers(size))

    @pytest.mark.parametrize("size", [2, 3, 4])
    def test_what_a_rank_reads_late_is_not_overwritten(self, size):
        """It has not arrived at the next meeting, but others have, and go on as far as they may."""
        eight = np.dtype(np.int64)

        def run(barrier):
            random = np.random.default_rng(barrier.own.rank)
            for _ in range(400):
                barrier.own.chunk(barrier.next, 2000, eight)[...] = (
                    barrier.next * 10 + barrier.own.rank
                )
                mine = slice(500 * barrier.own.rank - 5000, 500 * barrier.own.rank - 4500)
                barrier.reduced(barrier.next, 500 * size, eight)[mine] = barrier.next * 20
                meeting = barrier.arrive()
                if random.random() < 0.02:
                    time.sleep(0.001)
                if meeting > 1:  # of the meeting before, until this rank waits for the others
                    assert (
                        barrier.reduced(meeting - 1, 500 * size, eight) == (meeting - 1) * 20
                    ).all()
                barrier.wait(meeting)
                for place in barrier.slots:
                    if random.random() < 0.02:
                        time.sleep(0.001)
                    chunk = place.chunk(meeting, 2000, eight)
                    assert (chunk == meeting * 10 + place.rank).all()
                assert (barrier.reduced(meeting, 500 * size, eight) == meeting * 20).all()

        on_all_ranks(run, barriers(size))

    def test_meetings_go_on_where_their_numbers_wrap_around(self):
        made = barriers(3)
        for barrier in made:
            barrier.last = 2**32 - 5
            barrier.own.arrived.value = barrier.last

        def run(barrier):
            for _ in range(20):
                barrier.own.write(barrier.next, [barrier.next])
                meeting = barrier.meet()
                assert barrier.absent() == []
                assert {place.numbers(meeting)[0] for place in barrier.slots} == {meeting}
            return meeting

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

    def test_patience_is_told_how_long_and_may_end_the_wait(self):
        here, _ = barriers(2)
        told = []

        class Impatient:
            def check(self, elapsed):
                told.append(elapsed)
                if elapsed > 0.25:
                    raise InterruptedError

        with pytest.raises(InterruptedError):
            here.wait(here.arrive(), Impatient())
        assert told == sorted(told)
        assert 0.04 < told[0] < 0.2
        with pytest.raises(InterruptedError):  # it holds for later meetings, too
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
        """Of a device's work, say, for which nobody waits here."""
        here, there = barriers(2)
        here.check_alive()
        there.leave()
        with pytest.raises(RankGoneError, match="rank 11 has ended"):
            here.check_alive()

    def test_what_a_rank_has_brought_before_it_left_counts(self):
        here, there = barriers(2)
        there.own.write(there.next, [42])
        meeting = there.arrive()
        assert here.arrive() == meeting
        there.wait(meeting)
        there.leave()
        here.wait(meeting)
        assert here.slots[1].numbers(meeting)[0] == 42
        with pytest.raises(RankGoneError, match="rank 11 has ended"):
            here.meet()

    def test_who_comes_to_a_meeting_that_another_has_given_up_is_told(self):
        """What that one has brought is there, but it will not go on from it."""
        here, there = barriers(2)
        there.own.write(there.next, [42])
        there.arrive()
        there.leave()
        with pytest.raises(RankGoneError, match="rank 11 has ended"):
            here.meet()

    def test_who_waits_for_a_slow_rank_hears_of_another_that_has_left(self):
        """The slow one may be busy for an hour, and the meeting cannot take place any more."""
        here, _, leaving = barriers(3)
        threading.Timer(0.1, leaving.leave).start()

        class Impatient:
            def check(self, elapsed):
                if elapsed > 2:
                    raise TimeoutError("heard nothing of rank 12")

        with pytest.raises(RankGoneError, match="rank 12 has ended"):
            here.wait(here.arrive(), Impatient())

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
                barrier.wait(barrier.arrive(), NoPatience())
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
