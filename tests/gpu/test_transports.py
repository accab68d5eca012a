"""Both device transports on real devices: ranks are threads of this process."""

from __future__ import annotations

import numpy as np
import pytest

from hvdlite.base.reduction import Scaling, Sum
from hvdlite.transport.gpu.base import DeviceTransport
from hvdlite.transport.gpu.cuda import Cuda
from hvdlite.transport.gpu.nccl import NCCLTransport
from hvdlite.transport.mpi import MPITransport
from hvdlite.transport.registry import connect_device
from hvdlite.world import mpi
from tests.gpu.arrays import SHARING, on_device
from tests.harness import ranks
from tests.simulation import on_all_ranks
from tests.transport.gpu import device_checks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
each_check = pytest.mark.parametrize(
    "check", device_checks.EVERYTHING, ids=lambda check: check.__name__
)


@pytest.fixture
def nccl_ranks(cuda, make_ranks):
    """As many ranks as asked for, each with a device of its own."""

    def make(size):
        if cuda.device_count() < size:
            pytest.skip(f"there are fewer than {size} CUDA devices")
        if not cuda.nccl_version():
            pytest.skip("cupy finds no NCCL library")
        made = make_ranks(
            lambda control, device: connect_device(control, device, cuda),
            list(range(size)),
        )
        assert all(isinstance(rank.transport, NCCLTransport) for rank in made)
        return made

    return make


@each_check
@pytest.mark.parametrize("chunk_bytes", [64, 4 * 2**20])
def test_staged_on_one_device(make_ranks, cuda, check, chunk_bytes):
    made = make_ranks(
        lambda control, device: DeviceTransport(cuda, control, device, chunk_bytes=chunk_bytes),
        [0, 0],
    )
    on_all_ranks(check, made)


@each_check
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_nccl(nccl_ranks, check, size):
    on_all_ranks(check, nccl_ranks(size))


@ranks(2, 3, 4, fresh=True, env=SHARING)
@pytest.mark.parametrize("prefer_nccl", [True, False], ids=["nccl", "staged"])
def test_processes_with_or_without_a_device_each(device_count, prefer_nccl):
    MPI = mpi.load()
    control = MPITransport(MPI, MPI.COMM_WORLD)
    device = control.rank % device_count
    if prefer_nccl:
        transport = connect_device(control, device, Cuda())
    else:
        transport = DeviceTransport(Cuda(), control, device)
    if prefer_nccl and not isinstance(transport, NCCLTransport):
        pytest.skip("NCCL is missing, or two ranks cannot share a device with it")
    for check in device_checks.EVERYTHING:
        check(on_device(transport, control, device))
    transport.close()
    control.close()


def _busy(array, value):
    """Keep the current stream busy for a while, then write."""
    import cupy

    filler = cupy.ones(2**24, cupy.float32)
    for _ in range(200):
        filler *= 1.0001
    array.fill(value)


@pytest.mark.parametrize("kind", ["nccl", "staged"])
def test_events_order_the_work_with_a_framework_s_stream(nccl_ranks, make_ranks, cuda, kind):
    import cupy

    if kind == "nccl":
        (rank,) = nccl_ranks(1)
    else:
        (rank,) = make_ranks(lambda control, device: DeviceTransport(cuda, control, device), [0])
    stream = cupy.cuda.Stream(non_blocking=True)
    array, result = cupy.zeros(1000, cupy.float32), cupy.zeros(1000, cupy.float32)
    cupy.cuda.get_current_stream().synchronize()
    for value in range(1, 6):
        with stream:
            _busy(array, value)
        ready = rank.transport.record(stream.ptr)
        work = rank.transport.enqueue(
            lambda: rank.transport.allreduce(array, result, Sum, Scaling(2.0)), [ready]
        )
        work.wait_on(stream.ptr)
        with stream:
            seen = result.copy()
        stream.synchronize()
        assert work.done()
        np.testing.assert_array_equal(cupy.asnumpy(seen), np.full(1000, 2.0 * value))


def test_the_host_does_not_wait_for_the_device(nccl_ranks):
    import cupy

    (rank,) = nccl_ranks(1)
    array = cupy.zeros(1000, cupy.float32)
    gradients = cupy.zeros(1000, cupy.float16)

    def exchange():
        rank.transport.allreduce(array, array, Sum, Scaling(0.5))
        rank.transport.allreduce(gradients, gradients, Sum, Scaling(0.5))

    rank.run(exchange)  # compiles what it needs
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        _busy(array, 1.0)
    work = rank.transport.enqueue(exchange, [rank.transport.record(stream.ptr)])
    assert not work.done()
    work.wait()
    assert float(array[0]) == 0.5


def test_counts_above_two_to_the_31(nccl_ranks):
    import cupy

    (rank,) = nccl_ranks(1)
    size = 2**31 + 5
    if cupy.cuda.runtime.memGetInfo()[0] < 3 * size:
        pytest.skip("not enough memory on the device")
    send = cupy.ones(size, cupy.uint8)
    result = cupy.zeros(size, cupy.uint8)
    cupy.cuda.get_current_stream().synchronize()
    rank.run(lambda: rank.transport.allreduce(send, result, Sum, Scaling(3.0)))
    assert bool((result == 3).all())
