"""`DistributedOptimizer` with a compression: its memory, weights, the user's own."""

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


class TestMemory:
    """Nothing is lost: what is applied and what is left is what there was."""

    COMPRESSION = ErrorFeedback(Compression.bf16)

    def check(self, parameters, optimizer, steps):
        saved = optimizer.state_dict()["hvdlite"]["compression"]["parameters"]
        for name, parameter in parameters.items():
            left = hvd.allreduce(saved[name]["residual"].double(), name=f"left of {name}")
            applied = -parameter.detach().double()  # of steps with a learning rate of 1
            assert_close(applied + left, average(name, steps), 1e-5)

    @ranks(1, 2, 3)
    def test_through_a_change_of_buckets(self):
        """The second step has other buckets than the first: gradients came in another order."""
        new_world()
        parameters, optimizer = make(self.COMPRESSION)
        for number in range(5):
            step(parameters, optimizer, number)
        self.check(parameters, optimizer, range(5))
        assert_identical_on_all_ranks(torch.nn.ParameterDict(parameters))

    @ranks(2)
    def test_through_a_checkpoint(self):
        new_world()
        parameters, optimizer = make(self.COMPRESSION)
        for number in range(3):
            step(parameters, optimizer, number)
        saved, weights = optimizer.state_dict(), [p.detach().clone() for p in parameters.values()]
        assert saved["hvdlite"]["compression"]["rank"] == hvd.rank()
        new_world()
        parameters, optimizer = make(self.COMPRESSION)
        for parameter, weight in zip(parameters.values(), weights, strict=True):
            parameter.data.copy_(weight)
        optimizer.load_state_dict(saved)
        for number in range(3, 6):
            step(parameters, optimizer, number)
        self.check(parameters, optimizer, range(6))

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

    @pytest.mark.slow
    @ranks(3)
    def test_one_rank_saves_for_all(self):
        new_world()
        parameters, optimizer = make(self.COMPRESSION)
        for number in range(3):
            step(parameters, optimizer, number)
        optimizer.consolidate_exchange_state()
        self.check(parameters, optimizer, range(3))
        saved = hvd.broadcast_object(optimizer.state_dict(), 1)
        assert saved["hvdlite"]["compression"]["rank"] == -1
        weights = [p.detach().clone() for p in parameters.values()]
        parameters, optimizer = make(self.COMPRESSION)
        for parameter, weight in zip(parameters.values(), weights, strict=True):
            parameter.data.copy_(weight)
        optimizer.load_state_dict(saved)
        for number in range(3, 5):
            step(parameters, optimizer, number)
        self.check(parameters, optimizer, range(5))

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

    @ranks(2)
    def test_a_step_that_one_rank_has_no_gradient_for(self):
        """It sends what it has left all the same."""
        new_world()
        parameters, optimizer = make(self.COMPRESSION)
        step(parameters, optimizer, 0)
        optimizer.zero_grad()
        if hvd.rank() == 0:
            sum((p * gradient(n, 1, 0)).sum() for n, p in parameters.items()).backward()
        optimizer.step()
        saved = optimizer.state_dict()["hvdlite"]["compression"]["parameters"]
        for name, parameter in parameters.items():
            left = hvd.allreduce(saved[name]["residual"].double())
            expected = average(name, [0]) + gradient(name, 1, 0).double() / 2
            assert_close(left - parameter.detach().double(), expected, 1e-5)


class TestBatchSize:
    @ranks(1, 2, 3)
    @pytest.mark.parametrize("compression", [Compression.none, Compression.fp16])
    def test_uneven_batches_give_the_gradient_of_their_union(self, compression):
        new_world()
        parameters, optimizer = make(compression)
        expected = {name: torch.zeros(shape).double() for name, shape in SHAPES.items()}
        for number in range(4):
            sizes = [(3 * rank + 5 * number) % 7 for rank in range(hvd.size())]
            sizes[0] += 1  # not all may be 0
            step(parameters, optimizer, number, batch_size=sizes[hvd.rank()])
            for name in expected:
                drawn = [gradient(name, number, rank).double() for rank in range(hvd.size())]
                weighted = zip(sizes, drawn, strict=True)
                expected[name] -= sum(n * each for n, each in weighted) / sum(sizes)
        tolerance = 1e-5 if compression is Compression.none else 5e-3
        for name, parameter in parameters.items():
            assert_close(parameter.detach().double(), expected[name], tolerance)

    @ranks(2)
    def test_error_feedback_loses_nothing_by_the_first_step(self):
        """In which gradients have left before their weight was known."""
        new_world()
        parameters, optimizer = make(ErrorFeedback(Compression.bf16))
        sizes = [3, 1]
        for number in range(3):
            step(parameters, optimizer, number, batch_size=sizes[hvd.rank()])
        saved = optimizer.state_dict()["hvdlite"]["compression"]["parameters"]
        for name, parameter in parameters.items():
            drawn = [[gradient(name, k, rank).double() for rank in range(2)] for k in range(3)]
            total = sum((3 * first + second) / 4 for first, second in drawn)
            left = hvd.allreduce(saved[name]["residual"].double())
            assert_close(left - parameter.detach().double(), total, 1e-5)

    @ranks(2)
    def test_error_feedback_loses_nothing_in_the_first_step_after_a_checkpoint(self):
        new_world()
        compression = ErrorFeedback(Compression.TopK(0.1))
        parameters, optimizer = make(compression)
        step(parameters, optimizer, 0, batch_size=1)
        again, resumed = make(compression)
        resumed.load_state_dict(optimizer.state_dict())
        hvd.broadcast_parameters(parameters, root_rank=0)
        for number in (1, 2):
            step(parameters, optimizer, number, batch_size=1 + hvd.rank())
            step(again, resumed, number, batch_size=1 + hvd.rank())
        for name, parameter in again.items():
            drawn = [[gradient(name, k, rank).double() for rank in range(2)] for k in range(3)]
            total = sum(drawn[0]) / 2 + sum((a + 2 * b) / 3 for a, b in drawn[1:])
            saved = resumed.state_dict()["hvdlite"]["compression"]["parameters"]
            left = hvd.allreduce(saved[name]["residual"].double())
            # The first step was the other optimizer's.
            first = parameters[name].detach() - parameter.detach()
            assert_close(left - parameter.detach().double() - first.double(), total, 1e-5)

    @ranks(2)
    def test_error_feedback_loses_nothing_where_parameters_come_later(self):
        """The later parameters have a first step of their own."""
        new_world()
        parameters, optimizer = make(ErrorFeedback(Compression.TopK(0.1)), names=["a"])
        step(parameters, optimizer, 0, batch_size=1)
        parameters["b"] = torch.nn.Parameter(torch.zeros(SHAPES["b"]))
        optimizer.add_param_group({"params": [parameters["b"]]})
        for number in (1, 2):
            step(parameters, optimizer, number, batch_size=1 + 2 * hvd.rank())
        saved = optimizer.state_dict()["hvdlite"]["compression"]["parameters"]
        residual = [entry["residual"] for entry in saved.values() if entry["residual"].dim() == 2]
        drawn = [[gradient("a", k, rank).double() for rank in range(2)] for k in range(3)]
        total = sum(drawn[0]) / 2 + sum((a + 3 * b) / 4 for a, b in drawn[1:])
        left = hvd.allreduce(residual[0].double())
        assert_close(left - parameters["a"].detach().double(), total, 1e-5)

    @ranks(2)
    def test_sparse_gradients(self):
        new_world()
        table = torch.nn.Embedding(6, 3, sparse=True)
        torch.nn.init.zeros_(table.weight)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0))
        for number in range(2):
            optimizer.zero_grad()
            table(torch.tensor([hvd.rank(), 5])).sum().backward()
            optimizer.step(batch_size=3 - 2 * hvd.rank())
            expected = -torch.tensor([0.75, 0.25, 0, 0, 0, 1.0]) * (number + 1)
            assert_close(table.weight.detach()[:, 0], expected, 1e-6)

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
        parameters, optimizer = make(Compression.none)
        with pytest.raises(hvd.HorovodInternalError, match="batch_size is 0 on all ranks"):
            step(parameters, optimizer, 0, batch_size=0)
        parameters, optimizer = make(Compression.none, op=hvd.Sum)
        with pytest.raises(ValueError, match="batch_size weights averages"):
            step(parameters, optimizer, 0, batch_size=1)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2

    @ranks(2)
    def test_on_one_rank_only(self):
        new_world()
        parameters, optimizer = make(Compression.none)
        for number in range(2):  # in the first step both know of it
            given = {"batch_size": 2} if number == 0 or hvd.rank() == 0 else {}
            if number == 0:
                step(parameters, optimizer, number, **given)
                continue
            with pytest.raises(hvd.HorovodInternalError, match="rank 1 gave no batch_size"):
                step(parameters, optimizer, number, **given)
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

    @ranks(2)
    def test_of_a_rank_that_had_joined_before_its_first_step(self):
        new_world()
        parameters, optimizer = make(Compression.none)
        if hvd.rank() == 0:
            step(parameters, optimizer, 0, batch_size=3)
        hvd.join()
        hvd.broadcast_parameters(parameters, root_rank=0)
        assert_close(parameters["a"].detach(), -gradient("a", 0, 0), 1e-6)
        for number in (1, 2):
            step(parameters, optimizer, number, batch_size=1 + 2 * hvd.rank())
        first, second = (
            (gradient("a", number, 0) + 3 * gradient("a", number, 1)) / 4 for number in (1, 2)
        )
        expected = -gradient("a", 0, 0) - first - second
        assert_close(parameters["a"].detach(), expected, 1e-5)


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
    @ranks(1, 2)
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
@ranks(2, 3)
def test_results_do_not_depend_on_the_order_in_which_gradients_arrive(monkeypatch, compression):
    monkeypatch.setenv("HVDLITE_FIRST_BUCKET_SIZE", "64")  # c and b, then a
    new_world()
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
