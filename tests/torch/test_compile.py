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
@ranks(2)
def test_a_compiled_model_trains_like_one_process(size, backend):
    check(backend, size)


@ranks(2)
def test_a_compiled_model_with_synchronised_batch_normalisation(size):
    check("aot_eager", size, batch_norm=True)


def communicate(x):
    """Every kind of collective, between operations that can be compiled."""
    size, own = hvd.size(), torch.ones(hvd.size())
    y = hvd.broadcast(hvd.allreduce(x * 2, op=hvd.Sum) + 1 + hvd.rank(), 1) * size
    handle = hvd.allreduce_async_(y.detach().clone())
    hvd.poll(handle)
    rows, _ = hvd.alltoall(own, splits=torch.ones(size, dtype=torch.int32))
    hvd.barrier()
    sums = hvd.allgather(y).sum() + hvd.reducescatter(own).sum() + rows.sum()
    named = hvd.broadcast_object({"rank": hvd.rank()})["rank"]
    return y + sums + hvd.grouped_allreduce([x, x + 1])[1] + hvd.synchronize(handle) + named


@pytest.mark.slow
@ranks(2)
def test_collectives_and_steps_in_compiled_functions(size):
    """Graphs break at them, and what they compute is the same."""
    hvd.init()
    torch._dynamo.reset()
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(communicate, backend=backend)
        for step in range(3):
            x = torch.full((3,), float(hvd.rank() + step), requires_grad=step > 0)
            found, expected = compiled(x), communicate(x)
            assert torch.equal(found, expected)
            if step:
                (gradient,) = torch.autograd.grad(found.sum(), x)
                assert torch.equal(gradient, torch.autograd.grad(expected.sum(), x)[0])
    for whole in (True, False):
        trained = []
        for is_compiled in (True, False):
            model = make_model()
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
            )

            def train(x, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()

            if is_compiled and not whole:
                optimizer.step = torch.compile(optimizer.step, backend="eager")
            elif is_compiled:
                train = torch.compile(train, backend="eager")
            for step in range(3):
                train(torch.full((2, 4), 1.0 + step + hvd.rank(), dtype=torch.float64))
            assert_identical_on_all_ranks(model)
            trained.append(model)
        for pair in zip(*(model.parameters() for model in trained), strict=True):
            assert_close(*pair)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
@ranks(2, timeout=400)
def test_inductor(size):
    check("inductor", size)
