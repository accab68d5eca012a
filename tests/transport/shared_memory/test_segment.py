from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from hvdlite.transport.shared_memory import futex, segment
from hvdlite.transport.shared_memory.segment import Arena, Peer
from tests.forks import Signal, run_forked
from tests.harness.mpirun import environment

pytestmark = pytest.mark.skipif(not futex.is_supported(), reason="needs Linux on x86-64")

FLOAT, BYTE = np.dtype(np.float32), np.dtype(np.uint8)


def address(array):
    return array.__array_interface__["data"][0]


def open_files():
    return len(os.listdir("/proc/self/fd"))


def memory_in_use():
    """Bytes of this process's memory that are not files on disk, shared ones included."""
    fields = Path("/proc/self/status").read_text().split()
    parts = ("RssAnon:", "RssShmem:")
    return sum(int(fields[fields.index(part) + 1]) for part in parts) * 1024


def child_process(code):
    """A process that says one line, and then waits for the end of its standard input."""
    child = subprocess.Popen(
        [sys.executable, "-c", f"{code}\nimport sys; sys.stdout.flush(); sys.stdin.read()"],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return child, child.stdout.readline()


def end(child):
    child.kill()
    child.communicate()


@pytest.fixture
def arena():
    return Arena()


class TestArrays:
    @pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "complex128", "bfloat16"])
    @pytest.mark.parametrize("size", [0, 1, 7, 4096, 100_003])
    def test_they_are_as_any_other(self, arena, size, dtype):
        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        array = arena.empty(size, kind)
        assert (array.shape, array.dtype) == ((size,), kind)
        assert array.flags.writeable
        assert array.flags.c_contiguous
        assert array.flags.aligned
        array[...] = np.arange(size).astype(kind)
        np.testing.assert_array_equal(array, np.arange(size).astype(kind))
        assert array.copy().tobytes() == array.tobytes()

    def test_they_do_not_overlap(self, arena):
        arrays = [arena.empty(size, FLOAT) for size in (1, 1, 1000, 1024, 1025, 1024)]
        for number, array in enumerate(arrays):
            array[...] = number
        for number, array in enumerate(arrays):
            assert (array == number).all()

    def test_they_are_found_by_any_part_of_them(self, arena):
        array, other = arena.empty(1000, FLOAT), arena.empty(1000, FLOAT)
        assert arena.find(array) == 0
        assert arena.find(array[10:]) == 40
        assert arena.find(array[999:]) == 3996
        assert arena.find(array.view(np.uint8)[3:5]) == 3
        assert arena.find(other) == 4096

    def test_no_array_crosses_the_end_of_a_region(self, arena):
        """A peer maps regions, by what it knows of where they begin."""
        first, nothing = segment._FIRST, {}
        for nbytes in (first // 2, 4096, first, first // 2, 4 * first, 4096, first):
            array = nothing[nbytes, len(nothing)] = arena.empty(nbytes, BYTE)
            start = arena.find(array)
            region, size = segment._region_of(start)
            assert region <= start
            assert start + nbytes <= region + size
            array[[0, -1]] = len(nothing)
        for (_, number), array in nothing.items():
            assert array[[0, -1]].tolist() == [number + 1] * 2
        assert len(arena._regions) <= 5

    def test_what_lies_elsewhere_is_not_found(self, arena):
        kept = arena.empty(1000, FLOAT)
        for array in (np.zeros(0), np.zeros(5), np.zeros(10**6), kept.copy()):
            assert arena.find(array) is None
        assert Arena().find(kept) is None

    def test_a_part_of_no_elements_is_found_on_no_rank_or_on_all(self, arena):
        """Its address may be that of the memory behind it."""
        arrays = [arena.empty(1024, FLOAT) for _ in range(8)]
        assert {arena.find(array[1024:]) for array in arrays} == {None}


class TestReuse:
    def test_memory_is_used_again_when_its_array_has_gone(self, arena):
        array = arena.empty(1000, FLOAT)
        first = arena.find(array)
        del array
        assert arena.find(arena.empty(1000, FLOAT)) == first

    def test_it_is_not_used_again_while_a_view_of_a_view_lives(self, arena):
        array = arena.empty(1000, FLOAT)
        array[...] = 5
        first, tail = arena.find(array), array[10:].reshape(2, -1)[1, 5:].view(np.int32)
        del array
        other = arena.empty(1000, FLOAT)
        other[...] = 6
        assert arena.find(other) != first
        assert (tail.view(np.float32) == 5).all()
        assert arena.find(tail) == first + 4 * (10 + 495 + 5)
        del tail
        assert arena.find(arena.empty(1000, FLOAT)) == first

    @pytest.mark.parametrize("how", [memoryview, np.asarray, np.from_dlpack])
    def test_it_is_not_used_again_while_another_form_of_it_lives(self, arena, how):
        array = arena.empty(1000, FLOAT)
        first, form = arena.find(array), how(array[3:])
        del array
        kept = arena.empty(1000, FLOAT)
        assert arena.find(kept) != first
        del form
        assert arena.find(arena.empty(1000, FLOAT)) == first

    @pytest.mark.parametrize("how", ["from_numpy", "from_dlpack"])
    def test_a_tensor_keeps_it(self, arena, how):
        torch = pytest.importorskip("torch")
        array = arena.empty(1000, FLOAT)
        array[...] = 5
        first = arena.find(array)
        tensor = getattr(torch, how)(array[100:]).view(30, 30)[1:]
        del array
        other = arena.empty(1000, FLOAT)
        other[...] = 6
        assert arena.find(other) != first
        assert bool((tensor == 5).all())
        del tensor
        assert arena.find(arena.empty(1000, FLOAT)) == first

    def test_an_array_may_outlive_its_arena(self):
        array = Arena().empty(1000, FLOAT)
        gc.collect()
        array[...] = 3
        assert array.sum() == 3000
        del array

    def test_a_thousand_arrays_of_all_sizes_cost_what_few_do(self, arena):
        """Fused arrays vary with the operations that are ready, and so does their size."""
        files, memory = open_files(), memory_in_use()
        for number in range(1000):
            arena.empty(1024 * (number + 1), FLOAT)[...] = 1
        assert open_files() == files
        assert memory_in_use() - memory < 64 * 2**20

    def test_a_closed_arena_has_no_file_once_nobody_holds_what_is_released(self):
        files, arena = open_files(), Arena()
        exchanged, held = arena.empty(1000, FLOAT), [arena.empty(1000, FLOAT)]
        exchanged[...], held[0][...] = 1, 2
        arena.release(held[0])
        arena.close()
        with pytest.raises(OSError, match="no memory any more"):
            arena.empty(5000, FLOAT)
        run_forked(lambda: held[0].fill(3))
        assert (held[0] == 2).all()
        assert open_files() == files + 1
        held.clear()
        assert open_files() == files
        run_forked(lambda: None)
        assert (exchanged == 1).all()

    def test_files_are_closed_with_their_arena(self):
        files = open_files()
        for _ in range(100):
            arena = Arena()
            kept = arena.empty(10, FLOAT), arena.empty(10**5, FLOAT)
            del kept, arena
        gc.collect()
        assert open_files() == files

    def test_threads_may_ask_at_once(self, arena):
        """Lanes ask while the user's threads make buckets, and garbage comes at any time."""
        interval = sys.getswitchinterval()
        errors = []

        def ask(value):
            try:
                for _ in range(3000):
                    array = arena.empty(100, FLOAT)
                    array[...] = value
                    assert (array == value).all()
            except BaseException as error:
                errors.append(error)

        sys.setswitchinterval(1e-6)
        try:
            threads = [threading.Thread(target=ask, args=(value,)) for value in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        assert errors == []


class TestMemory:
    def test_pages_that_are_not_touched_cost_nothing(self, arena):
        before = memory_in_use()
        array = arena.empty(2**36, np.dtype(np.uint8))  # 64 GiB
        array[:: 2**32] = 7
        assert array[-(2**32)] == 7
        assert memory_in_use() - before < 2**20

    def test_a_python_that_is_built_for_older_systems(self, monkeypatch):
        """As those of conda and uv; the system has what they lack."""
        monkeypatch.delattr(os, "memfd_create")
        array = Arena().empty(1000, FLOAT)
        array[...] = 4
        assert array.sum() == 4000

    def test_the_shm_mount_does_not_matter(self):
        """Run in a mount namespace whose shm mount is full, as in a container with 64 MB."""
        code = """
import os
import numpy as np
from hvdlite.transport.shared_memory.segment import Arena
file = os.open("/dev/shm/full", os.O_WRONLY | os.O_CREAT)
try:
    while os.write(file, bytes(4096)):
        pass
except OSError:
    pass
assert os.statvfs("/dev/shm").f_bavail == 0
arena = Arena()
array = arena.empty(2**22, np.dtype(np.uint8))
array[...] = 1
print(array.sum())
"""
        mount = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$0" -c "$1"'
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount]
        trial = subprocess.run([*command, "/bin/echo", ""], capture_output=True, text=True)
        if trial.returncode:
            pytest.skip(f"cannot mount here: {trial.stderr.strip()}")
        done = subprocess.run(
            [*command, sys.executable, code], env=environment(), capture_output=True, text=True
        )
        assert (done.stdout.strip(), done.stderr) == (str(2**22), "")


class TestFork:
    @pytest.mark.parametrize("how", ["exit", "use"])
    def test_a_child_disturbs_nothing(self, arena, how):
        array = arena.empty(1000, FLOAT)
        array[...] = 4
        first, files = arena.find(array), open_files()

        def child():
            if how == "use":
                nonlocal array
                array[...] = 5
                del array
                with pytest.raises(OSError, match="was forked from"):
                    arena.empty(1000, FLOAT)

        run_forked(child)
        assert open_files() == files
        assert arena.find(array) == first
        assert (array == 4).all()
        assert (Peer(os.getpid(), arena.key).view(first, 1000, FLOAT) == 4).all()

    def test_what_is_released_is_the_childs_own(self, arena):
        """As other memory: neither sees what the other writes, nor what is written there later."""
        exchanged, released = (arena.empty(5000, FLOAT) for _ in range(2))
        exchanged[...], released[...] = 1, 2
        view, offset = released[10:].reshape(2, -1), arena.find(released)
        arena.release(released)
        written, go_on = Signal(), Signal()

        def child():
            view[0] = 7
            written.give()
            go_on.wait()
            assert (view[0] == 7).all()
            assert (view[1] == 2).all()
            assert (released[:10] == 2).all()
            exchanged[...] = 3

        def parent():
            nonlocal view, released
            written.wait()
            assert (view == 2).all()
            view[1], released[:10] = 8, 9
            del view, released
            again = arena.empty(5000, FLOAT)
            assert arena.find(again) == offset
            again[...] = 4
            # It is shared again.
            assert (Peer(os.getpid(), arena.key).view(offset, 5000, FLOAT) == 4).all()
            go_on.give()

        run_forked(child, parent)
        assert (exchanged == 1).all()

    @pytest.mark.parametrize("forks", [0, 2])
    def test_what_is_reclaimed_is_shared_again(self, arena, forks):
        array = arena.empty(5000, FLOAT)
        offset = arena.find(array)
        array[...] = 2
        arena.release(array)
        for _ in range(forks):
            run_forked(lambda: None)
        assert (array == 2).all()
        arena.reclaim(array)
        array[...] = 4
        assert (Peer(os.getpid(), arena.key).view(offset, 5000, FLOAT) == 4).all()
        arena.reclaim(array)  # of one that is not released: nothing
        arena.reclaim(np.empty(5, FLOAT))
        run_forked(lambda: None)
        array[...] = 5
        assert (Peer(os.getpid(), arena.key).view(offset, 5000, FLOAT) == 5).all()

    def test_an_array_may_go_while_a_fork_is_prepared(self, arena, monkeypatch):
        """Another thread may drop its last view at any time, between two look-ups, too."""

        class Vanishing(dict):
            def __contains__(self, key):
                found = super().__contains__(key)
                self.pop(key, None)
                return found

        array = arena.empty(1000, FLOAT)
        arena.release(array)
        monkeypatch.setattr(arena, "_in_use", Vanishing(arena._in_use))
        arena._before_fork()
        monkeypatch.undo()
        del array
        gc.collect()

    def test_a_second_child_costs_no_second_copy(self, arena, monkeypatch):
        array = arena.empty(1000, FLOAT)
        arena.release(array)
        run_forked(lambda: None)
        with monkeypatch.context() as patch:
            patch.setattr(arena, "_remap", lambda *arguments: pytest.fail("mapped again"))
            run_forked(lambda: None)


class TestPeer:
    def test_it_shows_what_the_other_writes_and_takes_what_is_written(self):
        child, line = child_process(
            "import numpy as np\n"
            "from hvdlite.transport.shared_memory.segment import Arena\n"
            "arena = Arena()\n"
            "memory = arena.empty(8192, np.dtype(np.uint8))\nmemory[5:8] = [*b'abc']\n"
            "print(*arena.key)\n"
            "import sys; sys.stdout.flush(); sys.stdin.readline()\n"
            "print(memory[100:103].tobytes().decode())"
        )
        try:
            peer = Peer(child.pid, tuple(map(int, line.split())))
            memory = peer.view(0, 8192, BYTE)
            assert memory[5:8].tobytes() == b"abc"
            assert address(peer.view(0, 8192, BYTE)) == address(memory)
            memory[100:103] = [*b"xyz"]
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "xyz\n"
        finally:
            end(child)
        assert memory[5:8].tobytes() == b"abc"  # it outlives its process

    def test_arrays_of_all_regions(self, arena):
        peer = Peer(os.getpid(), arena.key)
        arrays = [arena.empty(size, FLOAT) for size in (1000, 2**24, 1000, 2**26)]
        for number, array in enumerate(arrays):
            array[-1] = number
            assert peer.view(arena.find(array), array.size, FLOAT)[-1] == number

    def test_a_file_of_the_number_that_is_another_is_refused(self):
        _, inode = Arena().key  # which has gone
        other = Arena()
        with pytest.raises(OSError, match="is not the memory that was announced"):
            Peer(os.getpid(), (other.key[0], inode + 10**6)).view(0, 1, BYTE)

    def test_what_is_not_there_is_an_oserror(self):
        with pytest.raises(OSError, match="/fd/19999"):
            Peer(os.getpid(), (19999, 1)).view(0, 1, BYTE)

    def test_no_file_stays_open(self, arena):
        files = open_files()
        peer = Peer(os.getpid(), arena.key)
        memory = peer.view(0, 4096, BYTE)
        assert open_files() == files
        with pytest.raises(OSError, match="announced"):
            Peer(os.getpid(), (arena.key[0], 1)).view(0, 4096, BYTE)
        assert open_files() == files
        del peer
        gc.collect()
        arena.empty(4096, BYTE)[:3] = [*b"abc"]
        assert memory[:3].tobytes() == b"abc"


class TestIsRunning:
    def test_a_process_from_start_to_end(self):
        child, _ = child_process("print()")
        peer = Peer(child.pid, (0, 0))
        try:
            assert peer.is_running()
            child.send_signal(signal.SIGSTOP)
            deadline = time.monotonic() + 5
            stat = Path(f"/proc/{child.pid}/stat")
            while stat.read_text().rpartition(")")[2].split()[0] != "T":
                assert time.monotonic() < deadline
            assert peer.is_running()  # it may go on
            child.send_signal(signal.SIGCONT)
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie, as yet
            assert not peer.is_running()
        finally:
            end(child)
        assert not peer.is_running()

    def test_another_process_with_its_id(self, monkeypatch):
        child, _ = child_process("print()")
        peer = Peer(child.pid, (0, 0))
        end(child)
        monkeypatch.setattr(peer, "pid", os.getpid())
        assert not peer.is_running()

    def test_a_name_with_parentheses_and_spaces(self):
        child, _ = child_process(
            "open('/proc/self/comm', 'w').write(') Z (x) Z'); print(flush=True)"
        )
        try:
            assert Peer(child.pid, (0, 0)).is_running()
        finally:
            end(child)
