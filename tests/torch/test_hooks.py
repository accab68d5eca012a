"""Gradients that come without a hook of their own."""

import contextlib

import pytest

from tests.harness import ranks

pytest.importorskip("torch")

import torch
from torch.utils.checkpoint import checkpoint

import hvdlite.torch as hvd

WIDTH = 3


class Branches(torch.nn.Module):
    """Two branches, of which a step may use either, both, or both in another order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (
            torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)) for _ in range(2)
        )

    def forward(self, x, branches):
        for branch in branches:
            for layer in getattr(self, branch):
                x = torch.tanh(layer(x))
        return x


class Training:
    """A model, trained by all ranks, and what one process would make of it."""

    def __init__(self, make=Branches, **arguments):
        self.model, self.reference = make(), make()
        self.optimizer = hvd.DistributedOptimizer(
            self._sgd(self.model), self.model.named_parameters(), op=hvd.Average, **arguments
        )
        self.reference_optimizer = self._sgd(self.reference)
        self.steps = 0

    @staticmethod
    def _sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    @property
    def bare(self):
        """Return how many gradients have no hook, by bucket."""
        bucket_hooks = self.optimizer._reducer._hooks[0]._bucket_hooks
        return [len(each.bare) for each in bucket_hooks]

    def backward(self, *branches):
        self._loss(self.model, hvd.rank(), branches).backward()

    def step(self, *branches, set_to_none=True):
        """Train with all ranks, and with one process on everybody's losses."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.backward(*branches)
        self.optimizer.step()
        self.reference_optimizer.zero_grad(set_to_none=set_to_none)
        for rank in range(hvd.size()):
            (self._loss(self.reference, rank, branches) / hvd.size()).backward()
        self.reference_optimizer.step()
        self.steps += 1
        self.check()

    def check(self):
        for own, other in zip(self.model.parameters(), self.reference.parameters(), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)

    def _loss(self, model, rank, branches):
        generator = torch.Generator().manual_seed(100 * self.steps + rank)
        return model(torch.randn(5, WIDTH, generator=generator), branches).square().mean()


class Barred(torch.autograd.Function):
    """Identity that lets no gradient through."""

    @staticmethod
    def forward(ctx, parameter):
        return parameter.clone()

    @staticmethod
    def backward(ctx, upstream):
        return None


class BarredTraining(Training):
    """A training with a layer that has no gradient in some steps, which differ by rank."""

    def _loss(self, model, rank, branches):
        if (self.steps, rank) not in self.bars:
            return super()._loss(model, rank, branches)
        barred = {
            name: Barred.apply(parameter)
            for name, parameter in model.named_parameters()
            if name.startswith("first.1.")
        }
        call = torch.func.functional_call
        return super()._loss(lambda *given: call(model, barred, given), rank, branches)


BOTH = ("first", "second")


@contextlib.contextmanager
def hurried(**arguments):
    """A training that has come as far as the quick way."""
    hvd.init()
    training = Training(**arguments)
    for _ in range(5):
        training.step(*BOTH)
    assert sum(training.bare) == 14  # of 16, in one bucket
    yield training


@ranks(1, 2, 3)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_is_the_same(set_to_none):
    with hurried() as training:
        for _ in range(5):
            training.step(*BOTH, set_to_none=set_to_none)
            assert sum(training.bare) == 14


@pytest.mark.slow
@ranks(2, settings={"HVDLITE_FUSION_THRESHOLD": "300", "HVDLITE_FIRST_BUCKET_SIZE": "300"})
@pytest.mark.parametrize("overlap", ["0", "1"])
def test_the_first_and_the_last_gradient_of_each_bucket_have_hooks(monkeypatch, overlap):
    monkeypatch.setenv("HVDLITE_OVERLAP", overlap)
    hvd.init()
    training = Training()
    for _ in range(8):
        training.step(*BOTH)
    sizes = [
        len(members) for members in training.optimizer._reducer._hooks[0].exchange.buckets.plan
    ]
    assert len(sizes) > 1
    assert training.bare == [size - 2 if size >= 6 else 0 for size in sizes]
    assert any(training.bare)


@ranks(2, settings={"HVDLITE_OVERLAP": "1"})
def test_another_order_is_noticed():
    with hurried() as training:
        training.step("second", "first")
        assert sum(training.bare) == 14
        for turn in range(10):
            training.step(*BOTH[:: 1 if turn % 2 else -1])
        assert sum(training.bare) == 0  # no longer worth while


@ranks(2)
@pytest.mark.parametrize(
    "bars",
    [
        [(step, rank) for step in range(10) for rank in range(2)],
        [(0, 0), (0, 1), (7, 0), (7, 1)],
        [(0, 1), (6, 0), (7, 0), (8, 1)],
    ],
    ids=["always", "now and then", "on one rank"],
)
def test_a_backward_function_that_returns_none(bars):
    """torch calls the hooks of its parameter all the same."""
    hvd.init()
    training = BarredTraining()
    training.bars = bars
    for _ in range(10):
        training.step(*BOTH)


@ranks(2)
@pytest.mark.parametrize("part", ["first", "second"])
def test_a_second_backward_pass_through_a_part_is_refused(part):
    """One part has the first gradient that arrives, and the other has the last."""
    with hurried() as training:
        training.optimizer.zero_grad()
        training.backward(part)
        with pytest.raises(RuntimeError, match="was computed more than 1 times before step"):
            training.backward(part)
        hvd.barrier()


@ranks(2)
def test_backward_passes_that_no_hook_sees():
    """Gradients that have no hooks add up, as in one process."""
    with hurried() as training:
        weight, other = training.model.second[0].weight, training.model.second[1].weight
        for number, bare in enumerate((14, 0)):
            assert sum(training.bare) == bare
            training.optimizer.zero_grad()
            for _ in range(2 - number):  # more than one is refused, once a hook sees them
                (weight.sum() * (hvd.rank() + 1)).backward()
            training.optimizer.step()
            assert (weight.grad == (2 - number) * (hvd.size() + 1) / 2).all()
            assert other.grad is None
        training.optimizer.zero_grad()
        weight.sum().backward()
        with pytest.raises(RuntimeError, match="was computed more than 1 times"):
            weight.sum().backward()
        hvd.barrier()


@ranks(2, settings={"HVDLITE_OVERLAP": "0"})
def test_a_layer_of_two_checkpoints():
    """Its gradient is complete when the pass ends, and not when a pass within that does."""

    class Repeated(Branches):
        def forward(self, x, branches):
            for number in (2, 0, 2):  # the one in between has a hook
                x = checkpoint(self.first[number], x.requires_grad_(), use_reentrant=True)
            return super().forward(x, branches)

    hvd.init()
    training = Training(Repeated)
    for _ in range(4):
        training.step("second")
        assert sum(training.bare) == 14


@ranks(2, settings={"HVDLITE_OVERLAP": "0"})  # in a world that reads the parameter
@pytest.mark.parametrize("overlap", ["0", "1"])
def test_gradients_that_stay_beside_a_layer_without_any(monkeypatch, overlap):
    """Two passes through a part each: what is there after the first is not all new."""
    monkeypatch.setenv("HVDLITE_OVERLAP", overlap)

    class Unused(Branches):
        def __init__(self):
            super().__init__()
            self.unused = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.second = self._modules.pop("second")  # behind: its last gradient has a hook

    class Parts(Training):
        def _loss(self, model, rank, branches):
            parts = [super(Parts, self)._loss(model, rank, (each,)) for each in branches]
            for each in parts[1:]:
                (each / (hvd.size() if model is self.reference else 1)).backward()
            return parts[0]

    hvd.init()
    training = Parts(Unused)
    for _ in range(6):
        training.step(*BOTH, set_to_none=False)


@ranks(2)
def test_a_hook_of_the_user_that_drops_a_gradient():
    """It is an error, once a hook looks."""
    with hurried() as training:

        def drop(parameter):
            parameter.grad = None

        handle = training.model.first[1].weight.register_post_accumulate_grad_hook(drop)
        training.optimizer.zero_grad()
        training.backward(*BOTH)
        training.optimizer.step()
        training.optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"'first\.1\.weight' was computed, but has become"):
            training.backward(*BOTH)
        handle.remove()
        hvd.barrier()


@ranks(2)
def test_a_gradient_that_is_changed_too_early_is_an_error():
    with hurried() as training:
        training.optimizer.zero_grad()
        training.backward(*BOTH)
        training.model.first[1].weight.grad.mul_(2)
        with pytest.raises(RuntimeError, match=r"'first.1.weight' was changed after backward"):
            training.optimizer.step()


@ranks(2)
@pytest.mark.parametrize("branches", [BOTH, ("first",), ("second",)])
def test_gradients_that_wait_are_not_stepped_on(branches):
    with hurried() as training:
        training.optimizer.zero_grad()
        training.backward(*branches)
        with (
            pytest.raises(RuntimeError, match="have not been exchanged"),
            training.optimizer.skip_synchronize(),
        ):
            training.optimizer.step()
        training.optimizer.synchronize()
        with training.optimizer.skip_synchronize():
            training.optimizer.step()


@ranks(2)
def test_parameters_that_are_wrapped_again_belong_to_the_new_optimizer():
    with hurried() as training:
        before = training.optimizer
        training.optimizer = hvd.DistributedOptimizer(
            training._sgd(training.model), training.model.named_parameters()
        )
        before.synchronize()  # what it has no hooks for, it still exchanges
        for _ in range(6):
            training.step(*BOTH)
        assert sum(training.bare) == 14
