from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from hvdlite.errors import RankGoneError
from hvdlite.transport import futex
from hvdlite.transport.base import WORD_SIZE
from hvdlite.transport.segment import Arena
from hvdlite.transport.table import LARGEST_CHUNK, MOST_WORDS, SUMS, Table
from tests.harness.mpirun import environment
from tests.simulation import on_all_ranks
from tests.transport.checks import NoPatience
from tests.transport.worlds import tables

pytestmark = pytest.mark.skipif(not futex.is_supported(), reason="needs Linux on x86-64")


@pytest.fixture
def place():
    (table,) = tables(1)
    return table.own


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
        (table,) = tables(1)
        assert [table.meet() for _ in range(5)] == [1, 2, 3, 4, 5]
        assert table.absent() == []

    @pytest.mark.parametrize("size", [2, 3, 4])
    def test_everybody_sees_what_everybody_has_brought(self, size):
        def run(table):
            for _ in range(500):
                table.own.write(table.next, [table.next, table.own.rank])
                meeting = table.meet()
                found = [place.numbers(meeting)[:2] for place in table.places]
                assert found == [(meeting, 10 + rank) for rank in range(size)]

        on_all_ranks(run, tables(size))

    @pytest.mark.parametrize("size", [2, 3, 4])
    def test_what_a_rank_reads_late_is_not_overwritten(self, size):
        """It has not arrived at the next meeting, but others have, and go on as far as they may."""
        eight = np.dtype(np.int64)

        def run(table):
            random = np.random.default_rng(table.own.rank)
            for _ in range(400):
                table.own.chunk(table.next, 2000, eight)[...] = table.next * 10 + table.own.rank
                mine = slice(500 * table.own.rank - 5000, 500 * table.own.rank - 4500)
                table.reduced(table.next, 500 * size, eight)[mine] = table.next * 20
                meeting = table.arrive()
                if random.random() < 0.02:
                    time.sleep(0.001)
                if meeting > 1:  # of the meeting before, until this rank waits for the others
                    assert (
                        table.reduced(meeting - 1, 500 * size, eight) == (meeting - 1) * 20
                    ).all()
                table.wait(meeting)
                for place in table.places:
                    if random.random() < 0.02:
                        time.sleep(0.001)
                    chunk = place.chunk(meeting, 2000, eight)
                    assert (chunk == meeting * 10 + place.rank).all()
                assert (table.reduced(meeting, 500 * size, eight) == meeting * 20).all()

        on_all_ranks(run, tables(size))

    def test_meetings_go_on_where_their_numbers_wrap_around(self):
        made = tables(3)
        for table in made:
            table.last = 2**32 - 5
            table.own.arrived.value = table.last

        def run(table):
            for _ in range(20):
                table.own.write(table.next, [table.next])
                meeting = table.meet()
                assert table.absent() == []
                assert {place.numbers(meeting)[0] for place in table.places} == {meeting}
            return meeting

        assert on_all_ranks(run, made) == [2**32 + 15] * 3
        assert [table.own.arrived.value for table in made] == [15] * 3

    @pytest.mark.parametrize("before", [0, 2**31 - 1, 2**32 - 1])
    def test_a_rank_that_is_late_is_waited_for_wherever_the_numbers_are(self, before):
        late, waiting = tables(2)
        for table in (late, waiting):
            table.last = before
            table.own.arrived.value = before
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
        here, there = tables(2)
        threading.Timer(1.0, there.arrive).start()
        before = time.thread_time()
        here.meet()
        assert time.thread_time() - before < 0.05

    def test_patience_is_told_how_long_and_may_end_the_wait(self):
        here, _ = tables(2)
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
        made = tables(4)
        for rank in (0, 2):
            made[rank].arrive()
        assert made[0].absent() == made[2].absent() == [11, 13]


class TestGone:
    def test_who_waits_is_told_at_once(self):
        here, there = tables(2)
        threading.Timer(0.1, there.leave).start()
        start = time.monotonic()
        with pytest.raises(RankGoneError, match="rank 11 has ended while this rank waits"):
            here.meet()
        assert time.monotonic() - start < 1.0

    def test_who_comes_later_is_told(self):
        here, there = tables(2)
        there.leave()
        with pytest.raises(RankGoneError, match="rank 11 has ended"):
            here.meet()

    def test_who_only_asks_is_told(self):
        """Of a device's work, say, for which nobody waits here."""
        here, there = tables(2)
        here.check_alive()
        there.leave()
        with pytest.raises(RankGoneError, match="rank 11 has ended"):
            here.check_alive()

    def test_what_a_rank_has_brought_before_it_left_counts(self):
        here, there = tables(2)
        there.own.write(there.next, [42])
        meeting = there.arrive()
        assert here.arrive() == meeting
        there.wait(meeting)
        there.leave()
        here.wait(meeting)
        assert here.places[1].numbers(meeting)[0] == 42
        with pytest.raises(RankGoneError, match="rank 11 has ended"):
            here.meet()

    def test_who_comes_to_a_meeting_that_another_has_given_up_is_told(self):
        """What that one has brought is there, but it will not go on from it."""
        here, there = tables(2)
        there.own.write(there.next, [42])
        there.arrive()
        there.leave()
        with pytest.raises(RankGoneError, match="rank 11 has ended"):
            here.meet()

    def test_who_waits_for_a_slow_rank_hears_of_another_that_has_left(self):
        """The slow one may be busy for an hour, and the meeting cannot take place any more."""
        here, _, leaving = tables(3)
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
            "from hvdlite.transport.segment import Arena; arena = Arena();"
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
            table = Table(1 - position, ranks, arena, processes)
            threading.Timer(0.2, child.kill).start()
            start = time.monotonic()
            expected = rf"rank {ranks[position]} \(process {child.pid}\) has died"
            with pytest.raises(RankGoneError, match=expected):
                table.wait(table.arrive(), NoPatience())
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
                Table(0, [0, 1], arena, [(os.getpid(), arena.key), (os.getpid(), wrong)])
