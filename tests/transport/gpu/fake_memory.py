"""A framework on fake devices: tensors that are written when their stream comes to it."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import numpy as np

from hvdlite.base.settings import Settings
from hvdlite.engine import Engine, Lane
from hvdlite.engine.calls import Calls
from hvdlite.engine.device import DeviceArray
from hvdlite.engine.supervisor import Supervisor
from tests.simulation import Simulation
from tests.transport.gpu.fake_cuda import FakeCuda, FakeNode


class FakeMemory:
    """A `hvdlite.engine.device.DeviceMemory` of one stream at first."""

    def __init__(self, cuda, index=0):
        self.cuda = cuda
        self.index = index
        self.node = cuda.node
        self.kept = []
        self.main = self.node.new_stream()
        self._current = threading.local()

    def empty(self, size, dtype):
        return FakeTensor(self, self.cuda.empty(size, dtype))

    def array(self, tensor):
        flat = tensor.values.reshape(-1)
        return flat.view(np.uint16) if flat.dtype.name == "bfloat16" else flat

    def stream(self):
        return getattr(self._current, "stream", self.main.ptr)

    @contextlib.contextmanager
    def on(self, stream):
        before, self._current.stream = self.stream(), stream
        try:
            yield
        finally:
            self._current.stream = before

    def keep(self, tensor):
        self.kept.append(tensor)

    def launch(self, function):
        self.node.launch(self.node.streams[self.stream()], function)

    def produce(self, values):
        """A tensor that a pending kernel writes; it is rubbish before."""
        tensor = self.empty(values.size, values.dtype).reshape(values.shape)
        tensor[...] = values
        return tensor

    def lend(self, values):
        return DeviceArray(self.produce(values), values.shape, values.dtype, self)

    def read(self, tensor):
        """Return a tensor as a kernel sees it that is launched now, once the stream has run it."""
        seen = np.empty_like(tensor.values)
        self.launch(lambda: np.copyto(seen, tensor.values))
        self.node.synchronize(self.node.streams[self.stream()])
        return seen


class FakeTensor:
    def __init__(self, memory, values):
        self.memory = memory
        self.values = values
        self.nbytes = values.nbytes
        self.shape = values.shape

    def __getitem__(self, key):
        return FakeTensor(self.memory, self.values[key])

    def __setitem__(self, key, value):
        self.memory.launch(lambda: self.values.__setitem__(key, value))

    def reshape(self, shape):
        return FakeTensor(self.memory, self.values.reshape(shape))


class Blocked:
    """Work that a device never ends."""

    name = "blocked"
    complete = False

    def run(self, node, visiting):
        return False


class DeviceRanks:
    """Ranks in threads, each with an engine of two lanes and a device of its own."""

    def __init__(self, size, make_memory=FakeMemory, **settings):
        self.node = FakeNode()
        self.simulations = [Simulation(size) for _ in range(2)]
        self.settings = Settings(**settings)
        self.ranks = [self._rank(rank, make_memory) for rank in range(size)]

    def _rank(self, rank, make_memory):
        gradients, named = (
            Lane(name, simulation.transports[rank], self.settings)
            for name, simulation in zip(("gradients", "named"), self.simulations, strict=True)
        )
        engine = Engine.__new__(Engine)  # which would connect transports
        size = len(self.simulations[0].transports)
        engine.world = SimpleNamespace(ids=range(size), comm=SimpleNamespace(rank=rank, size=size))
        engine.gradients, engine.named = gradients, named
        engine.settings = self.settings
        engine.memory = make_memory(FakeCuda(self.node, str(rank)))
        engine.calls = Calls(named.queue.operations)
        engine.supervisor = Supervisor()
        return engine

    def block(self, rank):
        """Keep what the rank submits from now on from being executed."""
        self.node.push(self.ranks[rank].memory.stream(), Blocked())

    def close(self, rank):
        return [lane.close(5.0) for lane in (rank.gradients, rank.named)]
