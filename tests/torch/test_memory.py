"""Where gradients lie: the memory that they lend and are lent."""

import pytest

from tests.harness import ranks

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd
from hvdlite.torch import changes, parameter_set
from tests.torch.test_optimizer import batch as make_batch
from tests.torch.test_optimizer import flat as weights
from tests.torch.test_optimizer import (
    identical_on_all_ranks,
    loss_of,
    make_model,
    own,
    relative_error,
    sgd,
    train,
)


def let_nothing_be_small(monkeypatch):
    monkeypatch.setattr(parameter_set, "_LARGE", 0)
    monkeypatch.setattr(parameter_set, "_HUGE", 64)


def distributed():
    model = make_model()
    return model, hvd.DistributedOptimizer(sgd(model), model.named_parameters())


def backward(model, optimizer, step, set_to_none=True):
    optimizer.zero_grad(set_to_none=set_to_none)
    x, y = make_batch(step)
    loss_of(model, own(x), own(y)).backward()


@ranks(1, 2, 3)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_is_the_same(monkeypatch, set_to_none):
    let_nothing_be_small(monkeypatch)
    hvd.init()
    reference = make_model()
    train(reference, sgd(reference), 12, local=False)
    model, optimizer = distributed()
    for step in range(12):
        backward(model, optimizer, step, set_to_none)
        optimizer.step()
    assert relative_error(weights(model), weights(reference)) < 1e-5
    assert identical_on_all_ranks(model)


@ranks(2)
@pytest.mark.parametrize("reset", ["optimizer", "model", "in place"])
def test_a_gradients_own_memory_is_freed_when_the_next_step_begins(monkeypatch, reset):
    monkeypatch.setattr(parameter_set, "_LARGE", 0)
    hvd.init()
    reference = make_model()
    train(reference, sgd(reference), 12, local=False)
    model, optimizer = distributed()
    (members,) = optimizer._reducer._sets
    for step in range(12):
        if reset == "model":
            model.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=reset == "optimizer")
            assert members._kept == []
        x, y = make_batch(step)
        loss_of(model, own(x), own(y)).backward()
        assert members._kept == []
        before = [parameter.grad.data_ptr() for parameter in model.parameters()]
        optimizer.step()
        assert [own.data_ptr() for own in members._kept] == before
        after = [parameter.grad.data_ptr() for parameter in model.parameters()]
        assert not {*before} & {*after}
    assert relative_error(weights(model), weights(reference)) < 1e-5


@ranks(2)
def test_before_the_exchange_a_gradient_is_the_ranks_own(monkeypatch):
    let_nothing_be_small(monkeypatch)
    hvd.init()
    model, optimizer = distributed()
    for step in range(8):
        backward(model, optimizer, step)
        x, y = make_batch(step)
        expected = torch.autograd.grad(loss_of(model, own(x), own(y)), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        (members,) = optimizer._reducer._sets
        lent = [
            slot.data_ptr() == parameter.grad.data_ptr()
            for slot, parameter in zip(members._slots, members._parameters, strict=True)
        ]
        large = [parameter.numel() * 4 >= 64 for parameter in members._parameters]
        assert lent == (large if step >= changes._STEPS_COMPARED else [False] * 6)
        optimizer.step()


@ranks(2)
def test_a_gradient_stays_the_same_tensor(monkeypatch):
    """For who has got hold of it before `synchronize`, to clip it after."""
    let_nothing_be_small(monkeypatch)
    hvd.init()
    model, optimizer = distributed()
    for step in range(8):
        backward(model, optimizer, step)
        before = [parameter.grad for parameter in model.parameters()]
        versions = [gradient._version for gradient in before]
        optimizer.synchronize()
        for parameter, gradient, version in zip(model.parameters(), before, versions, strict=True):
            assert parameter.grad is gradient
            assert gradient._version > version
        with optimizer.skip_synchronize():
            optimizer.step()


@ranks(2)
def test_averages_of_earlier_steps_stay_as_they_were(monkeypatch):
    let_nothing_be_small(monkeypatch)
    hvd.init()
    model, optimizer = distributed()
    kept = []
    for step in range(10):
        backward(model, optimizer, step)
        optimizer.synchronize()
        kept += [(gradient, gradient.clone()) for gradient in map(grad_of, model.parameters())]
        with optimizer.skip_synchronize():
            optimizer.step()
    for gradient, value in kept:
        assert torch.equal(gradient, value)


def grad_of(parameter):
    return parameter.grad


@ranks(2)
def test_a_change_that_torch_does_not_see_is_an_error(monkeypatch):
    let_nothing_be_small(monkeypatch)
    hvd.init()
    model, optimizer = distributed()
    for step in range(8):
        backward(model, optimizer, step)
        if step == 7:
            next(model.parameters()).grad.data *= 2
            with pytest.raises(RuntimeError, match=r"'0\.weight' was changed after backward"):
                optimizer.step()
        else:
            optimizer.step()


@ranks(2, fresh=True, timeout=60, env={"HVDLITE_OVERLAP": "1"})
def test_training_with_overlap():
    check_training()


@ranks(2, fresh=True, timeout=60, env={"HVDLITE_OVERLAP": "0"})
def test_training_without_overlap():
    check_training()


def check_training():
    hvd.init()
    reference = make_model()
    train(reference, sgd(reference), 8, local=False)
    model, optimizer = distributed()
    train(model, optimizer, 8)
    assert relative_error(weights(model), weights(reference)) < 1e-5
    assert identical_on_all_ranks(model)
