"""Waiting ranks report which ranks are missing, and every wait ends."""

import logging
import re
import time

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.collectives.allreduce import Allreduce
from hvdlite.compression import Compression, Parameter, Reduction
from hvdlite.engine import lane, rounds, runtime
from hvdlite.engine.operation import Barrier
from hvdlite.gradients.exchange import GradientExchange
from tests.harness import ranks
from tests.transport.worlds import connected


def collect_warnings(monkeypatch):
    messages = []
    log = logging.getLogger("hvdlite")
    monkeypatch.setattr(log, "warning", lambda text, *args: messages.append(text % args))
    return messages


@ranks(3, settings={"HVDLITE_STALL_CHECK_TIME_SECONDS": "0.3"})
def test_a_late_rank_is_named_and_only_delays(monkeypatch):
    wait_for_a_late_rank(monkeypatch)


@ranks(3, settings={"HVDLITE_STALL_CHECK_TIME_SECONDS": "0.3", "HVDLITE_SHARED_MEMORY": "0"})
def test_over_mpi_the_ranks_that_wait_find_out_which_one_is_late(monkeypatch):
    wait_for_a_late_rank(monkeypatch)


def wait_for_a_late_rank(monkeypatch):
    hvd.init()
    hvd.barrier()
    messages = collect_warnings(monkeypatch)
    if hvd.rank() == 1:
        time.sleep(1.5)
    assert hvd.allreduce(1.0, name="loss", op=hvd.Sum) == 3
    if hvd.rank() == 1:
        assert not messages
    else:
        assert messages
        assert all("s for rank 1 in 'loss'" in message for message in messages), messages
        assert len(messages) <= 5


@ranks(2, settings={"HVDLITE_STALL_CHECK_TIME_SECONDS": "0.3"})
def test_gradients_that_are_missing_are_named(monkeypatch):
    """Messages name the parameters: users do not know which ones bucket 0 holds."""
    hvd.init()
    hvd.barrier()
    messages = collect_warnings(monkeypatch)
    engine = runtime.engine()
    parameters = [Parameter(name, (3,), np.dtype(np.float32)) for name in ("a", "b", "c", "d")]
    exchange = GradientExchange(engine, "model", parameters, Compression.none, Reduction())
    for step in range(3):
        exchange.begin()
        if step == 2 and hvd.rank() == 1:
            handle = engine.gradients.submit(Barrier("something else"))
            time.sleep(1.0)
        exchange.mark(*range(4))
        exchange.finish()
    if hvd.rank() == 0:
        hvd.synchronize(engine.gradients.submit(Barrier("something else")))
        expected = (
            r"'model: bucket 0' \(gradients of '[a-d]', '[a-d]' and 2 more\) \(missing on rank 1\)"
        )
        assert any(re.search(expected, message) for message in messages), messages
    else:
        hvd.synchronize(handle)


@ranks(
    3,
    settings={
        "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "1",
        "HVDLITE_SHUTDOWN_TIMEOUT_SECONDS": "1",
    },
)
def test_a_wait_that_is_too_long_is_an_error_on_all_ranks():
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 2:
        time.sleep(2)
    expected = "ended" if hvd.rank() == 2 else r"waited 1 s for rank 2 in 'loss'"
    with pytest.raises(hvd.HorovodInternalError, match=expected):
        hvd.allreduce(1.0, name="loss")
    with pytest.raises(hvd.HorovodInternalError, match="an earlier failure ended communication"):
        hvd.allreduce(1.0, name="loss")


@pytest.mark.slow
@ranks(3, settings={"HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "2"})
def test_ranks_that_wait_elsewhere_are_reported_early(monkeypatch):
    """In another lane, that of a process set: no lane alone knows why."""
    monkeypatch.setattr(lane, "_ELSEWHERE_SECONDS", 0.2)
    monkeypatch.setattr(rounds, "ASTRAY_SECONDS", 0.5)
    hvd.init()
    part = hvd.add_process_set([0, 1])
    messages = collect_warnings(monkeypatch)
    if hvd.rank() == 1:
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(1.0, name="loss", process_set=part)
        assert "missing on rank 0; rank 0 is in 'step'" in str(caught.value)
        assert "'loss' (missing on rank 0); rank 0 is in 'step'" in messages[0]
    else:
        with pytest.raises(hvd.HorovodInternalError) as caught:
            runtime.engine().gradients.run(Barrier("step"))
        assert "missing on rank 1; rank 1 is in 'loss'" in str(caught.value)
        assert "'step' (missing on rank 1); rank 1 is in 'loss'" in messages[0]
    assert len(messages) == 1
    assert hvd.allreduce(1.0, name="go on", op=hvd.Sum) == 3


@ranks(2)
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
def test_a_lack_of_memory_is_met_before_the_other_ranks_are(monkeypatch, op):
    def no_room(*_):
        raise MemoryError

    operation = Allreduce("loss", np.ones(3, np.float32), op, 2.0)
    with connected() as transport, monkeypatch.context() as patch:
        patch.setattr(np, "empty", no_room)
        patch.setattr(np, "ascontiguousarray", no_room)
        with pytest.raises(MemoryError):
            Allreduce("loss", np.ones(3), op)
        operation.execute(transport, [b"", b""])  # which allocates nothing any more
    assert operation._out.tolist() == [4.0 if op is hvd.Sum else 2.0] * 3
