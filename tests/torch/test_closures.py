"""Steps with a closure, by whose loss an optimizer decides how often to evaluate it."""

import numpy as np
import pytest

from tests.harness import ranks

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd
from tests.torch.checks import assert_identical_on_all_ranks


def make_model():
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    return torch.nn.Sequential(*layers).double()


def data_of(rank, samples=12):
    """Data that differ so much by rank that so do the decisions."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin() * (1 + rank)


def closure_of(model, optimizer, x, y, passes=1):
    def closure():
        optimizer.zero_grad()
        losses = [(model(x) - y).square().mean() / passes for _ in range(passes)]
        for loss in losses:
            loss.backward()
        return sum(losses)

    return closure


def lbfgs(model, line_search="strong_wolfe", **options):
    options = {"lr": 0.5, "max_iter": 10, **options}
    return torch.optim.LBFGS(model.parameters(), line_search_fn=line_search, **options)


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.slow
@ranks(3)
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_decides_alike_and_as_one_process_on_all_data(size, line_search):
    hvd.init()
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(lbfgs(model, line_search), model.named_parameters())
    plain = lbfgs(reference, line_search)
    own = closure_of(model, optimizer, *data_of(hvd.rank()))
    union = [torch.cat(parts) for parts in zip(*map(data_of, range(size)), strict=True)]
    whole = closure_of(reference, plain, *union)
    for step in range(50):
        loss = optimizer.step(own)
        if step < 5:
            expected = plain.step(whole)
            assert loss.dtype == torch.float64
            assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
            assert (flat(model) - flat(reference)).norm() < 1e-6 * flat(reference).norm()
    assert_identical_on_all_ranks(model)


@pytest.mark.slow
@ranks(3)
def test_losses_are_combined_as_gradients_are(size):
    """Unequal batches, and several passes."""
    hvd.init()
    samples = [4, 0, 12][hvd.rank()]
    x, y = data_of(hvd.rank(), samples)
    parts = [data_of(rank, count) for rank, count in enumerate([4, 0, 12])]
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(
        lbfgs(model), model.named_parameters(), backward_passes_per_step=2
    )
    plain = lbfgs(reference)
    whole = closure_of(reference, plain, *map(torch.cat, zip(*parts, strict=True)))
    for _ in range(5):
        loss = optimizer.step(closure_of(model, optimizer, x, y, passes=2), batch_size=samples)
        assert loss.item() == pytest.approx(plain.step(whole).item(), rel=1e-6)
        assert (flat(model) - flat(reference)).norm() < 1e-6 * flat(reference).norm()


@ranks(2)
def test_ranks_that_are_out_of_step_get_an_error():
    hvd.init()
    model = make_model()

    class Uneven(torch.optim.SGD):
        def step(self, closure):
            for _ in range(2 + hvd.rank()):
                closure()

    plain = Uneven(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    closure = closure_of(model, optimizer, *data_of(hvd.rank()))

    def two_steps():
        for _ in range(2):
            optimizer.step(closure)

    with pytest.raises(hvd.HorovodInternalError, match=r"the step .* is 2 on rank 0, 1 on rank 1"):
        two_steps()
    model = make_model()  # and the engine goes on
    optimizer = hvd.DistributedOptimizer(lbfgs(model), model.named_parameters())
    optimizer.step(closure_of(model, optimizer, *data_of(hvd.rank())))
    assert_identical_on_all_ranks(model)
    with pytest.raises(hvd.HorovodInternalError, match=r"no number on rank 1"):
        optimizer.step(lambda: None if hvd.rank() else 1.0)


@ranks(2)
def test_a_loss_keeps_its_type():
    hvd.init()
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0))
    own = 1.0 + hvd.rank()
    for loss in (
        own,
        int(own),
        np.float32(own),
        np.array(own),
        torch.tensor(own, dtype=torch.bfloat16),
        torch.tensor([own]),
    ):
        found = optimizer.step(lambda loss=loss: loss)
        assert type(found) is (float if type(loss) is int else type(loss))
        assert getattr(found, "dtype", None) == getattr(loss, "dtype", None)
        assert getattr(found, "shape", None) == getattr(loss, "shape", None)
        assert float(found) == 1.5
    for loss in (None, (own, "others"), torch.tensor([own, own])):
        assert optimizer.step(lambda loss=loss: loss) is loss


@ranks(2)
def test_a_rank_that_has_joined_has_no_loss():
    hvd.init()
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0))

    def closure():
        weight.square().backward()
        return 3.0

    assert optimizer.step(closure) == 3.0
    if hvd.rank() == 0:
        assert optimizer.step(closure) == 1.5
    hvd.join()
