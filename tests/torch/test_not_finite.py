"""Gradients that are NaN or infinite: named by parameter and rank, or left out of the training."""

import numpy as np
import pytest

from tests.harness import ranks
from tests.logs import logged

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd
from hvdlite.errors import NotFiniteError


def make(**options):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    named = model.named_parameters()
    return model, hvd.DistributedOptimizer(inner, named_parameters=named, **options)


def step(model, optimizer, bad=None):
    optimizer.zero_grad()
    x = torch.ones(2, 3)
    if bad is not None:
        x[0, 1] = bad
    model(x).sum().backward()
    optimizer.step()


def weights(model):
    return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])


@ranks(3, settings={"HVDLITE_NOT_FINITE": "raise"})
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_all_ranks_raise_and_name_the_ranks(bad):
    hvd.init()
    model, optimizer = make()
    step(model, optimizer)
    before = weights(model)
    culprit = hvd.size() - 1
    with pytest.raises(NotFiniteError) as caught:
        step(model, optimizer, bad if hvd.rank() == culprit else None)
    text = str(caught.value)
    assert f"'0.weight' on rank {culprit} (4 of 12 elements, the first at [0, 1]: {bad})" in text
    assert all(f"on rank {rank} " not in text for rank in range(culprit))
    np.testing.assert_array_equal(weights(model), before)
    step(model, optimizer)  # and training goes on
    assert np.isfinite(weights(model)).all()


@ranks(2, settings={"HVDLITE_NOT_FINITE": "skip"})
def test_skipped_steps_change_nothing():
    hvd.init()
    model, optimizer = make()
    other, undisturbed = make()
    with logged() as told:
        for number in range(6):
            bad = float("nan") if number in (2, 3) and hvd.rank() == 0 else None
            before = weights(model)
            step(model, optimizer, bad)
            if number in (2, 3):
                np.testing.assert_array_equal(weights(model), before)
            else:
                step(other, undisturbed)
    np.testing.assert_array_equal(weights(model), weights(other))  # momentum as well
    told = [text for text in told if "left out on all ranks" in text]
    assert len(told) == (2 if hvd.rank() == 0 else 0)


@ranks(2, settings={"HVDLITE_NOT_FINITE": "raise"})
def test_an_average_that_overflows_names_no_rank():
    hvd.init()
    layer = torch.nn.Linear(1, 1, bias=False, dtype=torch.float32)
    inner = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        inner, named_parameters=layer.named_parameters(), op=hvd.Sum
    )
    (layer(torch.ones(1, 1)) * 3e38).sum().backward()
    with pytest.raises(NotFiniteError, match="no rank's gradient"):
        optimizer.step()


@ranks(2, settings={"HVDLITE_NOT_FINITE": "pass"})
def test_by_default_they_are_passed_on():
    hvd.init()
    model, optimizer = make()
    step(model, optimizer, float("nan") if hvd.rank() == 0 else None)
    assert np.isnan(weights(model)).any()


@ranks(2, settings={"HVDLITE_NOT_FINITE": "pass"})
@pytest.mark.parametrize("width", [2, 1000])  # from 1 MiB on without a copy of a part
def test_a_planted_gradient_reaches_all_ranks(width):
    hvd.init()
    rehearsal = pytest.importorskip("hvdlite.tools.rehearsal")
    layer = torch.nn.Linear(width, width, bias=False)
    torch.nn.init.ones_(layer.weight)
    inner = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=layer.named_parameters())
    try:
        for number in range(3):
            if number == 1:
                rehearsal.plant(
                    {rehearsal.VARIABLE: "corrupt:rank=1,value=inf"}, hvd.rank(), hvd.size()
                )
            optimizer.zero_grad()
            layer(torch.ones(1, width)).sum().backward()
            optimizer.step()
            bad = (~torch.isfinite(layer.weight)).nonzero().tolist()
            assert bad == ([] if number == 0 else [[0, 0]])
    finally:
        rehearsal.plant({}, hvd.rank(), hvd.size())


@ranks(2, settings={"HVDLITE_NOT_FINITE": "raise"})
def test_beside_a_rank_that_has_joined():
    hvd.init()
    model, optimizer = make()
    step(model, optimizer)
    if hvd.rank() == 0:
        with pytest.raises(NotFiniteError, match="on rank 0"):
            step(model, optimizer, float("nan"))
    hvd.join()


@ranks(2, settings={"HVDLITE_NOT_FINITE": "raise"})
def test_large_gradients_exchanged_without_a_copy():
    hvd.init()
    layer = torch.nn.Linear(1000, 1000)
    inner = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=layer.named_parameters())
    for number in range(3):
        optimizer.zero_grad()
        x = torch.ones(2, 1000)
        if number == 2 and hvd.rank() == hvd.size() - 1:
            x[0, 999] = float("nan")
        loss = layer(x).sum()
        loss.backward()
        if number < 2:
            optimizer.step()
    with pytest.raises(NotFiniteError, match=r"'weight' on rank .* \(1000 of 1000000 elements"):
        optimizer.step()
