from __future__ import annotations

import pytest

from hvdlite.transport.gpu.cuda import Cuda
from tests.gpu.arrays import on_device
from tests.simulation import Simulation, on_all_ranks


@pytest.fixture(scope="session")
def cuda():
    pytest.importorskip("cupy", reason="cupy is not installed")
    devices = Cuda()
    if not devices.device_count():
        pytest.skip("there is no CUDA device")
    return devices


@pytest.fixture
def device_count(cuda):
    return cuda.device_count()


@pytest.fixture
def torch_cuda(device_count):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")


@pytest.fixture
def make_ranks():
    """Ranks as threads, rank r on the device ``devices[r]``."""
    made = []

    def make(connect, devices):
        controls = Simulation(len(devices), timeout=60).transports
        transports = on_all_ranks(lambda own: connect(own, devices[own.rank]), controls)
        made.extend(transports)
        return [on_device(*rank) for rank in zip(transports, controls, devices, strict=True)]

    yield make
    on_all_ranks(lambda transport: transport.close(), made)
