"""Virtual ranks: the weights are the same bits for any number of processes."""

import contextlib
import copy
import hashlib
import os

import numpy as np
import pytest

from hvdlite import rehearsal, virtual_ranks
from tests.harness import ranks

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd
from hvdlite.errors import GradientError, MismatchError, NotFiniteError

ALL = ranks(1, 3)
EVERY = ranks(1, 2, 3, 4)
SIZE = 5
FEATURES = 3


@contextlib.contextmanager
def virtual(size=SIZE, **environment):
    """Start hvdlite with virtual ranks, and end it."""
    hvd.shutdown()
    threads = torch.get_num_threads()
    os.environ.update(environment)
    try:
        hvd.init(virtual_ranks=size)
        hvd.seed(0)
        yield
    finally:
        for name in environment:
            del os.environ[name]
        hvd.shutdown()
        torch.set_num_threads(threads)


def data(samples=37):
    generator = np.random.default_rng(5)
    return generator.standard_normal((samples, FEATURES)).astype(np.float32)


def make_model():
    torch.manual_seed(4)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 7),
        torch.nn.BatchNorm1d(7),
        torch.nn.Tanh(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(7, 2),
    )


def wrap(model, lr=0.1, **options):
    inner = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=0.01)
    named = model.named_parameters()
    return hvd.DistributedOptimizer(inner, named_parameters=named, model=model, **options)


def backward(model, x):
    model.zero_grad()
    model(torch.from_numpy(np.ascontiguousarray(x))).square().mean().backward()


def train(model, optimizer, epochs=2, **options):
    steps = 0
    batches = hvd.shard(data(), batch_size=4, seed=1)
    for _ in range(epochs):
        for x in batches:
            backward(model, x)
            optimizer.step(batch_size=len(x), **options)
            steps += optimizer.stepped
    return steps


def state(model):
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def digest(model):
    return hashlib.sha256(b"".join(v.tobytes() for v in state(model).values())).hexdigest()


def tree_sum(arrays):
    if len(arrays) == 1:
        return arrays[0]
    middle = len(arrays) // 2
    return tree_sum(arrays[:middle]) + tree_sum(arrays[middle:])


def expected_training(epochs=2, base=0):
    """Train by one process without hvdlite's exchange, part by part."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    x, step = data(), 0
    sharding = hvd.Sharding(len(x), 4, rank=0, size=SIZE, seed=1)
    for epoch in range(epochs):
        for batch in sharding.global_batches(epoch):
            start = {name: value.clone() for name, value in model.state_dict().items()}
            gradients, buffers = [], []
            for rank in range(SIZE):
                for name, buffer in model.named_buffers():
                    buffer.copy_(start[name])
                key = np.random.SeedSequence(base, spawn_key=(2, step, rank))
                torch.manual_seed(int(key.generate_state(1, np.uint64)[0]))
                indices = sharding.share(batch, rank)
                backward(model, x[indices])
                weight = np.float32(len(indices) * SIZE / len(batch))
                gradients.append([p.grad.numpy().copy() * weight for p in model.parameters()])
                buffers.append([b.numpy().copy() for b in model.buffers()])
            for number, parameter in enumerate(model.parameters()):
                total = tree_sum([each[number] for each in gradients])
                parameter.grad.copy_(torch.from_numpy(total / np.float32(SIZE)))
            for number, buffer in enumerate(model.buffers()):
                parts = [each[number] for each in buffers]
                if parts[0].dtype.kind == "i":
                    buffer.copy_(torch.from_numpy(np.asarray(sum(map(int, parts)) // SIZE)))
                else:
                    total = tree_sum(parts)
                    buffer.copy_(torch.from_numpy(total / np.float32(SIZE)))
            optimizer.step()
            step += 1
    return step, state(model)


@EVERY
@pytest.mark.parametrize("base", [0, 7])
def test_weights_are_the_bits_of_one_process(base):
    with virtual():
        hvd.seed(base)
        model = make_model()
        steps = train(model, wrap(model))
        found = state(model)
        expected_steps, expected = expected_training(base=base)
        assert steps == expected_steps == virtual_ranks.step()
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


@ALL
def test_batch_sizes_weight_as_one_process_would():
    x = data(23)
    with virtual():
        model = torch.nn.Linear(FEATURES, 2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        optimizer = wrap(model, lr=1.0)
        for batch in hvd.shard(x, batch_size=23, shuffle=False):
            backward(model, batch)
            optimizer.step(batch_size=len(batch))
        weight, bias = np.full((2, FEATURES), 0.5), np.full(2, 0.5)
        output = x.astype(np.float64) @ weight.T + bias
        gradient = 2 * output / output.size
        expected = weight - (gradient.T @ x + 0.01 * weight)
        np.testing.assert_allclose(state(model)["weight"], expected, rtol=1e-5)
        np.testing.assert_allclose(
            state(model)["bias"], bias - gradient.sum(0) - 0.01 * bias, rtol=1e-5
        )


@ALL
def test_clipping_scheduling_and_synchronizing():
    with virtual():
        model = make_model()
        optimizer = wrap(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
        rates = []
        for x in hvd.shard(data(), batch_size=4):
            backward(model, x)
            if virtual_ranks.step() % 2:
                optimizer.clip_grad_norm_(1e-3)
                optimizer.step()
            else:
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            if optimizer.stepped:
                scheduler.step()
                rates.append(scheduler.get_last_lr()[0])
            else:
                assert all(p.grad is None for p in model.parameters())
        assert rates == pytest.approx([0.1, 0.01])
        assert len(set(hvd.allgather_object(digest(model)))) == 1


@EVERY
@pytest.mark.parametrize(("op", "factor"), [(hvd.Sum, SIZE), (hvd.Average, 1)])
def test_sum_average_and_gradients_that_are_missing(op, factor):
    with virtual():
        model = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(3)])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        named = model.named_parameters()
        optimizer = hvd.DistributedOptimizer(inner, named_parameters=named, op=op)
        stepped = False
        while not stepped:
            rank = hvd.virtual_rank()
            model[0].weight.grad = torch.full((1, 1), float(rank))
            if rank == SIZE - 1:
                model[1].weight.grad = torch.full((1, 1), 10.0)
            optimizer.step()
            stepped = optimizer.stepped
        mean = sum(range(SIZE)) / SIZE
        found = [each.weight.item() for each in model]
        assert found == pytest.approx([1 - factor * mean, 1 - factor * 10 / SIZE, 1.0])
        assert model[2].weight.grad is None


@ALL
def test_a_sampler_of_torch():
    x = torch.from_numpy(data())
    with virtual():
        sampler = hvd.ShardSampler(x, batch_size=4, seed=1)
        loader = torch.utils.data.DataLoader(x, batch_sampler=sampler)
        model = make_model()
        optimizer = wrap(model)
        for _ in range(2):
            for batch in loader:
                backward(model, batch.numpy())
                optimizer.step(batch_size=len(batch))
            with torch.no_grad():
                assert sum(map(len, loader)) == sum(
                    len(sampler.sharding.share(each, rank))
                    for each in sampler.sharding.global_batches(0)
                    for rank in virtual_ranks.current.share
                )
            sampler.set_epoch(virtual_ranks.step() // 2)
        _, expected = expected_training()
        np.testing.assert_array_equal(state(model)["4.weight"], expected["4.weight"])


@ALL
def test_evaluation_takes_the_parts_of_this_process():
    with virtual():
        own = [len(x) for x in hvd.shard(data(), batch_size=4, shuffle=False)]
        assert sum(hvd.allgather_object(sum(own))) == 37
        assert virtual_ranks.current.done == []


@ALL
def test_state_goes_on_with_another_number_of_virtual_ranks_per_process():
    options = {"compression": hvd.Compression.PowerSGD(1)}
    with virtual():
        model = make_model()
        optimizer = wrap(model, **options)
        train(model, optimizer, epochs=1)
        optimizer.consolidate_exchange_state()
        saved = copy.deepcopy(optimizer.state_dict())
        everything = hvd.allgather_object((saved["hvdlite"], digest(model)))
        middle = {name: value.clone() for name, value in model.state_dict().items()}
        train(model, optimizer, epochs=1)
        expected = digest(model)
    assert len({each for _, each in everything}) == 1
    assert len(everything[0][0]["virtual"]["compression"]) == SIZE
    with virtual():
        model = make_model()
        optimizer = wrap(model, **options)
        model.load_state_dict(middle)
        optimizer.load_state_dict(saved)
        train(model, optimizer, epochs=1)
        assert digest(model) == expected


@ALL
def test_the_number_of_virtual_ranks():
    with virtual():
        processes = hvd.size()
        assert hvd.virtual_size() == SIZE
        assert hvd.virtual_rank() == virtual_ranks.current.share[0]
        assert hvd.scale_lr(0.1) == pytest.approx(0.1 * SIZE)
    with pytest.raises(ValueError, match="virtual_ranks=-1"), virtual(-1):
        pass
    if processes > 1:
        with pytest.raises(ValueError, match="less than the number of processes"), virtual(1):
            pass
    with virtual(None, HVDLITE_VIRTUAL_RANKS="6"):
        assert hvd.virtual_size() == 6
    hvd.init()
    assert (hvd.virtual_rank(), hvd.virtual_size()) == (hvd.rank(), hvd.size())


@ALL
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"op": hvd.Adasum}, "op=hvd.Adasum"),
        ({"backward_passes_per_step": 2}, "backward_passes_per_step"),
        ({"schedule": hvd.Schedule.LocalSGD(2)}, "schedule"),
        ({"process_set": hvd.ProcessSet([0])}, "process_set"),
    ],
)
def test_what_virtual_ranks_cannot_do_is_refused(options, named):
    refused = pytest.raises(ValueError, match=f"{named} cannot be used with virtual ranks")
    with virtual(), refused:
        wrap(make_model(), **options)


@ALL
def test_closures_and_scalers_are_refused():
    with virtual():
        model = make_model()
        optimizer = wrap(model)
        with pytest.raises(ValueError, match="step\\(closure\\)"):
            optimizer.step(lambda: torch.zeros(()))
        scaler = torch.amp.GradScaler("cpu")
        with pytest.raises(ValueError, match="GradScaler"):
            scaler.unscale_(optimizer)
        with pytest.raises(ValueError, match="GradScaler"):
            scaler.step(optimizer)
        with pytest.raises(ValueError, match="unknown length"):
            hvd.shard(iter([1, 2]), batch_size=1, shuffle=False)
        assert train(model, optimizer) == 4


@ranks(1, 2)
def test_data_of_another_virtual_rank_are_noticed():
    with virtual():
        model = make_model()
        optimizer = wrap(model)
        first = iter(hvd.shard(data(), batch_size=4))
        backward(model, next(first))
        optimizer.step()
        again = iter(hvd.shard(data(), batch_size=4))
        backward(model, next(again))
        with pytest.raises(RuntimeError, match="leave a loop only after a step"):
            optimizer.step()


@ALL
def test_an_iteration_of_a_sampler_in_the_middle_of_a_step():
    with virtual():
        model = make_model()
        optimizer = wrap(model)
        sampler = hvd.ShardSampler(37, batch_size=4)
        if len(virtual_ranks.current.share) > 1:
            next(iter(sampler))
            backward(model, data()[:3])
            optimizer.step()
            with pytest.raises(RuntimeError, match="a new iteration begins in the middle"):
                next(iter(sampler))
            with torch.no_grad():
                next(iter(sampler))


@ALL
def test_sparse_gradients():
    with virtual():
        for dense in (False, True):
            model = torch.nn.Embedding(3, 2, sparse=True)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=1.0), sparse_as_dense=dense
            )
            model(torch.tensor([1])).sum().backward()
            if not dense:
                with pytest.raises(TypeError, match="sparse_as_dense=True"):
                    optimizer.step()
                continue
            before = model.weight.detach().clone()
            optimizer.step()
            while not optimizer.stepped:
                model(torch.tensor([1])).sum().backward()
                optimizer.step()
            change = (before - model.weight.detach()).numpy()
            np.testing.assert_allclose(change, [[0, 0], [1, 1], [0, 0]], rtol=1e-6)


@ranks(2, 3)
def test_weights_that_were_not_broadcast_are_noticed():
    with virtual():
        torch.manual_seed(hvd.rank())
        model = torch.nn.Linear(FEATURES, 2)
        optimizer = wrap(model)
        with pytest.raises(MismatchError, match="train replicas that differ"):
            train(model, optimizer)
        assert float(hvd.allreduce(torch.ones(()))) == 1.0


@ranks(2, 3)
def test_different_optimizers_are_noticed():
    with virtual():
        optimizer = wrap(torch.nn.Linear(FEATURES, 2 + (hvd.rank() == 1)))
        for _ in virtual_ranks.current.share[1:]:
            optimizer.step()
        with pytest.raises(MismatchError, match="parameter"):
            optimizer.step()
        assert virtual_ranks.current.done == []


@ALL
def test_batch_sizes_of_some_only():
    with virtual():
        model = make_model()
        optimizer = wrap(model)
        share = virtual_ranks.current.share
        for x in hvd.shard(data(), batch_size=4):
            backward(model, x)
            given = {} if hvd.virtual_rank() else {"batch_size": 4}
            if hvd.virtual_rank() == share[-1]:
                with pytest.raises(GradientError, match=r"virtual ranks? .* gave no batch_size"):
                    optimizer.step(**given)
                break
            optimizer.step(**given)
        train(model, optimizer)


@ALL
@pytest.mark.parametrize("reaction", ["raise", "skip"])
def test_gradients_that_are_not_finite(reaction):
    with virtual(HVDLITE_NOT_FINITE=reaction):
        model = make_model()
        optimizer = wrap(model)
        before = digest(torch.nn.ParameterList(model.parameters()))
        share = len(virtual_ranks.current.share)
        for number, x in enumerate(hvd.shard(data(), batch_size=4)):
            bad = float("nan") if hvd.virtual_rank() == 3 else 1.0
            backward(model, x * np.float32(bad))
            if reaction == "raise" and number == share - 1:
                with pytest.raises(NotFiniteError, match=r"'4.weight' on rank 3 \("):
                    optimizer.step()
                break
            optimizer.step()
        assert digest(torch.nn.ParameterList(model.parameters())) == before
        if reaction == "skip":
            assert virtual_ranks.step() == 2


@ranks(2)
def test_a_planted_gradient():
    with virtual(HVDLITE_NOT_FINITE="raise"):
        model = make_model()
        optimizer = wrap(model)
        rehearsal.plant(
            {rehearsal.VARIABLE: "corrupt:rank=1,name=4.weight"}, hvd.rank(), hvd.size()
        )
        try:
            with pytest.raises(
                NotFiniteError, match=r"'4.weight' on rank \d \(1 of .*\[0, 0\]: nan"
            ):
                train(model, optimizer)
        finally:
            rehearsal.plant({}, hvd.rank(), hvd.size())


@ALL
def test_initializing_again_begins_anew():
    with virtual():
        model = make_model()
        optimizer = wrap(model)
        train(model, optimizer, epochs=1)
        hvd.shutdown()
        hvd.init(virtual_ranks=SIZE)
        assert virtual_ranks.step() == 0
        train(model, optimizer, epochs=1)
        assert virtual_ranks.step() == 2
        hvd.shutdown()
        hvd.init(virtual_ranks=SIZE + 1)
        with pytest.raises(RuntimeError, match=f"wrapped for {SIZE} virtual ranks"):
            train(model, optimizer)


@ALL
def test_what_exchanges_in_the_forward_pass_is_refused():
    with virtual():
        layer = hvd.SyncBatchNorm(3)
        with pytest.raises(ValueError, match="SyncBatchNorm cannot be used with virtual ranks"):
            layer(torch.ones(2, 3))
        layer.eval()(torch.ones(2, 3))
        with pytest.raises(ValueError, match="ElasticSampler cannot be used"):
            hvd.elastic.ElasticSampler([1, 2])


@ranks(1, 3)
def test_a_model_of_which_only_a_part_is_called():
    with virtual():
        model = make_model()
        optimizer = wrap(model)
        model[1](torch.ones(2, 7)).sum().backward()
        with pytest.raises(RuntimeError, match="the Sequential that was passed as model="):
            optimizer.step()


@ranks(1, 3)
def test_a_frozen_batch_normalization_stays():
    with virtual():
        model = make_model().eval()
        optimizer = wrap(model)
        before = state(model)
        train(model, optimizer, epochs=1)
        np.testing.assert_array_equal(state(model)["1.running_mean"], before["1.running_mean"])
        assert (state(model)["0.weight"] != before["0.weight"]).all()


@ALL
def test_commits_within_a_step_do_nothing():
    with virtual():
        model = make_model()
        optimizer = wrap(model)
        kept = hvd.elastic.TorchState(model, optimizer)
        for x in hvd.shard(data(), batch_size=4):
            backward(model, x)
            optimizer.step(batch_size=len(x))
            kept.commit()
        assert kept.commits == 2


@ranks(1, 2)
def test_data_loaders_with_workers():
    x = torch.from_numpy(data())
    with virtual():
        hvd.seed(0)
        sampler = hvd.ShardSampler(x, batch_size=4, seed=1)
        loader = torch.utils.data.DataLoader(x, batch_sampler=sampler, num_workers=2)
        model = make_model()
        optimizer = wrap(model)
        for _ in range(2):
            for batch in loader:
                backward(model, batch.numpy())
                optimizer.step(batch_size=len(batch))
        _, expected = expected_training()
        np.testing.assert_array_equal(state(model)["4.weight"], expected["4.weight"])


@ranks(1, 2)
def test_a_rate_that_changes_within_a_step():
    with virtual():
        model = make_model()
        optimizer = wrap(model)
        backward(model, data()[:4])
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.2
        backward(model, data()[:4])
        with pytest.raises(RuntimeError, match=r"only if optimizer.stepped"):
            optimizer.step()


@ranks(1, 2)
def test_two_optimizers_in_turns_are_noticed():
    with virtual():
        first, second = make_model(), make_model()
        optimizers = [wrap(first), wrap(second)]
        backward(first, data()[:4])
        optimizers[0].step()
        backward(second, data()[:4])
        with pytest.raises(RuntimeError, match="two optimizers step in turns"):
            optimizers[1].step()


@ranks(1, 2)
def test_one_optimizer_after_the_other():
    with virtual():
        for _ in range(2):
            model = make_model()
            assert train(model, wrap(model), epochs=1) == 2


@ranks(1, 2)
def test_state_of_another_number_of_virtual_ranks():
    with virtual():
        model = make_model()
        optimizer = wrap(
            model, compression=hvd.Compression.ErrorFeedback(hvd.Compression.TopK(0.5))
        )
        train(model, optimizer, epochs=1)
        saved = copy.deepcopy(optimizer.state_dict())
    with virtual(SIZE + 1):
        model = make_model()
        optimizer = wrap(
            model, compression=hvd.Compression.ErrorFeedback(hvd.Compression.TopK(0.5))
        )
        with pytest.warns(UserWarning, match="saved for 5 virtual ranks, and is lost for 6"):
            optimizer.load_state_dict(saved)
        train(model, optimizer, epochs=1)
