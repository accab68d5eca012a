"""Exceptions from signal handlers come out as they are, and leave communication as it was."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from signal import getsignal as early_getsignal
from signal import signal as early_signal

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.base import interrupts
from hvdlite.collectives.allreduce import Allreduce
from hvdlite.engine import Handle, handle, runtime
from hvdlite.observe import timeline
from hvdlite.world import world
from tests.forks import run_forked
from tests.harness import ranks, run_script


class Stop(Exception):  # noqa: N818
    """An exception of a user's handler."""


def stop(*_):
    raise Stop("save and go")


@contextlib.contextmanager
def handling(handler, seconds=0.0, again=0.0):
    """Have a handler for SIGALRM, which comes after some seconds, and again and again."""
    previous = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds, again)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def interrupt(call, error=Stop):
    """Call a function that waits for ranks that come later, and have a handler raise there."""
    seen = 0

    def handler(*_):
        nonlocal seen
        seen += has_begun()
        if seen == 2:  # the second time, so that a call with several operations has submitted all
            raise error("save and go")

    with handling(handler, 0.05, 0.05), pytest.raises(error, match="save and go"):
        call()


def has_begun():
    """Return whether an operation or a shutdown waits for other ranks."""
    if runtime._ending is not None:
        return True
    return any(engine.named.queue.operations for engine in runtime._sets._engines.values())


def start(monkeypatch, **variables):
    hvd.shutdown()
    for name, value in variables.items():
        monkeypatch.setenv(f"HVDLITE_{name}", value)
    hvd.init()


TRANSPORTS = {
    "shared memory": {},
    "MPI": {"SHARED_MEMORY": "0"},
    "hierarchical": {"FORCE_LOCAL_SIZE": "2"},
}


@ranks(3)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_operation_stays_submitted_and_communication_goes_on(monkeypatch, transport):
    start(monkeypatch, **TRANSPORTS[transport])
    rank, comm = hvd.rank(), world.current().comm
    own, size = np.full(5000, 1.0 + rank), hvd.size()
    # On one rank, in its own thread; the others come when it tells them to.
    for number, error in enumerate((Stop, KeyboardInterrupt, SystemExit)):
        out = np.zeros(5000)
        if rank == 0:
            interrupt(lambda out=out: hvd.allreduce(own, name="a", op=hvd.Sum, out=out), error)
        comm.bcast(None)
        if rank:
            hvd.allreduce(own, name="a", op=hvd.Sum, out=out)
        assert hvd.allreduce(number, name="after", op=hvd.Sum) == number * size
        assert (out == 6).all()
    # On all ranks, each in another operation; then every rank comes to the others'.
    outs = [np.zeros(3) for _ in range(size)]
    for call in (
        hvd.allreduce,
        lambda *args, **kwargs: hvd.allreduce_async(*args, **kwargs).wait(),
    ):
        interrupt(lambda call=call: call(own[:3], name=f"{rank}", op=hvd.Sum, out=outs[rank]))
        comm.barrier()
        for other in {*range(size)} - {rank}:
            hvd.allreduce(own[:3], name=f"{other}", op=hvd.Sum, out=outs[other])
        hvd.barrier()
        assert np.array_equal(outs, np.full((size, 3), 6.0))
    hvd.shutdown()
    monkeypatch.undo()
    hvd.init()


@ranks(3)
def test_every_wait_can_be_interrupted(monkeypatch, tmp_path):
    """Also that for a process set, for ranks to join, and for their shutdown; then all goes on."""
    start(monkeypatch)
    rank, comm = hvd.rank(), world.current().comm
    pair = hvd.add_process_set([0, 2])
    calls = [
        hvd.barrier,
        lambda: hvd.allgather(np.ones((rank, 2)), name="rows"),
        lambda: hvd.broadcast_object({"rank": rank}, root_rank=1, name="object"),
        lambda: hvd.alltoall(np.arange(3), name="alltoall"),
        lambda: hvd.grouped_allreduce([np.ones(2), np.ones(3)], name="group"),
        lambda: hvd.allreduce(1.0, name="pair", process_set=pair),
        hvd.join,
    ]
    for call in calls:
        is_pair = call is calls[-2]
        if rank == 0:
            interrupt(call)
            comm.bcast(None)
            if call is hvd.join:
                assert hvd.join() in (1, 2)
        else:
            comm.bcast(None)
            if rank == 2 or not is_pair:
                call()
        assert hvd.allreduce(rank, name="after", op=hvd.Sum) == 3
    if rank == 0:
        interrupt(hvd.shutdown)
    comm.bcast(None)
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(rank, op=hvd.Sum) == 3


@ranks(2)
def test_a_handler_that_returns_lets_the_wait_go_on():
    """It may communicate itself, although its rank waits for something else."""
    hvd.init()
    comm, found = world.current().comm, []

    def communicate(*_):
        found.append(hvd.allreduce(2.0, name="inner", op=hvd.Sum))
        comm.send(None, 1)

    if hvd.rank() == 0:
        with handling(communicate, 0.1):
            assert hvd.allreduce(1.0, name="outer", op=hvd.Sum) == 2
        assert found == [4.0]
    else:
        hvd.allreduce(2.0, name="inner", op=hvd.Sum)
        comm.recv(source=0)
        assert hvd.allreduce(1.0, name="outer", op=hvd.Sum) == 2


@ranks(2)
def test_an_exception_may_come_at_any_moment():
    """Many are raised, wherever the ranks happen to be; what they retry, ends and is right."""
    hvd.init()
    active = False
    caught = 0

    def raise_once(*_):
        nonlocal active
        if active:
            active = False
            raise Stop

    def advance(number, state):
        """Take the next step that has not been taken; ``state`` has the handle and arrays."""
        nonlocal active
        active = True
        if "arrays" not in state:
            array = np.arange(2000.0 if number % 3 else 3.0) + number + hvd.rank()
            out = np.zeros_like(array)
            operation = Allreduce(f"{number}", array, hvd.Sum, out=out)
            state["arrays"] = operation, array, out
        operation, array, out = state["arrays"]
        if not hasattr(operation, "handle"):
            runtime.engine().named.submit(operation)
        operation.handle.wait()
        active = False
        assert np.array_equal(out, 2 * np.arange(float(len(out))) + 2 * number + 1)

    with handling(raise_once, 1e-3, 0.9e-3 if hvd.rank() else 0.7e-3):
        for number in range(300):
            state = {}
            while True:
                try:
                    advance(number, state)
                    break
                except Stop:
                    caught += 1
    assert hvd.allreduce(caught, op=hvd.Min) > 10


@ranks(1)
@pytest.mark.parametrize("moment", ["engine.runtime.ProcessSets", "world.world.enter"])
def test_after_an_exception_in_init_it_can_be_called_again(monkeypatch, moment):
    hvd.shutdown()
    with monkeypatch.context() as patch:
        patch.setattr(f"hvdlite.{moment}", stop)
        with pytest.raises(Stop):
            hvd.init()
    hvd.shutdown()
    hvd.init()
    assert hvd.rank() == 0
    assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [1.0, 1.0]


@ranks(1)
@pytest.mark.parametrize("moment", ["observe.timeline.Timeline.close", "observe.status.install"])
def test_after_an_exception_in_shutdown_it_can_be_called_again(monkeypatch, tmp_path, moment):
    hvd.init()
    hvd.start_timeline(tmp_path / "trace.json")
    with monkeypatch.context() as patch:
        patch.setattr(f"hvdlite.{moment}", stop)
        with pytest.raises(Stop):
            hvd.shutdown()
    hvd.shutdown()
    assert timeline.current is None
    hvd.init()
    hvd.start_timeline(tmp_path / "trace.json")
    hvd.stop_timeline()


@ranks(1, 2)
def test_a_signal_in_the_last_moment_of_shutdown_is_not_lost(monkeypatch):
    hvd.init()
    transport = runtime.engine().named.transport
    close, seen = transport.close, []

    def signal_and_close():
        signal.raise_signal(signal.SIGALRM)
        assert not seen
        close()

    monkeypatch.setattr(transport, "close", signal_and_close)
    with handling(lambda *_: seen.append(1)):
        hvd.shutdown()
    assert seen == [1]


def test_handlers_of_the_users_are_what_python_shows_and_are_given_back():
    default = signal.getsignal(signal.SIGINT)
    previous = signal.signal(signal.SIGUSR2, stop)
    try:
        interrupts.install()
        assert signal.getsignal(signal.SIGUSR2) is early_getsignal(signal.SIGUSR2) is stop
        assert signal.getsignal(signal.SIGINT) is default
        other = lambda *_: None  # noqa: E731
        assert early_signal(signal.SIGUSR2, other) is stop
        assert signal.signal(signal.SIGUSR2, signal.SIG_IGN) is other
        assert signal.signal(signal.SIGUSR2, stop) == signal.SIG_IGN
        with pytest.raises(Stop):
            signal.raise_signal(signal.SIGUSR2)
        if default is signal.default_int_handler:

            async def interrupt_itself():
                signal.raise_signal(signal.SIGINT)
                await asyncio.sleep(5)

            with pytest.raises(KeyboardInterrupt):
                asyncio.run(interrupt_itself())
        interrupts.uninstall()
        # Python's own functions: should they not be those that `signal` calls, this fails above.
        assert interrupts._get(signal.SIGUSR2) is stop
        assert signal.getsignal(signal.SIGUSR2) is stop
    finally:
        signal.signal(signal.SIGUSR2, previous)


@pytest.fixture
def deferring():
    interrupts.install()
    previous = signal.signal(signal.SIGUSR2, stop)
    yield
    interrupts.deferred.clear()
    signal.signal(signal.SIGUSR2, previous)
    interrupts.uninstall()


@pytest.mark.usefixtures("deferring")
class TestDeferred:
    def test_a_handler_waits_for_the_end_of_a_function(self):
        steps = []

        @interrupts.uninterrupted
        def work():
            signal.raise_signal(signal.SIGUSR2)
            signal.raise_signal(signal.SIGUSR2)
            steps.append("worked")

        work()
        assert steps == ["worked"]
        with pytest.raises(Stop):
            interrupts.run_deferred()
        assert not interrupts.run_deferred()  # a signal that comes twice counts once

    def test_an_outer_function_has_to_be_left_first(self):
        calls = []

        @interrupts.uninterrupted
        def patient():
            assert not interrupts.run_deferred()
            interrupts.leave()

        @interrupts.resumable
        def outer(number):
            calls.append(number)
            if len(calls) == 1:
                signal.raise_signal(signal.SIGUSR2)
                patient()
                interrupts.run_deferred()
            return number

        with pytest.raises(Stop):
            interrupts.call(outer, 7)
        calls.clear()
        signal.signal(signal.SIGUSR2, lambda *_: calls.append("handled"))
        assert interrupts.call(outer, 8) == 8
        assert calls == [8, "handled", 8]

    def test_another_thread_leaves_it_to_the_main_thread(self):
        @interrupts.uninterrupted
        def work():
            signal.raise_signal(signal.SIGUSR2)

        work()
        found = []
        thread = threading.Thread(target=lambda: found.append(interrupts.run_deferred()))
        thread.start()
        thread.join()
        assert found == [False]
        with pytest.raises(Stop):
            interrupts.run_deferred()

    def test_a_handler_may_wait_itself_where_it_comes_when_a_wait_begins(self, monkeypatch):
        free, taken_lock = [], handle._taken_lock

        def interrupted():
            signal.raise_signal(signal.SIGUSR2)
            return taken_lock()

        outer = Handle("outer")

        def handler(*_):
            free.append(not handle._waiting.locked())
            outer.finish(7)

        monkeypatch.setattr(handle, "_taken_lock", interrupted)
        signal.signal(signal.SIGUSR2, handler)
        assert outer.wait() == 7
        assert free == [True]

    def test_an_exchange_that_does_not_end_lets_the_handler_run(self, monkeypatch):
        @interrupts.uninterrupted
        def exchange():
            signal.raise_signal(signal.SIGUSR2)
            interrupts.run_overdue()
            monkeypatch.setattr(interrupts, "_MAX_SECONDS", 0.0)
            with pytest.raises(hvd.HorovodInternalError, match="handler raised Stop"):
                interrupts.run_overdue()

        exchange()
        with pytest.raises(Stop):
            interrupts.run_deferred()


@ranks(1)
def test_a_forked_child_does_not_wait_for_threads_that_it_lacks():
    """Its parent's unfinished work and signals stay with the parent."""
    hvd.init()
    lock = runtime.engine().named._lock

    def child():
        assert not interrupts.deferred
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)  # or it would hang
        signal.signal(signal.SIGUSR2, stop)
        with pytest.raises(Stop):
            signal.raise_signal(signal.SIGUSR2)
        # Not for the collection of garbage that follows, which takes seconds on a busy machine.
        signal.alarm(0)

    with lock:  # as another thread may while this one forks
        interrupts.deferred[signal.SIGALRM] = 0.0
        try:
            run_forked(child)
        finally:
            interrupts.deferred.clear()


def test_an_exception_at_the_end_of_a_program_is_shown_and_the_others_end():
    """A handler raises in the shutdown at exit, which waits for another rank."""
    done = run_script(
        """
import os, signal, time
import hvdlite as hvd

hvd.init()
if hvd.rank() == 0:
    def stop(*_):
        raise KeyboardInterrupt("enough")
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
else:
    time.sleep(1.0)
""",
        np=2,
    )
    assert "KeyboardInterrupt: enough" in done.stderr
    assert "Traceback" in done.stderr
