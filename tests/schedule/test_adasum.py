import copy

import numpy as np
import pytest

from tests.harness import ranks

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd
from tests.references import adasum
from tests.schedule import test_torch as local_steps
from tests.schedule.test_torch import Simulation, assert_as, closure_of, loss_of, make_model, train
from tests.torch.checks import assert_identical_on_all_ranks

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False
    ),
    "foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


def simulated(size, steps, make):
    """Every rank's step in one process, combined tensor by tensor."""
    simulation = Simulation(size, make)
    for step in range(steps):
        starts = [parameter.detach().clone() for parameter in simulation.models[0].parameters()]
        simulation.step(step)
        groups = zip(*(model.parameters() for model in simulation.models), strict=True)
        for start, of_all in zip(starts, groups, strict=True):
            changes = [(own.detach() - start).numpy().ravel() for own in of_all]
            whole = torch.from_numpy(adasum(changes)).reshape(start.shape)
            for own in of_all:
                own.data.copy_(start + whole)
    return simulation.models[0]


def wrapped(make=OPTIMIZERS["sgd"], **options):
    return local_steps.wrapped(None, make, op=hvd.Adasum, **options)


@ranks(2, 3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_steps_are_combined_tensor_by_tensor(size, name):
    hvd.init()
    model, optimizer = wrapped(OPTIMIZERS[name])
    train(model, optimizer, 4)
    assert_as(model, simulated(size, 4, OPTIMIZERS[name]))
    assert_identical_on_all_ranks(model)


@ranks(1)
def test_alone_a_step_is_the_optimizers_to_the_bit():
    hvd.init()
    model, optimizer = wrapped()
    plain = make_model()
    train(model, optimizer, 3)
    train(plain, OPTIMIZERS["sgd"](plain.parameters()), 3)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@ranks(2)
def test_compression_to_its_precision():
    hvd.init()
    exact = simulated(2, 3, OPTIMIZERS["sgd"])
    model, optimizer = wrapped(compression=hvd.Compression.fp16)
    train(model, optimizer, 3)
    assert_as(model, exact, 1e-3)
    assert not all(map(torch.equal, model.parameters(), exact.parameters()))
    assert_identical_on_all_ranks(model)


@ranks(2, 3)
def test_gradients_stay_local_and_may_be_clipped(size):
    hvd.init()
    model, optimizer = wrapped(lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    alone = make_model()
    for each in (model, alone):
        loss_of(each, hvd.rank(), 0).backward()
    optimizer.synchronize()
    for own, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert (own.grad is None) == (expected.grad is None)
        assert own.grad is None or torch.equal(own.grad, expected.grad)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    for own, start in zip(model.parameters(), before, strict=True):
        assert 0 < (own - start).norm() <= size * 1e-3
    assert_identical_on_all_ranks(model)


@ranks(2)
def test_what_an_optimizer_for_adasum_refuses():
    hvd.init()
    model, optimizer = wrapped(backward_passes_per_step=2)
    optimizer.set_backward_passes_per_step(3)
    with pytest.raises(ValueError, match="backward_passes_per_step=0"):
        optimizer.set_backward_passes_per_step(0)
    with (
        pytest.raises(RuntimeError, match="clip or unscale the gradients after backward"),
        optimizer.skip_synchronize(),
    ):
        pass
    with pytest.raises(ValueError, match="wrap it once"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(optimizer)
    with pytest.raises(ValueError, match="gradient_predivide_factor needs"):
        wrapped(gradient_predivide_factor=2.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, hvd.rank(), 0)).backward()
    with pytest.raises(RuntimeError, match="the others would wait for it"):
        scaler.step(optimizer)
    assert list(optimizer._parameter_names.values()) == [n for n, _ in model.named_parameters()]
    train(model, optimizer, 1)
    assert_identical_on_all_ranks(model)


@ranks(2)
def test_closures_are_steps_of_this_ranks_own():
    hvd.init()

    def make(parameters):
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)

    model, optimizer = wrapped(make)
    for step in range(3):
        optimizer.step(closure_of(model, optimizer, hvd.rank(), step))
    assert_as(model, simulated(2, 3, make), 1e-8)


@ranks(2)
def test_a_subclass_that_calls_its_parents_step():
    hvd.init()

    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    def make(parameters):
        return Counting(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)

    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # whose step is hooked from now on
    model, optimizer = wrapped(make)
    train(model, optimizer, 2)
    assert_as(model, simulated(2, 2, make))


@ranks(2)
def test_parameters_belong_to_the_optimizer_that_was_wrapped_last():
    hvd.init()
    model = make_model()
    hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), op=hvd.Adasum)
    for _ in range(2):  # the first one's hooks would complain
        loss_of(model, hvd.rank(), 0).backward()
    optimizer.step()
    assert_identical_on_all_ranks(model)
    train(model, hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters())), 2)
    assert_identical_on_all_ranks(model)


@ranks(2, 3)
def test_models_that_differ_are_an_error_on_all_ranks_and_no_weight_moves(size):
    hvd.init()
    model = torch.nn.Linear(6, 4 + (hvd.rank() == 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), op=hvd.Adasum
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        model(torch.ones(1, 6)).sum().backward()
        with pytest.raises(hvd.HorovodInternalError, match=r"'weight' float32\[4, 6\] on rank"):
            optimizer.step()
        assert all(map(torch.equal, model.parameters(), before))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


@ranks(2)
def test_adasum_goes_on_after_shutdown_and_init():
    hvd.init()
    model, optimizer = wrapped()
    train(model, optimizer, 2)
    hvd.shutdown()
    hvd.init()
    train(model, optimizer, 4, first=2)
    assert_as(model, simulated(2, 4, OPTIMIZERS["sgd"]))


@ranks(2)
def test_bfloat16_weights():
    hvd.init()
    model = make_model().to(torch.bfloat16)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
    start = np.concatenate([each.detach().float().numpy().ravel() for each in model.parameters()])
    model[:3](torch.full((2, 6), 1.0 + hvd.rank(), dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    end = np.concatenate([each.detach().float().numpy().ravel() for each in model.parameters()])
    assert (start != end).any()
    assert_identical_on_all_ranks(model)
