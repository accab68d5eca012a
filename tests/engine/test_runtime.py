from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.engine import runtime
from hvdlite.errors import RankGoneError
from hvdlite.world import mpi, world
from tests.forks import run_forked
from tests.harness import ranks, run_script
from tests.harness.mpirun import ROOT, command

FRAMEWORKS = ("torch", "tensorflow", "keras")


def total(value=1.0):
    return hvd.allreduce(np.full(3, value), op=hvd.Sum).tolist()


class TestInit:
    @ranks(1, 2, 3)
    def test_a_second_call_does_nothing(self, size):
        hvd.init()
        engine = runtime.engine()
        hvd.init()
        hvd.init([0])
        assert runtime.engine() is engine
        assert hvd.size() == size

    @ranks(1, 2, 3)
    def test_it_works_again_after_shutdown(self, size):
        for step in range(5):
            hvd.init()
            assert hvd.is_initialized()
            assert total(step) == [size * step] * 3
            hvd.shutdown()
            assert not hvd.is_initialized()
            hvd.shutdown()

    @ranks(1, 2)
    def test_several_threads_may_start_and_end_it(self, size):
        hvd.shutdown()
        with ThreadPoolExecutor(3) as threads:
            for _ in range(5):
                for started in [threads.submit(hvd.init) for _ in range(3)]:
                    started.result()
                assert total() == [size] * 3
                for ended in [threads.submit(hvd.shutdown) for _ in range(3)]:
                    ended.result()
                assert not hvd.is_initialized()

    @ranks(1)
    def test_the_end_of_a_program_does_not_wait_for_init(self, size, monkeypatch):
        hvd.shutdown()
        starts, goes_on = threading.Event(), threading.Event()
        monkeypatch.setattr(runtime, "start", lambda *_: (starts.set(), goes_on.wait(60)))
        with ThreadPoolExecutor(2) as threads:
            threads.submit(hvd.init)
            assert starts.wait(60)
            try:
                threads.submit(runtime.leave_world).result(10)
                run_forked(lambda: runtime._one_by_one.acquire(timeout=10) or sys.exit())
            finally:
                goes_on.set()

    @ranks(2)
    def test_communicators_are_given_back(self):
        # An MPI library has room for some thousands at most, and each init makes several.
        everyone = mpi.load().COMM_WORLD
        hvd.shutdown()
        for _ in range(30):
            hvd.init([1, 0])
            hvd.shutdown()
        first = everyone.Dup()
        used = first.py2f()
        first.Free()
        for _ in range(30):
            hvd.init([1, 0])
            hvd.shutdown()
        last = everyone.Dup()
        assert last.py2f() <= used
        last.Free()

    @ranks(1, 2)
    def test_calls_before_it_tell_the_remedy(self):
        hvd.shutdown()
        calls = [
            hvd.rank,
            hvd.size,
            hvd.local_rank,
            hvd.local_size,
            hvd.cross_rank,
            hvd.cross_size,
            hvd.is_homogeneous,
            world.node_index,
            hvd.barrier,
            lambda: hvd.allreduce(np.ones(3)),
            lambda: hvd.allreduce_async(np.ones(3), name="a"),
            lambda: hvd.allgather(np.ones(3)),
            lambda: hvd.broadcast(np.ones(3), 0),
            lambda: hvd.broadcast_object(1),
            lambda: hvd.allgather_object(1),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=r"call hvd\.init\(\) first"):
                call()
        hvd.shutdown()  # does nothing

    def test_a_bad_setting_is_named_before_anything_starts(self, monkeypatch):
        monkeypatch.setenv("HVDLITE_FUSION_THRESHOLD", "64MB")
        with pytest.raises(ValueError, match="HVDLITE_FUSION_THRESHOLD='64MB' is not a number"):
            hvd.init()
        assert not hvd.is_initialized()

    @ranks(2)
    @pytest.mark.parametrize("name", ["FUSION_THRESHOLD", "SHARED_MEMORY"])
    def test_a_setting_that_decides_on_collectives_is_the_same_on_all_ranks(
        self, monkeypatch, name
    ):
        hvd.shutdown()
        monkeypatch.setenv(f"HVDLITE_{name}", str(mpi.load().COMM_WORLD.rank))
        with pytest.raises(ValueError, match=f"HVDLITE_{name} is .* on rank 0 and .* on rank 1"):
            hvd.init()
        assert not hvd.is_initialized()

    @ranks(1)
    def test_the_log_level_is_set(self, monkeypatch):
        logger = logging.getLogger("hvdlite")
        for text, level in (("trace", 10), ("ERROR", 40), ("fatal", 50), ("warning", 30)):
            hvd.shutdown()
            monkeypatch.setenv("HOROVOD_LOG_LEVEL", text)
            hvd.init()
            assert logger.level == level
        hvd.shutdown()


class TestShutdown:
    @ranks(2)
    def test_it_waits_for_a_late_rank(self):
        hvd.init()
        if hvd.rank() == 1:
            time.sleep(0.5)
        start = time.monotonic()
        late = hvd.rank() == 1
        hvd.shutdown()
        waited = time.monotonic() - start
        assert waited < 0.4 if late else waited > 0.3

    @ranks(2, fresh=True, timeout=30, env={"HVDLITE_SHUTDOWN_TIMEOUT_SECONDS": "0.5"})
    def test_it_leaves_without_a_rank_that_does_not_come(self, monkeypatch):
        hvd.init()
        messages = []
        log = logging.getLogger("hvdlite")
        monkeypatch.setattr(log, "warning", lambda text, *args: messages.append(text % args))
        start = time.monotonic()
        if hvd.rank() == 0:
            hvd.shutdown()
            assert 0.4 < time.monotonic() - start < 3
            assert "rank 0: left without the others" in messages[0]
            assert "0 s" in messages[0]
        else:
            time.sleep(2)
            # Although rank 0 has never taken part in anything.
            with pytest.raises(hvd.HorovodInternalError, match="rank 0 has ended") as caught:
                hvd.allreduce(np.ones(3), name="loss")
            assert isinstance(caught.value.__cause__, RankGoneError)
            hvd.shutdown()
            assert time.monotonic() - start < 5


class TestExit:
    @pytest.mark.slow
    def test_without_shutdown(self):
        script = """
            import time
            import numpy as np, hvdlite as hvd
            hvd.init()
            handle = hvd.allreduce_async(np.ones(3), op=hvd.Sum)
            if hvd.rank() == 1:
                time.sleep(2)  # late to the exit
            assert handle.wait().tolist() == [2.0] * 3
        """
        done = run_script(script, np=2, timeout=20)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def test_a_rank_that_raises_ends_the_job_and_says_who_it_is(self, tmp_path):
        script = f"""
            import pathlib, time
            import numpy as np, hvdlite as hvd
            hvd.init()
            hvd.barrier()
            print("printed by", hvd.rank())
            def step():
                if hvd.rank() == 1:
                    pathlib.Path({str(tmp_path / "raised")!r}).write_text(str(time.time()))
                    raise KeyError("no such column")
                if hvd.rank() == 2:
                    time.sleep(60)
                hvd.allreduce(np.ones(3))
            step()
        """
        done = run_script(script, np=3, timeout=30)
        ended = time.time() - float((tmp_path / "raised").read_text())
        assert done.returncode != 0
        assert ended < 5
        assert done.stderr.count("Traceback") == 1
        assert done.stderr.count("KeyError: 'no such column'") == 1
        assert "hvdlite: rank 1 of 3 ends the job:" in done.stderr
        assert "printed by 1" in done.stdout

    def test_a_rank_that_exits_does_not_leave_the_others_waiting(self):
        script = """
            import sys
            import numpy as np, hvdlite as hvd
            hvd.init()
            hvd.barrier()
            if hvd.rank() == 1:
                sys.exit(3)
            hvd.allreduce(np.ones(3), name="loss")
        """
        start = time.monotonic()
        done = run_script(script, np=2, timeout=20)
        assert done.returncode != 0
        assert time.monotonic() - start < 12
        assert "rank 1 shut down without submitting 'loss'" in done.stderr

    def test_a_process_without_mpirun_is_a_job_of_one(self):
        code = """
            import sys
            sys.excepthook = lambda *caught: print("theirs:", caught[1])
            import numpy as np, hvdlite as hvd
            hvd.init()
            assert (hvd.rank(), hvd.size(), hvd.local_size(), hvd.cross_size()) == (0, 1, 1, 1)
            assert hvd.allreduce(np.arange(3)).tolist() == [0, 1, 2]
            print(hvd.allgather_object("alone"))
            raise ValueError("text")
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert (done.returncode, done.stdout, done.stderr) == (1, "['alone']\ntheirs: text\n", "")


class TestForks:
    def test_forked_children_disturb_nobody(self):
        script = """
            import multiprocessing, os, sys, time, warnings
            import numpy as np, hvdlite as hvd
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads

            def work(number, queue):
                queue.put((number, hvd.rank()))

            def child(how):
                pid = os.fork()
                if pid == 0:
                    if how == "raise":
                        sys.stderr = open(os.devnull, "w")
                        raise ValueError
                    if how == "communicate":
                        try:
                            hvd.allreduce(np.ones(2))
                        except hvd.HorovodInternalError as error:
                            assert "was started by rank" in str(error)
                            os._exit(7)
                        os._exit(8)
                    sys.exit(5)
                deadline = time.monotonic() + 10
                while True:
                    gone, status = os.waitpid(pid, os.WNOHANG)
                    if gone:
                        return os.waitstatus_to_exitcode(status)
                    if time.monotonic() > deadline:
                        os.kill(pid, 9)
                        raise TimeoutError(how)
                    time.sleep(0.01)

            hvd.init()
            hvd.barrier()
            context = multiprocessing.get_context("fork")
            queue = context.Queue()
            workers = [context.Process(target=work, args=(n, queue)) for n in range(2)]
            for worker in workers:
                worker.start()
            found = sorted(queue.get(timeout=10) for _ in workers)
            assert found == [(number, hvd.rank()) for number in range(2)]
            for worker in workers:
                worker.join(10)
                assert worker.exitcode == 0
            assert child("communicate") == 7
            assert child("exit") == 5
            assert child("raise") == 1
            for step in range(20):
                assert hvd.allreduce(np.full(3, step), op=hvd.Sum).tolist() == [2 * step] * 3
            print("done", flush=True)
        """
        done = run_script(script, np=2, timeout=40)
        assert (done.returncode, done.stdout.count("done"), done.stderr) == (0, 2, "")


class TestProcessesOfARank:
    def test_workers_know_their_rank_and_other_programs_are_refused(self):
        script = """
            import multiprocessing, os, subprocess, sys
            import numpy as np, hvdlite as hvd

            hvd.init()  # again in each worker, which imports this file
            place = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size()

            def work(number):
                hvd.init()
                try:
                    hvd.allreduce(np.ones(2))
                except hvd.HorovodInternalError as error:
                    assert f"was started by rank {hvd.rank()}" in str(error)
                    return number, place, "mpi4py.MPI" in sys.modules

            def program(**variables):
                code = "import hvdlite as hvd; hvd.init(); print(hvd.size(), hvd.allreduce(1))"
                return subprocess.run(
                    [sys.executable, "-c", code], env={**os.environ, **variables},
                    capture_output=True, text=True, timeout=30,
                )

            if __name__ == "__main__":
                for method in ("spawn", "forkserver"):
                    with multiprocessing.get_context(method).Pool(1) as pool:
                        assert pool.map(work, [2, 3]) == [(2, place, False), (3, place, False)]
                done = program()
                assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done
                assert f"of rank {hvd.rank()} (process {os.getpid()}), which" in done.stderr
                done = program(HVDLITE_CHECK_LAUNCHER="0")
                assert (done.returncode, done.stdout, done.stderr) == (0, "1 1\\n", ""), done
                assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [hvd.size()]
                print("done", flush=True)
        """
        done = run_script(script, np=2, timeout=60)
        assert (done.returncode, done.stdout.count("done"), done.stderr) == (0, 2, "")

    @pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
    def test_those_that_are_older_than_the_world_are_refused_or_alone(self, method):
        script = """
            import multiprocessing, os, sys
            import numpy as np, hvdlite as hvd

            def work(is_due, found, **variables):
                is_due.wait()
                os.environ.update(variables)
                try:
                    hvd.init()
                except hvd.errors.LauncherError as error:
                    found.put(str(error).replace(str(os.getpid()), "N"))
                else:
                    found.put(f"{hvd.size()} {hvd.allreduce(1)}")

            if __name__ == "__main__":
                context = multiprocessing.get_context(sys.argv[1])
                is_due, found = context.Event(), context.Queue()
                workers = [
                    context.Process(target=work, args=(is_due, found), kwargs=variables)
                    for variables in ({}, {}, {"HVDLITE_CHECK_LAUNCHER": "0"})
                ]
                for worker in workers:
                    worker.start()
                hvd.init()
                is_due.set()
                alone, *refused = sorted(found.get(timeout=30) for _ in workers)
                assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [hvd.size()]
                for worker in workers:
                    worker.join()
                print(alone, {*refused}, flush=True)
        """
        done = run_script(script, 2, [method], timeout=60)
        lines = done.stdout.splitlines()
        assert (done.returncode, len(lines), done.stderr) == (0, 2, "")
        told = "1 1 {'process N calls hvd.init() and would take the place in the job of a process"
        assert all(line.startswith(told) for line in lines), done.stdout

    @pytest.mark.slow
    def test_a_launcher_that_a_rank_starts_makes_ranks_of_another_job(self):
        script = """
            import os, subprocess, sys
            import numpy as np, hvdlite as hvd

            hvd.init()
            if "inner" in sys.argv:
                print(hvd.allreduce(np.ones(1), op=hvd.Sum), flush=True)
                sys.exit()
            program = [sys.executable, __file__, "inner"]
            for launcher in ([sys.executable, "-m", "hvdlite.launch"], [os.environ["MPIRUN"]]):
                out = subprocess.check_output([*launcher, "-np", "2", *program], timeout=40)
                assert out.count(b"[2.]") == 2, out
            assert hvd.run(hvd.is_initialized, num_proc=2) == [False] * 2
        """
        mpirun = {"MPIRUN": command(2)[0]}
        done = run_script(script, np=1, env=mpirun, timeout=100)
        assert (done.returncode, done.stderr) == (0, "")


class TestImport:
    def test_the_core_imports_no_framework(self):
        for path in Path(ROOT, "hvdlite").rglob("*.py"):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                words = line.split()
                if words[:1] in (["import"], ["from"]):
                    assert words[1].split(".")[0] not in FRAMEWORKS, f"{path}:{number}: {line}"
