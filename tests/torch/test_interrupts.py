"""A step that an exception from a signal handler has interrupted is ended, and mixed with none."""

from __future__ import annotations

import contextlib
import signal

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.world import world
from tests.harness import ranks


class Stop(Exception):  # noqa: N818
    """The exception of a user's handler."""


@contextlib.contextmanager
def stopping(seconds):
    """Have a handler of SIGALRM raise `Stop`, once, after so many seconds."""

    def stop(*_):
        raise Stop("save and go")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def weights(count):
    return [torch.nn.Parameter(torch.zeros(3)) for _ in range(count)]


def backward(parameters, value):
    """Make gradients that are ``value``, twice that, ..."""
    sum((number + 1) * value * each.sum() for number, each in enumerate(parameters)).backward()


def check(parameters, total):
    for number, each in enumerate(parameters):
        torch.testing.assert_close(each.detach(), torch.full((3,), -(number + 1.0) * total))


# With overlap, the interrupted wait is that for the sparse gradient: the bucket has arrived then.
@pytest.mark.parametrize("overlap", ["0", "1"])
@ranks(2)
def test_a_step_is_taken_up_again(overlap, monkeypatch):
    hvd.shutdown()
    monkeypatch.setenv("HVDLITE_OVERLAP", overlap)
    hvd.init()
    rank, comm = hvd.rank(), world.current().comm
    mean = sum(range(1, hvd.size() + 1)) / hvd.size()
    parameters = weights(3)
    # Of two kinds, which are exchanged one after the other.
    sparse = torch.nn.Embedding(4, 2, sparse=True)
    torch.nn.init.zeros_(sparse.weight)
    inner = torch.optim.SGD([*parameters, sparse.weight], lr=1.0)
    optimizer = hvd.DistributedOptimizer(inner)
    total = 0.0
    for step in range(6):
        value = (rank + 1.0) * (step + 1)
        backward(parameters, value)
        sparse(torch.tensor([1])).sum().backward()
        if step and rank == 0:
            with stopping(0.1), pytest.raises(Stop):
                optimizer.step()
            comm.bcast(None)
            with pytest.raises(RuntimeError, match="call one of these first"):
                optimizer.zero_grad()
            if step % 2:
                with pytest.raises(RuntimeError, match="computed more than 1 times"):
                    backward(parameters, 100.0)
                for number, each in enumerate(parameters):  # what that has added
                    each.grad.fill_((number + 1) * value)
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        else:
            if step:
                comm.bcast(None)
            optimizer.step()
        total += mean * (step + 1)
        check(parameters, total)
        assert sparse.weight[1].tolist() == [-(step + 1.0)] * 2
        optimizer.zero_grad()
    hvd.shutdown()


@ranks(2)
def test_a_backward_pass_is_ended_by_synchronize():
    """The gradients that have not come count as zeros on the rank that was interrupted."""
    hvd.init()
    parameters = weights(3)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
    for step in range(5):
        check(parameters, 0.0)
        if step % 2 and hvd.rank() == 0:
            middle = parameters[1].register_hook(lambda _: signal.raise_signal(signal.SIGALRM))
            with stopping(0), pytest.raises(Stop):
                backward(parameters, 1.0)
            middle.remove()
            arrived = [each.grad is not None for each in parameters]
            if any(arrived):
                with pytest.raises(RuntimeError, match="call one of these first"):
                    optimizer.zero_grad()
            optimizer.synchronize()
        else:
            arrived = [True] * 3
            backward(parameters, 1.0)
            optimizer.synchronize()
        everywhere = hvd.allgather_object(arrived)
        for number, each in enumerate(parameters):
            mean = sum(had[number] for had in everywhere) / 2 * (number + 1)
            assert each.grad.tolist() == [mean] * 3
        optimizer.zero_grad()


@ranks(2)
def test_a_handle_can_be_waited_for_again():
    hvd.init()
    comm, tensor = world.current().comm, torch.ones(3)
    if hvd.rank() == 0:
        handle = hvd.allreduce_async_(tensor, name="a", op=hvd.Sum)
        with stopping(0.1), pytest.raises(Stop):
            hvd.synchronize(handle)
        comm.bcast(None)
        assert hvd.synchronize(handle) is tensor
    else:
        comm.bcast(None)
        hvd.allreduce_(tensor, name="a", op=hvd.Sum)
    assert tensor.tolist() == [2.0] * 3
