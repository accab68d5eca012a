"""Ranks with fake devices, as threads of the test's process."""

from __future__ import annotations

import numpy as np

from hvdlite.transport.registry import connect_device
from tests.simulation import Simulation, on_all_ranks
from tests.transport.gpu.device_checks import Rank
from tests.transport.gpu.fake_cuda import FakeCuda, FakeNode


def connect(size, cudas=None, **options):
    """One `Rank` for each thread; each has a device of its own unless ``cudas`` say otherwise."""
    node = FakeNode()
    cudas = cudas(node) if cudas else [FakeCuda(node, str(rank)) for rank in range(size)]
    controls = Simulation(size).transports

    def make(control):
        cuda = cudas[control.rank]
        return connect_device(control, 0, cuda, **options), cuda

    made = on_all_ranks(make, controls)
    return [
        Rank(transport, control, _upload, _download)
        for control, (transport, _) in zip(controls, made, strict=True)
    ]


def node_of(rank):
    return rank.transport._cuda.node


def _upload(array):
    copy = array.copy()
    return copy.view(np.uint16) if array.dtype.name == "bfloat16" else copy


def _download(array, dtype):
    return array.view(dtype).copy()
