"""Compiled models: the exchange hangs on their parameters, not on their code."""

import shutil

import pytest

from tests.harness import ranks

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd
from tests.torch.checks import assert_close, assert_identical_on_all_ranks

# Dynamo warns of what it does to itself.
pytestmark = pytest.mark.filterwarnings("ignore")


def make_model(batch_norm=False):
    torch.manual_seed(0)
    middle = torch.nn.BatchNorm1d(8) if batch_norm else torch.nn.Identity()
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), middle, torch.nn.Tanh(), torch.nn.Linear(8, 2)
    ).double()


def check(backend, size, batch_norm=False):
    hvd.init()
    torch._dynamo.reset()
    alone, model = make_model(batch_norm), make_model(batch_norm)
    if batch_norm:
        model = hvd.convert_sync_batchnorm(model)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    compiled = torch.compile(model, backend=backend)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        whole = torch.randn(4 * size, 4, generator=generator, dtype=torch.float64)
        for each, data, wrapped in (
            (alone, whole, plain),
            (compiled, whole[4 * hvd.rank() :][:4], optimizer),
        ):
            wrapped.zero_grad()
            each(data).square().mean().backward()
            wrapped.step()
    for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert_close(parameter, expected)
    assert_identical_on_all_ranks(model)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@ranks(2, timeout=240)
def test_a_compiled_model_trains_like_one_process(size, backend):
    check(backend, size)


@ranks(2, timeout=240)
def test_a_compiled_model_with_synchronised_batch_normalisation(size):
    check("aot_eager", size, batch_norm=True)


@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
@ranks(2, timeout=400)
def test_inductor(size):
    check("inductor", size)
