"""`DistributedOptimizer` with a compression: its memory, weights, the user's own."""

import random
import re
import warnings

import numpy as np
import pytest

from tests.harness import ranks

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd
from hvdlite.compression import Compression, ErrorFeedback, FP16Compressor, NoneCompressor
from tests.torch.checks import assert_close, assert_identical_on_all_ranks

SHAPES = {"a": (5, 7), "b": (40,), "c": ()}


def new_world():
    hvd.shutdown()
    hvd.init()


def make(compression, lr=1.0, op=hvd.Average, names=None):
    names = list(SHAPES) if names is None else names
    parameters = {name: torch.nn.Parameter(torch.zeros(SHAPES[name])) for name in names}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters.values(), lr=lr), parameters.items(), compression, op=op
    )
    return parameters, optimizer


def gradient(name, step, rank):
    number = list(SHAPES).index(name)
    draw = np.random.default_rng([step, rank, number])
    return torch.from_numpy(draw.standard_normal(SHAPES[name]).astype(np.float32).copy())


def step(parameters, optimizer, number, **kwargs):
    optimizer.zero_grad()
    losses = [(p * gradient(n, number, hvd.rank())).sum() for n, p in parameters.items()]
    sum(losses).backward()
    optimizer.step(**kwargs)


def average(name, steps):
    """Return the sum of all ranks' gradients."""
    drawn = [
        [gradient(name, number, rank).double() for rank in range(hvd.size())] for number in steps
    ]
    return sum(sum(each) / hvd.size() for each in drawn)


class Training:
    """Steps, with or without weights, and all that ranks had to send in them."""

    def __init__(self, compression, draw):
        self.compression, self.draw = compression, draw
        self.is_weighted = draw.random() < 0.5
        self.first_names = draw.choice([["a"], ["a", "b"]])
        self.parameters, self.optimizer = make(compression, names=self.first_names)
        self.total = {name: torch.zeros(shape).double() for name, shape in SHAPES.items()}

    def step(self, number):
        everybody = range(hvd.size())
        samples = [self.draw.randint(rank == 0, 4) for rank in everybody]
        weights = samples if self.is_weighted else [1] * hvd.size()
        lacking = self.draw.choice([None, *everybody])  # it sends what it has left all the same
        self.optimizer.zero_grad()
        # Buckets differ when gradients come in another order.
        for name in self.draw.sample([*self.parameters], len(self.parameters)):
            if hvd.rank() != lacking:
                (self.parameters[name] * gradient(name, number, hvd.rank())).sum().backward()
        self.optimizer.step(**({"batch_size": samples[hvd.rank()]} if self.is_weighted else {}))
        for name in self.parameters:
            for rank in {*everybody} - {lacking}:
                own = gradient(name, number, rank).double()
                self.total[name] += own * weights[rank] / sum(weights)

    def add_parameter(self):
        """Add one, which has a first step of its own."""
        name = next((name for name in SHAPES if name not in self.parameters), None)
        if name is not None:
            self.parameters[name] = torch.nn.Parameter(torch.zeros(SHAPES[name]))
            self.optimizer.add_param_group({"params": [self.parameters[name]]})

    def load_what_every_rank_saved(self):
        self._resume(self.optimizer.state_dict())

    def load_what_one_rank_saved(self):
        self.optimizer.consolidate_exchange_state()
        self.check()
        saved = hvd.broadcast_object(self.optimizer.state_dict(), hvd.size() - 1)
        self._resume(saved)

    def _resume(self, saved):
        weights = [parameter.detach().clone() for parameter in self.parameters.values()]
        hvd.shutdown()
        hvd.init()
        self.parameters, self.optimizer = make(self.compression, names=self.first_names)
        while len(self.parameters) < len(weights):
            self.add_parameter()
        for parameter, weight in zip(self.parameters.values(), weights, strict=True):
            parameter.data.copy_(weight)
        self.optimizer.load_state_dict(saved)

    def check(self):
        state = self.optimizer.state_dict().get("hvdlite", {}).get("compression", {})
        entries = state.get("parameters", {}).values()
        left = {each["residual"].shape: each["residual"] for each in entries if "residual" in each}
        for name, parameter in self.parameters.items():
            rest = left.get(parameter.shape, torch.zeros(SHAPES[name])).double()
            applied = -parameter.detach().double()  # of steps with a learning rate of 1
            tolerance = 1e-5 if isinstance(self.compression, ErrorFeedback) else 5e-3
            assert_close(applied + hvd.allreduce(rest), self.total[name], tolerance)


@ranks(2)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "compression",
    [Compression.fp16, ErrorFeedback(Compression.bf16), ErrorFeedback(Compression.TopK(0.1))],
    ids=str,
)
def test_nothing_is_lost(compression, seed):
    """Nothing but what is applied and what is left to send was there before."""
    new_world()
    draw = random.Random(seed)
    training = Training(compression, draw)
    for number in range(10):
        training.step(number)
        training.check()
        draw.choice(
            [
                training.load_what_every_rank_saved,
                training.load_what_one_rank_saved,
                training.add_parameter,
                lambda: None,
            ]
        )()
    assert_identical_on_all_ranks(torch.nn.ParameterDict(training.parameters))


class TestMemory:
    """The state of an optimizer has what ranks have left to send."""

    COMPRESSION = ErrorFeedback(Compression.bf16)

    @ranks(2)
    def test_a_state_in_the_midst_of_a_step_is_told_of(self):
        new_world()
        for compression, told in ((self.COMPRESSION, True), (Compression.none, False)):
            parameters, optimizer = make(compression)
            step(parameters, optimizer, 0)
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                optimizer.state_dict()
                assert not found
                sum((parameter**2).sum() for parameter in parameters.values()).backward()
                optimizer.state_dict()
            texts = [str(each.message) for each in found]
            assert len(texts) == told
            assert all("call optimizer.synchronize() first" in text for text in texts)
            optimizer.step()

    @ranks(2)
    def test_it_can_be_saved_after_shutdown(self):
        new_world()
        parameters, optimizer = make(self.COMPRESSION)
        step(parameters, optimizer, 0)
        before, rank = optimizer.state_dict()["hvdlite"]["compression"], hvd.rank()
        hvd.shutdown()
        after = optimizer.state_dict()["hvdlite"]["compression"]
        assert (after["rank"], after["size"]) == (before["rank"], before["size"]) == (rank, 2)
        for name, entry in before["parameters"].items():
            assert torch.equal(after["parameters"][name]["residual"], entry["residual"])

    @ranks(2)
    def test_what_is_another_ranks_is_not_taken_over(self):
        new_world()
        parameters, optimizer = make(self.COMPRESSION)
        step(parameters, optimizer, 0)
        own = optimizer.state_dict()["hvdlite"]["compression"]["parameters"]["a"]["residual"]
        hvd.broadcast_optimizer_state(optimizer, 0)
        kept = optimizer.state_dict()["hvdlite"]["compression"]["parameters"]["a"]["residual"]
        assert torch.equal(own, kept)
        saved = hvd.broadcast_object(optimizer.state_dict(), 0)
        _, fresh = make(self.COMPRESSION)
        if hvd.rank() == 0:
            fresh.load_state_dict(saved)
        else:
            with pytest.warns(UserWarning, match=r"rank 1 of 2: .* saved on rank 0 of 2 .* lost"):
                fresh.load_state_dict(saved)
            # Only the counters are everybody's.
            assert {**fresh.state_dict()["hvdlite"]["compression"]["parameters"]["a"]} == {
                "exchanges": 1
            }

    @ranks(2)
    def test_an_optimizer_that_is_not_wrapped_loads_it(self):
        new_world()
        parameters, optimizer = make(self.COMPRESSION)
        step(parameters, optimizer, 0)
        torch.optim.SGD(parameters.values(), lr=0.5).load_state_dict(optimizer.state_dict())
        _, dense = make(Compression.none)
        assert "hvdlite" not in dense.state_dict()


class TestBatchSize:
    @ranks(2)
    def test_with_synchronize(self):
        new_world()
        parameters, optimizer = make(Compression.none)
        sum((p * gradient(n, 0, hvd.rank())).sum() for n, p in parameters.items()).backward()
        optimizer.synchronize(batch_size=1 + 2 * hvd.rank())
        expected = (gradient("a", 0, 0) + 3 * gradient("a", 0, 1)) / 4
        assert_close(parameters["a"].grad, expected, 1e-6)
        with optimizer.skip_synchronize():
            optimizer.step()
        sum(p.sum() for p in parameters.values()).backward()
        optimizer.synchronize(batch_size=1)
        with pytest.raises(ValueError, match=r"call synchronize\(batch_size=...\)"):
            optimizer.step(batch_size=1)

    @ranks(2)
    def test_what_is_refused(self):
        new_world()
        parameters, optimizer = make(Compression.none)
        for given in (-1, 2.5, float("nan"), 10**30, "3", [3]):
            with pytest.raises(ValueError, match=f"batch_size={re.escape(repr(given))} is not a"):
                step(parameters, optimizer, 0, batch_size=given)
            optimizer.step()
        with pytest.raises(ValueError, match="comes after a step without it"):
            step(parameters, optimizer, 0, batch_size=1)
        parameters, optimizer = make(Compression.none, op=hvd.Sum)
        with pytest.raises(ValueError, match="batch_size weights averages"):
            step(parameters, optimizer, 0, batch_size=1)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2

    @ranks(2)
    def test_on_one_rank_only_in_the_first_step(self):
        """Whose gradients have left before; the other rank learns of it in its next step."""
        new_world()
        parameters, optimizer = make(Compression.none)
        words = "batch_size is given on rank 0, not given on rank 1"
        if hvd.rank() == 0:
            with pytest.raises(hvd.MismatchError, match=words):
                step(parameters, optimizer, 0, batch_size=2)
        else:
            step(parameters, optimizer, 0)
            with pytest.raises(hvd.MismatchError, match=words):
                step(parameters, optimizer, 1)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2


class Halved:
    """A compression class as Horovod's users write them."""

    calls = 0

    @classmethod
    def compress(cls, tensor):
        cls.calls += 1
        assert isinstance(tensor, torch.Tensor)
        return tensor.to(torch.float16), (tensor.dtype, tensor.shape)

    @staticmethod
    def decompress(tensor, ctx):
        dtype, shape = ctx
        assert tensor.shape == shape
        return tensor.to(dtype)


class TestOnesOwn:
    @ranks(2)
    def test_a_class_with_compress_and_decompress(self):
        new_world()
        parameters, optimizer = make(Halved)
        before = Halved.calls
        for number in range(3):
            step(parameters, optimizer, number)
        assert Halved.calls == before + 3 * len(SHAPES)
        for name, parameter in parameters.items():
            assert_close(-parameter.detach().double(), average(name, range(3)), 5e-3)
        total = hvd.allreduce(torch.full((3,), 1.0 + hvd.rank()), compression=Halved, op=hvd.Sum)
        assert total.tolist() == [sum(range(1, hvd.size() + 1))] * 3
        first, second = hvd.grouped_allreduce(
            [torch.ones(2), torch.ones(3)], compression=Halved, op=hvd.Sum
        )
        assert first.tolist() + second.tolist() == [hvd.size()] * 5

    @ranks(1)
    def test_what_is_no_compression(self):
        new_world()
        with pytest.raises(TypeError, match=r"compression=TopK is a class, .* call it, as in"):
            make(Compression.TopK)
        with pytest.raises(ValueError, match="keeps state from step to step"):
            hvd.allreduce(torch.ones(1), compression=ErrorFeedback(Compression.fp16))


@ranks(2)
def test_horovods_compression_classes():
    """By hand, to derive from, and as they are."""
    hvd.init()
    for compression in (hvd.Compression.fp16, FP16Compressor):
        for dtype in (torch.float32, torch.float64, torch.float16, torch.int32):
            tensor = torch.tensor([1, -2, 3]).to(dtype)
            narrow, context = compression.compress(tensor)
            assert narrow.dtype == (torch.int32 if dtype == torch.int32 else torch.float16)
            assert torch.equal(compression.decompress(narrow, context), tensor)
    for compression in (hvd.Compression.none, NoneCompressor):
        tensor = torch.ones(2)
        assert compression.decompress(*compression.compress(tensor)) is tensor
    wide, context = hvd.Compression.bf16.compress(torch.ones(2))
    assert (wide.dtype, context) == (torch.bfloat16, torch.float32)

    class Halved(FP16Compressor):
        @staticmethod
        def decompress(tensor, ctx):
            return FP16Compressor.decompress(tensor, ctx) / 2

    for compression, expected in ((NoneCompressor, 1), (FP16Compressor, 1), (Halved, 0.5)):
        found = hvd.allreduce(torch.ones(3), compression=compression)
        assert found.tolist() == [expected] * 3
        model = torch.nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), compression=compression
        )
        model(torch.full((1, 2), 2.0 * hvd.rank())).sum().backward()
        optimizer.synchronize()
        assert model.weight.grad.tolist() == [[expected] * 2]


@pytest.mark.parametrize(
    "compression",
    [
        Compression.TopK(0.2),
        Compression.QSGD(),
        Compression.RandomK(0.3),
        Compression.Cast("fp16", scale="auto"),
        ErrorFeedback(Compression.Blockwise8()),
        ErrorFeedback(Compression.PowerSGD(1)),
        Compression.fp16,
    ],
    ids=str,
)
@ranks(2, settings={"HVDLITE_FIRST_BUCKET_SIZE": "64"})  # c and b, then a
def test_results_do_not_depend_on_the_order_in_which_gradients_arrive(compression):
    hvd.init()
    results = []
    for order in (["a", "b", "c"], ["c", "b", "a"], ["b", "a", "c"]):
        parameters, optimizer = make(compression)
        for number in range(4):
            optimizer.zero_grad()
            for name in order:
                (parameters[name] * gradient(name, number, hvd.rank())).sum().backward()
            optimizer.step()
        results.append([parameters[name].tolist() for name in SHAPES])
    assert results[0] == results[1] == results[2]
