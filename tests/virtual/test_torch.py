"""Virtual ranks: the weights are the same bits for any number of processes."""

import contextlib
import copy
import hashlib
import os
import sys

import numpy as np
import pytest

from hvdlite.tools import rehearsal
from hvdlite.world import parts
from tests.harness import ranks
from tests.logs import logged

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd
from hvdlite.errors import GradientError, MismatchError, NotFiniteError

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


def loading(x, batch_size, workers, seed=0):
    """Return a sampler of tensors, and a loader by it with so many workers."""
    sampler = hvd.ShardSampler(x, batch_size=batch_size, seed=seed)
    return sampler, torch.utils.data.DataLoader(x, batch_sampler=sampler, num_workers=workers)


def take_part(optimizer, compute):
    """Take the turn of a virtual rank."""
    compute(hvd.virtual_rank())
    optimizer.step()


def take_step(optimizer, compute):
    """Take turns until there is a step."""
    take_part(optimizer, compute)
    while not optimizer.stepped:
        take_part(optimizer, compute)


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
def test_weights_are_the_bits_of_one_process():
    """From another seed than that of most tests here."""
    with virtual():
        hvd.seed(7)
        model = make_model()
        steps = train(model, wrap(model))
        found = state(model)
        expected_steps, expected = expected_training(base=7)
        assert steps == expected_steps == parts.current.step
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


@ranks(2)
def test_clipping_scheduling_and_synchronizing():
    with virtual():
        model = make_model()
        optimizer = wrap(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
        rates = []
        for x in hvd.shard(data(), batch_size=4):
            backward(model, x)
            if parts.current.step % 2:
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


@ranks(2)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_of_torch(workers):
    x = torch.from_numpy(data())
    with virtual():
        sampler, loader = loading(x, 4, workers, seed=1)
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
                    for rank in parts.current.share
                )
            sampler.set_epoch(parts.current.step // 2)
        _, expected = expected_training()
        np.testing.assert_array_equal(state(model)["4.weight"], expected["4.weight"])


@ranks(2)
def test_evaluation_takes_the_parts_of_this_process():
    with virtual():
        own = [len(x) for x in hvd.shard(data(), batch_size=4, shuffle=False)]
        assert sum(hvd.allgather_object(sum(own))) == 37
        assert parts.current.done == []


@ranks(2)
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


@ranks(2)
def test_the_number_of_virtual_ranks():
    with virtual():
        processes = hvd.size()
        assert hvd.virtual_size() == SIZE
        assert hvd.virtual_rank() == parts.current.share[0]
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


@ranks(2)
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


@ranks(2)
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
        for make in (
            lambda: hvd.shard(iter([1, 2]), batch_size=1, shuffle=False),
            lambda: hvd.ShardStream(iter([1, 2]), batch_size=1),
        ):
            with pytest.raises(ValueError, match=r"of unknown length .* virtual ranks"):
                make()
        with pytest.raises(ValueError, match="lockstep cannot be used with virtual ranks"):
            next(hvd.lockstep([1]))
        with pytest.raises(ValueError, match=r"epoch\(\) cannot be used with virtual ranks"):
            hvd.shard(data(), batch_size=4).epoch(0)
        assert train(model, optimizer) == 4


@ranks(2)
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


@ranks(2)
def test_an_iteration_of_a_sampler_in_the_middle_of_a_step():
    with virtual():
        model = make_model()
        optimizer = wrap(model)
        sampler = hvd.ShardSampler(37, batch_size=4)
        if len(parts.current.share) > 1:
            next(iter(sampler))
            backward(model, data()[:3])
            optimizer.step()
            with pytest.raises(RuntimeError, match="a new iteration begins in the middle"):
                next(iter(sampler))
            with torch.no_grad():
                next(iter(sampler))


@ranks(2)
def test_sparse_gradients():
    with virtual():
        model = torch.nn.Embedding(4, 2, sparse=True)
        with pytest.raises(TypeError, match="sparse_as_dense=True"):
            take_step(
                hvd.DistributedOptimizer(torch.optim.SparseAdam(model.parameters())),
                lambda rank: model(torch.tensor([1])).sum().backward(),
            )
    with virtual():
        # Also where only some parts have a gradient.
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SparseAdam(model.parameters(), lr=0.5), sparse_as_dense=True
        )
        before = model.weight.detach().clone()

        def part(rank):
            optimizer.zero_grad()
            if rank in (0, 1):
                model(torch.tensor([1, 2 + rank])).sum().backward()

        take_step(optimizer, part)
        assert model.weight.grad.coalesce().indices().tolist() == [[1, 2, 3]]
        mean = torch.tensor([[2.0, 2.0], [1.0, 1.0], [1.0, 1.0]]) / SIZE
        torch.testing.assert_close(model.weight.grad.coalesce().values(), mean)
        change = (before - model.weight.detach()).numpy()  # Adam's first step
        np.testing.assert_allclose(change, [[0, 0], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]], rtol=1e-5)


@ranks(2)
def test_weights_that_were_not_broadcast_are_noticed():
    with virtual():
        torch.manual_seed(hvd.rank())
        model = torch.nn.Linear(FEATURES, 2)
        optimizer = wrap(model)
        with pytest.raises(MismatchError, match="train replicas that differ"):
            train(model, optimizer)
        assert float(hvd.allreduce(torch.ones(()))) == 1.0


@ranks(2)
def test_different_optimizers_are_noticed():
    with virtual():
        optimizer = wrap(torch.nn.Linear(FEATURES, 2 + (hvd.rank() == 1)))
        for _ in parts.current.share[1:]:
            hvd.virtual_rank()
            optimizer.step()
        hvd.virtual_rank()
        with pytest.raises(MismatchError, match="parameter"):
            optimizer.step()
        assert parts.current.done == []


@ranks(2)
def test_batch_sizes_of_some_only():
    with virtual():
        model = make_model()
        optimizer = wrap(model)
        share = parts.current.share
        for x in hvd.shard(data(), batch_size=4):
            backward(model, x)
            given = {} if hvd.virtual_rank() else {"batch_size": 4}
            if hvd.virtual_rank() == share[-1]:
                with pytest.raises(GradientError, match=r"virtual ranks? .* gave no batch_size"):
                    optimizer.step(**given)
                break
            optimizer.step(**given)
        train(model, optimizer)


@ranks(2)
def test_a_batch_size_that_is_refused_ends_no_part():
    with virtual():
        model = make_model()
        optimizer = wrap(model, op=hvd.Sum)
        for x in hvd.shard(data(), batch_size=4):
            backward(model, x)
            with pytest.raises(ValueError, match="batch_size weights averages"):
                optimizer.step(batch_size=len(x))
            optimizer.step()
        assert parts.current.step == 2


@ranks(2)
@pytest.mark.parametrize("reaction", ["raise", "skip"])
def test_gradients_that_are_not_finite(reaction):
    with virtual(HVDLITE_NOT_FINITE=reaction):
        model = make_model()
        optimizer = wrap(model)
        before = digest(torch.nn.ParameterList(model.parameters()))
        share = len(parts.current.share)
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
            assert parts.current.step == 2


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


@ranks(2)
def test_initializing_again_begins_anew():
    with virtual():
        model = make_model()
        optimizer = wrap(model)
        train(model, optimizer, epochs=1)
        hvd.shutdown()
        hvd.init(virtual_ranks=SIZE)
        assert parts.current.step == 0
        train(model, optimizer, epochs=1)
        assert parts.current.step == 2
        hvd.shutdown()
        hvd.init(virtual_ranks=SIZE + 1)
        with pytest.raises(RuntimeError, match=f"wrapped for {SIZE} virtual ranks"):
            train(model, optimizer)


@ranks(2)
def test_what_exchanges_in_the_forward_pass_is_refused():
    with virtual():
        layer = hvd.SyncBatchNorm(3)
        with pytest.raises(ValueError, match="SyncBatchNorm cannot be used with virtual ranks"):
            layer(torch.ones(2, 3))
        layer.eval()(torch.ones(2, 3))
        with pytest.raises(ValueError, match="ElasticSampler cannot be used"):
            hvd.elastic.ElasticSampler([1, 2])


@ranks(2)
def test_a_frozen_batch_normalization_stays():
    with virtual():
        model = make_model().eval()
        optimizer = wrap(model)
        before = state(model)
        train(model, optimizer, epochs=1)
        np.testing.assert_array_equal(state(model)["1.running_mean"], before["1.running_mean"])
        assert (state(model)["0.weight"] != before["0.weight"]).all()


@ranks(2)
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


@ranks(2)
def test_a_rate_that_changes_within_a_step():
    with virtual():
        model = make_model()
        optimizer = wrap(model)
        optimizer.param_groups[0]["note"] = np.nan  # equal to itself
        for _ in range(SIZE // hvd.size() - 1):
            take_part(optimizer, lambda rank: None)
        optimizer.param_groups[0]["lr"] = 0.2
        with pytest.raises(RuntimeError, match=r"only if optimizer.stepped"):
            take_part(optimizer, lambda rank: None)


@ranks(2)
def test_two_optimizers_in_turns_are_noticed():
    with virtual():
        first, second = make_model(), make_model()
        optimizers = [wrap(first), wrap(second)]
        take_part(optimizers[0], lambda rank: None)
        with pytest.raises(RuntimeError, match="two optimizers step in turns"):
            take_part(optimizers[1], lambda rank: None)


@ranks(2)
def test_one_optimizer_after_the_other():
    with virtual():
        for _ in range(2):
            model = make_model()
            assert train(model, wrap(model), epochs=1) == 2


@ranks(2)
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


class Memory(torch.nn.Module):
    """Remembers what it sees, in buffers of all kinds; its input is a vector of numbers."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(SIZE))
        self.register_buffer("changed", torch.zeros(SIZE))
        self.register_buffer("replaced", torch.zeros((), dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(SIZE, dtype=torch.bool))
        self.register_buffer("turned", torch.zeros((), dtype=torch.complex64))
        self.register_buffer("late", None)
        self.register_buffer("grown", torch.zeros(0), persistent=False)

    def forward(self, x):
        if self.training:
            self.changed.add_(x)
            self.replaced = self.replaced * 0.5 + float(x.sum())
            self.count += 2
            self.seen |= x == 1
            self.turned = self.turned * 1j + float(x.sum())
            self.late = x.clone() if self.late is None else self.late + x
            self.grown = self.grown + x if self.grown.numel() else x.clone()
            if not hasattr(self, "lazy"):
                self.register_buffer("lazy", torch.zeros(()))
            self.lazy += 1
        return (self.weight * x).sum()


def remembering():
    model = Memory()
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    return model, hvd.DistributedOptimizer(inner, model=model)


def one_hot(rank, value=1.0):
    x = torch.zeros(SIZE)
    x[rank] = value
    return x


@EVERY
def test_buffers_of_all_kinds():
    with virtual():
        model, optimizer = remembering()
        memory = model.changed
        for step in range(2):
            value = step + 1.0

            def part(rank, value=value, model=model):
                model(one_hot(rank, value * (rank + 1))).backward()

            take_step(optimizer, part)
        each = torch.arange(1, SIZE + 1) * 3.0 / SIZE  # 1 + 2 of what each part has seen
        mean = (SIZE + 1) / 2
        torch.testing.assert_close(model.changed, each)
        torch.testing.assert_close(model.late, each)
        torch.testing.assert_close(model.grown, each)
        assert model.changed is memory
        assert model.replaced.item() == pytest.approx(mean / SIZE * SIZE * 2.5)
        assert (model.count.item(), model.lazy.item()) == (4, 2)
        assert model.seen.tolist() == [True] + [False] * (SIZE - 1)
        assert model.turned.item() == pytest.approx(mean * 1j + 2 * mean)


@EVERY
def test_a_forward_pass_between_steps_counts_once():
    with virtual():
        model, optimizer = remembering()

        def part(rank):
            model(one_hot(rank)).backward()

        model(torch.ones(SIZE))
        take_step(optimizer, part)
        model(torch.ones(SIZE))
        take_step(optimizer, part)
        expected = 2 + 2 / SIZE
        torch.testing.assert_close(model.changed, torch.full((SIZE,), expected))
        assert model.count.item() == 8
        if hvd.size() > 1:
            model(one_hot(hvd.rank()))
            with pytest.raises(MismatchError, match=r"CRC-32 of the buffer 'changed' is .* rank 1"):
                take_step(optimizer, part)
            assert float(hvd.allreduce(torch.ones(()))) == 1.0


@ranks(2)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_forward_pass_between_epochs_of_a_loader(workers):
    x = torch.arange(4.0 * SIZE).reshape(-1, 1).expand(-1, SIZE)
    with virtual():
        model, optimizer = remembering()
        _, loader = loading(x, 2, workers)
        for _ in range(2):
            for batch in loader:
                model(batch.sum(0)).backward()
                optimizer.step()
            model(torch.ones(SIZE))
        torch.testing.assert_close(model.changed, 2 * (x.sum(0) / SIZE + 1))
        assert parts.current.step == 4


@ranks(2)
def test_a_forward_pass_in_the_middle_of_a_step():
    with virtual():
        model, optimizer = remembering()

        def part(rank):
            model.train()
            model(one_hot(rank)).backward()
            model.eval()(torch.ones(SIZE))

        take_step(optimizer, part)
        torch.testing.assert_close(model.changed, torch.full((SIZE,), 1 / SIZE))
    for disturb in (
        lambda model: model(torch.ones(SIZE)),
        lambda model: (hvd.virtual_rank(), model(torch.ones(SIZE))),
    ):
        with virtual():
            model, optimizer = remembering()
            take_part(optimizer, lambda rank, model=model: model(one_hot(rank)).backward())
            disturb(model)
            with pytest.raises(RuntimeError, match=r"buffer 'changed' .* was changed in a step"):
                take_part(optimizer, lambda rank: None)


@ranks(2)
def test_modules_with_buffers_have_to_be_in_model():
    with virtual():
        body, head = torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)
        both = torch.nn.ModuleList([body, head])
        inner = torch.optim.SGD(body.parameters(), lr=0.1)
        for model in (None, body):
            with pytest.raises(ValueError, match=r"a buffer, '1.running_mean', .* pass model="):
                hvd.DistributedOptimizer(inner, model=model)
        take_step(hvd.DistributedOptimizer(inner, model=both), lambda rank: None)
    with virtual():
        body = torch.nn.Linear(2, 2)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(body.parameters(), lr=0.1))
        whole = torch.nn.Sequential(body, head)
        with pytest.raises(ValueError, match="no model="):
            take_step(optimizer, lambda rank: whole)


@ranks(2)
def test_data_have_to_be_asked_for():
    with virtual(), logged() as messages:
        optimizer = wrap(make_model())
        for _ in range(2 * SIZE):
            optimizer.step()
            if optimizer.stepped:
                break
        assert len(messages) == (hvd.rank() == 0)
        assert all("nothing has asked which data are its" in each for each in messages)
    with virtual(), logged() as messages:
        optimizer = wrap(make_model())
        take_step(optimizer, lambda rank: None)
        assert not messages
        for _ in hvd.shard(data(), batch_size=4):
            optimizer.step()
            if optimizer.stepped:
                break
        with pytest.raises(RuntimeError, match="nothing has asked which data are its"):
            optimizer.step()


@ranks(2)
@pytest.mark.parametrize("workers", [None, 0, 2])
def test_gradients_accumulated_by_hand(workers):
    with virtual():
        batches = hvd.shard(np.ones((8 * SIZE, 3), np.float32), batch_size=1)
        if workers is not None:
            _, batches = loading(torch.ones(8 * SIZE, 3), 1, workers)
        optimizer = wrap(torch.nn.Linear(3, 1))
        taken = iter(batches)

        def accumulate():
            for number, _ in enumerate(taken, start=1):
                if number % 2 == 0:
                    optimizer.step()

        # A process with one part takes its step, in which it waits for those that have raised.
        words = r"one for each optimizer.step|batch without a step"
        if hvd.rank():
            words += "|shut down without submitting"
        with pytest.raises(RuntimeError, match=words):
            accumulate()


def change_weights(optimizer, scheduler):
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].clamp_(-1, 1)


def change_schedule(optimizer, scheduler):
    scheduler.step()


def change_an_option(optimizer, scheduler):
    optimizer.param_groups[0]["momentum"] *= 0.5


def freeze(optimizer, scheduler):
    optimizer.param_groups[0]["params"][0].requires_grad_(False)


@ranks(2)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (change_weights, "the version of the weight '0.weight'"),
        (change_schedule, "the number of steps of StepLR"),
        (change_an_option, "the optimizer's momentum was 0.45"),
        (freeze, "than in the first part of the step: 0.weight"),
    ],
)
def test_what_changes_in_the_middle_of_a_step(change, named):
    with virtual():
        optimizer = wrap(make_model())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
        take_step(optimizer, lambda rank: None)
        change(optimizer, scheduler)
        take_part(optimizer, lambda rank: None)
        optimizer.param_groups[0]["params"][0].requires_grad_(True)
        if change is freeze:
            change = lambda *_: None  # noqa: E731
        change(optimizer, scheduler)
        with pytest.raises(RuntimeError, match=named):
            take_part(optimizer, lambda rank: None)


@ranks(2)
def test_seeds_and_threads_have_to_be_the_same():
    for differ, named in (
        (lambda: hvd.seed(hvd.rank()), "the seed of hvd.seed is 0 on rank 0, 1 on rank 1"),
        (lambda: torch.set_num_threads(1 + (hvd.rank() == 1)), "number of threads is 1 on rank"),
    ):
        with virtual():
            optimizer = wrap(make_model())
            differ()
            with pytest.raises(MismatchError, match=named):
                take_step(optimizer, lambda rank: None)
            assert float(hvd.allreduce(torch.ones(()))) == 1.0


@ranks(2)
@pytest.mark.parametrize("workers", [None, 0, 2])
def test_positions_count_steps(workers):
    x = torch.ones(8 * SIZE, 3)
    with virtual():
        optimizer = wrap(make_model())
        loader = data_source = hvd.shard(x.numpy(), batch_size=2)
        if workers is not None:
            data_source, loader = loading(x, 2, workers)
        steps = 0
        for _ in loader:
            optimizer.step()
            steps += optimizer.stepped
            if optimizer.stepped and steps == 2:
                break
        assert data_source.state_dict()["done"] == data_source.state_dict(2)["done"] == 4 * SIZE
        with pytest.raises(
            ValueError, match=r"2 steps have been taken in this .*optimizer.stepped"
        ):
            data_source.state_dict(3)
        with pytest.raises(ValueError, match=r"2 steps have been taken: .*optimizer.stepped"):
            hvd.Sharding(8 * SIZE, 2).position(0, 3)


@ranks(2)
def test_an_evaluation_before_a_loop_of_ones_own():
    with virtual():
        optimizer = wrap(make_model())
        list(hvd.shard(data(), batch_size=4))
        take_step(optimizer, lambda rank: None)


class Forgetful(torch.nn.Linear):
    """Keeps what it sees in plain attributes."""

    def __init__(self):
        super().__init__(2, 1)
        self.calls = 0
        self.seen = torch.zeros(2)

    def forward(self, x):
        self.calls += 1
        self.seen.add_(x)
        return super().forward(x)


@ranks(2)
def test_state_that_depends_on_the_process(monkeypatch):
    generator = torch.Generator()
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "drawn", generator, raising=False)
    monkeypatch.setattr(main, "kept", np.random.default_rng(1), raising=False)
    for model in (torch.nn.Linear(2, 1), Forgetful()):
        with virtual(), logged() as messages:
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = hvd.DistributedOptimizer(inner, model=model)
            draw = isinstance(model, Forgetful)

            def part(rank, model=model, draw=draw):
                x = torch.rand(2, generator=generator) if draw else torch.ones(2)
                model(x).sum().backward()

            take_step(optimizer, part)
            assert len(messages) == (draw and hvd.rank() == 0)
            for message in messages:
                for name in ("attribute 'calls'", "attribute 'seen'", "generator 'drawn'"):
                    assert message.count(name) == 1
                assert "kept" not in message
