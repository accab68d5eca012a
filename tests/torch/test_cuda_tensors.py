"""CUDA tensors through the torch adapter; the device is a fake, and ranks are threads."""

import contextlib
import itertools
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd
from hvdlite.compression import Compression, Strategy
from hvdlite.engine import runtime
from hvdlite.torch import device_memory, tensors
from hvdlite.world import world
from tests import test_random_operations as operations
from tests.simulation import on_all_ranks
from tests.torch.test_random_collectives import OfTensors
from tests.transport.gpu.fake_memory import DeviceRanks

here = threading.local()  # the rank that a thread is
_WRITES = {
    torch.Tensor.copy_,
    torch.Tensor.fill_,
    torch.Tensor.__setitem__,
    torch._foreach_copy_,
}


class OnDevice(torch.Tensor):
    """A tensor that is written when the stream of its rank comes to it."""

    is_cpu = False
    is_cuda = True

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.cpu:  # which waits for the stream
            here.rank.memory.finish()
            return on_host(args[0])
        if function not in _WRITES:
            return super().__torch_function__(function, types, args, kwargs)
        plain = torch.utils._pytree.tree_map_only(cls, on_host, args)
        here.rank.memory.launch(lambda: function(*plain))
        return args[0]


def on_host(tensor):
    return tensor.as_subclass(torch.Tensor)


class Memory(device_memory.CudaMemory):
    def __init__(self, cuda):
        super().__init__(cuda, 0)
        self.node = cuda.node
        self.current = self.main = self.node.new_stream()
        self.kept = []

    def empty(self, size, dtype):
        rubbish = torch.full((size * dtype.itemsize,), 0xCD, dtype=torch.uint8)
        return rubbish.view(tensors.torch_dtype(dtype)).as_subclass(OnDevice)

    def array(self, tensor):
        flat = on_host(tensor.detach()).reshape(-1)
        if flat.dtype == torch.bfloat16:
            return flat.view(torch.int16).numpy().view(np.uint16)
        return flat.numpy()

    def stream(self):
        return self.current.ptr

    def on(self, stream):
        assert stream == self.main.ptr
        return contextlib.nullcontext()

    def keep(self, tensor):
        self.kept.append(tensor)

    def compare(self, first, second):
        found = []
        first, second = on_host(first), on_host(second)
        self.launch(lambda: found.append(torch.equal(first, second)))
        return lambda: found[0] if found else None

    def launch(self, function):
        self.node.launch(self.current, function)

    def produce(self, values):
        """A tensor that a pending kernel writes; it is rubbish before."""
        tensor = torch.full_like(values, 77).as_subclass(OnDevice)
        tensor.copy_(values)
        return tensor

    def finish(self):
        self.node.synchronize(self.main)


@pytest.fixture
def run(monkeypatch):
    """Call a function on every rank of a job, whose tensors all are on devices."""

    def next_label(kind, process_set):
        return f"{kind} {next(here.numbers)}"

    monkeypatch.setattr(runtime, "engine", lambda process_set=None: here.rank)
    monkeypatch.setattr(world, "rank", lambda: here.rank.rank)
    monkeypatch.setattr(world, "size", lambda: here.size)
    monkeypatch.setattr(world, "current", lambda: here.rank.world)
    monkeypatch.setattr("hvdlite.torch.wrapping.next_label", next_label)
    monkeypatch.setattr(device_memory, "find", lambda tensor: here.rank.memory)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    made = []

    def run(size, function):
        # The comparison of weights waits for the device.
        settings = {"fusion_threshold": 400, "first_bucket_size": 40, "check_ranks": "off"}
        ranks = DeviceRanks(size, Memory, **settings)
        made.append(ranks)

        def enter(rank):
            here.rank, here.size = rank, size
            here.numbers = itertools.count()
            return function(SimpleNamespace(rank=rank.rank, size=size, memory=rank.memory))

        return on_all_ranks(enter, ranks.ranks)

    yield run
    for ranks in made:
        on_all_ranks(ranks.close, ranks.ranks)


SIZES = pytest.mark.parametrize("size", [1, 2, 3])
ON_DEVICES = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)


def read(rank, tensor):
    rank.memory.finish()
    return on_host(tensor)


# Named collectives


@SIZES
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_collectives(run, monkeypatch, size):
    def read(tensor):
        here.rank.memory.finish()
        return on_host(tensor)

    def produce(tensor):
        made = here.rank.memory.produce(tensor)
        if not tensor.is_contiguous():  # of which the fake makes copies at once
            here.rank.memory.finish()
        return made

    on_device = OfTensors(produce, read)
    monkeypatch.setattr(operations, "hvd", on_device)

    def use(rank):
        everybody = SimpleNamespace(ranks=list(range(size)))
        tasks = [task for task in operations.tasks(300) if task.op in ON_DEVICES]
        handles = [task.submit(rank.rank, everybody) for task in tasks]
        for task, handle in zip(tasks, handles, strict=True):
            task.check(on_device.synchronize(handle), rank.rank, everybody.ranks)

    run(size, use)


@SIZES
def test_what_else_collectives_take(run, size):
    def use(rank):
        large = rank.memory.produce(torch.full((size,), 60000.0))
        average = hvd.reducescatter(large, compression=Compression.fp16)
        np.testing.assert_allclose(read(rank, average), 60000.0, rtol=1e-3)
        scaled = hvd.allreduce(large, op=hvd.Sum, prescale_factor=2.0)
        assert read(rank, scaled).tolist() == [120000.0 * size] * size
        assert isinstance(scaled, OnDevice)
        number = rank.memory.produce(torch.tensor(rank.rank))
        assert read(rank, hvd.allgather(number)).tolist() == list(range(size))
        with pytest.raises(ValueError, match="must lie on one device"):
            hvd.grouped_allreduce_async([large, torch.ones(1)])

    run(size, use)


class Exotic(Strategy):
    """Knows nothing of devices."""

    name = "exotic"

    def exchange(self, bucket, transport):
        Compression.none.exchange(bucket, transport)


def test_what_a_strategy_cannot_do_on_the_device_goes_through_the_host(run, monkeypatch):
    copied = []

    def cpu(tensor):
        copied.append(tensor)
        return read(here.rank, tensor)

    monkeypatch.setattr(OnDevice, "cpu", cpu)

    def use(rank):
        found = hvd.allreduce(
            rank.memory.produce(torch.full((3,), rank.rank + 1.0)), compression=Exotic()
        )
        assert on_host(found).tolist() == [1.5] * 3

    run(2, use)
    assert len(copied) == 2


def test_gradients_flow_through_collectives(run):
    def use(rank):
        x = rank.memory.produce(torch.ones(3))
        rank.memory.finish()
        x.requires_grad_()
        result = hvd.allreduce(x, op=hvd.Sum)
        rank.memory.finish()
        (gradient,) = torch.autograd.grad(result, x, rank.memory.produce(torch.ones(3)))
        assert (read(rank, gradient) == 2).all()

    run(2, use)


# The optimizer


def make_optimizer(rank, **options):
    torch.manual_seed(0)
    model = torch.nn.ParameterDict(
        {
            f"p{n}": torch.randn(n % 5 + 1, 7, dtype=(torch.float32, torch.float64)[n % 2])
            for n in range(12)
        }
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def backward(model, rank, step, without=()):
    """Make the gradient of a parameter ``(rank + 1) * (step + 1) * (its number + 1)``."""
    loss = sum(
        (parameter * (rank + 1) * (step + 1) * (number + 1)).sum()
        for number, parameter in enumerate(model.parameters())
        if number not in without
    )
    loss.backward()


@SIZES
def test_steps_on_the_average(run, size):
    def train(rank):
        model, optimizer = make_optimizer(rank)
        expected = [parameter.detach().clone() for parameter in model.parameters()]
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            backward(model, rank.rank, step)
            optimizer.synchronize()
            own = [(rank.rank + 1.0) * (step + 1) * (n + 1) for n in range(12)]
            # The host has not waited for the device.
            found = [parameter.grad.max().item() for parameter in model.parameters()]
            assert found == pytest.approx(own)
            rank.memory.finish()
            with optimizer.skip_synchronize():
                optimizer.step()
            for number, parameter in enumerate(model.parameters()):
                mean = (size + 1) / 2 * (step + 1) * (number + 1)
                assert torch.equal(parameter.grad, torch.full_like(parameter, mean))
                expected[number] -= 0.5 * mean
                torch.testing.assert_close(parameter.detach(), expected[number])
        (members,) = optimizer._reducer._hooks
        assert len(members.exchange.buckets.plan) > 2

    run(size, train)


def test_the_average_of_no_samples_counts_as_zeros(run):
    def train(rank):
        model, optimizer = make_optimizer(rank)
        for step in range(4):
            optimizer.zero_grad()
            loss = sum(parameter.sum() for parameter in model.parameters())
            (loss * (math.inf if rank.rank else step + 1)).backward()  # 0 * inf is NaN
            optimizer.step(batch_size=0 if rank.rank else 8)
            rank.memory.finish()
            for parameter in model.parameters():
                assert torch.equal(parameter.grad, torch.full_like(parameter, step + 1))

    run(2, train)


def test_gradients_that_come_on_several_streams(run):
    def train(rank):
        memory = rank.memory
        streams = [memory.node.new_stream() for _ in range(3)]
        numbers = {}

        def compute(parameter):
            """As autograd does: it runs hooks on the stream of the gradient."""
            memory.current = streams[numbers[parameter] % 3]
            value = (rank.rank + 1.0) * (numbers[parameter] + 1)
            memory.launch(lambda: on_host(parameter.grad).data.fill_(value))

        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.zeros(5)) for _ in range(12)]
        for number, parameter in enumerate(parameters):
            numbers[parameter] = number
            parameter.register_post_accumulate_grad_hook(compute)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
        short_hooks = []
        for _ in range(5):
            buckets = optimizer._reducer._hooks[0]._bucket_hooks
            short_hooks.append(sum(len(bucket.bare) for bucket in buckets))
            optimizer.zero_grad()
            sum(parameter.sum() for parameter in parameters).backward()
            memory.current = memory.main
            memory.join(stream.ptr for stream in streams)  # at its end, autograd does that
            optimizer.synchronize()
            memory.finish()
            for number, parameter in enumerate(parameters):
                assert (parameter.grad == 1.5 * (number + 1)).all()
        assert short_hooks[0] == 0 < short_hooks[-1]

    run(2, train)


def test_unseen_changes_are_reported_once_the_device_has_found_them(run):
    def train(rank):
        model, optimizer = make_optimizer(rank)
        backward(model, rank.rank, 0)
        rank.memory.finish()
        model["p3"].grad.data.mul_(2)  # leaves the version as it is
        optimizer.synchronize()
        rank.memory.finish()
        optimizer.zero_grad()
        backward(model, rank.rank, 1)
        with pytest.raises(RuntimeError, match="gradient of 'p3' was changed after backward"):
            optimizer.synchronize()
        rank.memory.finish()
        optimizer.zero_grad()
        backward(model, rank.rank, 2)
        optimizer.synchronize()

    run(2, train)


def test_parameters_of_several_devices_do_not_share_buckets(run, monkeypatch):
    def on_one_only(tensor):
        return here.rank.memory if tensor.dtype == torch.float64 else None

    monkeypatch.setattr(device_memory, "find", on_one_only)

    def train(rank):
        model, optimizer = make_optimizer(rank)
        sets = optimizer._reducer._hooks
        assert [members._memory for members in sets] == [None, rank.memory]
        for step in range(3):
            optimizer.zero_grad()
            backward(model, rank.rank, step)
            optimizer.synchronize()
            rank.memory.finish()
            for number, parameter in enumerate(model.parameters()):
                mean = 1.5 * (step + 1) * (number + 1)
                assert torch.equal(parameter.grad, torch.full_like(parameter, mean))

    run(2, train)


def test_nothing_is_exchanged_while_a_graph_is_captured(run, monkeypatch):
    capturing = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: here.rank in capturing)

    def train(rank):
        model, optimizer = make_optimizer(rank)
        own = here.rank
        capturing.append(own)
        with pytest.raises(RuntimeError, match=r"gradient of 'p\d+' .*CUDA graph.*make_graphed"):
            backward(model, rank.rank, 0)
        with pytest.raises(RuntimeError, match="CUDA graph"):
            hvd.allreduce(torch.ones(3).as_subclass(OnDevice), name="x")
        capturing.remove(own)
        optimizer._reducer.restart()
        optimizer.zero_grad()
        backward(model, rank.rank, 0)
        optimizer.synchronize()
        rank.memory.finish()
        assert all((each.grad == 1.5 * (n + 1)).all() for n, each in enumerate(model.parameters()))

    run(2, train)


def test_the_default_stream_is_torch_s_own(monkeypatch):
    """An external stream of address 0 would be another one."""
    entered = []
    monkeypatch.setattr(torch.cuda, "default_stream", lambda index: f"default of {index}")
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda ptr, device: f"{ptr} on {device}")
    monkeypatch.setattr(torch.cuda, "stream", entered.append)
    memory = device_memory.CudaMemory(None, 1)
    memory.on(0)
    memory.on(77)
    assert entered == ["default of 1", "77 on 1"]


# Without a device


def test_without_cupy_devices_share_no_set(run, monkeypatch):
    """Autograd runs the hooks of two devices in two threads at once."""
    monkeypatch.setattr(device_memory, "find", lambda tensor: None)
    on_cuda = torch.float64
    monkeypatch.setattr(
        torch.Tensor, "get_device", lambda tensor: 0 if tensor.dtype == on_cuda else -1
    )

    def train(rank):
        _, optimizer = make_optimizer(rank)
        assert [
            {parameter.dtype == on_cuda for parameter in members.parameters}
            for members in optimizer._reducer._hooks
        ] == [{False}, {True}]

    run(2, train)


def test_a_tensor_on_the_host_is_in_no_device_s_memory():
    assert device_memory.find(torch.ones(3)) is None
    assert device_memory.device_array(torch.ones(3)) is None


def test_without_cupy_cuda_tensors_go_through_the_host_with_a_word(monkeypatch, caplog):
    def missing():
        raise ImportError("No module named 'cupy'")

    monkeypatch.setattr(device_memory, "Cuda", missing)
    device_memory._load.cache_clear()
    try:
        for _ in range(2):
            assert device_memory.find(SimpleNamespace(is_cuda=True)) is None
    finally:
        device_memory._load.cache_clear()
    (record,) = caplog.records
    assert "copied to the host and back one by one" in record.getMessage()
